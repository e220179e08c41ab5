"""Ends of processes, as told through the store by their launchers, and which of them the job went on without.

Launchers know the store, but neither the name nor the key of a launch in it. So these news have a place of their own, the same
for all launches of a job, and are not signed. Whoever reaches the store's port can tell a false end, as it can end the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from torch.distributed import Store

from adaptra.errors import ControlError
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.control_store.spare_clients import Part
from adaptra.runtime.control_store.stores import innermost
from adaptra.runtime.survival.news import News

_PLACE: Final = "adaptra ends"
_ENDED: Final = "ended"
_OUTLIVED: Final = "outlived"
_TEXT_LIMIT: Final = 200


def _nothing(_process: int) -> None:
    """Do nothing."""


class Ends:
    """The ends of a job's processes. Its callbacks are called from a thread, also for what was told before.

    Args:
        store: Any part of the job's store.
        on_end: Called with a process that has ended, and how in words, such as ``was ended by SIGKILL``.
        on_outlived: Called with a process that the job has gone on without.
    """

    def __init__(
        self, store: Store, on_end: Callable[[int, str], object], on_outlived: Callable[[int], object] = _nothing
    ) -> None:
        self._on_end = on_end
        self._on_outlived = on_outlived
        self._outlived: set[int] = set()
        self._news = News(Part(_PLACE, innermost(store)), self._hear)

    def tell(self, process: int, how: str) -> None:
        """Tell how a process has ended; its launcher knows. Errors are those of :meth:`.News.tell`."""
        self._news.tell(encode({"what": _ENDED, "process": process, "how": how}))

    def tell_outlived(self, processes: Iterable[int]) -> None:
        """Tell that the job has gone on without processes, so that their launchers don't fail for their ends.

        What has been told is told no more.
        """
        for process in set(processes) - self._outlived:
            self._news.tell(encode({"what": _OUTLIVED, "process": process, "how": ""}))

    def interrupt(self) -> None:
        """Go on over other connections, as these may be stuck."""
        self._news.interrupt()

    def close(self) -> None:
        """Hear what has been told so far, and no more."""
        self._news.close()

    def _hear(self, number: int, text: str) -> None:
        fields = decode(text.encode(), f"end {number}")
        what, process, how = fields.text("what", _TEXT_LIMIT), fields.whole("process"), fields.text("how", _TEXT_LIMIT)
        fields.end()
        if what == _ENDED:
            self._on_end(process, how)
        elif what == _OUTLIVED:
            self._outlived.add(process)
            self._on_outlived(process)
        else:
            raise ControlError(f"end {number}: {what!r}: expected {_ENDED} or {_OUTLIVED}")
