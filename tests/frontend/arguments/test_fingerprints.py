"""What ranks compare of a user's function: the same everywhere, and different where the function is."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from loss_functions import GIVEN, Smooth, scaled
from paths import SUPPORT
from torch import Tensor, nn

from adaptra.frontend.arguments.fingerprints import describe_function, describe_model

SCRIPT = """
import sys
import torch.nn.functional as F
from torch import nn
sys.path.insert(0, sys.argv[1])
from loss_functions import GIVEN
from adaptra.frontend.arguments.fingerprints import describe_function
print([describe_function(one) for one in GIVEN])
"""


def test_functions_that_compute_something_else_are_described_otherwise_and_the_same_in_every_process() -> None:
    described = [describe_function(one) for one in GIVEN]
    assert len(set(described)) == len(described)
    assert [describe_function(one) for one in (scaled(1.0), nn.CrossEntropyLoss(ignore_index=0), Smooth(2.0))] == [
        described[GIVEN.index(GIVEN[9])],
        described[6],
        described[16],
    ]
    again = subprocess.run([sys.executable, "-c", SCRIPT, str(SUPPORT)], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(described)


class Opaque:
    """What each rank has of its own, such as a writer of logs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def write(self) -> None:
        self.seed += 1


@dataclass
class Settings:
    beta: float
    path: str


class Trainer:
    def __init__(self, rank: int, beta: float) -> None:
        self.rank, self.device, self.writer, self.beta = rank, torch.device("cuda", rank), Opaque(rank), beta
        self.log_dir = f"runs/{rank}"

    def _scale(self) -> float:
        return self.beta

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        if self.rank == 0:
            self.writer.write()
        return (a - b).square().mean() * self._scale()


def losses(rank: int, beta: float) -> dict[str, Callable[..., Any]]:
    """Losses that healthy ranks close over, by what they reach; those of another ``beta`` compute something else."""
    import torch.nn.functional as F  # noqa: N812 - as users import it

    log = logging.getLogger("train")
    log.addFilter(lambda record: rank == 0)
    args = argparse.Namespace(
        local_rank=rank, device=f"cuda:{rank}", gpu=rank, beta=beta, out=f"runs/{rank}", where=torch.device("cuda", rank)
    )
    settings, opaque, device, where = Settings(beta, f"runs/{rank}"), Opaque(rank), torch.device("cuda", rank), f"cuda:{rank}"

    def with_module(a: Tensor, b: Tensor) -> Tensor:
        return F.mse_loss(a, b) * beta

    def with_logger(a: Tensor, b: Tensor) -> Tensor:
        log.info("loss")
        return (a - b).mean() * beta

    def with_arguments(a: Tensor, b: Tensor) -> Tensor:
        if args.local_rank == 0:
            opaque.write()
        return (a.to(args.device) - b).mean() * args.beta

    def with_devices(a: Tensor, b: Tensor) -> Tensor:
        return (a.to(device) - b.to(where)).mean() * settings.beta

    def with_rank(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).mean() * beta if rank else (a - b).mean() * beta + 0

    def helped(a: Tensor, b: Tensor, given: argparse.Namespace, rank: int = 0) -> Tensor:
        return (a - b).mean() * given.beta + rank * 0

    made = {one.__name__: one for one in (with_module, with_logger, with_arguments, with_devices, with_rank)}
    partly = partial(helped, given=args, rank=rank)
    return {**made, "method": Trainer(rank, beta).loss, "partial": partly, "options": lambda a, b: helped(a, b, args)}


@pytest.mark.parametrize("name", losses(0, 1.0))
def test_what_healthy_ranks_have_of_their_own_is_no_other_function_and_another_number_is(name: str) -> None:
    first, second, other = (describe_function(losses(*given)[name]) for given in ((0, 1.0), (1, 1.0), (1, 2.0)))
    assert first == second != other


def test_a_module_counts_by_its_name() -> None:
    one, other = ModuleType("helpers"), ModuleType("helpers")
    one.__dict__["cache"], other.__dict__["cache"] = 1, 2
    described = [describe_function(partial(max, given)) for given in (one, other, ModuleType("others"))]
    assert described[0] == described[1] != described[2]


def test_a_model_is_described_by_its_class_and_size() -> None:
    assert describe_model(nn.Linear(2, 3)) == "Linear (9 parameters)"
    assert describe_model([nn.Linear(40, 50), nn.Tanh()]) == "Linear, Tanh (2,050 parameters)"
