"""Training without devices: what the monitors of all ranks would record, step by step, on noisy machines that now and then
fail.

A step is simulated under the costs of its moment, and every record of it is disturbed as on real machines. Ops scatter and
drift, and one now and then holds a pause of the garbage collector. Messages have a long tail, clocks run apart, the first
steps warm up. Monitor, policy, detector and planner are the real ones; hours pass in seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from policy_world import PolicyWorld

from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.runtime.control.deciding.policy import BeginPlanning, ControllerOptions
from adaptra.runtime.control.deciding.replanning import Planning
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.detection.changes import Change, ChangeKind
from adaptra.runtime.detection.detector import Detection
from adaptra.runtime.detection.shape_scales import RelativeSizes, ShapeScales
from adaptra.runtime.measuring.measurement import StepMeasurement
from adaptra.runtime.measuring.monitor import Monitor
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import simulate
from adaptra.simulation.timeline import MessageInterval

CASE = Case(CostModel.uniform(4, 0.02, 0.02, 0.02, latency=2e-4), 16, (0, 1, 2, 3))
"""Four healthy stages."""

EFFORT = 30_000
"""Of the planner, about a millisecond: the same plans everywhere."""

PLANNING = Planning(lambda case, incumbent: PERIOD.plan(case, incumbent=incumbent, effort=EFFORT))


@dataclass(frozen=True, slots=True)
class Noise:
    """How records scatter; shares of durations, or seconds.

    Attributes:
        ops: Standard deviation of an op's duration, as a share of it.
        drift: The amplitude of a stage's slow drift, as a share of its durations; its period is ``drift_steps``.
        pause: How often a rank's step holds a pause, which lengthens one op by 50 to 300 ms.
        jitter: The mean of what a message takes more, exponentially distributed.
        tail: How often a message takes up to ``tail_seconds`` more, as when a packet is sent again.
        clocks: How far a rank's clock may run fast or slow, as a share of the time.
    """

    ops: float = 0.02
    drift: float = 0.03
    drift_steps: int = 1500
    pause: float = 0.03
    jitter: float = 3e-4
    tail: float = 0.01
    tail_seconds: float = 0.03
    clocks: float = 5e-5


@dataclass(frozen=True, slots=True)
class Fault:
    """Something slow in the steps ``first`` to ``last``.

    Attributes:
        kind: Of what.
        places: Directed edges, or the stage alone.
        size: Seconds that are added to a latency or an occupancy, or to late messages, or the factor of a stage's durations.
        share: Of the messages of a lossy edge, how many are lost at first; what is sent behind them waits for them.
    """

    kind: ChangeKind
    places: tuple[tuple[int, ...], ...]
    size: float
    first: int
    last: int
    share: float = 0.0

    def apply(self, cost: CostModel) -> CostModel:
        """The costs while it lasts."""
        for place in self.places:
            match self.kind, place:
                case ChangeKind.COMPUTE, (stage,):
                    cost = slower(cost, stage, self.size)
                case ChangeKind.LATENCY, (source, destination):
                    cost = cost.with_latency(source, destination, cost.latency(source, destination) + self.size)
                case ChangeKind.BANDWIDTH, (source, destination):
                    cost = cost.with_occupancy(source, destination, self.size)
                case ChangeKind.LOSS, _:
                    pass  # No cost says what happens to single messages.
                case _:
                    raise AssertionError(f"{self.kind} at {place}")
        return cost


def slower(cost: CostModel, stage: int, factor: float) -> CostModel:
    """The costs when a stage's ops take so many times as long."""

    def changed(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * (factor if index == stage else 1.0) for index, value in enumerate(values))

    return replace(
        cost,
        forward=changed(cost.forward),
        input_grad=changed(cost.input_grad),
        weight_grad=changed(cost.weight_grad),
    )


def sized(cost: CostModel, size: float) -> CostModel:
    """The costs of a batch so many times as large: of ops, and of messages' occupancies."""

    def changed(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * size for value in values)

    return replace(
        cost,
        forward=changed(cost.forward),
        input_grad=changed(cost.input_grad),
        weight_grad=changed(cost.weight_grad),
        occupancy_forward=changed(cost.occupancy_forward),
        occupancy_backward=changed(cost.occupancy_backward),
    )


