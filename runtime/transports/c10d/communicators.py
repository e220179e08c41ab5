"""The communicators of one rank's transport: one of gloo per class of channels. Sums use that of bulk, under other tags."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed import Store, Work

from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.spare_clients import give_back
from adaptra.runtime.transports import clock_offset as clock
from adaptra.runtime.transports.base import ChannelClass
from adaptra.runtime.transports.c10d.preposted import FIRST_TAG
from adaptra.runtime.transports.message_format import MOST_TAGS
from adaptra.runtime.transports.process_groups import (
    Members,
    control_plane,
    end_group,
    end_keys,
    end_waits,
    initialise,
    make_groups,
)


class Communicators:
    """Makes the communicators of all pairs of ranks, and ends their operations and them. All ranks create it together.

    Args:
        members: Those to join. None for all ranks of the default group, which is set up from the launcher's environment if it
            does not exist.

    Attributes:
        rank: This rank.
        size: The number of ranks.

    Raises:
        LaunchError: There is no group and no launcher.
    """

    def __init__(self, members: Members | None) -> None:
        self._owns_default = members is None and initialise("gloo")
        self._members = (members or Members.of_job()).part("c10d")
        _, self.rank, self.size = self._members
        self._groups = make_groups(self._members, sorted({*map(_shared, ChannelClass)}))

    def control_plane(self) -> Store:
        """Return a new client of the ranks' control plane; all ranks call it."""
        return control_plane(self._members)

    def send(self, memory: Tensor, destination: int, channel: ChannelClass, tag: int) -> Work:
        """Begin to send a part of a message of a class."""
        return self._groups[_shared(channel)].send([memory], destination, _tag_on(channel, tag))

    def receive(self, memory: Tensor, source: int, channel: ChannelClass, tag: int) -> Work:
        """Begin to receive a part of a message of a class."""
        return self._groups[_shared(channel)].recv([memory], source, _tag_on(channel, tag))

    def end_waits(self) -> None:
        """End all waits, here and at the other ranks."""
        for group in self._groups.values():
            end_waits(group)

    def close(self, is_idle: bool, store: Store) -> None:
        """Release the communicators if none of their operations is under way, and the default group if it was set up here.

        ``store`` is the control plane, which is given back.
        """
        groups, self._groups = self._groups, {}
        # Ending a group waits for its operations, which may never end once a rank is lost.
        if is_idle:
            for group in groups.values():
                end_group(group)
            end_keys(*self._members)
            give_back(store)
        if self._owns_default:
            distributed.destroy_process_group()

    def compare_clocks(self, store: Store) -> tuple[clock.Offset, ...]:
        """Measure how far every rank's clock is ahead of this one's, from neighbour to neighbour."""
        cell = torch.zeros(1, dtype=torch.float64, device="cpu")
        to_next: clock.Offset | None = None
        for lower in (self.rank - 1, self.rank):
            if lower < 0 or lower + 1 >= self.size:
                continue
            is_initiator = lower == self.rank
            peer = lower + 1 if is_initiator else lower
            there, here = ChannelClass.FORWARD, ChannelClass.BACKWARD
            out, back = (there, here) if is_initiator else (here, there)

            def send(value: float, out: ChannelClass = out, peer: int = peer) -> None:
                self.send(torch.full_like(cell, value), peer, out, FIRST_TAG).wait()

            def receive(back: ChannelClass = back, peer: int = peer) -> float:
                self.receive(cell, peer, back, FIRST_TAG).wait()
                return float(cell.item())

            if is_initiator:
                to_next = clock.initiate(send, receive)
            else:
                clock.answer(send, receive)
        return clock.share(under("clock", store), self.rank, self.size, to_next)


def _shared(channel: ChannelClass) -> ChannelClass:
    """Return the class whose communicator messages of a class use."""
    return ChannelClass.BULK if channel is ChannelClass.SUMS else channel


def _tag_on(channel: ChannelClass, tag: int) -> int:
    return tag if channel is _shared(channel) else MOST_TAGS + tag
