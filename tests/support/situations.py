"""Some thirty named planning problems that a reader can follow, and the document that shows their plans.

``tests/planning/test_golden_plans.py`` holds each plan to its golden file, and ``docs/plans.md`` to what :func:`document`
prints.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaptra.planning.planner import plan
from adaptra.program import Program
from adaptra.program.schedules import one_f_one_b
from adaptra.report import text
from adaptra.simulation.case import Case
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.simulation.simulate import Simulation, lower_bound, simulate


@dataclass(frozen=True)
class Situation:
    """A case, the limit of microbatches in flight if there is one, and in a sentence what to look at."""

    group: str
    name: str
    sentence: str
    case: Case
    in_flight: int | None = None

    def plan(self) -> Program:
        """What the golden file holds."""
        return plan(self.case, in_flight=self.in_flight)


def _even(stages: int = 4, time: float = 2.0) -> CostModel:
    return CostModel.uniform(stages, time, time, time)


def _delayed(cost: CostModel, *edges: tuple[int, int], by: float = 6.0) -> CostModel:
    for source, destination in edges:
        cost = cost.with_latency(source, destination, by)
    return cost


def _occupied(cost: CostModel, *edges: tuple[int, int], by: float = 3.0) -> CostModel:
    for source, destination in edges:
        cost = cost.with_occupancy(source, destination, by)
    return cost


def _capped(cost: CostModel, *limits: float) -> CostModel:
    return cost.limited(tuple(map(float, limits)))


def _situation(
    group: str,
    name: str,
    sentence: str,
    cost: CostModel,
    microbatches: int = 6,
    placement: Sequence[int] | None = None,
    in_flight: int | None = None,
) -> Situation:
    placed = tuple(range(cost.stages)) if placement is None else tuple(placement)
    return Situation(group, name, sentence, Case(cost, microbatches, placed, name), in_flight)


_HEALTHY = "Nothing is slow"
_DELAY = "Slow edges"
_OCCUPANCY = "Edges and stages that handle one message at a time"
_UNEQUAL = "Unequal stages and ops"
_MEMORY = "Little memory"
_SEVERAL = "Several stages on a rank"

SITUATIONS = (
    _situation(
        _HEALTHY, "even_stages", "Four equal stages. W fills what would be bubbles, and stage 0 runs ahead for it.", _even()
    ),
    _situation(_HEALTHY, "one_stage", "Nothing to wait for: any order takes as long.", _even(1), 3),
    _situation(
        _HEALTHY, "two_stages", "Two stages need only a few forwards ahead to be busy from the first op to the last.", _even(2)
    ),
    _situation(
        _HEALTHY,
        "fewer_microbatches_than_stages",
        "Two microbatches in four stages: most time is filling and draining.",
        _even(),
        2,
    ),
    _situation(
        _HEALTHY, "one_microbatch", "One microbatch goes there and back; only W can overlap with its way home.", _even(), 1
    ),
    _situation(_HEALTHY, "many_microbatches", "With twelve microbatches filling and draining weigh less.", _even(3), 12),
    _situation(
        _DELAY,
        "slow_first_edge",
        "Messages between stages 0 and 1 take 6, both ways: stage 0 runs further ahead.",
        _delayed(_even(), (0, 1), (1, 0)),
    ),
    _situation(
        _DELAY,
        "slow_middle_edge",
        "The slow edge is in the middle: both stages before it run ahead.",
        _delayed(_even(), (1, 2), (2, 1)),
    ),
    _situation(
        _DELAY,
        "slow_last_edge",
        "The slow edge is the last: all stages before it run ahead.",
        _delayed(_even(), (2, 3), (3, 2)),
    ),
    _situation(
        _DELAY,
        "slow_forwards",
        "Only activations are late, from stage 1 to 2; gradients come at once.",
        _delayed(_even(), (1, 2)),
    ),
    _situation(_DELAY, "slow_backwards", "Only gradients are late, from stage 2 to 1.", _delayed(_even(), (2, 1))),
    _situation(
        _DELAY,
        "two_slow_edges",
        "The first and the last edge are slow: the slack for both adds up on stage 0.",
        _delayed(_even(), (0, 1), (1, 0), (2, 3), (3, 2), by=4),
    ),
    _situation(
        _DELAY,
        "every_edge_slow",
        "All edges take 2 each way: more is in flight everywhere.",
        _delayed(_even(), (0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), by=2),
    ),
    _situation(
        _DELAY,
        "very_slow_edge",
        "A delay of 20 is longer than the microbatches at hand can hide.",
        _delayed(_even(3), (0, 1), (1, 0), by=20),
    ),
    _situation(
        _OCCUPANCY,
        "narrow_forward_edge",
        "Activations occupy edge 1→2 for 3 each, longer than a forward takes: they queue.",
        _occupied(_even(), (1, 2)),
    ),
    _situation(
        _OCCUPANCY,
        "narrow_edge_both_ways",
        "Both directions of edge 1-2 are occupied for 3 per message, each on its own.",
        _occupied(_even(), (1, 2), (2, 1)),
    ),
    _situation(
        _OCCUPANCY,
        "bottleneck_edge",
        "Edge 0→1 is occupied for 7 per message, longer than a stage works for a microbatch: the edge sets the pace.",
        _occupied(_even(3), (0, 1), by=7),
    ),
    _situation(
        _OCCUPANCY,
        "shared_edge",
        "Both directions share edge 1-2, in the order in which messages are handed over.",
        replace(_occupied(_even(), (1, 2), (2, 1), by=2), half_duplex=True),
    ),
    _situation(
        _OCCUPANCY,
        "blocking_send",
        "A sender waits until its message has arrived.",
        replace(_delayed(_even(3), (0, 1), (1, 0), by=2), blocking=Blocking.SEND),
    ),
    _situation(
        _OCCUPANCY,
        "blocking_both",
        "Sender and receiver both wait while a message travels.",
        replace(_delayed(_even(3), (0, 1), (1, 0), by=2), blocking=Blocking.BOTH),
    ),
    _situation(
        _UNEQUAL,
        "slow_first_stage",
        "Stage 0 takes twice as long: it sets the pace and never waits after its first op.",
        replace(_even(3), forward=(4, 2, 2), input_grad=(4, 2, 2), weight_grad=(4, 2, 2)),
    ),
    _situation(
        _UNEQUAL,
        "slow_last_stage",
        "The last stage takes twice as long, as one with a large vocabulary does.",
        replace(_even(3), forward=(2, 2, 4), input_grad=(2, 2, 4), weight_grad=(2, 2, 4)),
    ),
    _situation(
        _UNEQUAL,
        "slow_middle_stage",
        "The middle stage takes twice as long; both neighbours have time to spare.",
        replace(_even(3), forward=(2, 4, 2), input_grad=(2, 4, 2), weight_grad=(2, 4, 2)),
    ),
    _situation(
        _UNEQUAL,
        "no_input_gradient_on_stage_0",
        "The first stage has no input gradient to send: its I takes no time.",
        replace(_even(3), input_grad=(0, 2, 2), weight_grad=(4, 2, 2)),
    ),
    _situation(
        _UNEQUAL,
        "long_weight_gradients",
        "W takes twice as long as F and I: there is more than enough to fill bubbles with.",
        replace(_even(3), weight_grad=(4, 4, 4)),
    ),
    _situation(
        _UNEQUAL,
        "no_weight_gradients",
        "W takes no time: there is nothing to fill bubbles with.",
        replace(_even(3), weight_grad=(0, 0, 0)),
    ),
    _situation(
        _MEMORY,
        "as_much_as_1f1b",
        "Every rank has room for as many microbatches as there are stages.",
        _capped(_even(), 4, 4, 4, 4),
    ),
    _situation(
        _MEMORY, "tight_at_stage_0", "Stage 0 has room for two microbatches, the others for all.", _capped(_even(3), 2, 6, 6)
    ),
    _situation(
        _MEMORY,
        "tight_at_the_last_stage",
        "The last stage has room for one microbatch: its W can't wait.",
        _capped(_even(3), 6, 6, 1),
    ),
    _situation(
        _MEMORY,
        "room_for_one_microbatch",
        "Every rank has room for one microbatch: one after the other, whatever the order.",
        _capped(_even(3), 1, 1, 1),
        3,
    ),
    _situation(
        _MEMORY,
        "weight_gradients_hold_the_memory",
        "I frees nothing, W everything: W can't be put off for long.",
        replace(_capped(_even(3), 4, 4, 4), memory_input_grad=(0.0, 0.0, 0.0)),
    ),
    _situation(
        _MEMORY,
        "slow_edge_and_little_memory",
        "A delay of 6 on edge 1-2 asks for more microbatches in flight than the room for four allows.",
        _capped(_delayed(_even(), (1, 2), (2, 1)), 4, 4, 4, 4),
    ),
    _situation(
        _MEMORY, "two_in_flight", "No stage may have more than two microbatches between F and I.", _even(3), in_flight=2
    ),
    _situation(_SEVERAL, "interleaved", "Each of two ranks holds two stages in turn.", _even(4, 3), 4, (0, 1, 0, 1)),
    _situation(
        _SEVERAL, "v_shaped", "There and back: rank 0 holds the first and the last stage.", _even(4, 3), 4, (0, 1, 1, 0)
    ),
    _situation(
        _SEVERAL,
        "v_shaped_slow_edge",
        "As before, but messages between the ranks take 6: each microbatch crosses the edge four times.",
        _delayed(_even(4, 3), (0, 1), (1, 0), (2, 3), (3, 2)),
        4,
        (0, 1, 1, 0),
    ),
)
"""The thirty-six, in the order of the document."""


_MARGIN = len("rank 0 ")
_WIDTH = 128


def document() -> str:
    """``docs/plans.md``."""
    parts = [_INTRODUCTION]
    group = ""
    for situation in SITUATIONS:
        if situation.group != group:
            group = situation.group
            parts.append(f"## {group}\n")
        parts.append(_section(situation))
    return "\n".join(parts)


_INTRODUCTION = """\
# Plans to look at

