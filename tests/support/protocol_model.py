"""All orders of events that a few ranks can meet, for the code that agrees on plans: an explicit-state model checker.

What is stepped is :class:`adaptra.runtime.control.agreement.participant.Participant` itself, with the log and the agreement
that it uses.
The model supplies what lies around it. There is a store, and mail that travels for as long as it likes and may be lost or told
twice. There are ranks that run steps when the log covers them, and ranks that think about a proposal. There are impatience,
connections that break and coordinators that give up. Processes die, also in the midst of what they were writing. A plan is its
version and who made it; what it holds does not matter here.

In every state reached:

- all ranks that have run a step have run it under one plan, which every rank had confirmed before the log named it;
- the log names no speculative plan that has not been released;
- the versions and the steps of the log only grow;
- at an end no rank holds a plan that was withdrawn, as long as mail arrives and nobody takes over from a coordinator;
- no rank has met what it takes for an error;
- there is a next event, or every rank that lives has run all steps, or has been told that another died;
- an end is still possible without another fault. So every run in which no event waits for ever ends.

Mail between two ranks arrives in order; mail of different ranks in any order, which is more than the real queues permit. Mail
to oneself is read at once. What a rank does with one mail is one event. Of its requests to the store only the append of the log
has an answer that depends on others. The store makes that as a whole or refuses it. That the rank dies between two requests is
an event of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from exploring import Trace, ViolationError, explore
from protocol_world import Bounds, Faults, ModelPlan, World, cloned, frozen

from adaptra.runtime.control.agreement.participant import Participant, Surroundings
from adaptra.runtime.control.mail.mail import Gathered, Mail, Measured, Proposed, Reports, Spread
from adaptra.runtime.control.mail.relay import Relay
from adaptra.runtime.control_store.schema import decode
from adaptra.runtime.measuring.measurement import StepMeasurement


class _DiesError(BaseException):
    """The process dies between two requests to the store."""


class _NoNews:
    """What ranks measured does not matter here, so nothing is told."""

    told = 0

    def tell(self, measurements: Sequence[StepMeasurement]) -> tuple[StepMeasurement, ...]:
        """Nothing."""
        return ()

    def forget(self) -> None:
        """Nothing is remembered."""

    def read(
        self, ranks: Sequence[int], step: int, told: int, seconds: Sequence[float], news: Sequence[StepMeasurement]
    ) -> tuple[StepMeasurement, ...]:
        """Nothing."""
        return ()


Event = tuple[str, str, int | None, Callable[[World], None]]
"""Its name, the kind of fault it is if any, the rank that acts if one does, and what happens."""


class Model:
    """Explores all states within the bounds. The callbacks of all participants act on the state that is being changed."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._world: World
        self._writes_left: int | None = None
        self._writes = 0
        self._to_oneself: deque[Mail] = deque()
        self._numbers: dict[Mail, int] = {}
        self._mail: list[Mail] = []
        initial: Any = ModelPlan(0, "initial")
        ranks = range(bounds.ranks)
        self._world = World(
            [Participant(rank, bounds.ranks, initial, self._around(rank), bounds.ahead, 0) for rank in ranks],
            [None] * bounds.ranks,
            [True] * bounds.ranks,
            [False] * bounds.ranks,
            [()] * bounds.ranks,
            [0] * bounds.ranks,
            [()] * bounds.ranks,
            {},
            {},
            (0, 0),
            bounds.proposals,
            bounds.faults,
        )
        if bounds.relaying is not None:
            self._world.relays = [self._relay(rank) for rank in ranks]
        for rank in ranks:
            self._world.participants[rank].start()
            self._settle(self._world, rank)
        self._initial = self._world

    def explore(self) -> tuple[int, set[tuple[int, ...]]]:
        """Visit every reachable state.

        Returns:
            How many there are, and the versions that the steps were run under in all runs that ended without a death.

        Raises:
            ViolationError: A property does not hold.
        """
        histories: set[tuple[int, ...]] = set()

        def is_end(world: World, path: Trace) -> bool:
            if not all(self._has_ended(world, rank) for rank in range(self.bounds.ranks) if world.alive[rank]):
                return False
            self._check_plans(world, path)
            if all(world.alive):
                histories.add(world.covered[0][: self.bounds.steps])
            return True

        return explore(self._initial, World.key, self._successors, is_end), histories

    def _has_ended(self, world: World, rank: int) -> bool:
        return world.told[rank] or world.ran[rank] == self.bounds.steps

    def _successors(self, world: World, trace: Callable[[], str]) -> Iterator[tuple[str, bool, World]]:
        """The states after one event: its name, whether it is a fault, and the state."""
        for name, fault, rank, act in self._events(world):
            changed = self._after(world, rank, fault, act, None, name, trace)
            writes = self._writes
            yield name, fault != "", changed
            if world.faults.crashes and rank is not None and fault == "":
                for count in range(writes):
                    dying = self._after(world, rank, "crashes", act, count, name, trace)
                    yield f"{name} and death after {count} writes", True, dying

    def _after(
        self,
        world: World,
        rank: int | None,
        fault: str,
        act: Callable[[World], None],
        writes_left: int | None,
        name: str,
        trace: Callable[[], str],
    ) -> World:
        changed = world.copied()
        if fault:
            changed.faults = replace(changed.faults, **{fault: getattr(changed.faults, fault) - 1})
        if rank is not None:
            changed.participants[rank] = cloned(changed.participants[rank])
            if changed.relays:
                changed.relays[rank] = cloned(changed.relays[rank])
        self._world, self._writes_left, self._writes = changed, writes_left, 0
        self._to_oneself.clear()
        try:
            act(changed)
            if rank is not None:
                self._settle(changed, rank)
        except _DiesError:
            assert rank is not None
            self._die(changed, rank)
        except Exception as error:
            raise ViolationError(f"{type(error).__name__}: {error}, after {trace()}, {name}") from error
        return changed

    def _settle(self, world: World, rank: int) -> None:
        """Let a rank that has acted read its mail to itself, and run what it can if it is eager."""
        while True:
            self._flush(world, rank)
            while self._to_oneself:
                self._handle(world, rank, self._to_oneself.popleft())
                self._flush(world, rank)
            if not (self.bounds.eager and self._can_run(world, rank)):
                break
            self._run(world, rank)
        world.keys[rank] = (frozen(world.participants[rank]), frozen(world.relays[rank]) if world.relays else None)

    def _flush(self, world: World, rank: int) -> None:
        if world.relays:
            world.relays[rank].flush()

    def _handle(self, world: World, rank: int, mail: Mail | Reports) -> None:
        if isinstance(mail, (Gathered, Spread)):
            for inner in world.relays[rank].take(mail):
                self._handle(world, rank, inner)
        else:
            protocol_mail: Any = mail  # participants send some kinds alone
            world.participants[rank].handle(protocol_mail)

    def _may_turn_impatient(self, world: World, rank: int, is_quiet: bool) -> bool:
        # A rank that waits for a dead one asks and replaces coordinators until it is told; once round is enough.
        has_death, term = not all(world.alive), world.participants[rank]._term
        may_ask = not has_death or term < self.bounds.ranks
        return world.ran[rank] < self.bounds.steps and may_ask and (is_quiet or world.faults.early > 0)

    def _can_run(self, world: World, rank: int) -> bool:
        return world.ran[rank] < min(len(world.covered[rank]), self.bounds.steps)

    def _events(self, world: World) -> Iterator[Event]:
        """Every event that can happen."""
        for (source, to), mails in world.mail.items():
            what = f"{type(self._mail[mails[0]]).__name__} {source}→{to}"
            yield what, "", to, lambda world, source=source, to=to: self._deliver(world, source, to)
            if world.faults.lost:
                yield f"lose {what}", "lost", None, lambda world, at=(source, to): self._drop(world, at)
            if world.faults.repeated:
                yield f"repeat {what}", "repeated", None, lambda world, at=(source, to): self._repeat(world, at)
        present = [rank for rank in range(self.bounds.ranks) if world.alive[rank] and not world.told[rank]]
        is_quiet = not world.mail and not any(world.considering) and not any(self._can_run(world, rank) for rank in present)
        for rank in present:
            yield from self._events_of(world, rank, is_quiet)

    def _events_of(self, world: World, rank: int, is_quiet: bool) -> Iterator[Event]:
        """The events of one rank, but for the mail that it gets."""
        if self._can_run(world, rank):
            yield f"step of {rank}", "", rank, lambda world: self._run(world, rank)
        elif self._may_turn_impatient(world, rank, is_quiet):
            fault = "" if is_quiet else "early"
            yield f"impatience of {rank}", fault, rank, lambda world: world.participants[rank].impatient()
        if world.considering[rank]:
            yield f"readiness of {rank}", "", rank, lambda world: self._ready(world, rank)
            if world.faults.refused:
                yield f"refusal of {rank}", "refused", rank, lambda world: self._refuse(world, rank)
        agreement = world.participants[rank].agreement
        if agreement is not None and agreement.current is not None:
            if agreement.proposal is None and world.proposals:
                yield f"proposal of {rank}", "", rank, lambda world: self._propose(world, rank)
                if self.bounds.speculative:
                    yield (
                        f"proposal of {rank}, speculative",
                        "",
                        rank,
                        lambda world: self._propose(world, rank, is_speculative=True),
                    )
            elif agreement.proposal is not None and (is_quiet or agreement.is_speculative or world.faults.refused):
                fault = "" if is_quiet or agreement.is_speculative else "refused"
                yield f"withdrawal of {rank}", fault, rank, lambda world: self._withdraw(world, rank)
            if agreement.is_speculative:
                yield f"release of {rank}", "", rank, lambda world: self._release(world, rank)
        if world.faults.broken:
            yield f"broken connection of {rank}", "broken", rank, lambda world: world.participants[rank].rejoin()
        if world.faults.crashes:
            yield f"death of {rank}", "crashes", None, lambda world: self._die(world, rank)
        if not all(world.alive):
            yield f"end of {rank}", "", None, lambda world: self._tell(world, rank)

    def _deliver(self, world: World, source: int, to: int) -> None:
        self._handle(world, to, self._take(world, (source, to)))

    def _take(self, world: World, at: tuple[int, int]) -> Any:
        """The first mail of a queue, which it leaves."""
        first, *rest = world.mail[at]
        if rest:
            world.mail[at] = tuple(rest)
        else:
            del world.mail[at]
        return self._mail[first]

    def _drop(self, world: World, at: tuple[int, int]) -> None:
        self._take(world, at)

    def _repeat(self, world: World, at: tuple[int, int]) -> None:
        world.mail[at] = (world.mail[at][0], *world.mail[at])

    def _run(self, world: World, rank: int) -> None:
        step = world.ran[rank]
        world.ran[rank] += 1
        version = world.covered[rank][step]
        for other in range(self.bounds.ranks):
            if world.ran[other] > step and world.covered[other][step] != version:
                raise ViolationError(f"rank {rank} runs step {step} under plan {version}, rank {other} under another")
        coordinator = world.participants[rank].reach(step)
        measurement = StepMeasurement(rank, step, 0.0, (), ())
        if world.relays:
            for reports in world.relays[rank].ran(measurement):
                self._handle(world, rank, reports)
        else:
            self._send(rank, coordinator, Measured(measurement))

    def _ready(self, world: World, rank: int) -> None:
        plan: Any
        plan, *rest = world.considering[rank]
        world.considering[rank] = tuple(rest)
        world.participants[rank].ready(plan)

    def _refuse(self, world: World, rank: int) -> None:
        plan, *rest = world.considering[rank]
        world.considering[rank] = tuple(rest)
        world.participants[rank].refuse(plan.version, "")

    def _propose(self, world: World, rank: int, *, is_speculative: bool = False) -> None:
        plan: Any = ModelPlan(0, f"{rank}.{world.proposals}")
        world.proposals -= 1
        world.unreleased |= {plan.digest} if is_speculative else frozenset[str]()
        world.participants[rank].propose(plan, None, "", is_speculative)

    def _release(self, world: World, rank: int) -> None:
        agreement = world.participants[rank].agreement
        assert agreement is not None and agreement.proposal is not None
        world.unreleased -= {agreement.proposal.digest}
        world.participants[rank].release()

    def _withdraw(self, world: World, rank: int) -> None:
        agreement = world.participants[rank].agreement
        assert agreement is not None and agreement.proposal is not None
        world.participants[rank].withdraw(agreement.proposal.version, "")

    def _die(self, world: World, rank: int) -> None:
        world.alive[rank] = False
        self._forget_mail_to(world, rank)

    def _tell(self, world: World, rank: int) -> None:
        world.told[rank] = True
        self._forget_mail_to(world, rank)

    def _forget_mail_to(self, world: World, rank: int) -> None:
        world.considering[rank] = ()
        world.mail = {at: mails for at, mails in world.mail.items() if at[1] != rank}

    def _relay(self, rank: int) -> Relay:
        assert self.bounds.relaying is not None
        return Relay(
            rank,
            self.bounds.ranks,
            self.bounds.relaying,
            lambda: self._world.participants[rank].coordinator,
            lambda to, mail: self._send(rank, to, mail),
            _NoNews(),
            _NoNews(),
        )

    def _around(self, rank: int) -> Surroundings:
        return Surroundings(
            self,  # the store
            lambda to, mail: self._world.relays[rank].send(to, mail) if self._world.relays else self._send(rank, to, mail),
            lambda until, plan: self._cover(rank, until, plan),
            lambda proposed: self._consider(rank, proposed),
            lambda leads: None,
            lambda event: None,
        )

    def _check_plans(self, world: World, path: Callable[[], str]) -> None:
        """Whether ranks keep plans that nobody needs."""
        if world.mail or any(world.considering) or replace(self.bounds.faults, refused=0, repeated=0) != Faults():
            return
        # All have confirmed the coordinator's current plan; earlier ones go when the log names it.
        agreement = next(participant.agreement for participant in world.participants if participant.agreement)
        assert agreement.current is not None, "the steps have been run under it"
        proposed = set() if agreement.proposal is None else {agreement.proposal.version}
        for rank, participant in enumerate(world.participants):
            if unneeded := {version for version in participant._plans if version > agreement.current.version} - proposed:
                raise ViolationError(f"rank {rank} still holds plans {sorted(unneeded)} after {path()}")

    def _write(self) -> None:
        """A request that changes what others see is about to be made."""
        if self._writes_left is not None and self._writes == self._writes_left:
            raise _DiesError
        self._writes += 1

    def _send(self, source: int, to: int, mail: Mail) -> None:
        self._write()
        world = self._world
        if to == source:
            self._to_oneself.append(mail)
        elif world.alive[to] and not world.told[to]:
            if mail not in self._numbers:
                self._numbers[mail] = len(self._mail)
                self._mail.append(mail)
            world.mail[source, to] = (*world.mail.get((source, to), ()), self._numbers[mail])

    def _cover(self, rank: int, until: int, plan: Any) -> None:
        covered = self._world.covered[rank]
        assert until > len(covered), f"entry ends at {until}: expected an end after {len(covered)}"
        self._world.covered[rank] = covered + (plan.version,) * (until - len(covered))

    def _consider(self, rank: int, proposed: Proposed) -> None:
        plan: Any = proposed.plan
        if plan not in self._world.considering[rank]:
            self._world.considering[rank] = (*self._world.considering[rank], plan)

    # What follows is the store.

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        return self._world.store[key].encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._world.store for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._write()
        self._world.store[key] = self._world.store.get(key, 0) + amount
        return self._world.store[key]

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        self._write()
        return self._world.store.pop(key, None) is not None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if its value is the expected one; only the log is written like this."""
        self._write()
        world = self._world
        if world.store.get(key, "") == expected:
            self._check_entry(desired)
            world.store[key] = desired
        return world.store[key].encode()

    def _check_entry(self, text: str) -> None:
        fields = decode(text.encode(), "entry")
        until, version = fields.whole("until"), fields.whole("version")
        last_until, last_version = self._world.written
        if until <= last_until or version < last_version:
            raise ViolationError(f"entry ({until}, {version}) after ({last_until}, {last_version}): the log only grows")
        self._world.written = until, version
        confirmed: list[Any] = [participant._plans.get(version) for participant in self._world.participants]
        if len({plan and plan.digest for plan in confirmed}) != 1 or confirmed[0] is None:
            raise ViolationError(f"the log names plan {version}, which not all ranks have confirmed: {confirmed}")
        if confirmed[0].digest in self._world.unreleased:
            raise ViolationError(f"the log names plan {version}, which is speculative and has not been released")
