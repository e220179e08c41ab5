"""The numbers of a plan of several replicas, and its equations filled with them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from adaptra.equations.equation import Equation
from adaptra.equations.replicas import replica_equations
from adaptra.planning.explaining.lines import Line
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.simulate import Simulation

ROUNDED: Final = 1 + 1e-9
"""Periods are sums of rounded numbers."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker computes of one of its stages.

    Attributes:
        worker: The worker.
        stage: The stage.
        microbatches: The number of microbatches, those of other replicas included.
        trip: The shortest time from the end of the F of one of them to the start of its I, infinite if there is none.
    """

    worker: int
    stage: int
    microbatches: int
    trip: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of a step over a directed link, or through a port in one direction.

    Attributes:
        where: The link's or port's name for people.
        ends: The link's workers and the stages between which the messages go; None for a port.
        messages: The number of messages.
        occupancy: How long each occupies it.
    """

    where: str
    ends: tuple[int, int, int, int] | None
    messages: int
    occupancy: float


@dataclass(frozen=True)
class JobNumbers:
    """The numbers of one plan, as the equations take them."""

    simulation: Simulation
    routing: Routing

    @property
    def case(self) -> Case:
        """The case."""
        return self.simulation.case

    @cached_property
    def loads(self) -> tuple[WorkerLoad, ...]:
        """The loads of all live workers, by worker and stage."""
        count: Counter[tuple[int, int]] = Counter()
        shortest: defaultdict[tuple[int, int], float] = defaultdict(lambda: math.inf)
        for path, number in self._paths.items():
            trip = 0.0
            for stage in reversed(range(self.case.stages)):
                place = path[stage], stage
                count[place] += number
                shortest[place] = min(shortest[place], trip)
                ops = sum(self.times(stage)[:2]) * self.case.slow.get(path[stage], 1.0)
                edges = ((stage - 1, stage), (stage, stage - 1)) if stage else ()
                ways = [self.case.link(path[source], path[destination], (source, destination)) for source, destination in edges]
                trip += ops + sum(link.latency + link.occupancy for link in ways)
        held = ((worker, stage) for worker in self.routing.live for stage in self.routing.stages_of(worker))
        return tuple(WorkerLoad(*place, count[place], shortest[place]) for place in held)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """The messages over each directed link in use, then those through each port in use."""
        links: Counter[tuple[int, int, int, int]] = Counter()
        ports: Counter[tuple[int, str]] = Counter()
        for path, number in self._paths.items():
            for edge in pairwise(range(self.case.stages)):
                if path[edge[0]] == path[edge[1]]:
                    continue
                for source, destination in (edge, edge[::-1]):
                    links[path[source], path[destination], source, destination] += number
                    ports[path[source], "sends"] += number
                    ports[path[destination], "receives"] += number
        over_links = (
            Traffic(f"link {ends[0]}→{ends[1]}", ends, number, self.case.link(ends[0], ends[1], ends[2:]).occupancy)
            for ends, number in links.items()
        )
        through_ports = (
            Traffic(f"worker {worker} {what}", None, number, self.case.ports[worker])
            for (worker, what), number in ports.items()
            if worker in self.case.ports
        )
        return (*over_links, *through_ports)

    @cached_property
    def _paths(self) -> Counter[tuple[int, ...]]:
        """The number of microbatches that take each path."""
        paths: Counter[tuple[int, ...]] = Counter()
        for route in self.routing.routes:
            paths[route.workers] += len(route.microbatches)
        return paths

    @cached_property
    def lost_speed(self) -> list[float]:
        """L_i of each stage."""
        lost = list(map(float, self.lost))
        for load in self.loads:
            lost[load.stage] += 1 - 1 / self.slow(load)
        return lost

    @cached_property
    def left(self) -> tuple[int, int, float]:
        """P, S and L: of workers with several stages each counts once, and S is the number of a replica's workers."""
        slow = sum(1 - 1 / self.case.slow.get(worker, 1.0) for worker in self.routing.live)
        return self.case.replicas, self.case.workers // self.case.replicas, len(self.case.lost) + slow

    @cached_property
    def lost(self) -> list[int]:
        """f_i of each stage."""
        return [self.case.replicas - len(self.routing.column(stage)) for stage in range(self.case.stages)]

    def times(self, stage: int) -> tuple[float, float, float, float, float]:
        """Return tF_i, tI_i, tW_i, tR_i and tO_i."""
        cost = self.case.cost
        ops = cost.forward[stage], cost.input_grad[stage], cost.weight_grad[stage]
        return (*ops, self.case.reduce[stage], self.case.step[stage])

    def size(self, stage: int) -> tuple[int, int, int]:
        """Return f_i, M and P."""
        return self.lost[stage], self.case.microbatches, self.case.replicas

    def is_even(self, stage: int) -> bool:
        """Whether no live worker of the stage is slow or fast."""
        return all(self.case.slow.get(worker, 1.0) == 1.0 for worker in self.routing.column(stage))

    @property
    def is_equal(self) -> bool:
        """Whether all stages take the same times, each on a worker of its own."""
        return self.left[1] == self.case.stages and len({self.times(stage) for stage in range(self.case.stages)}) == 1

    def of_stages(self) -> Iterator[Line]:
        """Yield the lines of the fit, of each stage's work, and of what it bears."""
        model, case = replica_equations(), self.case
        stages = range(case.stages)
        hit = [stage for stage in stages if self.lost[stage]]
        for stage in hit:
            yield Line.of(model.extra, f"stage {stage}", *self.size(stage))
        if self.is_equal and not case.slow:
            for stage in hit:
                yield Line.of(model.fit, f"stage {stage}", *self.size(stage), case.stages)
            yield Line.of(model.most_lost, "any stage", case.microbatches, case.replicas, case.stages)
        if self.is_equal:
            yield Line.of(model.one_f_one_b, "any stage", case.microbatches, case.stages, *self.times(0))
        even = [stage for stage in stages if self.is_even(stage)]
        for stage in even:
            yield Line.of(model.work, f"stage {stage}", *self.size(stage), *self.times(stage))
        for stage in stages:
            if not self.is_even(stage):
                values = self.lost_speed[stage], case.microbatches, case.replicas, *self.times(stage)[:3]
                yield Line.of(model.capacity, f"stage {stage}", *values)
        yield from self._lines(
            model.kept,
            [load for load in self.loads if self.slow(load) != 1.0],
            lambda load: (self.lost_speed[load.stage], case.microbatches, case.replicas, self.slow(load)),
        )
        for stage in even:
            if case.lost and sum(self.times(stage)[:3]) > 0:
                period = self.simulation.period * ROUNDED
                yield Line.of(model.bears, f"stage {stage}", case.microbatches, case.replicas, *self.times(stage), period)

    def of_workers(self) -> Iterator[Line]:
        """Yield each bound of a worker where it is greatest on each stage, and how much room workers need."""
        model, period = replica_equations(), self.simulation.period * ROUNDED
        yield from self._lines(model.worker_work, self._greatest(self.work, self.loads), self._computed)
        # A worker with several stages has no other bound: these are of a worker's one round trip.
        single = [load for load in self.loads if len(self.routing.stages_of(load.worker)) == 1 and load.microbatches]
        by_fill = self._greatest(lambda load: model.fill.evaluate(*self._placed(load)), single)
        yield from self._lines(model.fill, by_fill, self._placed)
        running = [load for load in by_fill if self.times(load.stage)[0] > 0]
        yield from self._lines(model.fill_room, running, lambda load: (load.trip, self.times(load.stage)[0], self.slow(load)))
        by_memory = self._greatest(lambda load: model.memory.evaluate(*self._placed(load)), single)
        yield from self._lines(model.memory, by_memory, self._placed)
        timed = [load for load in by_memory if load.trip + sum(self.times(load.stage)[:3]) > 0]
        yield from self._lines(
            model.memory_room,
            timed,
            lambda load: (load.microbatches, load.trip, *self._times_of(load), period),
        )
        yield from self._lines(
            model.memory_price,
            [load for load in timed if self.lost[load.stage] and self.is_even(load.stage)],
            lambda load: (*self.size(load.stage), load.trip, *self._times_of(load), period),
        )
        held, memory = self.simulation.held, self.case.memory
        if memory is not None:
            fullest = self._greatest(lambda load: held[load.worker], self.loads)
            yield from self._lines(model.held, fullest, lambda load: (held[load.worker], self._room(load, memory)))

    def _greatest(self, value: Callable[[WorkerLoad], float], among: Iterable[WorkerLoad]) -> list[WorkerLoad]:
        """Return the load with the greatest value of each stage."""
        of_stage: defaultdict[int, list[WorkerLoad]] = defaultdict(list)
        for load in among:
            of_stage[load.stage].append(load)
        return [max(of_stage[stage], key=value) for stage in sorted(of_stage)]

    def _lines(
        self, equation: Equation, among: Iterable[WorkerLoad], values: Callable[[WorkerLoad], Sequence[float]]
    ) -> Iterator[Line]:
        for load in among:
            yield Line.of(equation, self.name(load), *values(load))

    def name(self, load: WorkerLoad) -> str:
        """Return the name of a worker and its stage for people."""
        return f"worker {load.worker} of stage {load.stage}"

    def slow(self, load: WorkerLoad) -> float:
        """Return phi_k."""
        return self.case.slow.get(load.worker, 1.0)

    def work(self, load: WorkerLoad) -> float:
        """Return the time of all ops of a worker's stage."""
        return float(replica_equations().worker_work.evaluate(*self._computed(load)))

    def _times_of(self, load: WorkerLoad) -> tuple[float, ...]:
        return *self.times(load.stage), self.slow(load)

    def _computed(self, load: WorkerLoad) -> tuple[float, ...]:
        return load.microbatches, *self._times_of(load)

    def _placed(self, load: WorkerLoad) -> tuple[float, ...]:
        """Return n_k, A_k, d_k and the times of a worker with one stage."""
        room = load.microbatches if self.case.memory is None else min(load.microbatches, self._room(load, self.case.memory))
        return load.microbatches, room, load.trip, *self._times_of(load)

    def _room(self, load: WorkerLoad, memory: Sequence[int]) -> int:
        """Return the most microbatches that the case lets a worker hold."""
        return memory[self.case.placement[load.stage]]

    def of_messages(self) -> Iterator[Line]:
        """Yield the lines of the busiest link and port, and of detours round each narrow link."""
        model, size = replica_equations(), self.case.microbatches
        for is_link in (True, False):
            found = [one for one in self.traffic if (one.ends is not None) == is_link and one.occupancy > 0]
            if found:
                most = max(found, key=lambda one: one.messages * one.occupancy)
                yield Line.of(model.messages, most.where, most.messages, most.occupancy)
        ways = [(one, self.way_round(one)) for one in self.traffic if self._is_narrow(one)]
        usable = [(one, way) for one, way in ways if way < one.occupancy]
        for one, way in usable:
            carried = size - one.messages
            yield Line.of(model.detour, f"{one.where}, as planned", size, one.occupancy, 0, way, carried)
        for equation in (model.detour_share, model.detour_bound):
            for one, way in usable:
                yield Line.of(equation, one.where, size, one.occupancy, 0, way)

    def _is_narrow(self, link: Traffic) -> bool:
        """Whether it is a replica's own link that all of its messages occupy for longer than any worker works."""
        if link.ends is None or len({self.routing.replica_of(worker) for worker in link.ends[:2]}) > 1:
            return False
        return self.case.microbatches * link.occupancy > self._longest * ROUNDED

    @cached_property
    def _longest(self) -> float:
        return max(map(self.work, self.loads))

    def way_round(self, link: Traffic) -> float:
        """Return the least occupancy of a link by which messages leave a narrow link's sender for another replica."""
        assert link.ends is not None
        source, destination, before, stage = link.ends
        others = (worker for worker in self.routing.column(stage) if worker != destination)
        return min((self.case.link(source, other, (before, stage)).occupancy for other in others), default=math.inf)

    @cached_property
    def recut(self) -> Line:
        """The period that no re-cut beats."""
        case = self.case
        whole = sum(sum(self.times(stage)[:3]) for stage in range(case.stages))
        replicas, workers, lost = self.left
        return Line.of(replica_equations().recut_limit, "all stages", case.microbatches, replicas, workers, whole, lost)

    def of_recut(self) -> Iterator[Line]:
        """Yield the lines of a re-cut, and after how many steps one pays that takes as long as a step."""
        yield self.recut
        period, best = self.simulation.period, float(self.recut.result)
        if period > best * ROUNDED:
            yield Line.of(replica_equations().break_even, "a re-cut that costs one period", period, best, period)
