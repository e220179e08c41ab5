"""The part of one process in the epochs of its job: it notices a break, says how far it has come, and learns what follows.

A thread does all that, so a process also answers while its main thread is in the user's code. The main thread asks before it
completes a call, and after a call has broken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torch.distributed import DistError

from adaptra.errors import ControlError, PeerLostError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.stores import Connection, own_address
from adaptra.runtime.survival.epochs import Epoch, leader
from adaptra.runtime.survival.evidence import CUT_OFF_SECONDS, Evidence
from adaptra.runtime.survival.news import News
from adaptra.runtime.survival.recovery import Recovery

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptra.runtime.world.world import ProcessId, World

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.01
_WATCH_SECONDS: Final = 0.1
_SILENT_SECONDS: Final = 0.5
"""Seconds in a call after which a process asks the others whether they live."""
_KNOWN_SECONDS: Final = 5.0
"""Seconds that a process that ends waits for its reason to be known."""


class EpochKeeper:
    """Keeps one process in its job's epochs. Starts a thread at once.

    Args:
        store: The job's records.
        process: This process.
        world: The world of the first epoch.
        on_break: Called from a thread once for each epoch that breaks, with the reason; ends this process's waits.
        on_loss: Called from a thread with the processes that an epoch has lost; with all others if no epoch follows.
    """

    def __init__(
        self,
        store: Store,
        process: ProcessId,
        world: World,
        on_break: Callable[[PeerLostError], object],
        on_loss: Callable[[set[ProcessId]], object],
    ) -> None:
        self._store = Connection(under("survival", store))
        self._process = process
        self._everyone = world.processes
        self._on_break = on_break
        self._on_loss = on_loss
        self._recovery = Recovery(process, world)
        self._why_before = ""
        self._waits_since: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._evidence = Evidence(
            under("evidence", store),
            process,
            world.processes,
            own_address(store),
            on_end=self._hear_of_end,
            on_return=self._begin_anew,
            on_cut_off=self._give_up,
        )
        self._news = News(under("survival news", store), self._hear)
        self._thread = threading.Thread(target=self._run, name=f"adaptra rank {process} keeper", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that this process knows."""
        return self._recovery.epoch

    def begin_call(self) -> None:
        """Begin to wait for other processes: one that is silent then breaks the epoch."""
        self._waits_since = time.monotonic()

    def end_call(self) -> None:
        """Wait for no other process any more."""
        self._waits_since = None

    def complete(self, call: int, number: int) -> bool:
        """Complete a call in an epoch of this number, before this process waits for the others. False if it has broken."""
        with self._changed:
            return self._recovery.complete(call, number)

    def broke(self, number: int, error: BaseException) -> None:
        """Tell all that the epoch of this number has broken. Only the first time counts."""
        why = f"rank {self._process}: {error}"
        if self._break(number, why):
            self._news.tell(f"{number} {why}")

    def fail(self, error: BaseException) -> None:
        """End the job, as this process can't go on by its own fault. Waits until the others can know."""
        with self._changed:
            if self._recovery.end is not None or self._closed:
                return
            self._recovery.failure = f"rank {self._process} failed: {type(error).__name__}: {error}"
            number = self._recovery.number
        self.broke(number, error)
        with self._changed:
            self._changed.wait_for(lambda: self._recovery.end is not None or self._closed, _KNOWN_SECONDS)

    def follower(self, number: int) -> World:
        """Return the world of the newest epoch that follows the one of this number, once there is one.

        Raises:
            StageLostError, DataLostError, FencedError, PeerLostError: No epoch follows, or none with this process.
        """
        with self._changed:
            self._wait_for_record(number)
            if self._recovery.end is not None:
                raise self._recovery.end
            return self.epoch.world

    def counts(self, call: int, number: int) -> bool:
        """Return whether a call of a broken epoch counts, also if it was the last one of the job. Waits to know it.

        Raises:
            As :meth:`follower`, if it does not count.
        """
        with self._changed:
            self._wait_for_record(number)
            if self._recovery.certain >= call:
                return True
            if self._recovery.end is not None:
                raise self._recovery.end
            return False

    def _wait_for_record(self, number: int) -> None:
        self._changed.wait_for(lambda: self._recovery.number > number or self._recovery.end is not None)

    def broken(self, number: int) -> PeerLostError | None:
        """Return why the epoch of this number has broken; None if it goes on, or is still to come."""
        with self._changed:
            newest = self._recovery.number
            if self._recovery.end is not None:
                return self._recovery.end
            if number > newest or (number == newest and self._recovery.why is None):
                return None
            return self._lost(number, self._recovery.why or self._why_before)

    def move(self, world: World) -> None:
        """Go on in a world that all processes have agreed on, between two calls."""
        with self._changed:
            self._recovery.enter(Epoch(world, self._recovery.completed))
            self._changed.notify_all()
        self._break_by_ends_before()

    def close(self) -> None:
        """Take no part any more. May be called again."""
        with self._changed:
            was_closed, self._closed = self._closed, True
            self._changed.notify_all()
        if was_closed:
            return
        self._news.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._evidence.close()
        if not self._thread.is_alive():
            self._store.close()

    def _hear(self, _number: int, text: str) -> None:
        number, _, why = text.partition(" ")
        self._break(int(number), why)

    def _break(self, number: int, why: str) -> bool:
        """Take it that the epoch of this number has broken, and return whether this process's has, by just that."""
        with self._changed:
            has_broken = not self._closed and self._recovery.hear(number, why)
            self._changed.notify_all()
        if has_broken:
            self._on_break(self._lost(number, why))
        return has_broken

    def _hear_of_end(self, process: int, how: str) -> None:
        world = self.epoch.world
        if process in world.processes:
            self._break(world.epoch, f"rank {process} {how}")

    def _break_by_ends_before(self) -> None:
        """Take it that the newest epoch has broken if a process of it had ended before this process knew that epoch."""
        for process, how in self._evidence.told(self._everyone).items():
            self._hear_of_end(process, how)

    def _begin_anew(self) -> None:
        """Make the requests of a recovery anew, as this process was cut off meanwhile."""
        if self._recovery.why is not None:
            self._store.interrupt()
            self._news.interrupt()

    def _give_up(self) -> None:
        """End this process's part in the job, as it has been cut off for so long, or all others are frozen."""
        if self._recovery.why is not None:
            self._store.give_up(DistError(f"all other ranks have been silent for {CUT_OFF_SECONDS:.0f} s"))

    def _run(self) -> None:
        recovery = self._recovery
        try:
            while not self._closed and recovery.end is None:
                with self._changed:
                    self._changed.wait_for(lambda: recovery.why is not None or self._closed, _WATCH_SECONDS)
                if recovery.why is not None:
                    self._recover(recovery.epoch.world)
                elif recovery.failure is not None:
                    self.broke(recovery.number, PeerLostError(recovery.failure))
                else:
                    self._watch(recovery.epoch.world)
        except (DistError, ControlError) as error:
            with self._changed:
                recovery.end = PeerLostError(f"the job's store is lost: {error}")
                self._changed.notify_all()
            self._on_break(recovery.end)

    def _watch(self, world: World) -> None:
        """Ask the others whether they live, while this process waits for them."""
        since = self._waits_since
        if since is not None and time.monotonic() - since > _SILENT_SECONDS:
            for process, why in self._against_others(world).items():
                self.broke(world.epoch, PeerLostError(f"rank {process} {why}", rank=process))

    def _recover(self, world: World) -> None:
        """Say how far this process has come, wait for what follows, and decide it if no lower process is left to."""
        recovery, began = self._recovery, time.monotonic()
        why = self._why_before = f"{recovery.why}"
        recovery.say(self._store)
        with self._evidence.awaiting():
            while not self._closed:
                with self._changed:
                    follows = recovery.follow(self._store)
                    self._changed.notify_all()
                if follows:
                    break
                record = recovery.decide(self._store, self._against_others(world))
                if record is None:
                    time.sleep(_POLL_SECONDS)
                else:
                    recovery.publish(self._store, record)
        logger.info("epoch %d has broken: %s; another followed after %.3f s", world.epoch, why, time.monotonic() - began)
        after = recovery.epoch.world
        gone = set(world.processes).difference(after.processes)
        lost_to_it = gone if recovery.end is None else set(world.processes).difference([self._process])
        if lost_to_it and not self._closed:
            self._on_loss(lost_to_it)
        if (lost := self.broken(after.epoch)) is not None:
            self._on_break(lost)
        self._break_by_ends_before()
        if after is not world and leader(after, {}) == self._process:
            # Also whom earlier epochs have lost: who was to tell it may have died before.
            self._evidence.outlived(set(self._everyone).difference(after.processes))

    def _lost(self, number: int, why: str) -> PeerLostError:
        return PeerLostError(f"epoch {number} of the job has broken: {why}")

    def _against_others(self, world: World) -> dict[int, str]:
        return self._evidence.against([process for process in world.processes if process != self._process])