@dataclass
class NoisySteps:
    """A run. :meth:`step` makes the next step and lets the control loop see it.

    Attributes:
        case: The healthy pipeline, in seconds.
        seed: Of all noise.
        faults: What is slow and when.
        options: The controller's.
        shapes: The real and the estimated size of batches of each shape, relative to the case; steps draw one.
        detections: All that were made, calibration included.
        switches: The first steps under another plan.
    """

    case: Case
    seed: int
    noise: Noise = field(default_factory=Noise)
    faults: Sequence[Fault] = ()
    options: ControllerOptions = field(default_factory=ControllerOptions)
    shapes: Sequence[tuple[float, float]] = ((1.0, 1.0),)
    detections: list[Detection] = field(default_factory=list[Detection])
    switches: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._phases = [self._dice.uniform(0, 2 * math.pi) for _ in self.case.placement]
        self._clocks = [self._dice.uniform(-self.noise.clocks, self.noise.clocks) for _ in set(self.case.placement)]
        self._monitors = [Monitor(rank, self.case.placement) for rank in sorted(set(self.case.placement))]
        self._scales = [ShapeScales() for _ in self._monitors]
        self._lengths = random.Random(self.seed)
        self._steps = count()
        program = PERIOD.plan(self.case, effort=EFFORT).compute_only()
        predicted, bound = PERIOD.of(program, self.case.cost), PERIOD.bound(self.case)
        initial = Plan(0, program, self.case, predicted, bound, "initial")
        self._world = PolicyWorld(initial, len(self._monitors), PLANNING, self.options)
        self.seconds = 0.0

    def cost_at(self, step: int) -> CostModel:
        """What really holds in a step."""
        cost = self.case.cost
        for fault in self.faults:
            if fault.first <= step <= fault.last:
                cost = fault.apply(cost)
        for stage, phase in enumerate(self._phases):
            cost = slower(cost, stage, 1 + self.noise.drift * math.sin(phase + 2 * math.pi * step / self.noise.drift_steps))
        return cost

    @property
    def program(self) -> Program:
        """What the next step runs."""
        return self._world.plan.program

    def step(self) -> Detection | None:
        """Make a step, and let the policy see it."""
        step, version = next(self._steps), self._world.plan.version
        self._world.actions.clear()
        if self._world.step(self._measured(step)).version != version:
            self.switches.append(step + 1)
        begun = [one.detection for one in self._world.actions if isinstance(one, BeginPlanning) and not one.is_draft]
        self.detections += begun
        return begun[0] if begun else None

    def _measured(self, step: int) -> list[StepMeasurement]:
        noise, dice = self.noise, self._dice
        shape = self._lengths.randrange(len(self.shapes))
        real, estimated = self.shapes[shape]
        cost = sized(self.cost_at(step), real)
        timeline = simulate(self.program, cost).timeline
        length = max(op.end for ops in timeline.ops for op in ops)
        self.seconds += length
        warming = 1 + 2.0 * (step == 0) + 0.2 * (step == 1)
        for monitor, ops in zip(self._monitors, timeline.ops, strict=True):
            paused = dice.randrange(len(ops)) if dice.random() < noise.pause else None
            for index, op in enumerate(ops):
                duration = (op.end - op.start) * warming * max(0.5, dice.gauss(1.0, noise.ops))
                pause = dice.uniform(0.05, 0.3) if index == paused else 0.0
                monitor.op(op.op, op.start, op.start + duration + pause)
        arrivals: dict[tuple[int, int], float] = {}
        for message in timeline.messages:
            edge = message.source, message.destination
            late = self._late()
            sender, receiver = self.case.placement[message.source], self.case.placement[message.destination]
            # Read from the receiver's clock, which agreed with the sender's at the start.
            arrived = message.arrived + late * warming + (self._clocks[receiver] - self._clocks[sender]) * self.seconds
            for fault in self._losses(step, edge):
                lost = dice.random() < fault.share
                arrived = arrivals[edge] = max(arrived + lost * fault.size, arrivals.get(edge, 0.0))
            monitor = self._monitors[receiver]
            monitor.message(
                message.kind,
                message.source,
                message.destination,
                message.microbatch,
                1 << 20,
                message.posted,
                message.posted,
                arrived,
                arrived,
            )
        self._probe(timeline.messages, cost, warming)
        stages = range(cost.stages)
        edges = [(stage, stage + way) for stage in stages for way in (-1, 1) if stage + way in stages]
        sizes = RelativeSizes(dict.fromkeys(stages, estimated), dict.fromkeys(edges, real))
        return [
            scales.convert(shape, sizes, monitor.end_step(step, 0.0, length, shape))
            for scales, monitor in zip(self._scales, self._monitors, strict=True)
        ]

    def _losses(self, step: int, edge: tuple[int, int]) -> list[Fault]:
        """What makes an edge lossy in a step."""
        lossy = (fault for fault in self.faults if fault.kind is ChangeKind.LOSS and edge in fault.places)
        return [fault for fault in lossy if fault.first <= step <= fault.last]

    def _probe(self, messages: Sequence[MessageInterval], cost: CostModel, warming: float) -> None:
        """Over every edge a few bytes, as soon as its source has the first message from its destination."""
        firsts: dict[tuple[int, int], float] = {}
        for message in messages:
            edge = message.destination, message.source
            firsts[edge] = min(firsts.get(edge, math.inf), message.arrived)
        for (source, destination), sent in firsts.items():
            sender, receiver = self.case.placement[source], self.case.placement[destination]
            before = [m for m in messages if (m.source, m.destination) == (source, destination) and m.posted <= sent]
            departed = max([sent, *(m.departed + cost.occupancy(source, destination) for m in before)])
            arrived = departed + cost.latency(source, destination) + self._late() * warming
            drifted = (self._clocks[receiver] - self._clocks[sender]) * self.seconds
            self._monitors[receiver].probe(source, destination, sent, arrived + drifted)

    def _late(self) -> float:
        """How much longer than the costs say a message takes."""
        noise, dice = self.noise, self._dice
        return dice.expovariate(1 / noise.jitter) + (dice.random() < noise.tail) * dice.uniform(0, noise.tail_seconds)


