"""adaptra.compile trains a model on cuda, in one process, to the bits of the same model on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

pytestmark = pytest.mark.usefixtures("one_thread")


def mean_of_squares(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


def sum_and_weight(outputs: Any, targets: Any) -> Any:
    squares = ((outputs - targets) ** 2).sum()
    return squares, squares.new_tensor(outputs.numel())


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [("mse_loss", "mean"), ("cross_entropy", "mean"), (mean_of_squares, "mean"), (sum_and_weight, "weighted")],
    ids=["mse_loss", "cross_entropy", "mean of squares", "weighted"],
)
def test_a_pipeline_trains_on_the_device_as_on_the_cpu(machine: Machine, loss: Any, reduction: Any) -> None:
    import torch
    from torch import nn

    import adaptra

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))
    inputs = torch.randn(8, 8)
    targets = torch.randint(0, 5, (8,)) if loss == "cross_entropy" else torch.randn(8, 5)
    results: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        trained, batch = deepcopy(model).to(device), (inputs.to(device), targets.to(device))
        function: Any = getattr(nn.functional, loss) if isinstance(loss, str) else loss
        pipe = adaptra.compile(trained, stages=2, microbatches=4, example_inputs=batch, loss=function, reduction=reduction)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        found: list[torch.Tensor] = []
        for _ in range(2):
            optimizer.zero_grad()
            found.append(pipe.step(*batch).detach())
            optimizer.step()
        results.append([tensor.detach().cpu() for tensor in (*found, *pipe.parameters())])
        assert {tensor.device.type for tensor in pipe.parameters()} == {device}
        pipe.close()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
def test_a_loss_with_class_weights_on_the_device_is_checked_as_on_the_cpu(machine: Machine, is_sum: bool) -> None:
    import torch
    from torch import nn

    import adaptra
    from adaptra.errors import CaptureError

    weights = torch.rand(5).cuda()

    def loss(outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(outputs, targets, weights, reduction="sum" if is_sum else "mean")

    example = torch.randn(8, 8), torch.randint(0, 5, (8,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)).cuda()
    with pytest.raises(CaptureError, match="looks like a sum") if is_sum else nullcontext():
        adaptra.compile(model, stages=2, microbatches=2, example_inputs=example, loss=loss).close()
