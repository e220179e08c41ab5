"""Which tests can't run on cuda, or on its stand-in only, and why."""

from __future__ import annotations

from typing import Final

from fake_cuda.loading import is_enabled

_LSTM: Final = "a cell of an LSTM is one kernel of CUDA, which CPUs don't have"
_NOT_DETERMINISTIC: Final = "does not have a deterministic implementation"

ON_THE_STAND_IN: Final = {
    "tests/graph/backward/test_differentiate.py::test_input_and_weight_gradients_together_do_the_work_of_one_backward_pass": (
        "torch counts operations of attention by its CPU kernel, and the stand-in takes the form in mathematics"
    ),
    "tests/graph/ops/test_fake_ops.py::test_strides_are_those_of_real_tensors": (
        "kernels on the stand-in are the CPU's, and so are their strides, where fake tensors of cuda have those of CUDA's"
    ),
    "tests/frontend/arguments/test_wrapped_models.py::test_a_wrapped_model_is_refused_by_torch_compile[whole": (
        "DataParallel scatters a batch by what only a torch for CUDA has"
    ),
    "tests/integrations/test_pipeline_trainer.py::test_replicas_count_each_row_once": (
        "accelerate's group on cuda has gloo and NCCL, and the stand-in for NCCL can be no part of one"
    ),
    "tests/end_to_end/test_architectures.py::test_it_trains_bitwise_as_in_one_process[LSTM": _LSTM,
    "tests/end_to_end/test_architectures.py::test_it_trains_bitwise_over_processes[LSTM": _LSTM,
    "tests/end_to_end/test_architectures.py::test_what_rounds_otherwise_than_eager_torch_stays_close[LSTM": _LSTM,
}
ON_CUDA: Final = {
    "tests/frontend/arguments/test_wrapped_models.py::test_every_wrapper": "its meshes are of CPUs",
    "tests/graph/ops/test_autocast.py": "its models ask for the autocast of CPUs",
    "tests/runtime/devices/test_device_clock.py::test_on_a_cpu": "it is about CPUs",
    "tests/frontend/test_api.py::test_a_model_that_cannot_be_captured_is_told_with_its_line": (
        "the innermost line is that of the mode that puts tensors of tests on the device"
    ),
}
"""By the beginning of a test's name: the reason."""


def cannot_run_on_cuda(test: str) -> str | None:
    """Why a test can't run on cuda as it is here, or None if it can."""
    refusals = ON_CUDA | ON_THE_STAND_IN if is_enabled() else ON_CUDA
    return next((reason for name, reason in refusals.items() if test.startswith(name)), None)


def gives_no_bits(error: Exception) -> str | None:
    """torch's sentence if it refused an op whose results differ from run to run on a GPU, also on a rank; else None."""
    return next((line for line in str(error).splitlines() if _NOT_DETERMINISTIC in line), None)
