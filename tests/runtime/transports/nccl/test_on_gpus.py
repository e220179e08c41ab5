"""Training over NCCL itself, to the bits of the delegate."""

from __future__ import annotations

import pytest
import torch
from processes import run_processes

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPUS < 2 or not torch.distributed.is_nccl_available(),
        reason=f"NCCL needs a GPU for each of two ranks: torch finds {GPUS} here",
    ),
]


def train(rank: int, transport: str) -> list[str]:
    """Return the losses of five steps and the weights after them."""
    import adaptra

    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)]
    model, inputs, targets = torch.nn.Sequential(*layers), torch.randn(64, 256), torch.randn(64, 256)
    pipe = adaptra.compile(
        model.cuda(),
        stages=2,
        microbatches=8,
        example_inputs=(inputs, targets),
        loss=torch.nn.functional.mse_loss,
        transport=transport,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    shown: list[str] = []
    for _ in range(5):
        optimizer.zero_grad()
        shown.append(float(pipe.step(inputs, targets)).hex())
        optimizer.step()
    shown += [str(value.cpu().tolist()) for value in pipe.full_state_dict().values()]
    pipe.close()
    torch.distributed.destroy_process_group()
    return shown


def test_two_ranks_train_over_nccl_as_over_the_delegate() -> None:
    assert run_processes(train, 2, "nccl") == run_processes(train, 2, "delegate")
