"""The members of a group of torch.distributed, as they add terms without a pipeline, over connections of their own."""

from __future__ import annotations

import atexit
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from adaptra.collectives.rounds import ALGORITHMS
from adaptra.errors import AdaptraError, LaunchError, OptionError
from adaptra.reduction.joining import Joining
from adaptra.reduction.peer_watch import PeerWatch
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.options.reduce_options import Reduce
from adaptra.runtime.transports.process_groups import FOR_EVER, Members, end_group, end_waits, is_gloo, new_group, own_client

_joined: Final = Counter[str]()
"""How often this process has joined the members of each group, for each purpose."""
_failed: Final = WeakKeyDictionary[ProcessGroup, dict[str, AdaptraError]]()
"""What has ended a joining for good, by group and purpose."""
_open: Final = WeakSet[PeerWatch]()
"""The watches of this process that nobody has closed."""


def joined_group(group: ProcessGroup | None) -> ProcessGroup:
    """Return a group of which this process is a member; the one of all ranks for None.

    Raises:
        LaunchError: There is no process group, or this process is no member.
    """
    if not dist.is_initialized():
        raise LaunchError("a sum over ranks without a process group: expected torch.distributed.init_process_group before it")
    joined = dist.group.WORLD if group is None else group
    if not isinstance(joined, ProcessGroup) or dist.get_rank(joined) < 0:
        raise LaunchError("a sum over a group of which this process is no member: expected it on the group's ranks alone")
    return joined


class Peers:
    """A member of a group, and what joins it to the others. All members make theirs at the same time.

    Args:
        group: A group of torch.distributed; None for all ranks.
        how: How sums are made.
        purpose: What it is for, in words. Members that join for another purpose never meet.

    Attributes:
        ranks: The members' ranks in the job.
        rank: This one's number among them.
        sums: Adds over them; there is none for one member alone.

    Raises:
        ControlError: Another member waits for this one in another group, or for another purpose; names both.
        LaunchError: There is no process group, or this process is no member.
        PeerLostError: A member is lost, or does not come in time; names its rank.
        OptionError: Sums are to be made as late ranks need it. Only a pipeline's steps tell when ranks come.
    """

    def __init__(self, group: ProcessGroup | None, how: Reduce, purpose: str = "HookState") -> None:
        if how.is_auto:
            raise OptionError(f"{how}: expected algorithm='direct' or 'chain', as only a pipeline's steps tell when ranks come")
        joined = joined_group(group)
        self.ranks: Final = dist.get_process_group_ranks(joined)
        self.rank: Final = dist.get_rank(joined)
        # Groups that have no rank in common may have one name.
        name = f"{joined.group_name} from {self.ranks[0]} for {purpose}"
        self._one_at_a_time = threading.Lock()
        self._how: Final = how
        self._number = 0
        self._is_closed = False
        self._groups: list[ProcessGroup] = []
        if len(self.ranks) == 1:
            return
        failed = _failed.setdefault(joined, {})
        if purpose in failed:
            raise copy(failed[purpose])
        _joined[name] += 1
        members = Members(f"adaptra/reduction/{name}/{_joined[name]}", self.rank, len(self.ranks))
        doing = f"the first {purpose} over {_described(joined, self.ranks)}"
        try:
            self._join(joined, members, doing)
        except AdaptraError as error:
            failed[purpose] = copy(error)  # without the frames, which hold the group
            raise
        carrier = self._groups[0]
        # With tags, members that do something else never meet. NCCL has none.
        self._texts = None if len(self._groups) == 1 else self._groups[1]
        self.sums: Final = GroupSum(carrier, algorithm=ALGORITHMS[how.algorithm], limit=how.bucket, dtype=how.dtype)

    def require_open(self) -> None:
        """Refuse a sum after the end.

        Raises:
            LaunchError: :meth:`close` was called.
        """
        if self._is_closed:
            raise LaunchError("a sum over ranks after its end: expected none after close()")

    @contextmanager
    def meeting(self, what: str) -> Generator[None]:
        """Meet the others in what all of them do, one meeting at a time, under watch.

        Args:
            what: What this member does, in words; the same on all of them.

        Raises:
            ControlError: Another member does something else, or in another way; names both.
            PeerLostError: A member is lost; names its rank.
        """
        what = f"{what} by {self._how}"  # other ways send other messages, or round otherwise
        with self._one_at_a_time:
            self.require_open()
            if self._watch.error is not None:
                raise copy(self._watch.error)
            self._number += 1
            digest = hashlib.sha256(f"{self._number} {what}".encode()).digest()
            self.sums.tag = int.from_bytes(digest[:4], "big") >> 2
            self._watch.begin(self._number, what)
            try:
                self._meet_before(digest)
                yield
                self._watch.finish()
            except RuntimeError as error:
                raise copy(self._watch.explain(error)) from error
            finally:
                self._watch.end()

    def combine(self, tensor: Tensor, what: str, *, mean: bool) -> None:
        """Replace a tensor by its sum or mean over the members; raises as :meth:`meeting`, which ``what`` is for."""
        if len(self.ranks) > 1:
            with self.meeting(what):
                self.sums.combine([tensor], mean=mean)
                self.sums.check()

    def close(self) -> None:
        """End this member's part. The others take it for lost if they begin another sum. May be called again."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed or len(self.ranks) == 1:
            return
        _open.discard(self._watch)
        self._watch.close()

    def _join(self, group: ProcessGroup, members: Members, doing: str) -> None:
        """Open this member's connections, once all members have come to do so."""
        groups, backend = self._groups, dist.get_backend(group)

        def connect() -> None:
            with own_client():  # as several threads may connect at once
                groups.append(new_group(members.part("terms"), backend, FOR_EVER))
                if not is_gloo(groups[0]):
                    groups.append(new_group(members.part("texts"), "gloo", FOR_EVER))

        with Joining(group, members, self.ranks, doing) as joining:
            joining.meet()
            ends = partial(_end_waits, groups), partial(_end, groups)
            self._watch = joining.wait(lambda: PeerWatch(members, self.ranks, *ends))
            # Whoever drops the group drops this too, and then all that belongs to it ends.
            weakref.finalize(self, self._watch.close, waits=False).atexit = False
            _open.add(self._watch)
            try:
                self._watch.begin(self._number, doing)
                joining.wait(connect, self._watch)
            except BaseException:
                self.close()
                raise
            finally:
                self._watch.end()

    def _meet_before(self, digest: bytes) -> None:
        """Where messages have no tags, wait until all members do the same."""
        if self._texts is None:
            return
        own = torch.tensor([*digest], dtype=torch.uint8, device="cpu")
        everyone = [torch.empty_like(own) for _ in self.ranks]
        self._texts.allgather([everyone], [own]).wait()
        if any(not torch.equal(one, own) for one in everyone):
            raise RuntimeError("members do something else")


def _end_waits(groups: list[ProcessGroup]) -> None:
    for group in groups:
        end_waits(group)


def _end(groups: list[ProcessGroup]) -> None:
    while groups:
        end_group(groups.pop())


def _described(group: ProcessGroup, ranks: list[int]) -> str:
    some = [*map(str, ranks)] if len(ranks) < 5 else [*map(str, ranks[:2]), "…", str(ranks[-1])]
    return f"the group {group.group_name} of ranks {', '.join(some)}"


@atexit.register
def _close_all() -> None:
    """End what joins this process to others, before torch and Python end."""
    watches = [*_open]
    for watch in watches:
        watch.close(waits=False)
    for watch in watches:
        watch.close()
