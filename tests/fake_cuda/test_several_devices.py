"""One process trains a list of stages on several devices, to the bits of one device."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
from errors_table import check_documented
from test_sabotages import missing

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

pytestmark = pytest.mark.usefixtures("one_thread")


def stages_on(devices: list[str]) -> list[Any]:
    """Three stages, on a device each."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3)),
        nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16)),
        nn.Linear(16, 5),
    ]
    return [deepcopy(stage).to(device) for stage, device in zip(stages, devices, strict=True)]


def train(devices: list[str], **how: Any) -> list[Any]:
    """Return losses, norms, outputs and weights of three steps and an evaluation, on the host."""
    import torch
    from torch import nn

    import adaptra

    stages = stages_on(devices)
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 8), torch.randint(0, 5, (16,))
    pipe = adaptra.compile(
        stages, stages=3, microbatches=4, example_inputs=(inputs, targets), loss=nn.functional.cross_entropy, **how
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    results: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        results += [pipe.step(inputs, targets), pipe.clip_grad_norm_(0.5)]
        optimizer.step()
    pipe.eval()
    results += [pipe(inputs), *pipe.parameters()]
    assert [str(next(stage.parameters()).device) for stage in stages] == devices
    pipe.close()
    return [result.detach().cpu() for result in results]


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1", "cuda:0"], ["cuda:1", "cuda:1", "cuda:0"]], ids=str)
def test_stages_on_several_devices_train_to_the_bits_of_one(machine: Machine, devices: list[str]) -> None:
    import torch

    expected, found = train(["cuda:0"] * 3), train(devices)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


def refused(model: Any, stages: int, pattern: str, **how: Any) -> str:
    """Return an error that fits a pattern."""
    import torch
    from torch import nn

    import adaptra
    from adaptra.errors import OptionError

    batch = torch.randn(4, 8), torch.randn(4, 5)
    with pytest.raises(OptionError) as caught:
        adaptra.compile(model, stages=stages, microbatches=2, example_inputs=batch, loss=nn.functional.mse_loss, **how)
    check_documented("OptionError", str(caught.value), pattern)
    return str(caught.value)


def test_parts_that_lie_on_several_devices_otherwise_are_refused(machine: Machine) -> None:
    from torch import nn

    stages = stages_on(["cuda:0", "cuda:1", "cuda:0"])
    text = refused(
        nn.Sequential(*stages),
        2,
        "model: … is on …, and … on …: expected all on one device, or a list of stages, each on a GPU",
    )
    assert "0.0.weight is on cuda:0, and 1.0.weight on cuda:1" in text
    text = refused(
        stages,
        3,
        "model: … is on …, and … on …: expected all on one device, since each rank is a process and trains on one",
        transport="delegate",
    )
    assert "0.0.weight is on cuda:0, and 1.0.weight on cuda:1" in text
    text = refused(
        [nn.Sequential(*stages[:2]), stages[2]],
        2,
        "model: rank … has stages …: … is on …, and … on …: expected all of a rank on one device",
    )
    assert "rank 0 has stages [0]: 0.0.0.weight is on cuda:0, and 0.1.0.weight on cuda:1" in text
    text = refused(
        [*stages[:2], nn.Linear(16, 5)],
        3,
        "model: … is on …, and … on …: expected all on GPUs, or all on the host",
    )
    assert "0.0.weight is on cuda:0, and 2.weight on cpu" in text
    text = refused(
        [*stages[:2], nn.Tanh()],
        3,
        "model: rank … has stages …, and one has no parameters and buffers that say its device: expected some in each "
        "stage of a list on several GPUs; torch.nn.Sequential joins a stage to the next",
    )
    assert "rank 2 has stages [2]" in text


@pytest.mark.parametrize("what", ["wait_event", "record_stream"])
@pytest.mark.parametrize("caller", ["to", "use"])
def test_a_copy_without_its_order_is_reported(machine: Machine, what: str, caller: str) -> None:
    import torch

    owner = torch.Tensor if what == "record_stream" else torch.cuda.Stream
    with missing(owner, what, caller):
        train(["cuda:0", "cuda:1", "cuda:0"])
    fault = "early free" if what == "record_stream" else "race"
    assert any(str(report).startswith(fault) for report in machine.detector.reports)
