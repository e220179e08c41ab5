"""Plans and the agreement about them: which plan runs which step, the same on all ranks.

There is one log per pipeline, in the ranks' common store. Its entry i says "the steps from where entry i-1 ended up to
``until`` run plan ``version``", and entries are never changed. A rank starts a step only when the log covers it, so two ranks
never run one step under different plans, however late either reads. The coordinator appends, and only where no entry is yet,
so two ranks that both believe to be the coordinator still write one log. It keeps the log ``ahead`` steps beyond the slowest
rank, so that nobody waits for it, and it names a new version only after every rank has confirmed that version. A rank that
does not confirm keeps everyone on the old plan; a rank that is slow delays the switch, not the step. A plan may be confirmed
before anybody knows whether it is wanted: it is held until it is released or withdrawn.

:class:`Agreement` is the coordinator's part and :class:`Coverage` each rank's; neither touches the store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from adaptra.errors import ControlError, TransportError
from adaptra.runtime.control.plan import Plan
from adaptra.runtime.control_store.schema import decode, encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log: the steps from the previous entry's ``until`` up to, not including, ``until`` run ``version``."""

    until: int
    version: int


class LogStore(Protocol):
    """What the log needs of a torch.distributed Store."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is set."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are set."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if its value is the expected one, "" if it must not be set; the value that it then has."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""
        ...


class Log:
    """The log as one rank sees it: read so far, and appended to at that place.

    Args:
        store: The store that all ranks share.
        kept: How many entries there are at most that a rank may not have read yet.
    """

    def __init__(self, store: LogStore, kept: int) -> None:
        self._store = store
        self._position = 0
        self._latest: deque[tuple[int, int]] = deque(maxlen=kept)

    @property
    def position(self) -> int:
        """How many entries have been read or appended."""
        return self._position

    def read(self) -> Iterator[Entry]:
        """The entries since those that were read or appended before. Does not wait.

        An entry counts as read when it is yielded: if the store fails after it, the next call goes on behind it.

        Raises:
            ControlError: An entry is not what it should be.
        """
        while self._store.check([f"log/{self._position}"]):
            fields = decode(self._store.get(f"log/{self._position}"), f"log entry {self._position}")
            entry = Entry(fields.whole("until"), fields.whole("version"))
            fields.end()
            self._pass(entry)
            yield entry

    def hear(self, position: int, entry: Entry) -> Iterator[Entry]:
        """What :meth:`read` gives, after being told of an entry; asks the store only if others before it have not been read."""
        if position == self._position:
            self._pass(entry)
            yield entry
        elif position > self._position:
            yield from self.read()

    def append(self, entry: Entry) -> bool:
        """Append an entry behind all that was read; False if another rank has appended a different one there."""
        text = encode({"until": entry.until, "version": entry.version})
        if self._store.compare_set(f"log/{self._position}", "", text).decode() != text:
            return False
        self._pass(entry)
        return True

    def forget(self, step: int) -> None:
        """Remove the entries that end at ``step`` or before it. Every rank must have run all steps before ``step``."""
        while self._latest and self._latest[0][1] <= step:
            self._store.delete_key(f"log/{self._latest[0][0]}")
            self._latest.popleft()

    def _pass(self, entry: Entry) -> None:
        self._latest.append((self._position, entry.until))
        self._position += 1


class Agreement:
    """Decides what the log says next; the coordinator's part.

    Args:
        ranks: How many ranks must confirm and report.
        first_step: The first step of the log.
        ahead: How many steps beyond the next step of the slowest rank the log covers.
    """

    def __init__(self, ranks: int, first_step: int = 0, ahead: int = 2) -> None:
        self._reported = [first_step - 1] * ranks
        self._until = first_step
        self._ahead = ahead
        self._current: Plan | None = None
        self._proposal: Plan | None = None
        self._is_held = False
        self._confirmed: set[int] = set()

    @property
    def current(self) -> Plan | None:
        """The plan of the latest entry, or of the next one if all have confirmed it; None until the first is confirmed."""
        return self._current

    @property
    def proposal(self) -> Plan | None:
        """The plan that is waiting for confirmations, or held and waiting for its release."""
        return self._proposal

    @property
    def is_held(self) -> bool:
        """Whether the proposal is one that only stands by."""
        return self._proposal is not None and self._is_held

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not confirmed the proposal."""
        return tuple(rank for rank in range(len(self._reported)) if rank not in self._confirmed)

    @property
    def slowest(self) -> int:
        """The last step that all ranks have reported."""
        return min(self._reported)

    @property
    def until(self) -> int:
        """The first step that the log does not cover."""
        return self._until

    def propose(self, plan: Plan, is_held: bool = False) -> None:
        """Put a plan to the ranks. There is one proposal at a time, and versions only grow.

        A held one stands by: the ranks get ready for it, and the log does not name it unless it is released.
        """
        assert self._proposal is None, "one proposal at a time"
        assert self._current is None or plan.version > self._current.version, "versions only grow"
        self._proposal, self._is_held, self._confirmed = plan, is_held, set()

    def confirm(self, rank: int, version: int, digest: str) -> bool:
        """A rank is ready to run a version. True when this was the last one: the plan, unless held, is then the current one.

        A confirmation of anything but the proposal comes late, after a withdrawal, and changes nothing.

        Raises:
            ControlError: The rank confirms a program other than the one proposed.
        """
        plan = self._proposal
        if plan is None or version != plan.version:
            return False
        if digest != plan.digest:
            raise ControlError(f"rank {rank} holds program {digest[:12]} as plan {version}: expected {plan.digest[:12]}")
        self._confirmed.add(rank)
        return self._conclude(plan)

    def release(self) -> bool:
        """The held proposal is wanted. True if all had confirmed it: it is then the current plan, else it is once they have."""
        self._is_held = False
        return self._proposal is not None and self._conclude(self._proposal)

    def _conclude(self, proposal: Plan) -> bool:
        if self.missing or self._is_held:
            return False
        self._current, self._proposal = proposal, None
        return True

    def withdraw(self) -> None:
        """Give the proposal up; the current plan stays."""
        self._proposal = None

    def adopt(self, until: int, plan: Plan) -> None:
        """The log says so, whoever wrote it: the steps before ``until`` are covered, the latest of them by ``plan``."""
        self._until = until
        if self._current is None or plan.version > self._current.version:
            self._current = plan
        if self._proposal is not None and self._proposal.version <= self._current.version:
            self._proposal = None

    def report(self, rank: int, step: int) -> None:
        """A rank has run all steps up to this one. What it has reported before may be told again.

        Raises:
            ControlError: The step is beyond what the log covers.
        """
        if step >= self._until:
            raise ControlError(f"rank {rank} reports step {step}: expected one before {self._until}, where the log ends")
        self._reported[rank] = max(step, self._reported[rank])

    def advance(self) -> Entry | None:
        """The entry to append now, if any."""
        target = self.slowest + 1 + self._ahead
        if self._current is None or target <= self._until:
            return None
        self._until = target
        return Entry(target, self._current.version)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive steps that run one plan."""

    start: int
    until: int
    plan: Plan


class Coverage:
    """Which plan runs which step, as far as this rank has read the log. One thread extends it, another asks."""

    def __init__(self, first_step: int = 0) -> None:
        self._changed = threading.Condition()
        self._segments: tuple[_Segment, ...] = ()
        self._until = first_step
        self._error: Exception | None = None

    def extend(self, until: int, plan: Plan) -> None:
        """Take the next entry of the log.

        Raises:
            ControlError: The entry does not end after the previous one.
        """
        with self._changed:
            if until <= self._until:
                raise ControlError(f"log entry ends at step {until}: expected an end after {self._until}")
            last = self._segments[-1] if self._segments else None
            if last is not None and last.plan.version == plan.version:
                self._segments = (*self._segments[:-1], _Segment(last.start, until, plan))
            else:
                self._segments = (*self._segments, _Segment(self._until, until, plan))
            self._until = until
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End it: whoever asks or waits from now on gets the error. The first error stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait_for(self, step: int, seconds: float | None) -> bool:
        """Wait until this rank has read so far that the step is covered, or it has ended; whether either is so.

        Args:
            step: The step.
            seconds: How long to wait at most, or None.
        """
        if self._error is None and step < self._until:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or step < self._until, seconds)

    def plan_for(self, step: int) -> Plan:
        """The plan that runs a step. Does not wait. Earlier steps than the one asked for are forgotten.

        Args:
            step: The step; not before the last one asked for.

        Raises:
            TransportError: It was given to :meth:`fail`.
            ControlError: The control plane has failed or ended, or the log does not reach the step yet.
        """
        if isinstance(self._error, TransportError):
            raise self._error
        if self._error is not None:
            raise ControlError(f"step {step} has no plan: {self._error}") from self._error
        segments = self._segments
        for segment in segments:
            if segment.start <= step < segment.until:
                if segment is not segments[0]:
                    self._forget(step)
                return segment.plan
        if segments and step < segments[0].start:
            raise ControlError(f"step {step} has no plan: it lies before step {segments[0].start}, the first one still known")
        raise ControlError(f"step {step} has no plan: the log covers the steps before {self._until}")

    def _forget(self, step: int) -> None:
        with self._changed:
            self._segments = tuple(segment for segment in self._segments if step < segment.until)
