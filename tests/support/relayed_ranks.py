"""Ranks whose part in the agreement on plans is stepped in one thread, with relays in between, over a store that counts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from counting_store import CountingStore

from adaptra.program.schedules import gpipe
from adaptra.runtime.control.agreement.participant import Participant, Surroundings
from adaptra.runtime.control.mail.mail import Gathered, Mail, Measured, Proposed, Reports, Spread, TellAnew, from_json, to_json
from adaptra.runtime.control.mail.mailbox import queue_of
from adaptra.runtime.control.mail.relay import Relay, RelayOptions
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control_store.schema import encode
from adaptra.runtime.detection.news import NewsReader, NewsTeller
from adaptra.runtime.measuring.measurement import EdgeEstimate, EdgeMeasurement, StageMeasurement, StepMeasurement
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

CASE = Case(CostModel.uniform(2, 0.02, 0.02, 0.01), 4, (0, 1))
PLAN = Plan(0, gpipe(2, 4), CASE, 0.3, 0.25, "initial")
"""What the ranks agree on, of which only the version matters here."""


class RelayedRanks:
    """All ranks of a job: each has one stage, and an edge from each of its neighbours.

    Args:
        count: The number of ranks.
        relaying: How mail travels; None if all of it is direct.
        noise: The standard deviation of what a rank measures, as a fraction of it.
        ahead: As of a controller without a relay.

    Attributes:
        store: The ranks' store.
        participants: The ranks' parts in the agreement.
        known: By rank, the version that the latest log entry it knows names.
        slow: By rank, the factor of what its stage takes.
        lost: Whether mail to a rank is lost, asked for each.
        measured: The measurements, by step and rank.
        restored: What the coordinator took for them.
    """

    def __init__(self, count: int, relaying: RelayOptions | None, noise: float = 0.01, ahead: int = 2) -> None:
        self.store = CountingStore()
        self.known = [-1] * count
        self.slow: dict[int, float] = {}
        self.lost: Callable[[int, Mail], bool] = lambda rank, mail: False
        self.measured: dict[tuple[int, int], StepMeasurement] = {}
        self.restored: dict[tuple[int, int], StepMeasurement] = {}
        self.participants: list[Participant] = []
        self.relays: list[Relay] = []
        self._clients = [self.store.of(rank) for rank in range(count)]
        self._random = random.Random(0)
        self._noise = noise
        self._covered = [0] * count
        self._next = [0] * count
        self._proposed: dict[int, Plan] = {}
        self._considering: list[tuple[int, Plan]] = []
        for rank in range(count):
            self._add(rank, count, relaying, ahead)
        for rank, participant in enumerate(self.participants):
            participant.start()
            self._flush(rank)

    @property
    def steps(self) -> list[int]:
        """The number of steps that each rank has run."""
        return list(self._next)

    @property
    def log_version(self) -> int:
        """The version that the latest entry of the log names, as rank 0 knows it."""
        return self.known[0]

    def propose(self) -> int:
        """Have rank 0 propose a plan, and return its version."""
        coordinator = self.participants[0]
        coordinator.propose(PLAN, None, "another")
        assert coordinator.agreement is not None and coordinator.agreement.proposal is not None
        plan = coordinator.agreement.proposal
        self._proposed[plan.version] = plan
        self._flush(0)
        return plan.version

    def run(self, steps: int) -> None:
        """Have all ranks run steps, with all mail under way delivered after each.

        Ranks that wait for the log after that turn impatient.
        """
        end = self._next[0] + steps
        while min(self._next) < end:
            self.step(end)
            while self.deliver():
                pass
            for rank in self._waiting(end):
                self.participants[rank].impatient()
                self._flush(rank)
            while self.deliver():
                pass

    def step(self, end: int) -> None:
        """Have each rank run its next step before ``end`` that its log covers."""
        for rank, step in enumerate(self._next):
            if step < min(end, self._covered[rank]):
                self._run(rank, step)

    def deliver(self) -> bool:
        """Have each rank handle the mail that has arrived; what is then sent has not.

        Returns:
            False if there was none.
        """
        arrived = [(rank, len(queue)) for rank in range(len(self._next)) if (queue := self._queue(rank))]
        for rank, count in arrived:
            for _ in range(count):
                mail = from_json(self._clients[rank].queue_pop(queue_of(rank)))
                if not self.lost(rank, mail):
                    self._handle(rank, mail)
                    self._flush(rank)
            for other, plan in self._take_considered():
                self.participants[other].ready(plan)
                self._flush(other)
        return bool(arrived)

    def _add(self, rank: int, count: int, relaying: RelayOptions | None, ahead: int) -> None:
        def send(to: int, mail: Mail) -> None:
            self._push(rank, to, mail)

        if relaying is not None:
            teller, reader = NewsTeller(), NewsReader()
            relay = Relay(rank, count, relaying, lambda: self.participants[rank].coordinator, send, teller, reader)
            self.relays.append(relay)
            ahead += relay.period
        around = Surroundings(
            self._clients[rank],
            self.relays[rank].send if self.relays else send,
            lambda until, plan: self._cover(rank, until, plan),
            lambda proposed: self._consider(rank, proposed),
            lambda leads: None,
            lambda event: None,
        )
        self.participants.append(Participant(rank, count, PLAN, around, ahead, 0))

    def _queue(self, rank: int) -> deque[bytes] | None:
        return self.store.queues.get(queue_of(rank))

    def _waiting(self, end: int) -> list[int]:
        return [rank for rank, step in enumerate(self._next) if self._covered[rank] <= step < end]

    def _push(self, source: int, to: int, mail: Mail) -> None:
        self._clients[source].queue_push(queue_of(to), encode(to_json(mail)))

    def _flush(self, rank: int) -> None:
        if self.relays:
            self.relays[rank].flush()

    def _handle(self, rank: int, mail: Mail | Reports) -> None:
        match mail:
            case Gathered() | Spread() | TellAnew():
                for inner in self.relays[rank].take(mail):
                    self._handle(rank, inner)
                return
            case Reports():
                self.restored |= {(one.step, one.rank): one for one in mail.measurements}
            case Measured(measurement):
                self.restored[measurement.step, measurement.rank] = measurement
            case _:
                pass
        known: Any = mail  # of which participants send some kinds alone
        self.participants[rank].handle(known)

    def _run(self, rank: int, step: int) -> None:
        self._next[rank] += 1
        measured = self._measure(rank, step)
        self.measured[step, rank] = measured
        coordinator = self.participants[rank].reach(step)
        if not self.relays:
            self._push(rank, coordinator, Measured(measured))
            return
        for reports in self.relays[rank].ran(measured):
            self._handle(rank, reports)
        self._flush(rank)

    def _measure(self, rank: int, step: int) -> StepMeasurement:
        factor = self.slow.get(rank, 1.0)
        forward, input_grad, weight_grad = (factor * self._scattered(seconds) for seconds in (0.02, 0.02, 0.01))
        neighbours = [one for one in (rank - 1, rank + 1) if 0 <= one < len(self._next)]
        edges = tuple(
            EdgeMeasurement(one, rank, 8, 0.0, EdgeEstimate(self._scattered(2e-4), None, self._scattered(0.01)))
            for one in neighbours
        )
        stage = StageMeasurement(rank, forward, input_grad, weight_grad, None)
        return StepMeasurement(rank, step, self._scattered(0.5), (stage,), edges)

    def _scattered(self, seconds: float) -> float:
        return seconds * max(self._random.gauss(1.0, self._noise), 0.5)

    def _cover(self, rank: int, until: int, plan: Plan) -> None:
        assert until > self._covered[rank]
        self._covered[rank], self.known[rank] = until, plan.version

    def _consider(self, rank: int, proposed: Proposed) -> None:
        self._considering.append((rank, self._proposed[proposed.version]))

    def _take_considered(self) -> list[tuple[int, Plan]]:
        taken, self._considering = self._considering, []
        return taken
