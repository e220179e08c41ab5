"""The plan log and the agreement on it: which plan runs which step, the same on all ranks.

There is one log per pipeline, in the ranks' common store. Its entry i says "the steps from where entry i-1 ended up to
``until`` run plan ``version``", and entries are never changed. A rank starts a step only when the log covers it, so two ranks
never run one step under different plans, however late either reads.

The coordinator appends, and only where no entry exists, so two ranks that both believe they coordinate still write one log. It
keeps the log ``ahead`` steps beyond the slowest rank, so that no rank waits for it. It names a new version only after every
rank has confirmed that version. A rank that does not confirm keeps all ranks on the old plan; a slow rank delays the switch,
not the step. A speculative plan is confirmed before it is wanted, and pending until it is released or withdrawn.

:class:`Agreement` is the coordinator's part and :class:`Coverage` each rank's; neither touches the store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from adaptra.errors import BatchError, ControlError, TransportError
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control_store.schema import decode, encode


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log: the steps from the previous entry's ``until`` up to, not including, ``until`` run ``version``."""

    until: int
    version: int


class LogStore(Protocol):
    """The part of a torch.distributed Store that the log uses."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return True if all keys are set."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if its value is the expected one, where "" means that it is not set, and return its value afterwards."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""
        ...


class Log:
    """The log as one rank sees it: the entries read so far, and the position for the next one.

    Args:
        store: The store that all ranks share.
        kept: The largest number of entries that some rank may not have read yet.
    """

    def __init__(self, store: LogStore, kept: int) -> None:
        self._store = store
        self._position = 0
        self._latest: deque[tuple[int, int]] = deque(maxlen=kept)

    @property
    def position(self) -> int:
        """The number of entries that have been read or appended."""
        return self._position

    def read(self) -> Iterator[Entry]:
        """Yield the entries that were not read or appended before. Does not wait.

        An entry counts as read when it is yielded: if the store fails after it, the next call continues behind it.

        Raises:
            ControlError: An entry is malformed.
        """
        while self._store.check([f"log/{self._position}"]):
            fields = decode(self._store.get(f"log/{self._position}"), f"log entry {self._position}")
            entry = Entry(fields.whole("until"), fields.whole("version"))
            fields.end()
            self._pass(entry)
            yield entry

    def hear(self, position: int, entry: Entry) -> Iterator[Entry]:
        """Yield the same as :meth:`read` after mail about an entry, asking the store only if earlier entries have not been
        read.
        """
        if position == self._position:
            self._pass(entry)
            yield entry
        elif position > self._position:
            yield from self.read()

    def append(self, entry: Entry) -> bool:
        """Append an entry behind all entries that were read.

        Returns:
            False if another rank has appended a different entry there.
        """
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
    """The coordinator's decision on the next log entry.

    Args:
        ranks: The number of ranks that must confirm and report.
        first_step: The first step of the log.
        ahead: The number of steps by which the log exceeds the next step of the slowest rank.
    """

    def __init__(self, ranks: int, first_step: int = 0, ahead: int = 2) -> None:
        self._reported = [first_step - 1] * ranks
        self._slowest = first_step - 1
        self._at_slowest = ranks
        self._until = first_step
        self._ahead = ahead
        self._current: Plan | None = None
        self._proposal: Plan | None = None
        self._is_speculative = False
        self._confirmed: set[int] = set()

    @property
    def current(self) -> Plan | None:
        """The plan of the latest entry, or of the next one if all have confirmed it; None until the first is confirmed."""
        return self._current

    @property
    def proposal(self) -> Plan | None:
        """The pending proposal, which waits for confirmations or, if speculative, for its release."""
        return self._proposal

    @property
    def is_speculative(self) -> bool:
        """True if the pending proposal is speculative."""
        return self._proposal is not None and self._is_speculative

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not confirmed the proposal."""
        return tuple(rank for rank in range(len(self._reported)) if self.is_missing(rank))

    def is_missing(self, rank: int) -> bool:
        """Return True if a rank has not confirmed the proposal."""
        return rank not in self._confirmed

    @property
    def slowest(self) -> int:
        """The last step that all ranks have reported."""
        return self._slowest

    @property
    def until(self) -> int:
        """The first step that the log does not cover."""
        return self._until

    def propose(self, plan: Plan, is_speculative: bool = False) -> None:
        """Begin a proposal. There is one at a time, and versions only grow.

        For a speculative one (``is_speculative``) the ranks prepare, and the log names it only after its release.
        """
        assert self._proposal is None, "one proposal at a time"
        assert self._current is None or plan.version > self._current.version, "versions only grow"
        self._proposal, self._is_speculative, self._confirmed = plan, is_speculative, set()

    def confirm(self, rank: int, version: int, digest: str) -> bool:
        """Record a rank's confirmation of a version. One for another version than the proposal's comes late and changes
        nothing.

        Returns:
            True if this was the last one: the plan, unless speculative, is then the current one.

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
        """Accept the speculative proposal, which becomes the current plan once all ranks have confirmed it.

        Returns:
            True if all had confirmed it, so that it is the current plan now.
        """
        self._is_speculative = False
        return self._proposal is not None and self._conclude(self._proposal)

    def _conclude(self, proposal: Plan) -> bool:
        if len(self._confirmed) < len(self._reported) or self._is_speculative:
            return False
        self._current, self._proposal = proposal, None
        return True

    def withdraw(self) -> None:
        """Withdraw the proposal; the current plan stays."""
        self._proposal = None

    def adopt(self, until: int, plan: Plan) -> None:
        """Take over a log entry of any writer: the steps before ``until`` are covered, the latest of them by ``plan``."""
        self._until = until
        if self._current is None or plan.version > self._current.version:
            self._current = plan
        if self._proposal is not None and self._proposal.version <= self._current.version:
            self._proposal = None

    def report(self, rank: int, step: int) -> None:
        """Record that a rank has run all steps up to this one. Reports may be repeated.

        Raises:
            ControlError: The step is beyond the end of the log.
        """
        if step >= self._until:
            raise ControlError(f"rank {rank} reports step {step}: expected one before {self._until}, where the log ends")
        before = self._reported[rank]
        if step <= before:
            return
        self._reported[rank] = step
        # The slowest are counted, because a search after each report would take a time that grows with ranks squared.
        if before == self._slowest:
            self._at_slowest -= 1
            if self._at_slowest == 0:
                self._slowest = min(self._reported)
                self._at_slowest = self._reported.count(self._slowest)

    def advance(self) -> Entry | None:
        """Return the entry to append now, or None."""
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
    """The plans of steps as far as this rank has read the log. One thread extends it, another asks."""

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
        """Make every waiting and later call raise the error. The first error stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait_for(self, step: int, seconds: float | None) -> bool:
        """Wait until the log that this rank has read covers the step, or the control plane has ended.

        Args:
            step: The step.
            seconds: The longest wait in seconds, or None for no limit.

        Returns:
            False if the time is over and neither has happened.
        """
        if self._error is None and step < self._until:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or step < self._until, seconds)

    def plan_for(self, step: int) -> Plan:
        """Return the plan that runs a step, without waiting. Earlier steps than the one asked for are forgotten.

        Args:
            step: The step; not before the last one asked for.

        Raises:
            TransportError, BatchError: It was given to :meth:`fail`.
            ControlError: The control plane has failed or ended, or the log does not reach the step yet.
        """
        if isinstance(self._error, TransportError | BatchError):
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
