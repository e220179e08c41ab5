"""The pass ``fuse-backward``: fuses I and W into one op where the split saves no time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from adaptra.errors import PassError
from adaptra.passes.base import Pass
from adaptra.program import Kind, Op, Program
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, simulate

TOLERANCE: Final = 1e-9
"""Lengthening of the step, as a fraction of the makespan, that counts as rounding."""


@dataclass(frozen=True)
class FuseBackward(Pass):
    """Replace I and the W of the same microbatch right after it by one B, if the step does not get longer.

    Split backwards cost kernel launches and keep buffers. A B sends its gradient only after W, so it can delay the stage before
    it. On stage 0 no stage waits for the gradient, so every adjacent pair fuses. On other stages, all pairs of a stage are
    tried at once, then halves of those that did not fuse.

    Guarantees: the same simulated makespan, up to rounding; no more memory on any rank; a valid program stays valid. It never
    moves an op, and fuses only adjacent pairs. Run it after adapt-order, which may defer W on purpose.

    Refuses a program with communication ops, which would separate I from W, and one of several replicas. How fast their workers
    are is not in the cost model, so what a B delays is not known.
    """

    name: ClassVar[str] = "fuse-backward"

    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the program with pairs fused into B, or ``program`` itself if no pair can be fused."""
        program.require_one_pipeline(self.name)
        if program.is_lowered:
            raise PassError(f"{self}: {program.name} holds SEND and RECV ops: run {self.name} before insert-comm")
        if program.is_forward_only:
            return program
        limit = simulate(program, cost)
        for stage in range(program.stages):
            pairs = _pairs(program, stage)
            tries = [pairs] if pairs else []
            while tries:
                attempt = tries.pop()
                fused = _fuse(program, stage, frozenset(attempt))
                if _as_good(simulate(fused, cost), limit):
                    program = fused
                elif len(attempt) > 1:
                    half = len(attempt) // 2
                    tries += [attempt[half:], attempt[:half]]
        return program


def _pairs(program: Program, stage: int) -> list[int]:
    """Return the microbatches whose I and W are adjacent on the stage."""
    order = program.orders[program.placement[stage]]
    return [
        first.microbatch
        for first, second in itertools.pairwise(order)
        if first.stage == stage and first.kind is Kind.I and second == Op(stage, Kind.W, first.microbatch)
    ]


def _fuse(program: Program, stage: int, microbatches: frozenset[int]) -> Program:
    rank = program.placement[stage]

    def fused(op: Op) -> Sequence[Op]:
        if op.stage != stage or op.microbatch not in microbatches or op.kind is Kind.F:
            return (op,)
        return (Op(stage, Kind.B, op.microbatch),) if op.kind is Kind.I else ()

    order = tuple(made for op in program.orders[rank] for made in fused(op))
    return replace(program, orders=(*program.orders[:rank], order, *program.orders[rank + 1 :]))


def _as_good(found: Simulation, limit: Simulation) -> bool:
    held = zip(found.peak_memory, limit.peak_memory, strict=True)
    return found.makespan <= limit.makespan * (1 + TOLERANCE) and all(mine <= most for mine, most in held)
