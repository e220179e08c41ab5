"""How the members of a group come together for their first sum, when nothing watches over them yet.

Each says in the store what it joins, and which ranks it waits for there. So two that wait for each other in different places
find out, and get an error that names both. Who has died before it came is known by the broken connections of torch's own group,
where that has gloo. Who comes at all has to come within the timeout of ``init_process_group``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from torch.distributed import ProcessGroup, Store

from adaptra.errors import AdaptraError, ControlError, PeerLostError
from adaptra.reduction.asked_store import AskedStore
from adaptra.reduction.peer_watch import PeerWatch
from adaptra.runtime.control_store.spare_clients import Borrower, Part, give_back
from adaptra.runtime.control_store.stores import clone
from adaptra.runtime.transports.process_groups import Members, broken_peer, job_store, meets_lazily

T = TypeVar("T")

_QUIET_SECONDS: Final = 0.2
"""Seconds of a wait after which it is asked why it lasts."""
_LOOK_SECONDS: Final = 0.1
_LONG_SECONDS: Final = 2.0
"""Seconds of a wait after which it is asked less often."""
_LONG_LOOK_SECONDS: Final = 0.5
_EVIDENCE_SECONDS: Final = 1.0
"""The longest time in which a failure is explained."""
_CROSSED_SECONDS: Final = 10.0
"""Seconds for which two members wait for each other in different places until that is an error: other threads may join both."""
_SHORTEST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.25
"""The longest time between two questions whether all have come."""
_LOST: Final = "lost"
_CROSSED: Final = "crossed"

_lock: Final = threading.Lock()
_under_way: Final[dict[str, str]] = {}
"""What this process joins, as it stands in the store, by its name."""


class Joining:
    """One member's way into a group, as a context.

    Args:
        group: The group of torch.distributed.
        members: This member of them, under a name of this joining alone.
        ranks: Their ranks in the job.
        doing: What this member does here, in words.
    """

    def __init__(self, group: ProcessGroup, members: Members, ranks: Sequence[int], doing: str) -> None:
        self._group = group
        self._members = members
        self._ranks = ranks
        self._own = ranks[members.rank]
        self._doing = doing
        self._borrower = Borrower()
        self._store = AskedStore(_records())
        self._seconds: float = job_store().timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
        self._until = time.monotonic() + self._seconds
        self._crossed: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._is_over = False

    def meet(self) -> None:
        """Wait until all members have come to this joining; raises as :meth:`wait`."""

        def come() -> None:
            records = _records()
            with _lock:
                _under_way[self._members.name] = "\t".join([self._members.name, self._doing, ",".join(map(str, self._ranks))])
                records.set(f"joining/{self._own}", "\n".join(_under_way.values()))
            records.set(_came(self._members.name, self._own), "")
            count, began = f"{self._members.name}/count", time.monotonic()
            records.add(count, 1)
            # torch's store warns of waits that time out, and has no way to end one.
            while records.add(count, 0) < self._members.size and not self._is_over:
                time.sleep(min(_LONGEST_PAUSE, _SHORTEST_PAUSE + (time.monotonic() - began) / 10))
            give_back(records)

        self.wait(come)

    def wait(self, make: Callable[[], T], watch: PeerWatch | None = None) -> T:
        """Return what a call returns that waits for the other members, and look meanwhile why it lasts.

        Args:
            make: The call. It is made in a thread, which is given up after an error.
            watch: What watches over the members already.

        Raises:
            ControlError: Another member waits for this one in another place; names both.
            PeerLostError: A member is lost, or does not come in time; names its rank.
        """
        results: list[T] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                with self._borrower.here():
                    results.append(make())
            except Exception as error:
                failed.append(error)

        began = time.monotonic()
        thread = self._thread = threading.Thread(target=run, name="adaptra joins the ranks of a sum", daemon=True)
        thread.start()
        thread.join(_QUIET_SECONDS)
        explains_until: float | None = None
        while not results:
            now = time.monotonic()
            if failed and (isinstance(failed[0], AdaptraError) or not isinstance(failed[0], RuntimeError)):
                raise failed[0]
            if (error := self._error() if watch is None else watch.error) is not None:
                raise error
            if now > self._until:
                raise self._late()
            if failed:
                explains_until = explains_until or now + _EVIDENCE_SECONDS
                if now > explains_until:
                    raise PeerLostError(f"a sum over ranks has failed: {failed[0]}") from failed[0]
                time.sleep(_LOOK_SECONDS)
            thread.join(_LOOK_SECONDS if now - began < _LONG_SECONDS else _LONG_LOOK_SECONDS)
        return results[0]

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Say that this member no longer waits here."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join(_EVIDENCE_SECONDS)
            if self._thread.is_alive():
                # If a thread still waited for the store when this process ends, C++ would abort the process.
                self._borrower.give_up()
                self._thread.join(_EVIDENCE_SECONDS)
        with _lock:
            _under_way.pop(self._members.name, None)
            text = "\n".join(_under_way.values())
            self._store.ask(lambda store: store.set(f"joining/{self._own}", text))
        self._store.give_back()

    def _error(self) -> AdaptraError | None:
        """Return why this joining can't end, the same on all members that can still ask the store; None if it may."""
        missing = self._store.ask(self._missing)
        text = self._broken(missing or self._ranks)
        if missing and not text:
            text = self._store.ask(lambda store: self._cross(store, missing))
        key = _ended(self._members.name)
        text = self._store.ask(lambda store: store.compare_set(key, "", text or "").decode()) or text or ""
        kind, _, what = text.partition(" ")
        if kind == _CROSSED:
            return ControlError(f"{what}: expected the same on all ranks of the group")
        if kind == _LOST and what.isdecimal():
            return PeerLostError(
                f"rank {what} is lost: it has ended or broken its connections before {self._doing}", rank=int(what)
            )
        return None

    def _late(self) -> PeerLostError:
        missing = self._store.ask(self._missing) or ["…"]
        return PeerLostError(
            f"rank {missing[0]} has not come to {self._doing} within {self._seconds:g} s, the timeout of the process group: "
            "expected it on all ranks of the group",
            rank=missing[0] if isinstance(missing[0], int) else None,
        )

    def _missing(self, store: Store) -> list[int]:
        """Return the ranks that have not come. If few are missing, that takes few requests."""

        def of(ranks: Sequence[int]) -> list[int]:
            if store.check([_came(self._members.name, rank) for rank in ranks]):
                return []
            half = len(ranks) // 2
            return [*ranks] if not half else of(ranks[:half]) + of(ranks[half:])

        return of(self._ranks)

    def _broken(self, among: Sequence[int]) -> str:
        """Return which of some ranks has broken its connection, as a record; "" if none."""
        peer = None if meets_lazily() else broken_peer(self._group, [self._ranks.index(rank) for rank in among])
        return "" if peer is None else f"{_LOST} {self._ranks[peer]}"

    def _cross(self, store: Store, missing: Sequence[int]) -> str:
        """Return which missing rank waits for this one elsewhere, as a record; "" if none has done so for long."""
        before, self._crossed = self._crossed, {}
        for rank in missing:
            record = f"joining/{rank}"
            for line in store.get(record).decode().splitlines() if store.check([record]) else ():
                name, doing, ranks = [*line.split("\t"), "", ""][:3]
                if str(self._own) not in ranks.split(",") or store.check([_came(name, self._own)]):
                    continue
                since = self._crossed[name] = before.get(name, time.monotonic())
                if time.monotonic() - since > _CROSSED_SECONDS:
                    text = f"{_CROSSED} rank {self._own} does: {self._doing}; rank {rank}: {doing}"
                    store.compare_set(_ended(name), "", text)
                    return text
        return ""


def _records() -> Store:
    """Return a client of its own for what is told while nobody has come yet; it is not signed, as that takes all members."""
    return Part("adaptra/joining", clone(job_store()))


def _came(name: str, rank: int) -> str:
    return f"{name}/came/{rank}"


def _ended(name: str) -> str:
    return f"{name}/ended"
