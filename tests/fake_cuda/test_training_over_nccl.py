"""Ranks train over NCCL, each on a device of its own, to the bits of the same ranks on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_processes

SOON = 150.0


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_cuda.loading import DEVICES

    monkeypatch.setenv(DEVICES, "4")


def model_and_batch() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    hidden = [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)] * 1
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), *hidden, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    return model, torch.randn(16, 8), torch.randint(0, 5, (16,))


def train(rank: int, device: str, transport: str, stages: int, backend: str, placement: str) -> dict[str, Any]:
    """Return the losses and weights of three steps as text, what the stand-in reports, and what was made and waited for."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import adaptra

    model, inputs, targets = model_and_batch()
    if device == "cuda":
        from fake_cuda import nccl_backends

        nccl_backends.use(backend)
        torch.cuda.set_device(rank)
        model.cuda()
    pipe = adaptra.compile(
        model,
        stages=stages,
        microbatches=4,
        example_inputs=(inputs, targets),
        loss=nn.functional.cross_entropy,
        transport=transport,
        placement=placement,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    shown: list[str] = []
    made = communicators()
    for step in range(3):
        optimizer.zero_grad()
        loss = pipe.step(inputs, targets)
        assert loss.device.type == device
        shown.append(float(loss).hex())
        shown.append(float(pipe.clip_grad_norm_(1.0)).hex())
        optimizer.step()
        assert communicators() == made, f"step {step} has made one"
    shown += [str(value.cpu().tolist()) for value in pipe.full_state_dict().values()]
    shown.append(float(pipe.eval_step(inputs, targets)).hex())
    pipe.close()
    dist.destroy_process_group()
    return {"shown": shown, "reports": reports(), "made": made}


def communicators() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    from fake_cuda.machine import the_machine

    return sum(count for what, count in the_machine().syncs.items() if "communicator" in what)


def reports() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    from fake_cuda.machine import the_machine

    return [*map(str, the_machine().detector.reports)]


@pytest.mark.parametrize(
    ("ranks", "stages", "backend", "placement", "made"),
    [
        (2, 2, "older", "straight", [2, 2]),
        (2, 2, "newer", "straight", [2, 2]),
        (4, 4, "newer", "straight", [2, 4, 4, 2]),
        (4, 2, "older", "straight", [2, 2, 2, 2]),
        (2, 4, "newer", "interleaved", [4, 4]),
    ],
    ids=["two ranks, 2.13's backend", "two ranks, 2.15's", "four ranks", "two replicas", "two stages on each rank"],
)
def test_ranks_train_to_the_bits_of_the_cpu(
    ranks: int, stages: int, backend: str, placement: str, made: list[int], four_devices: None
) -> None:
    on_cpu = run_processes(train, ranks, "cpu", "c10d", stages, backend, placement, timeout=SOON)
    on_cuda = run_processes(train, ranks, "cuda", "nccl", stages, backend, placement, timeout=SOON, is_fresh=True)
    assert [one["shown"] for one in on_cuda] == [one["shown"] for one in on_cpu]
    assert not [report for one in on_cuda for report in one["reports"]]
    assert [one["made"] for one in on_cuda] == made, "one for each directed edge that ends here"
