"""The way of one process from epoch to epoch, request by request to the store. It has no thread, and never waits.

What calls it has an order to keep. After a break a process says its census before it reads anything. It reads the censuses
and decides, and publishes. Between any two of these it may follow, and does so at last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from adaptra.errors import DataLostError, FencedError, PeerLostError, StageLostError
from adaptra.runtime.survival.epochs import (
    DATA_LOST,
    FAILED,
    LOST,
    Census,
    End,
    Epoch,
    Progress,
    census_of,
    decide,
    follower_of,
    leader,
    text_of,
)

if TYPE_CHECKING:
    from adaptra.runtime.control_store.stores import Connection
    from adaptra.runtime.world.world import ProcessId, World


class Recovery:
    """Knows how far one process has come, which epoch it is in, and whether that has broken.

    Args:
        process: This process.
        world: The world of the first epoch.

    Attributes:
        epoch: The newest epoch that this process knows.
        certain: The number of the last call that counts by the records that it knows, also by that of the end.
        why: Why that one has broken; None as long as it has not.
        failure: This process's own exception, for users; it ends the job with the next census.
        end: The error by which this process's part in the job has ended.
    """

    def __init__(self, process: ProcessId, world: World) -> None:
        self._process = process
        self.epoch = Epoch(world, 0)
        self.certain = 0
        self.why: str | None = None
        self.failure: str | None = None
        self.end: PeerLostError | None = None
        self._progress = Progress()
        self._said: dict[int, Census] = {}
        self._news: dict[int, str] = {}

    @property
    def number(self) -> int:
        """The number of the newest epoch that this process knows."""
        return self.epoch.world.epoch

    @property
    def completed(self) -> int:
        """The number of the last call that this process has completed."""
        return self._progress.completed

    def complete(self, call: int, number: int) -> bool:
        """Complete a call in an epoch of this number, before this process waits for the others. False if it has broken."""
        return number == self.number and self._progress.complete(call)

    def hear(self, number: int, why: str) -> bool:
        """Take the news that the epoch of this number has broken. Returns whether this process's has, by just that.

        It may be of an epoch that this process does not know yet: one that is late with the record before it. Nobody tells it
        again, so it is kept.
        """
        if number > self.number:
            self._news.setdefault(number, why)
        if number != self.number or self.why is not None or self.end is not None:
            return False
        self.why = why
        self._progress.say()
        return True

    def say(self, store: Connection) -> None:
        """Write how far this process has come in the epoch that has broken, once. A connection may break with what it wrote."""
        own = self._census_of(self._process)
        while not store.check([own]):
            store.set(own, text_of(self._progress.say(self.failure)))

    def decide(self, store: Connection, gone: Mapping[int, str]) -> str | None:
        """Return the record to publish. None if a lower process decides, or one that is left has not said anything.

        Only who decides reads what others have said. It asks for all that are left at once, so a store that is late costs it
        the same for any number of them.
        """
        world = self.epoch.world
        if leader(world, gone) != self._process:
            return None
        unread = [process for process in world.processes if process not in self._said]
        self._listen(store, [process for process in unread if process not in gone])
        for process in [one for one in unread if one in gone]:  # it may have failed by its own exception before it ended
            self._listen(store, [process])
        record = decide(world, self._said, gone)
        return None if record is None else text_of(record)

    def publish(self, store: Connection, record: str) -> None:
        """Write the record, unless there is one."""
        store.compare_set(self._record, "", record)

    def follow(self, store: Connection) -> bool:
        """Go on as the record says, if there is one: in the next epoch, or to :attr:`end`. Returns whether there was."""
        if not store.check([self._record]):
            return False
        record = follower_of(store.get(self._record).decode())
        if isinstance(record, End):
            # One that the others took for lost is not among those that have completed the call of the record.
            self.certain = max(self.certain, min(record.call, self._progress.completed))
            self.end = {LOST: StageLostError, DATA_LOST: DataLostError, FAILED: PeerLostError}[record.kind](
                record.why, rank=record.process
            )
        elif self._process not in record.world.processes:
            number = record.world.epoch
            self.end = FencedError(f"rank {self._process}: the others went on without it in epoch {number}", rank=self._process)
        else:
            self.enter(record)
        return True

    def enter(self, epoch: Epoch) -> None:
        """Go on in a later epoch. It may have broken by then."""
        self.epoch, self._progress, self._said = epoch, Progress(epoch.call), {}
        self.certain, self.why = epoch.call, None
        if (why := self._news.pop(self.number, None)) is not None:
            self.hear(self.number, why)

    def _listen(self, store: Connection, processes: list[ProcessId]) -> None:
        """Read what processes have said, once all of them have."""
        keys = [self._census_of(process) for process in processes]
        if keys and store.check(keys):
            texts = zip(processes, store.multi_get(keys), strict=True)
            self._said |= {process: census_of(text.decode()) for process, text in texts}

    def _census_of(self, process: ProcessId) -> str:
        return f"{self.number}/census/{process}"

    @property
    def _record(self) -> str:
        return f"{self.number}/record"
