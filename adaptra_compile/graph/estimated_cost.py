"""The first cost model, estimated from the FLOPs and bytes of the stage graphs before anything is measured.

Only the ratios between stages and kinds matter at this point. The first measured steps replace the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from adaptra.graph import CompiledStages
from adaptra.program.placement import stages_of
from adaptra.simulation.cost import CostModel

FLOPS_PER_SECOND: Final = 1e11
"""Speed of a nominal device, of the order of one CPU core with vector units."""


def estimated_cost(compiled: CompiledStages, placement: Sequence[int]) -> CostModel:
    """Return the estimated cost model.

    Durations are in seconds on a nominal device, and edges take no time. Memory is in units of one microbatch's activations on
    a rank.
    """
    held = [1.0 / len(stages_of(rank, placement)) for rank in placement]
    flops = [stage.flops for stage in compiled.train]
    kept = [(stage.kept_after_forward, stage.kept_after_input_grad) for stage in compiled.train]
    free = (0.0,) * (len(compiled.train) - 1)
    return CostModel(
        forward=tuple(one.forward / FLOPS_PER_SECOND for one in flops),
        input_grad=tuple(one.input_grad / FLOPS_PER_SECOND for one in flops),
        weight_grad=tuple(one.weight_grad / FLOPS_PER_SECOND for one in flops),
        latency_forward=free,
        latency_backward=free,
        occupancy_forward=free,
        occupancy_backward=free,
        memory_forward=tuple(held),
        memory_input_grad=tuple(
            share * _freed_by_input_grad(first, second) for share, (first, second) in zip(held, kept, strict=True)
        ),
    )


def _freed_by_input_grad(after_forward: int, after_input_grad: int) -> float:
    """Return the share of a microbatch's memory that I frees. It is zero if I keeps more than F saved."""
    return max(0.0, 1.0 - after_input_grad / after_forward) if after_forward else 0.0
