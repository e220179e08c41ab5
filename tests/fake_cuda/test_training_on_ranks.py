"""Ranks train a model on cuda, each on a device of its own, to the bits of the same ranks on the CPU."""

from __future__ import annotations

import pytest
from errors_table import check_documented
from processes import run_processes

STAGES = DEVICES = 2
SOON = 120.0


def train(rank: int, device: str, transport: str | None) -> tuple[list[str], list[str]]:
    """Return the losses and weights of three steps as text, and what the stand-in reports. The batch lies on the host."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import adaptra

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    inputs, targets = torch.randn(16, 8), torch.randint(0, 5, (16,))
    if device == "cuda":
        torch.cuda.set_device(rank % DEVICES)
        model.cuda()
    loss = nn.functional.cross_entropy
    pipe = adaptra.compile(
        model,
        stages=STAGES,
        microbatches=4,
        example_inputs=(inputs, targets),
        loss=loss,
        transport=transport,
        options=adaptra.Options(reduce=adaptra.Reduce(bucket=2048)),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    shown: list[str] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of_step = pipe.step(inputs, targets)
        assert loss_of_step.device.type == device
        shown.append(float(loss_of_step).hex())
        shown.append(float(pipe.clip_grad_norm_(1.0)).hex())
        optimizer.step()
    shown += [str(value.cpu().tolist()) for value in pipe.full_state_dict().values()]
    shown.append(float(pipe.eval_step(inputs, targets)).hex())
    pipe.close()
    dist.destroy_process_group()
    if device == "cpu":
        return shown, []
    from fake_cuda.machine import the_machine

    return shown, [*map(str, the_machine().detector.reports)]


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [(2, None), (2, "c10d"), (4, None)],
    ids=["delegate by default", "c10d", "two replicas, two ranks on each device"],
)
def test_ranks_train_on_their_devices_as_on_the_cpu(ranks: int, transport: str | None) -> None:
    on_cpu = run_processes(train, ranks, "cpu", "c10d", timeout=SOON)
    on_cuda = run_processes(train, ranks, "cuda", transport, timeout=SOON)
    assert [shown for shown, _ in on_cuda] == [shown for shown, _ in on_cpu]
    assert not [one for _, reports in on_cuda for one in reports]


def test_a_batch_on_another_device_is_refused_at_the_door() -> None:
    import torch
    from torch import nn

    import adaptra
    from adaptra.errors import BatchError

    model, inputs, targets = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), torch.randn(8, 8), torch.randn(8, 5)
    with adaptra.compile(
        model.cuda(), stages=2, microbatches=2, example_inputs=(inputs, targets), loss=nn.functional.mse_loss
    ) as pipe:
        pipe.step(inputs, targets)
        with pytest.raises(BatchError) as refused:
            pipe.step(inputs.to("cuda:1"), targets)
    assert "inputs: input is on cuda:1: expected cuda:0" in str(refused.value)
    check_documented("BatchError", str(refused.value), "…: … is on …: expected …, where the model is, or the host")
