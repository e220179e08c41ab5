"""The first cost model, before anything was measured: from the FLOPs and bytes of the stage graphs.

Only the ratios between stages and kinds matter at this point; the first measured steps replace the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from adaptra.graph import CompiledStages
from adaptra.program.placement import stages_of
from adaptra.simulation.cost import CostModel

FLOPS_PER_SECOND: Final = 1e11
"""A nominal device; of the order of one CPU core with vector units."""


def estimated_cost(compiled: CompiledStages, placement: Sequence[int]) -> CostModel:
    """Durations in seconds on a nominal device, free links, memory in units of one microbatch's activations on a rank."""
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
    """The share of a microbatch's memory that I gives back. I may keep more than F left; then nothing is freed early."""
    return max(0.0, 1.0 - after_input_grad / after_forward) if after_forward else 0.0
