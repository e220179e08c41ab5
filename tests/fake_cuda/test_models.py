"""Models train on the stand-in bit for bit as on the CPU, and torch's tools take their ways for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

pytestmark = pytest.mark.usefixtures("one_thread")


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))


def convolutions() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    )


def gpt() -> Any:
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.all, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x.abs().mul(4).long().clamp(max=15))
            q, k, v = self.all(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(8, 8, device=x.device).triu(1).bool(), -1e9).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(-2)).mean(1)

    return Attention()


@pytest.mark.parametrize("model", [mlp, convolutions, gpt])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse_loss"])
def test_training_gives_the_bits_of_the_cpu(machine: Machine, model: Callable[[], Any], loss: str) -> None:
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    made, inputs = model(), torch.randn(6, 8)
    targets = torch.randint(0, 5, (6,)) if loss == "cross_entropy" else torch.randn(6, 5)
    results: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        trained = deepcopy(made).to(device)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        found: list[torch.Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            value = getattr(functional, loss)(trained(inputs.to(device)), targets.to(device))
            value.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
            optimizer.step()
            found.append(value.detach())
        found += trained.state_dict().values()
        results.append([tensor.cpu() for tensor in found])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


def test_autocast_is_that_of_cuda(machine: Machine) -> None:
    import torch

    model, inputs = mlp().cuda(), torch.randn(6, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(inputs).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs).dtype is torch.float32


def test_export_and_fake_tensors_keep_the_device(machine: Machine) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, inputs = mlp().cuda(), torch.randn(6, 8, device="cuda")
    exported = torch.export.export(model, (inputs,)).module()
    assert torch.equal(exported(inputs), model(inputs))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(inputs) @ torch.ones(8, 3, device="cuda:0")
    assert fake.device == inputs.device and fake.shape == (6, 3)


def test_random_numbers_come_from_the_devices_generators(machine: Machine) -> None:
    import torch

    torch.manual_seed(3)
    on_host = torch.rand(4)
    torch.manual_seed(3)
    on_device = torch.rand(4, device="cuda")
    assert torch.equal(torch.rand(4), on_host), "drawing on the device leaves the CPU's generator alone"
    assert torch.equal(on_device.cpu(), on_host)
    state = torch.cuda.default_generators[0].get_state()
    dropped = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
    torch.cuda.default_generators[0].set_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="cuda")), dropped)
    generator = torch.Generator("cuda").manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda", generator=generator).cpu(), on_host)


def test_synchronisations_of_the_host_are_written_down_with_their_place(machine: Machine) -> None:
    import torch

    ones, pinned = torch.ones(4, device="cuda"), torch.ones(4, pin_memory=True)
    machine.forget()
    ones.copy_(pinned, non_blocking=True)
    assert not machine.syncs
    for wait, what in (
        (ones.cpu, "copy to the host of pageable memory"),
        (lambda: ones.copy_(pinned), "copy to the device"),
        (lambda: ones.sum().item(), ".item()"),
        (ones.nonzero, "aten::nonzero"),
        (torch.cuda.synchronize, "cuda.synchronize"),
        (torch.cuda.current_stream().synchronize, "stream.synchronize"),
        (torch.cuda.current_stream().record_event().synchronize, "event.synchronize"),
    ):
        machine.forget()
        wait()
        assert len(machine.syncs) == 1, what
        assert next(iter(machine.syncs)).startswith(f"{what} at test_models.py:")
