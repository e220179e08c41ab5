"""Broadcast of each stage's gradients and changed buffers to all ranks of a job, so that each rank's module stays complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from adaptra.errors import PeerLostError
from adaptra.frontend.running.session import Session


class Everywhere:
    """Sends tensors from the ranks that have them to all others. All ranks call it at the same points.

    Args:
        session: The pipeline's session, under a launcher, with one stage on each rank.
        timeout: Seconds to wait at first for the other ranks to join.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        launched, world = session.launched, session.launched.world
        launched.meet(timeout)
        self._group: Final = launched.everyone
        self._rank: Final = launched.process
        pipeline = world.hosts_of(world.pipeline(0))
        # The first replica is the source: gradients are equal on all replicas, and DDP would broadcast its buffers too.
        self._source: Final = {name: pipeline[holders[0]] for name, holders in session.compiled.names.items() if holders}
        captured = session.compiled.captured
        assert captured is not None, "torch.compile gives a graph, which is captured"
        self._changed: Final = captured.analysis.changed_state
        self._trainable: Final = tuple(dict.fromkeys(name for stage in session.compiled.train for name in stage.trainable))

    def bring(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of tensors from the ranks whose stages have them.

        Args:
            tensors: This rank's tensors by name, and for those of other ranks any tensor of their shape and dtype.
            names: The names of the tensors to send, the same on every rank.

        Raises:
            PeerLostError: A rank is lost.
        """
        groups: dict[tuple[int, torch.dtype], list[str]] = {}
        for name in names:
            groups.setdefault((self._source[name], tensors[name].dtype), []).append(name)
        flat = {key: self._joined(key, [tensors[name] for name in members]) for key, members in groups.items()}
        try:
            works = [self._group.broadcast(_bytes(one), source) for (source, _), one in flat.items()]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"gradients of all stages: a rank is lost: {error}") from error
        return {name: one for key, members in groups.items() for name, one in self._split(flat[key], members, tensors)}

    def gradients(self, own: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return the gradients of all stages of a model, given this rank's ``own``. Raises as :meth:`bring`."""
        return self.bring({name: own.get(name, one) for name, one in model.named_parameters()}, self._trainable)

    def take_buffers(self, model: nn.Module) -> None:
        """Copy the buffers that other ranks' stages change into a model. Raises as :meth:`bring`."""
        buffers = dict(model.named_buffers())
        for name, value in self.bring(buffers, [name for name in buffers if name in self._changed]).items():
            if value is not buffers[name]:
                buffers[name].copy_(value)

    def _joined(self, key: tuple[int, torch.dtype], tensors: list[Tensor]) -> Tensor:
        source, dtype = key
        if source == self._rank:
            return torch.cat([one.detach().reshape(-1).cpu() for one in tensors])
        return torch.empty(sum(one.numel() for one in tensors), dtype=dtype)

    def _split(self, flat: Tensor, members: list[str], like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, part in zip(members, flat.split([like[name].numel() for name in members]), strict=True):
            if self._source[name] == self._rank:
                yield name, like[name]
            else:
                yield name, torch.empty_like(like[name]).copy_(part.view(like[name].shape))


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, since gloo supports few dtypes."""
    return tensor.view(torch.uint8)
