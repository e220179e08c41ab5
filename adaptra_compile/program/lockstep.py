"""Lockstep: an abstract run of a program in which each rank executes its next op in every step, if it may.

There are no times and no messages. The run shows whether and where ranks deadlock, and gives the grid of ranks and steps in
which people read a schedule. The caller supplies the dependency rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from adaptra.program import Op, Program


@dataclass(frozen=True, slots=True)
class Lockstep:
    """The result of an abstract run.

    Attributes:
        program: The program.
        steps: The step in which each executed op ran, counted from zero.
        stuck: The ranks that did not reach their ends, in order of ranks. Each has the number of its ops that ran, and the op
            for which the next one waits. Empty if the program ran to its end.
    """

    program: Program
    steps: Mapping[Op, int]
    stuck: Mapping[int, tuple[int, Op]]

    def grid(self) -> Iterator[str]:
        """Yield lines of ranks × steps: the last steps that ran, then ``→`` with the waiting op, then the next ops."""
        end = max(self.steps.values(), default=-1) + 1
        shown = range(max(0, end - _STEPS_SHOWN), end)
        rows = [["step", *map(str, shown)]]
        for rank, order in enumerate(self.program.orders):
            position = self.stuck[rank][0] if rank in self.stuck else len(order)
            ran = {self.steps[op]: self.program.text_of(op) for op in order[:position]}
            shown_ops = order[position : position + 1 + _OPS_AHEAD]
            waiting, *ahead = map(self.program.text_of, shown_ops) if rank in self.stuck else ["end"]
            marked = f"→{waiting}" if rank in self.stuck else waiting
            rows.append([f"{self.program.rank_word} {rank}", *(ran.get(step, ".") for step in shown), marked, *ahead])
        widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()


def run_in_lockstep(program: Program, waits_for: Callable[[Op, Container[Op]], Op | None]) -> Lockstep:
    """Execute the program as far as possible, in time linear in its ops.

    Args:
        program: The program.
        waits_for: Called with an op and the ops that ran in earlier steps. Returns an op for which it still waits, or None if
            it may run. It is called again once that op has run.
    """
    position = [0] * program.ranks
    steps: dict[Op, int] = {}
    waiting: defaultdict[Op, list[int]] = defaultdict(list)
    active = [rank for rank, order in enumerate(program.orders) if order]
    step = 0
    while active:
        executed: list[tuple[int, Op]] = []
        for rank in active:
            op = program.orders[rank][position[rank]]
            missing = waits_for(op, steps)
            if missing is None:
                executed.append((rank, op))
            else:
                waiting[missing].append(rank)
        active = []
        for rank, op in executed:
            steps[op] = step
            position[rank] += 1
            if position[rank] < len(program.orders[rank]):
                active.append(rank)
            active += waiting.pop(op, ())
        step += 1
    missing_of = {rank: missing for missing, ranks in waiting.items() for rank in ranks}
    return Lockstep(program, steps, {rank: (position[rank], missing_of[rank]) for rank in sorted(missing_of)})


_STEPS_SHOWN: Final = 12
_OPS_AHEAD: Final = 4
