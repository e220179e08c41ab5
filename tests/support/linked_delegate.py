"""The delegate as an installed transport, ``linked``, whose ranks reach each other only over links that fail to order.

Every rank listens on two addresses. Before each lies a :class:`delegate_lab.Link` in the rank's own process, and all that the
rank sends passes one of the two. So a rank's links fail for it and for those that it sends to.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from delegate_lab import Link, behind_links
from installed import install_transport
from linked_hosts import CONTROL, change_links

from adaptra.runtime.transports.delegate import join as delegate_join
from adaptra.runtime.transports.delegate.engine import Timing


class Linked(Protocol):
    """A delegate of this kind."""

    links: list[Link]

    def statistics(self) -> list[tuple[int, int, int, bool, dict[str, int]]]: ...


HOSTS = ("127.0.0.2", "127.0.0.3")
TIMING = Timing(heartbeat=0.05, silence=0.25, healthy_for=0.1, lost_after=10.0, handshake=1.0)

# Silence is noticed only after a while, so those that are silent come less often.
KINDS = ("reset", "corruption", "link down", "loss", "reset", "corruption", "link down", "stop", "corruption", "reset")


def install(folder: str | Path) -> None:
    """Leave the transport in ``folder`` as an installer leaves a package; :func:`find_in` lets a process find it."""
    install_transport(folder, "linked", "linked_delegate:join")


def find_in(folder: str | Path) -> None:
    sys.path.insert(0, str(folder))


def join(members: Any = None, device: Any = "cpu") -> Linked:
    """What the entry point names: this rank's delegate, with its links as ``links``."""
    links: list[Link] = []
    transport: Any = delegate_join.join(members, HOSTS, TIMING, device, listen=behind_links(links))
    transport.links = links
    return transport


class Disturber:
    """Makes the link that carries a rank's messages fail, each kind of failure in its turn.

    Attributes:
        counts: How often each kind was made and noticed by the engine.
    """

    def __init__(self, transport: Linked, first: int = 0, kinds: Sequence[str] = KINDS) -> None:
        self._transport = transport
        self._turn = first
        self._kinds = kinds
        self._kind: str | None = None
        self._link: Link | None = None
        self._stopped: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._carried = [0 for _ in transport.links]
        self.counts = dict.fromkeys(kinds, 0)

    def failures(self) -> int:
        """Paths that were up and failed, of the channels on which this rank sends."""
        return sum(counters["path_failures"] for *_, is_sender, counters in self._transport.statistics() if is_sender)

    def disturb(self) -> None:
        """Let the present failure end if it has been noticed, and the next one begin if there is none. Called once a step."""
        link = self._busiest()
        if self._kind is not None:
            if self.failures() == self._failures or (self._stopped is not None and self._stopped.poll() is None):
                return
            self.end()
            self.counts[self._kind] += 1
        self._kind = self._kinds[self._turn % len(self._kinds)]
        self._turn += 1
        self._failures = self.failures()
        self._link = link
        self._begin(self._kind, link)

    def _begin(self, kind: str, link: Link) -> None:
        match kind:
            case "reset":
                link.reset()
            case "corruption":
                # Traffic may be about to return to the better link.
                for each in self._transport.links:
                    each.corrupt()
            case "link down":
                link.vanish()
            case "loss":
                link.is_silent = True
            case "stop":
                # This whole process stops for longer than the others bear silence.
                command = f"kill -STOP {os.getpid()}; sleep {1.4 * TIMING.silence}; kill -CONT {os.getpid()}"
                self._stopped = subprocess.Popen(["/bin/sh", "-c", command])
            case _:
                raise AssertionError(kind)

    def _busiest(self) -> Link:
        """The link that carried most since the last call, of those that connections cross."""
        links = self._transport.links
        moved = [link.carried - before for link, before in zip(links, self._carried, strict=True)]
        self._carried = [link.carried for link in links]
        return links[max(range(len(links)), key=lambda k: (links[k].is_connected, moved[k]))]

    def end(self) -> None:
        """End the present failure."""
        if self._link is None:
            return
        if self._kind == "link down":
            self._link.come_back()
        if self._stopped is not None:
            self._stopped.wait()
            self._stopped = None
        self._link.is_silent = False
        for each in self._transport.links:
            each.is_corrupting = False


class NetworkDisturber(Disturber):
    """The same on hosts that a network joins: it is the network's rails that reset, lose everything and are down.

    Rail 0 is the control plane's; the addresses of this rank's paths are on rails 1 and 2.
    """

    def _begin(self, kind: str, link: Link) -> None:
        change = {"reset": "reset", "link down": "down", "loss": "loss=1"}.get(kind)
        if change is None:
            super()._begin(kind, link)
        else:
            change_links(os.environ[CONTROL], f"all/{self._rail(link)} {change}")

    def end(self) -> None:
        """End the present failure."""
        if self._link is not None and self._kind in ("link down", "loss"):
            change_links(os.environ[CONTROL], f"all/{self._rail(self._link)} up loss=0")
        else:
            super().end()

    def _rail(self, link: Link) -> int:
        return 1 + self._transport.links.index(link)
