"""What carries the messages of a job's workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.lanes import LanedTransport
from adaptra.runtime.transports.nccl.edges import edges_of
from adaptra.runtime.transports.process_groups import Members
from adaptra.runtime.transports.registry import create_transport
from adaptra.runtime.world.world import World


class DelegateSetup(NamedTuple):
    """How the delegate is set up.

    Attributes:
        is_beside: Whether some edges may take it beside another transport.
        addresses: Addresses of this host for it; see :class:`adaptra.runtime.options.Options`.
    """

    is_beside: bool = False
    addresses: Sequence[str] = ()


NO_DELEGATE: Final = DelegateSetup()
"""The delegate with the addresses that it finds, beside nothing."""


@dataclass(frozen=True, slots=True)
class Carriers:
    """What carries the messages of a job's workers.

    Attributes:
        name: The transport's name.
        delegate: How the delegate is set up.
        device: The device of what is sent and received.
        placement: The place of each stage.
    """

    name: str
    delegate: DelegateSetup
    device: torch.device
    placement: Sequence[int]

    def join(self, members: Members, world: World) -> Transport:
        """Return the transport of one of these members, the workers of a world; all of them call it."""
        here = {"members": members, "device": self.device}
        if self.name == "nccl":  # which has the delegate beside it
            edges = edges_of(self.placement, map(world.pipeline, range(world.replicas)))
            return create_transport(self.name, edges=edges, addresses=self.delegate.addresses, **here)
        if self.name == "delegate":
            return create_transport(self.name, addresses=self.delegate.addresses, **here)
        transport = create_transport(self.name, **here)
        if not self.delegate.is_beside:
            return transport
        return LanedTransport(transport, {"delegate": create_transport("delegate", addresses=self.delegate.addresses, **here)})

    def clients(self, workers: int, *, survives: bool) -> int:
        """Return how many clients of the store a process uses at most for that many workers.

        A worker has three for mail, and one for each control plane of its transports. NCCL has a client by which its
        communicators meet. The process has one for its calls and one for its membership. While roles or cuts change, there are
        the old transports too. Where one epoch follows another there are all the old workers, and five clients keep the epochs.
        """
        control_planes = 2 if self.delegate.is_beside or self.name == "nccl" else 1
        if survives:
            return 2 * workers * (control_planes + 3) + 7
        return workers * (2 * control_planes + 3) + 2