def best_plan(case: Case, cost: CostModel, incumbent: Program) -> tuple[Program, float]:
    """The planner's program under these costs, and its period."""
    found = PLANNING.planner(replace(case, cost=cost), incumbent).compute_only()
    return found, PERIOD.of(found, cost)


def random_episode(case: Case, seed: int) -> list[Fault]:
    """One or two faults of random kind, place, size and length, which may overlap. The first begins when all is calibrated."""
    dice = random.Random(seed)
    stages, forward = case.cost.stages, case.cost.forward[0]
    faults: list[Fault] = []
    first = dice.randint(8, 12)
    taken: set[int] = set()
    for _ in range(dice.choice((1, 1, 2))):
        kind = dice.choice((ChangeKind.COMPUTE, ChangeKind.LATENCY, ChangeKind.BANDWIDTH, ChangeKind.LOSS))
        free = [where for where in range(stages - (kind is not ChangeKind.COMPUTE)) if where not in taken]
        where = dice.choice(free)
        taken |= {where - 1, where, where + 1}
        if len(taken) >= stages:
            taken = set(range(stages))
        both, length, share = ((where, where + 1), (where + 1, where)), dice.randint(8, 20), 0.0
        match kind:
            case ChangeKind.COMPUTE:
                places, size = ((where,),), dice.uniform(1.2, 2.5)
            case ChangeKind.LATENCY:
                places, size = dice.choice((both, both[:1], both[1:])), dice.uniform(0.5, 5.0) * forward
            case ChangeKind.BANDWIDTH:
                places, size = dice.choice((both, both[:1], both[1:])), dice.uniform(1.3, 3.0) * forward
            case _:
                # The least timeout of TCP and, where that is lost as well, the next one.
                places, size = dice.choice((both[:1], both[1:])), dice.choice((0.2, 0.4))
                length, share = length + 12, dice.uniform(0.05, 0.2)
        faults.append(Fault(kind, places, size, first, first + length, share))
        first += dice.randint(4, 12)
        if not set(range(stages - 1)) - taken:
            break
    return faults


