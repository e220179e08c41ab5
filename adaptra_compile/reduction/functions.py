"""Collectives of a group whose sums have the same bits in every run, and whose lost ranks are named on all others."""

from __future__ import annotations

import threading
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from adaptra.errors import BatchError
from adaptra.reduction.peers import Peers, joined_group
from adaptra.runtime.options.reduce_options import Reduce

_by_group: Final = WeakKeyDictionary[ProcessGroup, dict[Reduce, Peers]]()
_lock: Final = threading.Lock()


def all_reduce(tensor: Tensor, group: ProcessGroup | None = None, *, mean: bool = False, how: Reduce | None = None) -> None:
    """Replace a tensor by its sum over the ranks of a group, the left fold in the group's order. All of them call it.

    Args:
        tensor: Dense, of the same shape and dtype on all ranks. Complex ones are added as their real and imaginary parts.
        group: A group of torch.distributed; None for all ranks. Its first call opens connections of our own.
        mean: Whether to divide by the number of ranks.
        how: How the sum is made; all ways give the same bits, but for another dtype of additions.

    Raises:
        BatchError: The tensor can't be added; names it.
        ControlError: Other ranks call something else; names both.
        PeerLostError: A rank died, or froze for two seconds; names it. The tensor's values are then unspecified.
        LaunchError: There is no process group, or this process is no member.
    """
    check_summand(tensor, mean=mean)
    peers_of(group, how or Reduce()).combine(tensor, f"all_reduce({described(tensor)}, mean={mean})", mean=mean)


def reduce_scatter(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None, *, mean: bool = False, how: Reduce | None = None
) -> None:
    """Write a rank's part of the sum over a group to ``output``; otherwise as :func:`all_reduce`.

    Args:
        output: Contiguous; has the elements of one part of ``input``, which has a part for each rank, in the group's order.
        input: This rank's terms of all parts, contiguous.
        group, mean, how: As of :func:`all_reduce`.

    Raises:
        As :func:`all_reduce`.
    """
    check_summand(input, mean=mean)
    peers = peers_of(group, how or Reduce())
    _check_parts("reduce_scatter", input, output, len(peers.ranks))
    parts = input.view(-1).chunk(len(peers.ranks))
    if len(peers.ranks) == 1:
        output.view(-1).copy_(parts[0])
        return
    with peers.meeting(f"reduce_scatter({described(input)}, mean={mean})"):
        peers.sums.reduce_scatter(output.view(-1), parts, mean=mean)
        peers.sums.check()


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:
    """Write the tensors of all ranks of a group to ``output``, one behind the other. All of them call it.

    Args:
        output: Contiguous; has as many times the elements of ``input`` as there are ranks, in the group's order.
        input: Contiguous; of the same shape and dtype on all ranks.
        group: As of :func:`all_reduce`.

    Raises:
        As :func:`all_reduce`.
    """
    peers = peers_of(group, Reduce())
    _check_parts("all_gather", output, input, len(peers.ranks))
    if len(peers.ranks) == 1:
        output.view(-1).copy_(input.view(-1))
        return
    # Bytes, as gloo and NCCL know fewer dtypes than torch.
    parts = output.view(-1).view(torch.uint8).chunk(len(peers.ranks))
    parts[peers.rank].copy_(input.view(-1).view(torch.uint8))
    with peers.meeting(f"all_gather({described(input)})"):
        peers.sums.all_gather(parts)


def peers_of(group: ProcessGroup | None, how: Reduce) -> Peers:
    """Return what joins this rank to a group's, made at the first call, by all of them."""
    with _lock:
        of_group = _by_group.setdefault(joined_group(group), {})
        if how not in of_group:
            of_group[how] = Peers(group, how)
        return of_group[how]


def described(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape, in words that all ranks compare."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def check_summand(tensor: Tensor, *, mean: bool) -> None:
    """Refuse what can't be added.

    Raises:
        BatchError: Names what it is.
    """
    if tensor.layout is not torch.strided:
        raise BatchError(f"a sum over ranks of a {tensor.layout} tensor: expected a dense one")
    if tensor.dtype is torch.bool or (mean and not (tensor.is_floating_point() or tensor.is_complex())):
        expected = "floating-point or complex numbers" if mean else "numbers"
        raise BatchError(f"a {'mean' if mean else 'sum'} over ranks of {described(tensor)}: expected {expected}")


def _check_parts(call: str, whole: Tensor, part: Tensor, count: int) -> None:
    if (
        whole.dtype != part.dtype
        or whole.numel() != part.numel() * count
        or not (whole.is_contiguous() and part.is_contiguous())
    ):
        raise BatchError(
            f"{call} of {described(whole)} and {described(part)} over {count} ranks: expected contiguous tensors of one dtype, "
            f"the first with {count} times the elements of the second"
        )
