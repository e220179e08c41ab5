"""torch.distributed.pipelining's schedules on emulated devices: the same durations as :class:`adaptra.EmulatedDevice` states.

Durations are made by sleeping, in the forward and at the two places of the backward where input and weight gradients end.
Stage 0's input has no gradient; as in a real model, what its layers need of one another still takes its time.
"""

from __future__ import annotations

import argparse
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _ranks import layer, squared_error
from torch import Tensor, nn
from torch.distributed import config
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

CHUNKS = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}
"""Their names, and how many stages each has on a rank."""

SETTINGS = {"per-edge": "one communicator per directed edge", "deferred": "each receive right before the op that needs it"}
"""What torch 2.15 can set besides, by the name that follows a schedule's after a plus."""


def contender_named(text: str) -> str:
    """Return the name of a contender, as a command takes it: a schedule's, and settings as in ``ZBVZeroBubble+per-edge``.

    Raises:
        ArgumentTypeError: There is no such schedule or setting, or this torch has none.
    """
    name, *settings = text.split("+")
    if name not in CHUNKS or not set(settings) <= set(SETTINGS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(CHUNKS)}, then +{' or +'.join(SETTINGS)}")
    if settings and not hasattr(config, "pipeline_per_edge_p2p"):
        raise argparse.ArgumentTypeError(f"{text!r}: torch {torch.__version__} has no such setting: expected torch 2.15")
    if "deferred" in settings and CHUNKS[name] == 1:
        raise argparse.ArgumentTypeError(f"{text!r}: schedules of one stage per rank cannot defer receives")
    return text


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """Return the stages of a rank under a schedule: a V's two arms for ZBVZeroBubble, else every ``ranks``-th."""
    count = ranks * CHUNKS[name]
    return [rank, count - 1 - rank] if name == "ZBVZeroBubble" else list(range(rank, count, ranks))


class _TakesLong(torch.autograd.Function):
    """The identity, whose backward takes ``seconds``."""

    @staticmethod
    def forward(context: Any, given: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class EmulatedStage(nn.Module):
    """One layer whose F, I and W take ``seconds`` each."""

    def __init__(self, seconds: float, is_first: bool) -> None:
        super().__init__()
        self.layer = layer()
        self.entry = nn.Parameter(torch.ones(1)) if is_first else None
        self._seconds = seconds

    def forward(self, given: Tensor) -> Tensor:
        """F, padded to its duration."""
        until = time.monotonic() + self._seconds
        if self.entry is not None:
            given = given * self.entry
        weights = {name: _TakesLong.apply(weight, 0.0) for name, weight in self.layer.named_parameters()}
        weights["0.weight"] = _TakesLong.apply(self.layer.get_parameter("0.weight"), self._seconds)
        found = torch.func.functional_call(self.layer, weights, (_TakesLong.apply(given, self._seconds),))
        time.sleep(max(0.0, until - time.monotonic()))
        return found


def _per_edge() -> AbstractContextManager[None]:
    """While it holds, stages are made with communicators of their own per directed edge."""
    settings: Any = config
    return settings.patch(pipeline_per_edge_p2p=True)


class TorchSchedule:
    """One of torch's schedules on this rank, named as by :func:`contender_named`, for the small problem of ``_ranks.py``."""

    def __init__(self, name: str, microbatches: int, seconds: float) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        name, *settings = name.split("+")
        chunks = CHUNKS[name]
        count = ranks * chunks
        mine = stages_of(name, rank, ranks)
        torch.manual_seed(0)
        with _per_edge() if "per-edge" in settings else nullcontext():
            stages = [
                PipelineStage(EmulatedStage(seconds / chunks, index == 0), index, count, torch.device("cpu")) for index in mine
            ]
        made: Any = get_schedule_class(name)
        deferred = {"defer_pp_recv": True} if "deferred" in settings else {}
        self._schedule = made(stages if chunks > 1 else stages[0], microbatches, loss_fn=squared_error, **deferred)
        self._is_first, self._is_last = 0 in mine, count - 1 in mine

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step."""
        self._schedule.step(*((inputs,) if self._is_first else ()), target=targets if self._is_last else None)
