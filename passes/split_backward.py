"""The pass ``split-backward``: every B becomes its I and its W."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from adaptra.passes.base import Pass
from adaptra.program import Kind, Op, Program
from adaptra.simulation.cost import CostModel


@dataclass(frozen=True)
class SplitBackward(Pass):
    """Replace every B by I and W of the same stage and microbatch, side by side.

    Guarantees: the result holds no B, and is the program itself if that holds none. No op moves, so nothing that was in
    order is out of order now. A SEND_B after the B stays where it is, behind the W.

    Refuses nothing.
    """

    name: ClassVar[str] = "split-backward"

    def apply(self, program: Program, cost: CostModel) -> Program:
        """The program without B; ``cost`` does not matter."""
        if not any(op.kind is Kind.B for order in program.orders for op in order):
            return program
        return replace(program, orders=tuple(tuple(_split(order)) for order in program.orders))


def _split(order: tuple[Op, ...]) -> Iterator[Op]:
    for op in order:
        if op.kind is Kind.B:
            yield Op(op.stage, Kind.I, op.microbatch)
            yield Op(op.stage, Kind.W, op.microbatch)
        else:
            yield op
