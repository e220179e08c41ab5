"""The pass ``split-backward``: splits every B into I and W."""

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

    Guarantees: the result has no B, and is the program itself if that has none. No op moves, so all orders are kept. A SEND_B
    after the B stays at its position, after the W.

    Refuses nothing.
    """

    name: ClassVar[str] = "split-backward"

    @property
    def uses_cost(self) -> bool:
        """False: no time decides anything."""
        return False

    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the program without B. ``cost`` is not used."""
        if not any(op.kind is Kind.B for order in program.orders for op in order):
            return program
        return replace(program, orders=tuple(tuple(_split(order)) for order in program.orders))


def _split(order: tuple[Op, ...]) -> Iterator[Op]:
    for op in order:
        if op.kind is Kind.B:
            yield replace(op, kind=Kind.I)
            yield replace(op, kind=Kind.W)
        else:
            yield op