def flapping_episode(case: Case, seed: int) -> tuple[Case, list[Fault]]:
    """A link or a stage that comes and goes until about step 240, where memory is plenty or scarce.

    In a third of the episodes another link is slow for a while.

    Returns:
        The case with its memory, and the faults.
    """
    dice = random.Random(seed)
    stages, forward = case.cost.stages, case.cost.forward[0]
    scarce = dice.choice((None, 4.0, 6.0))
    if scarce is not None:
        case = replace(case, cost=case.cost.limited((scarce,) * stages))
    kind = dice.choice((ChangeKind.LATENCY, ChangeKind.LATENCY, ChangeKind.BANDWIDTH, ChangeKind.COMPUTE))
    where = dice.randrange(stages - 1)
    slow, healthy = dice.choice((3, 6, 12, 30)), dice.choice((3, 6, 12, 30))
    size = {
        ChangeKind.LATENCY: dice.uniform(1.0, 5.0) * forward,
        ChangeKind.BANDWIDTH: dice.uniform(1.3, 3.0) * forward,
    }.get(kind) or dice.uniform(1.3, 2.5)
    places = ((where,),) if kind is ChangeKind.COMPUTE else ((where, where + 1), (where + 1, where))
    faults: list[Fault] = []
    first = 10
    while first < 240:
        length = max(2, round(slow * dice.uniform(0.7, 1.3)))
        faults.append(Fault(kind, places, size, first, first + length - 1))
        first += length + max(2, round(healthy * dice.uniform(0.7, 1.3)))
    if dice.random() < 1 / 3:
        other, first = (where + 2) % (stages - 1), dice.randint(40, 200)
        both = ((other, other + 1), (other + 1, other))
        faults.append(Fault(ChangeKind.LATENCY, both, dice.uniform(1.0, 5.0) * forward, first, first + dice.randint(10, 60)))
    return case, faults


def over_the_best(run: NoisySteps, steps: int) -> float:
    """Run so many steps, and compare their periods with those of the best plan of each step, as if it were known before.

    The calibrating steps do not count, and noise counts on neither side.
    """
    best: dict[tuple[Fault, ...], Program] = {}
    first = run.program
    ours = clairvoyant = 0.0
    for step in range(steps):
        lasting = tuple(fault for fault in run.faults if fault.first <= step <= fault.last)
        if lasting not in best:
            cost = run.case.cost
            for fault in lasting:
                cost = fault.apply(cost)
            found = (best_plan(run.case, cost, start)[0] for start in (run.program, first))
            best[lasting] = min(found, key=lambda program, cost=cost: PERIOD.of(program, cost))
        if step >= 4:
            cost = run.cost_at(step)
            taken = PERIOD.of(run.program, cost)
            ours += taken
            clairvoyant += min(taken, PERIOD.of(best[lasting], cost))
        run.step()
    return ours / clairvoyant


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault.

    Attributes:
        matters: Whether another plan would win by enough while it lasts: such a fault must be detected.
        detected: Whether it was, while it lasted.
        named: Whether only places were named at which something was slow.
        kind: Whether its kind was said rightly; None where it could not be told.
        steps: From its first step to the detection; None when it was not detected.
    """

    fault: Fault
    matters: bool
    detected: bool
    named: bool
    kind: bool | None
    steps: int | None


AFTER = 8
"""Steps beyond the last fault of an episode, but for those of a lossy path, which is believed to have healed more slowly."""

AFTER_LOSS = 30


def judge(run: NoisySteps, faults: Sequence[Fault]) -> list[Verdict]:
    """Run an episode to some steps beyond its last fault, and say of each fault what was made of it."""
    matters: dict[Fault, bool] = {}
    said: list[tuple[int, Change]] = []
    for step in range(max(fault.last + (AFTER_LOSS if fault.kind is ChangeKind.LOSS else AFTER) for fault in faults)):
        for fault in faults:
            if fault.first == step:
                cost = run.cost_at(step)
                _, best = best_plan(run.case, cost, run.program)
                # Its share and size are such that it always does.
                matters[fault] = fault.kind is ChangeKind.LOSS or best < (1 - ControllerOptions().switch_gain) * PERIOD.of(
                    run.program, cost
                )
        detection = run.step()
        said += [(step, change) for change in detection.changes if not change.is_healed] if detection else []
    verdicts: list[Verdict] = []
    for fault in faults:
        during = [(step, change) for step, change in said if fault.first <= step <= fault.last]
        mine = [(step, change) for step, change in during if change.where in fault.places]
        others = {place for other in faults if other is not fault for place in other.places}
        named = all(change.where in (*fault.places, *others) for _, change in during)
        told = [change.kind is fault.kind for _, change in mine if change.kind is not ChangeKind.FLIGHT]
        steps = mine[0][0] - fault.first if mine else None
        verdicts.append(Verdict(fault, matters[fault], bool(mine), named, all(told) if told else None, steps))
    return verdicts
