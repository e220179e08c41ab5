"""The exact solver of small jobs of several replicas, to compare plans with: CP-SAT over the start times of all ops."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from ortools.sat.python import cp_model

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import needs
from adaptra.simulation.case import Case


class ExactPeriod(NamedTuple):
    """The shortest period found, and the period that no plan beats, as far as it was proven."""

    period: float
    bound: float


class PeriodModel:
    """The model of a case and the routes of a program, for whole numbers as times, without messages that occupy a link or port.

    The period is that of the steady state in which a worker begins its next step once its stage has ended this one.
    """

    def __init__(self, case: Case, program: Program, at_least: int, at_most: int) -> None:
        self._case = case
        self._routing = routing = program.routing
        horizon = 2 * at_most
        self._horizon = horizon
        self._times = {Kind.F: case.cost.forward, Kind.I: case.cost.input_grad, Kind.W: case.cost.weight_grad}
        self.model = cp_model.CpModel()
        self.period = self.model.new_int_var(at_least, at_most, "period")
        self._starts: dict[Op, cp_model.IntVar] = {}
        tasks: defaultdict[int, list[Op]] = defaultdict(list)
        for replica in range(case.replicas):
            for stage in range(case.stages):
                for microbatch in range(case.microbatches):
                    for kind in self._times:
                        task = Op(stage, kind, microbatch, None, replica)
                        self._starts[task] = self.model.new_int_var(0, horizon, str(task))
                        tasks[routing.holder(replica, stage, microbatch)].append(task)
        for task, start in self._starts.items():
            for need in needs(task, program, False, case.hands_over, case.changing):
                for before in self._starts.keys() & set(need.ops):
                    self.model.add(start >= self._end(before) + self._latency(before, task))
        for stage in range(case.stages):
            last = self.model.new_int_var(0, horizon, f"last of {stage}")
            for worker in routing.column(stage):
                if tasks[worker]:
                    self._add_worker(stage, worker, tasks[worker], last)
        self.model.minimize(self.period)

    def _end(self, task: Op) -> cp_model.LinearExpr:
        return self._starts[task] + self._duration(task)

    def _duration(self, task: Op) -> int:
        return int(self._times[task.kind][task.stage] * self._case.slow.get(self._holder(task), 1.0))

    def _holder(self, task: Op) -> int:
        return self._routing.holder(task.replica, task.stage, task.microbatch)

    def _latency(self, before: Op, task: Op) -> int:
        source, destination = self._holder(before), self._holder(task)
        if source == destination:
            return 0
        return int(
            self._case.hand_over
            if before.stage == task.stage
            else self._case.link(source, destination, (before.stage, task.stage)).latency
        )

    def _add_worker(self, stage: int, worker: int, tasks: list[Op], last: cp_model.IntVar) -> None:
        """Add the rules of one worker: one op at a time, in microbatch order, within memory, and once per period."""
        first = self.model.new_int_var(0, self._horizon, "first")
        before: dict[tuple[int, Kind], Op] = {}
        works: list[cp_model.IntervalVar] = []
        holds: list[cp_model.IntervalVar] = []
        for task in tasks:
            start = self._starts[task]
            works.append(self.model.new_fixed_size_interval_var(start, self._duration(task), str(task)))
            self.model.add(first <= start)
            self.model.add(last >= self._end(task))
            earlier = before.get((task.replica, task.kind))
            if earlier is not None:
                self.model.add(start >= self._end(earlier))
            before[task.replica, task.kind] = task
            if task.kind is Kind.F:
                length = self.model.new_int_var(0, self._horizon, "held")
                until = self._end(replace(task, kind=Kind.W))
                holds.append(self.model.new_interval_var(start, length, until, "held"))
        self.model.add_no_overlap(works)
        if self._case.memory is not None:
            self.model.add_cumulative(holds, [1] * len(holds), self._case.memory[stage])
        slow = self._case.slow.get(worker, 1.0)
        # All workers of a stage reduce at once. So each starts behind its own STEP, and they share the rest of the period.
        self.model.add(self.period >= last + int(self._case.step[stage] * slow + self._case.reduce[stage]) - first)


def exact_period(case: Case, program: Program, seconds: float, at_least: float, at_most: float) -> ExactPeriod | None:
    """Search the shortest period of a program's routes, from a bound to a known period. None if nothing was found in time."""
    made = PeriodModel(case, program, math.ceil(at_least - 1e-6), math.floor(at_most + 1e-6))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    if solver.solve(made.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return ExactPeriod(solver.objective_value, solver.best_objective_bound)
