"""Checks a proposed plan before it is confirmed, and prepares the switch to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from adaptra.errors import ControlError
from adaptra.program import Program
from adaptra.program.routing import Grid
from adaptra.runtime.control.mail.mail import Proposed
from adaptra.runtime.control.plans.plan import Plan


class Preparation:
    """Checks and prepares proposed plans beside training, one at a time, on threads of its own.

    Args:
        rank: This rank, for the threads' names.
        running: A program of the pipeline, whose placement and microbatches a plan must have.
        workers: Those of each stage by replica, which a plan of several replicas must have.
        check: Refuses a program that the ranks can't execute, by an exception.
        prepare: Prepares a switch to a plan. An exception that it raises refuses the plan.
        ready: Called with a plan that can be run.
        refuse: Called with the version of a plan that can't be run, and the reason. An invalid plan never ends the one that
            runs.
    """

    def __init__(
        self,
        rank: int,
        running: Program,
        workers: Grid,
        check: Callable[[Program], None],
        prepare: Callable[[Plan], None] | None,
        ready: Callable[[Plan], None],
        refuse: Callable[[int, str], None],
    ) -> None:
        self._rank = rank
        self._running = running
        self._workers = workers
        self._check_program = check
        self._prepare = prepare
        self._ready = ready
        self._refuse = refuse
        self._one_at_a_time = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self, proposal: Proposed) -> None:
        """Start to check a proposal, without waiting for the result."""
        name = f"adaptra-prepare-{self._rank}"
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._consider, args=(proposal,), name=name, daemon=True))
        self._threads[-1].start()

    def close(self, timeout: float) -> None:
        """Wait for checks that are under way, at most ``timeout`` seconds each: a thread must not outlive the interpreter."""
        for thread in self._threads:
            thread.join(timeout)

    def _consider(self, proposal: Proposed) -> None:
        with self._one_at_a_time:
            try:
                plan = Plan.from_json(proposal.plan)
                self._check(plan, proposal.version)
                if self._prepare is not None:
                    self._prepare(plan)
            except Exception as error:
                self._refuse(proposal.version, str(error))
            else:
                self._ready(plan)

    def _check(self, plan: Plan, version: int) -> None:
        proposed, expected = plan.program, self._running
        if plan.version != version:
            raise ControlError(f"plan {plan.version} proposed as version {version}: expected the plan's own")
        placed = proposed.placement if proposed.is_one_pipeline else proposed.routing.workers
        wanted = expected.placement if proposed.is_one_pipeline else self._workers
        if (placed, proposed.microbatches) != (wanted, expected.microbatches):
            what = "placement" if proposed.is_one_pipeline else "workers"
            raise ControlError(
                f"plan {version} has {what} {placed} and {proposed.microbatches} microbatches: "
                f"expected {wanted} and {expected.microbatches}"
            )
        self._check_program(proposed)
