"""Training over NCCL itself, to the bits of the delegate."""

from __future__ import annotations

import pytest
import torch
from cuda_training import Training, train
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


def test_two_ranks_train_over_nccl_as_over_the_delegate() -> None:
    trainings = [Training(transport=transport, deterministic=True) for transport in ("nccl", "delegate")]
    for over_nccl, over_the_delegate in run_processes(train, 2, *trainings, is_fresh=True):
        assert over_nccl.is_bitwise(over_the_delegate)
