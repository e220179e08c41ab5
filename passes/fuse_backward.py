"""The pass ``fuse-backward``: I and W as one op wherever splitting gains nothing."""

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
"""How much longer, as a part of the makespan, is rounding."""


@dataclass(frozen=True)
class FuseBackward(Pass):
    """Replace I and the W of the same microbatch right behind it by one B, where the step does not get longer.

    A B keeps its gradient until W is done, so it can delay the stage before it; split backwards cost kernel launches and keep
    buffers. On stage 0 nobody waits for the gradient: there every such pair fuses. Elsewhere pairs are tried stage by stage,
    first all of a stage at once, then halves of those that did not fuse.

    Guarantees: the same simulated makespan, up to rounding; no more memory on any rank; a valid program stays valid. It never
    moves an op, and of pairs that are not side by side, as where W is put off on purpose, it fuses none: run it after
    adapt-order.

    Refuses a program with communication ops, between which I and W would not stand side by side.
    """

    name: ClassVar[str] = "fuse-backward"

    def apply(self, program: Program, cost: CostModel) -> Program:
        """The program with as many B, or ``program`` itself where none fits."""
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
    """The microbatches whose I and W stand side by side on the stage."""
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
