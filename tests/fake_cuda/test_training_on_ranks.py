"""Ranks train a model on cuda, each on a device of its own, to the bits of the same ranks on the CPU."""

from __future__ import annotations

import pytest
from errors_table import check_documented
from processes import run_processes

SOON = 120.0


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [(2, None), (2, "c10d"), (4, None)],
    ids=["delegate by default", "c10d", "two replicas, two ranks on each device"],
)
def test_ranks_train_on_their_devices_as_on_the_cpu(ranks: int, transport: str | None) -> None:
    from cuda_training import Training, train

    on_cpu = run_processes(train, ranks, Training(device="cpu", transport="c10d"), timeout=SOON)
    on_cuda = run_processes(train, ranks, Training(transport=transport), timeout=SOON)
    for (expected,), (trained,) in zip(on_cpu, on_cuda, strict=True):
        assert trained.is_bitwise(expected)
        assert not trained.reports


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
