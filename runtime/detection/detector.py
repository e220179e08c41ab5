"""The detector: it turns measurements of steps into a new cost model and the reasons for it.

Every stage and every directed edge has a level. The first steps are warm-up, and the next ones calibrate the levels.

After that a level moves only if the last ``persist`` steps agree. All must lie on the same side of it. Their distance must
exceed ``change`` of the op times and ``noise`` times the scatter of recent steps. They must also agree with each other about
the new level.

So an outlier, a step during which something changed, and mere noise move nothing. Slowdowns and recoveries are detected in the
same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Final

from adaptra.errors import ControlError
from adaptra.runtime.detection.changes import Change, EdgeChange, LossChange, StageChange
from adaptra.runtime.detection.clock_drift import ClockDrift
from adaptra.runtime.detection.flapping import FlapDamping, Relapses
from adaptra.runtime.detection.level_shift import DetectorOptions, Level
from adaptra.runtime.detection.packet_loss import LossyPath
from adaptra.runtime.detection.step_noise import StepNoise
from adaptra.runtime.measuring.measurement import EdgeMeasurement, StageMeasurement, Stalls, StepMeasurement
from adaptra.simulation.cost import CostModel
from adaptra.simulation.scenarios import Scenario, delay_scenarios

MOST_LOSSY: Final = 3
"""The number of lossy edges that are planned for in all combinations. Beyond it, the least lossy are planned for by their mean.
"""


@dataclass(frozen=True, slots=True)
class Detection:
    """A new cost model and its reasons. ``changes`` is empty for the first one, which is the calibration.

    Attributes:
        step: The last step that was measured.
        changes: What has changed.
        cost: The new costs; for a lossy edge, those of its mean message. Of several replicas the largest.
        scenarios: The possible delays of messages on lossy edges, if there are any.
        hold_off: Steps for which no plan for it runs, because all that has changed is the recovery of flapping edges or stages.
        noise: The standard deviation of a step's time, seconds.
        by_replica: The new costs of each replica; empty in what the detector of one replica finds.
        is_review: Whether nothing has changed, and the costs are those of the last steps.
        barrier: Whether all ranks meet between steps.
        barrier_is_new: Whether the running plan is for the other answer to that.
    """

    step: int
    changes: tuple[Change, ...]
    cost: CostModel
    scenarios: tuple[Scenario, ...] = ()
    hold_off: int = 0
    noise: float = 0.0
    by_replica: tuple[CostModel, ...] = ()
    is_review: bool = False
    barrier: bool = False
    barrier_is_new: bool = False

    @property
    def reason(self) -> str:
        """The changes as one line of text."""
        if self.is_review:
            return "nothing is gained any more, as the last steps measured"
        changes = [*map(str, self.changes)] or ([] if self.barrier_is_new else ["calibrated by measurement"])
        if self.barrier_is_new:
            changes.append("all ranks meet between steps" if self.barrier else "ranks meet no more between steps")
        return "; ".join(changes)

    def after(self, earlier: Detection | None) -> Detection:
        """Return this detection with the changes of an earlier one, for which nothing was decided, that it does not replace."""
        if earlier is None:
            return self
        mine = {(type(change), change.where) for change in self.changes}
        # What looked like a slow edge was losses, as is known now.
        mine |= {(EdgeChange, change.where) for change in self.changes if isinstance(change, LossChange)}
        kept = tuple(change for change in earlier.changes if (type(change), change.where) not in mine)
        return replace(self, changes=(*kept, *self.changes))

    def with_occupancies(self, edges: Sequence[tuple[int, int]], factor: float) -> Detection:
        """Return the detection as it would be if each message occupied these edges for ``factor`` times as long."""
        scenarios = tuple(replace(one, cost=one.cost.with_occupancies(edges, factor)) for one in self.scenarios)
        return replace(self, cost=self.cost.with_occupancies(edges, factor), scenarios=scenarios)


@dataclass(slots=True)
class _Calibration:
    """The measurements of the calibrating steps."""

    stages: dict[int, list[StageMeasurement]] = field(default_factory=dict[int, list[StageMeasurement]])
    edges: dict[tuple[int, int], list[EdgeMeasurement]] = field(default_factory=dict[tuple[int, int], list[EdgeMeasurement]])

    def latest(self, count: int) -> _Calibration:
        """Return the latest measurements of each stage and edge, this many of them."""
        return _Calibration(
            {stage: measured[-count:] for stage, measured in self.stages.items()},
            {edge: measured[-count:] for edge, measured in self.edges.items()},
        )


class Detector:
    """Detects changes in a pipeline's measurements.

    Args:
        cost: The estimated cost model. Measured costs replace it; memory and costs that are never measured stay.
        options: The thresholds of a change.
    """

    def __init__(self, cost: CostModel, options: DetectorOptions | None = None) -> None:
        self._options = options or DetectorOptions()
        self._cost = cost
        self._seen = 0
        self._is_calibrated = False
        self._now = self._options
        self._step_noise = StepNoise(self._options.memory)
        self._calibration = _Calibration()
        self._stages: dict[int, Level] = {}
        self._clocks = ClockDrift()
        self._flights: dict[tuple[int, int], Level] = {}
        self._occupancies: dict[tuple[int, int], Level] = {}
        self._paths: dict[tuple[int, int], LossyPath] = {}
        self._flapping = FlapDamping(self._options.relapse)
        self._updates: dict[int, deque[float]] = {}

    @property
    def cost(self) -> CostModel:
        """The current cost model, in seconds."""
        return self._cost

    @property
    def is_calibrated(self) -> bool:
        """Whether the costs are measured ones."""
        return self._is_calibrated

    @property
    def latest(self) -> Detection:
        """The costs of the recent steps, which are more than the steps that a change was detected in."""
        return Detection(self._seen, (), self._latest_cost())

    def noise_of(self, steps: int) -> float:
        """Return the standard deviation of a step's time over the latest steps, seconds."""
        return self._step_noise.deviation_of(steps)

    def _latest_cost(self) -> CostModel:
        cost = self._with_updates()
        for stage, level in self._stages.items():
            if level.level > 0.0:
                ratio = level.latest / level.level
                cost = cost.with_stage(
                    stage, ratio * cost.forward[stage], ratio * cost.input_grad[stage], ratio * cost.weight_grad[stage]
                )
        for edge, level in self._flights.items():
            if self._paths[edge].loss is None:
                flight = max(level.latest, 0.0)
                occupancy = min(max(self._occupancies[edge].latest, 0.0), flight)
                cost = cost.with_occupancy(*edge, occupancy).with_latency(*edge, flight - occupancy)
        return cost

    def _with_updates(self) -> CostModel:
        """Return the costs with the usual update of each rank, which counts as that of its first stage."""
        if not self._updates:
            return self._cost
        usual = {stage: median(measured) for stage, measured in self._updates.items()}
        return replace(self._cost, update=tuple(usual.get(stage, 0.0) for stage in range(self._cost.stages)))

    @property
    def slow_edges(self) -> tuple[tuple[int, int], ...]:
        """The directed edges, as stages, that are slower than at calibration."""
        return tuple(
            edge
            for edge, flight in self._flights.items()
            if self._paths[edge].loss is not None
            or flight.level - flight.calibrated > flight.limit(self._edge_limit(flight.calibrated), self._options.noise)
        )

    def observe(self, measurements: Sequence[StepMeasurement]) -> Detection | None:
        """Take the measurements of all ranks of one step.

        Returns:
            A detection if the cost model has changed, else None.

        Raises:
            ControlError: A measurement names a stage or edge that the pipeline does not have.
        """
        step = max(measurement.step for measurement in measurements)
        stages = [stage for measurement in measurements for stage in measurement.stages]
        edges = [edge for measurement in measurements for edge in measurement.edges]
        self._check(stages, edges)
        if not stages and not edges:  # of a batch whose shape is not known well enough
            return None
        self._seen += 1
        self._flapping.step()
        if self._seen <= self._options.warm_up:
            return None
        seconds = max(measurement.seconds for measurement in measurements)
        self._step_noise.observe(seconds)
        for one in measurements:
            if one.update is not None and one.stages:
                self._updates.setdefault(one.stages[0].stage, deque(maxlen=self._options.memory)).append(one.update)
        if not self._is_calibrated:
            for stage in stages:
                self._calibration.stages.setdefault(stage.stage, []).append(stage)
            for edge in edges:
                possible = replace(edge.estimate, flight=max(edge.estimate.flight, 0.0))
                self._calibration.edges.setdefault((edge.source, edge.destination), []).append(replace(edge, estimate=possible))
            return self._end_calibration(step)
        noise = self._step_noise.deviation
        persist = max(self._options.persist, self._step_noise.last(self._options.lasting))
        self._now = replace(self._options, persist=persist)
        edges = list(map(self._of_rate_probe, edges))
        unsteady = {(edge.source, edge.destination) for edge in edges if self._says_nothing(edge)}
        levels = {edge: flight.level for edge, flight in self._flights.items() if edge not in unsteady}
        edges = self._clocks.correct(edges, levels, self._least_change, seconds)
        pauses = {stage.stage: one.pause for one in measurements for stage in one.stages}
        # A rank leaves out the stages of a batch of a shape of which it knows too little.
        known = [edge for edge in edges if edge.source in pauses and edge.destination in pauses]
        used = [edge for edge in known if edge.messages > 0 or edge.estimate.occupancy is not None]
        losses = [self._observe_path(edge, max(pauses[edge.source], pauses[edge.destination])) for edge in used]
        steady = [edge for edge in edges if (edge.source, edge.destination) not in unsteady]
        moved = (*map(self._observe_stage, stages), *losses, *map(self._observe_edge, steady))
        changes = tuple(change for change in moved if change is not None)
        if not changes:
            return None
        self._cost = self._with_updates()
        return Detection(step, changes, self._cost, self._scenarios(), self._flapping.hold_off(changes), noise)

    def foresee(self, measurements: Sequence[StepMeasurement]) -> Detection | None:
        """Return the detection that would follow if the next step measured the same as the last one, which is already observed.

        If an edge turned slow in that step, its messages look late by one stall. The next step would not count that as a stall,
        so stalls are ignored here.
        """
        levels = (*self._stages.values(), *self._flights.values(), *self._occupancies.values())
        if not any(level.suspects for level in levels) or not any(one.stages or one.edges for one in measurements):
            return None
        return deepcopy(self).observe([replace(one, edges=tuple(map(self._without_stall, one.edges))) for one in measurements])

    def _without_stall(self, edge: EdgeMeasurement) -> EdgeMeasurement:
        path = self._paths.get((edge.source, edge.destination))
        return edge if path is None or path.loss is not None else replace(edge, stalls=Stalls())

    def _check(self, stages: Sequence[StageMeasurement], edges: Sequence[EdgeMeasurement]) -> None:
        count = self._cost.stages
        for stage in stages:
            if stage.stage >= count:
                raise ControlError(f"measurement of stage {stage.stage}: expected stages 0..{count - 1}")
        for edge in edges:
            if abs(edge.source - edge.destination) != 1 or max(edge.source, edge.destination) >= count:
                raise ControlError(
                    f"measurement of edge {edge.source}→{edge.destination}: expected neighbours of 0..{count - 1}"
                )

    def _end_calibration(self, step: int) -> Detection | None:
        """Set the levels once enough steps agree. Until they do, it is repeated with later ones; at last all of them count."""
        options, count = self._options, self._seen - self._options.warm_up
        if count % options.calibration or options.calibration == 0:
            return None
        latest = self._calibration.latest(options.calibration)
        totals = [[total for total in map(_total, one) if total is not None] for one in latest.stages.values()]
        if all(map(self._agree, totals)):
            self._calibration = latest
        elif count < options.calibrations * options.calibration:
            return None
        self._calibrate()
        self._is_calibrated = True
        self._cost = self._with_updates()
        return Detection(step, (), self._cost)

    def _agree(self, totals: Sequence[float]) -> bool:
        """Return whether a stage took equally long in all but one step, up to the smallest change."""
        ordered = sorted(totals)
        pairs = zip(ordered, ordered[max(len(ordered) - 2, 0) :], strict=False)
        return min((high - low for low, high in pairs), default=0.0) <= self._options.change * median(ordered or (0.0,))

    def _calibrate(self) -> None:
        options = self._options
        for stage, measured in self._calibration.stages.items():
            ordered = sorted(measured, key=lambda m: _total(m) or 0.0)
            self._set_stage(ordered[len(ordered) // 2])
            totals = [total for total in map(_total, measured) if total is not None]
            if totals:
                self._stages[stage] = Level.calibrate(totals, options)
        for edge, measured in self._calibration.edges.items():
            self._flights[edge] = Level.calibrate([m.estimate.flight for m in measured], options)
            known = self._cost.occupancy(*edge)
            self._occupancies[edge] = Level.calibrate([_occupancy(m, known) for m in measured], options)
            self._paths[edge] = LossyPath(options.stall_window, Relapses(options.relapse))
            self._set_edge(edge)
        self._calibration = _Calibration()

    def _observe_stage(self, measured: StageMeasurement) -> StageChange | None:
        stage, total, level = measured.stage, _total(measured), self._stages.get(measured.stage)
        if total is None or level is None:
            return None
        smallest = self._options.change * level.level
        has_moved = level.moves(total, self._now, smallest)
        if not has_moved and not level.has_fallen(smallest, self._options.window):
            return None
        near = self._options.change * level.calibrated
        confidence = level.confidence
        was, now = level.level, level.settle(self._now.persist if has_moved else self._options.window)
        healed = abs(now - level.calibrated) <= level.limit(near, self._options.noise)
        flapping = self._flapping.changed((stage,), now > was)
        # This step may be one of those that scatter, where only the median of many has fallen.
        self._set_stage(measured, 1.0 if has_moved or total <= 0.0 else now / total)
        return StageChange(stage, was, now, level.calibrated, healed, flapping, confidence)

    def _says_nothing(self, measured: EdgeMeasurement) -> bool:
        """Return True if most messages were late by stalls, which are no change of level, or if a probe alone is too little.

        Stalls are most on a lossy path, and when one follows another. A probe of a few bytes alone tells of an edge's latency.
        Where messages are late for another reason, their rate or losses, it tells nothing.
        """
        edge, stalls = (measured.source, measured.destination), measured.stalls
        if edge not in self._paths:
            return False
        if measured.messages == 0:
            narrow = self._occupancies[edge].level > self._edge_limit(self._flights[edge].calibrated)
            is_small = measured.estimate.occupancy is None
            return stalls.count > 0 or (is_small and (narrow or self._paths[edge].loss is not None))
        if 2 * stalls.late <= measured.messages:
            return False
        return self._paths[edge].loss is not None or (stalls.count > 0 and bool(self._flights[edge].suspects))

    def _of_rate_probe(self, measured: EdgeMeasurement) -> EdgeMeasurement:
        """Return the measurement of a lossy path by a rate probe with a stall if that was late; any other as it is."""
        path = self._paths.get((measured.source, measured.destination))
        if measured.messages or path is None or path.loss is None:
            return measured
        lateness = measured.estimate.flight - path.loss.prompt
        return replace(measured, stalls=Stalls(1, 1, lateness)) if 2 * lateness > path.loss.extra else measured

    def _observe_path(self, measured: EdgeMeasurement, pause: float) -> LossChange | None:
        edge = (measured.source, measured.destination)
        if edge not in self._paths:
            return None
        path, flight = self._paths[edge], self._flights[edge]
        was = flight.level if path.loss is None else path.loss.mean
        if not path.changes(measured, pause, self._options, self._edge_limit(flight.level)):
            return None
        flapping, confidence = path.relapses.count > 0, path.confidence
        self._flapping.forget(edge)
        if path.loss is None:
            self._set_edge(edge)
            return LossChange(*edge, was, flight.level, 0.0, 0.0, True, flapping, confidence)
        # The late messages had made the link look slow until now.
        flight.correct(min(flight.level, path.loss.prompt))
        self._set_edge(edge)
        return LossChange(*edge, was, path.loss.mean, path.loss.share, path.loss.extra, False, flapping, confidence)

    def _scenarios(self) -> tuple[Scenario, ...]:
        """Return scenarios in which all messages of a lossy edge are prompt or all are late, weighted by the share of late
        ones.
        """
        losses = {edge: path.loss for edge, path in self._paths.items() if path.loss is not None}
        worst = sorted(losses.items(), key=lambda item: item[1].prompt - item[1].mean)[:MOST_LOSSY]
        prompt = self._cost
        for edge, loss in worst:
            prompt = prompt.with_latency(*edge, loss.prompt - min(self._occupancies[edge].level, loss.prompt))
        delays = {edge: {0.0: 1.0 - loss.share, loss.extra: loss.share} for edge, loss in worst}
        return delay_scenarios(prompt, delays) if delays else ()

    def _observe_edge(self, measured: EdgeMeasurement) -> EdgeChange | None:
        edge = (measured.source, measured.destination)
        if edge not in self._flights:
            return None
        change, path = self._moved_edge(measured), self._paths[edge]
        if change is None:
            return None
        if path.loss is None:
            change = replace(change, is_flapping=self._flapping.changed(edge, change.is_slower))
        else:
            path.loss = replace(path.loss, prompt=change.now)
        self._set_edge(edge)
        return change

    def _moved_edge(self, measured: EdgeMeasurement) -> EdgeChange | None:
        edge, estimate = (measured.source, measured.destination), measured.estimate
        flight, occupancy, options = self._flights[edge], self._occupancies[edge], self._now
        if self._paths[edge].loss is not None:
            options = replace(options, persist=max(options.persist, options.window))
        smallest = self._edge_limit(flight.level)
        flight_moved = flight.moves(estimate.flight, options, smallest)
        occupancy_moved = occupancy.moves(_occupancy(measured, occupancy.level), options, smallest)
        agreeing = options.persist
        if not (flight_moved or occupancy_moved) and self._paths[edge].loss is None:
            flight_moved = flight.has_fallen(smallest, options.window)
            occupancy_moved = not flight_moved and occupancy.has_fallen(smallest, options.window)
            agreeing = max(agreeing, options.window)
        if not (flight_moved or occupancy_moved):
            return None
        confidence = max(level.confidence for level, moved in ((flight, flight_moved), (occupancy, occupancy_moved)) if moved)
        was, occupied_was = flight.level, occupancy.level
        now, occupied = flight.settle(agreeing), occupancy.settle(agreeing)
        near = self._edge_limit(flight.calibrated)
        healed = abs(now - flight.calibrated) <= flight.limit(near, options.noise)
        healed = healed and occupied - occupancy.calibrated <= occupancy.limit(near, options.noise)
        unseen = now if estimate.spacing is None else min(now, estimate.spacing)
        occupied, occupied_was = min(occupied, now), min(occupied_was, was)
        most = unseen if estimate.occupancy is None else occupied
        found = (was, now, flight.calibrated, occupied_was, occupied, most, healed)
        return EdgeChange(*edge, *found, confidence=confidence)

    def _least_change(self, edge: tuple[int, int]) -> float:
        flight = self._flights[edge]
        return flight.limit(self._edge_limit(flight.level), self._options.noise)

    def _edge_limit(self, flight: float) -> float:
        return max(self._options.change * fmean(self._cost.forward), self._options.edge_change * flight)

    def _set_edge(self, edge: tuple[int, int]) -> None:
        loss = self._paths[edge].loss
        flight = self._flights[edge].level if loss is None else loss.mean
        # Both are medians of their own, so the occupancy may slightly exceed the flight.
        occupancy = min(self._occupancies[edge].level, flight)
        self._cost = self._cost.with_occupancy(*edge, occupancy).with_latency(*edge, flight - occupancy)

    def _set_stage(self, measured: StageMeasurement, factor: float = 1.0) -> None:
        """Put a stage's measured durations, times a factor, into the cost model. If only B ran, I and W keep their shares."""
        stage, cost = measured.stage, self._cost
        input_grad, weight_grad = measured.input_grad, measured.weight_grad
        if (input_grad is None or weight_grad is None) and measured.both is not None:
            known = cost.input_grad[stage] + cost.weight_grad[stage]
            share = cost.input_grad[stage] / known if known > 0 else 0.5
            input_grad, weight_grad = share * measured.both, (1 - share) * measured.both
        found = (None if one is None else factor * one for one in (measured.forward, input_grad, weight_grad))
        self._cost = cost.with_stage(stage, *found)


def _total(measured: StageMeasurement) -> float | None:
    """Return F, I and W (or B) of one microbatch, seconds; None if the stage did not run both directions."""
    backward = measured.backward
    return None if measured.forward is None or backward is None else measured.forward + backward


def _occupancy(measured: EdgeMeasurement, known: float) -> float:
    """Return the measured occupancy, or the known one as far as the flight and the spacing of the arrivals allow it."""
    estimate = measured.estimate
    if estimate.occupancy is not None:
        return estimate.occupancy
    return min(known, estimate.flight, known if estimate.spacing is None else estimate.spacing)
