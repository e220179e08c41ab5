"""Where a model can't train over NCCL, that is said before anything is connected, on each rank that it concerns."""

from __future__ import annotations

from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes


def ask(rank: int, devices: tuple[int | None, ...], sabotage: str) -> list[str]:
    """Compile over NCCL with the model of each rank on a device, and return the kind and text of what is raised."""
    import torch
    from torch import nn

    import adaptra
    from adaptra.errors import AdaptraError

    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), torch.randn(8, 8)
    if (device := devices[rank]) is not None:
        torch.cuda.set_device(device)
        model.cuda()
    if sabotage == "no NCCL":
        torch.distributed.is_nccl_available = lambda: False
    if sabotage == "NCCL refuses":
        from fake_cuda.nccl import ProcessGroupNCCL

        def refuse(*_: Any) -> None:
            raise torch.distributed.DistBackendError("NCCL error: unhandled system error")

        ProcessGroupNCCL.eager_connect_single_device = refuse  # type: ignore[method-assign]
    with pytest.raises(AdaptraError) as caught:
        adaptra.compile(
            model,
            stages=2,
            microbatches=2,
            example_inputs=(inputs, torch.randn(8, 5)),
            loss=nn.functional.mse_loss,
            transport="nccl",
        )
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the store ends with rank 0
    return [type(caught.value).__name__, str(caught.value)]


@pytest.mark.parametrize(
    ("devices", "sabotage", "part", "pattern"),
    [
        (
            (None, None),
            "",
            "with a model on cpu:",
            "transport 'nccl' with a model on …: expected one on a GPU of its own for each rank; leave transport= out",
        ),
        (
            (1, 1),
            "",
            "ranks 0 and 1 are on one GPU",
            "transport 'nccl': ranks … and … are on one GPU: expected a GPU of its own for each rank, as NCCL refuses to share "
            "one; transport='delegate' shares it",
        ),
        (
            (0, 1),
            "no NCCL",
            "without NCCL",
            "transport 'nccl': this torch was built without NCCL: expected 'delegate', or leave transport= out",
        ),
        (
            (0, 1),
            "NCCL refuses",
            "NCCL error: unhandled system error",
            "transport 'nccl': NCCL can't connect rank …: …",
        ),
    ],
    ids=["a model on the CPU", "two ranks on one device", "a torch without NCCL", "NCCL itself refuses"],
)
def test_it_is_refused_in_words(devices: tuple[int | None, ...], sabotage: str, part: str, pattern: str) -> None:
    for kind, text in run_processes(ask, 2, devices, sabotage):
        assert part in text
        check_documented(kind, text, pattern)
