"""A rank's view of the job: its members, and what this rank knows of them and of itself.

Three enumerations say how far the end of the job has come. They are this rank's :class:`State` in its record, its
:class:`Phase` on the way out, and its :class:`Inquiry` into the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.record import Failure, RankRecord, State


class Phase(Enum):
    """The progress of a rank out of the job.

    ``MEMBER`` and ``KNOWN`` alternate with what the others know. A lost store turns both into ``CUT_OFF``. Each phase can turn
    into ``ENDED``.
    """

    MEMBER = "the others may not know yet that this rank failed or leaves"
    KNOWN = "every other rank that lives knows that this rank failed or left, and why the job ends"
    CUT_OFF = "this rank has lost the store and can report nothing more"
    ENDED = "this rank takes no part any more"


class Inquiry(Enum):
    """The state of a rank's search for the cause.

    ``NONE`` turns into one of the others with the first failure. These alternate as more failures are read.
    """

    NONE = "no failure is known"
    OPEN = "a failure is known; the report of an earlier one is awaited"
    FOUND = "the failure that came first is known"


class View:
    """The members of the job as one of them knows them. It asks nobody and measures no time.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    Attributes:
        rank: This rank.
        others: The other ranks.
        records: The newest record of each other rank of which one was read.
        state: This rank's state, as in its record.
        failure: This rank's failure; its ordinal is 0 until the store has numbered it.
        phase: See :class:`Phase`.
        inquiry: See :class:`Inquiry`.
        cause: The rank whose failure was last found to be the cause, or None.
        lost: The reason why the job ended, if another rank or the store is lost.
        has_lost_a_process: True if that is a process that gives no sign of life, and no rank's own error.
        reads_all: True once this rank reads all records because the job ends.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.others = tuple(other for other in range(world_size) if other != rank)
        self.records: dict[int, RankRecord] = {}
        self.state = State.RUNNING
        self.failure: Failure | None = None
        self.phase = Phase.MEMBER
        self.inquiry = Inquiry.NONE
        self.cause: int | None = None
        self.lost: PeerLostError | None = None
        self.has_lost_a_process = False
        self.reads_all = False
        self._beat = 0
        self._bulletin = 0

    # Events that this rank makes.

    def fail(self, failure: Failure) -> bool:
        """Take a failure of this rank or a loss that it noticed.

        Returns:
            True if it is to be reported: it is the first, and the store is not lost.
        """
        if self.failure is not None or self.phase in (Phase.CUT_OFF, Phase.ENDED):
            return False
        self.failure = failure
        self.inquiry = Inquiry.OPEN
        self._enter(State.FAILED)
        return True

    def leave(self) -> bool:
        """Leave the job. Returns True if this rank ran until now."""
        if self.state is not State.RUNNING:
            return False
        self._enter(State.LEFT)
        return True

    def _enter(self, state: State) -> None:
        self.state = state
        if self.phase is Phase.KNOWN:
            self.phase = Phase.MEMBER

    def next_record(self) -> RankRecord:
        """Return the record of this rank's next heartbeat."""
        self._beat += 1
        return RankRecord(self._beat, self.state, self.failure, self.gone(), self.is_settled)

    def lose(self, error: PeerLostError, *, is_process: bool = False) -> bool:
        """Take the loss of another rank or the store. Returns True if it is the first, to be reported to the caller."""
        if self.lost is not None or self.phase is Phase.ENDED:
            return False
        self.lost, self.has_lost_a_process = error, is_process
        return True

    def cut_off(self) -> None:
        """Record that the store is lost."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.CUT_OFF

    def end(self) -> None:
        """End this rank's part."""
        self.phase = Phase.ENDED

    # What this rank reads.

    def read_record(self, rank: int, record: RankRecord) -> bool:
        """Take another rank's record. Returns True if it is a sign of life.

        An older record is none: any client of the store may write back an old value.
        """
        known = self.records.get(rank)
        if known is not None and record.beat <= known.beat:
            return False
        self.records[rank] = record
        return True

    def read_bulletin(self, number: int) -> bool:
        """Take the number of the leader's bulletin. Returns True if it is a sign of life."""
        is_newer = number > self._bulletin
        self._bulletin = max(number, self._bulletin)
        return is_newer

    def find(self, cause: int, is_final: bool) -> bool:
        """Take the cause of all failures read so far, and whether no report can change it.

        Returns:
            True if the cause is found, also because the job has already ended for another reason.
        """
        self.inquiry = Inquiry.FOUND if is_final or self.lost is not None else Inquiry.OPEN
        if self.is_settled:
            self.cause = cause
        return self.is_settled

    def note_known(self, written: RankRecord, is_quiet: Callable[[int], bool]) -> None:
        """Find out whether the others know of this rank's end, as its record that was ``written`` last says it.

        Args:
            written: That record.
            is_quiet: Returns True for a rank that has sent no heartbeat lately, so that nobody waits for it.
        """
        if self.phase in (Phase.MEMBER, Phase.KNOWN):
            is_said = written.state is not State.RUNNING and written.is_settled
            is_known = is_said and all(is_quiet(other) or self._is_known_to(other) for other in self.others)
            self.phase = Phase.KNOWN if is_known else Phase.MEMBER

    # What this rank knows.

    @property
    def is_settled(self) -> bool:
        """True if this rank knows of no failure or has found the first one."""
        return self.inquiry is not Inquiry.OPEN

    @property
    def is_cause(self) -> bool:
        """True if this rank's failure is the cause."""
        return self.cause == self.rank

    @property
    def expects_the_end(self) -> bool:
        """True if this rank or another one has left, so that the store may end with its host."""
        return self.phase is Phase.ENDED or self.state is State.LEFT or self._any_left()

    @property
    def has_reported_a_loss(self) -> bool:
        """True if this rank has reported another one lost and awaits that one's own report."""
        return self.failure is not None and self.failure.lost is not None and self.lost is None

    def gone(self) -> tuple[int, ...]:
        """Return the ranks of which this rank has read that they failed or left, in ascending order."""
        return tuple(sorted(rank for rank, record in self.records.items() if record.state is not State.RUNNING))

    def has_left(self, rank: int) -> bool:
        """Return True if another rank's record says that it left."""
        record = self.records.get(rank)
        return record is not None and record.state is State.LEFT

    def failures(self) -> dict[int, Failure]:
        """Return the numbered failures of all ranks that this rank knows, its own included."""
        failures = {rank: record.failure for rank, record in self.records.items() if record.failure is not None}
        if self.failure is not None and self.failure.ordinal:
            failures[self.rank] = self.failure
        return failures

    def _any_left(self) -> bool:
        return any(record.state is State.LEFT for record in self.records.values())

    def _is_known_to(self, other: int) -> bool:
        """Return True if a peer knows that this rank failed or left and why the job ends, or has left itself."""
        record = self.records.get(other)
        if record is None:
            return False
        if record.state is State.RUNNING:
            return record.is_settled and self.rank in record.seen
        return record.is_settled or record.state is State.LEFT
