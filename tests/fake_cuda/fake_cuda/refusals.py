"""Which tests can't run on the stand-in, and why."""

from __future__ import annotations

from typing import Final

REFUSALS: Final = {
    "tests/graph/backward/test_differentiate.py::test_input_and_weight_gradients_together_do_the_work_of_one_backward_pass": (
        "torch counts operations of attention by its CPU kernel, and the stand-in takes the form in mathematics"
    ),
    "tests/graph/ops/test_fake_ops.py::test_strides_are_those_of_real_tensors": (
        "kernels on the stand-in are the CPU's, and so are their strides, where fake tensors of cuda have those of CUDA's"
    ),
    "tests/graph/ops/test_fake_ops.py::test_a_model_of_them_is_bitwise": (
        "storages are made by torch.UntypedStorage, which a torch for CPUs refuses to make on cuda"
    ),
    "tests/graph/ops/test_autocast.py": "its models ask for the autocast of CPUs",
    "tests/runtime/devices/test_device_clock.py::test_on_a_cpu": "it is about CPUs",
}
"""By the beginning of a test's name: the reason."""


def cannot_run_on_cuda(test: str) -> str | None:
    """Why a test can't run on the stand-in, or None if it can."""
    return next((reason for name, reason in REFUSALS.items() if test.startswith(name)), None)
