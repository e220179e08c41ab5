"""The memory of one message on a device: its header and its tensors in one buffer, so that a message is one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec
from adaptra.runtime.devices import pack
from adaptra.runtime.transports.base import Identity
from adaptra.runtime.transports.message_format import HEADER_BYTES, Header, copy_into, flat_bytes, shared_memory, views_of
from adaptra.runtime.world.world import Attempt


class DeviceMessage:
    """A message in memory of a device, with a copy of its header in pinned memory. All is done on the current stream.

    Args:
        specs: One per tensor.
        device: A GPU.

    Attributes:
        specs: As given.
        memory: The whole message, (HEADER_BYTES + tensors,) uint8.
        free_from: Passed once the last user of its tensors is done; None if there was none.
    """

    def __init__(self, specs: MessageSpec, device: torch.device) -> None:
        self.specs = specs
        self.memory = torch.empty(HEADER_BYTES + flat_bytes(specs), dtype=torch.uint8, device=device)
        self.free_from: torch.cuda.Event | None = None
        self._rule = Header(specs)
        self._bytes, self._header = shared_memory(HEADER_BYTES, is_pinned=True)
        self._flat = self.memory[HEADER_BYTES:]
        self._views = views_of(self._flat, specs)

    def fill(self, tensors: Sequence[Tensor], *, packs: bool) -> None:
        """Copy the tensors into the message, by one kernel if ``packs`` and where that is worth it."""
        if packs and pack.is_worthwhile(tensors, self.specs, self.memory.device):
            pack.pack(self._flat, tensors, self.specs)
        else:
            copy_into(self._views, tensors, non_blocking=True)

    def write_header(self, identity: Identity, attempt: Attempt, sent_at: float) -> None:
        """Write the header of a message that is sent at a time, seconds."""
        self._rule.pack_into(self._bytes, identity, attempt, sent_at)
        self.memory[:HEADER_BYTES].copy_(self._header, non_blocking=True)

    def fetch_header(self) -> None:
        """Copy the received header to the host."""
        self._header.copy_(self.memory[:HEADER_BYTES], non_blocking=True)

    def check(self, expected: Identity) -> float:
        """Read the received header, which is on the host.

        Returns:
            The time at which the message was sent, on the sender's clock, seconds.

        Raises:
            TransportError: It is another message; names the edge, the expected message and the received one.
        """
        return self._rule.check(self._bytes, expected)

    @property
    def is_rounded(self) -> bool:
        """Whether a tensor travels in a smaller dtype than its own."""
        return any(spec.lossy_bf16 for spec in self.specs)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the received tensors: views of the memory, unless they were rounded."""
        return tuple(view.detach().to(spec.dtype) for view, spec in zip(self._views, self.specs, strict=True))