Small planning problems, one reason each, and the plans that adaptra makes for them. One character is one unit of time (in very
short plans half a unit or less); `.` is a rank that waits. F, I and W take 2 each unless a problem says otherwise, and 3 where
ranks hold several stages. A microbatch holds 1 from F on, half of it until I has ended, half until W has. In flight is, stage
by stage, the most microbatches between F and I.

Where communication does not block, the exact solver (`adaptra plan --exact --barrier`) proves the shortest makespan of each.
"No order takes less" says that a bound does, without searching, and which.

The programs are `tests/golden/plan_NAME.sched`. A test makes each plan again and compares it, and this page, letter by letter;
`pytest --accept-golden tests/planning/test_golden_plans.py` rewrites them.
"""


def _section(situation: Situation) -> str:
    case = situation.case
    run, bound = simulate(situation.plan(), case.cost), lower_bound(case)
    per_unit = math.ceil((text.LEAST_WIDTH - _MARGIN) / run.makespan)
    picture = text.render(run.timeline, _MARGIN + per_unit * round(run.makespan)).split("\n", 1)[1]
    figures = [f"The plan takes {run.makespan:g}, in flight are {_in_flight(run)}."]
    if situation.in_flight is None:
        below = (
            "no order takes less" if run.makespan <= bound.value * (1 + 1e-9) else f"no order takes less than {bound.value:g}"
        )
        figures.append(f"{below[0].upper()}{below[1:]} ({bound.kind.value}, {bound.where}).")
    if case.placement == tuple(range(case.cost.stages)):
        known = simulate(one_f_one_b(case.cost.stages, case.microbatches), case.cost)
        over = any(peak > situation.in_flight for peak in known.peak_in_flight) if situation.in_flight else known.over_memory
        figures.append(f"1F1B takes {known.makespan:g}{', and more memory than there is' if over else ''}.")
    description = textwrap.fill(" ".join([situation.sentence, *figures]), _WIDTH)
    return f"### {situation.name}\n\n{description}\n\n```\n{picture}```\n"


def _in_flight(run: Simulation) -> str:
    return ", ".join(map(str, run.peak_in_flight))
