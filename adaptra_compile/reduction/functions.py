"""Collectives of a group whose sums have the same bits in every run, and whose lost ranks are named on all others."""

from __future__ import annotations

import threading
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from adaptra.errors import BatchError
from adaptra.reduction.peers import Peers, joined_group
from adaptra.runtime.data_parallel.collectives.owned_chunks import real, write_real
from adaptra.runtime.options.reduce_options import Reduce

_FRACTIONS: Final = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
_WHOLE: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DISPATCHER: Final = "__torch_dispatch__"

_by_group: Final = WeakKeyDictionary[ProcessGroup, tuple[threading.Lock, dict[Reduce, Peers]]]()
_lock: Final = threading.Lock()


def all_reduce(tensor: Tensor, group: ProcessGroup | None = None, *, mean: bool = False, how: Reduce | None = None) -> None:
    """Replace a tensor by its sum over the ranks of a group, the left fold in the group's order. All of them call it.

    Args:
        tensor: Dense, of the same shape and dtype on all ranks. Complex ones are added as their real and imaginary parts.
        group: A group of torch.distributed; None for all ranks. Its first call opens connections of our own. One thread at a
            time calls for a group: calls are matched by their order.
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
    check_summand(input, mean=mean, is_result=False)
    peers = peers_of(group, how or Reduce())
    _check_parts("reduce_scatter", input, output, len(peers.ranks), output)
    parts = input.detach().view(-1).chunk(len(peers.ranks))
    if len(peers.ranks) == 1:
        output.detach().view(-1).copy_(parts[0])
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
    _check_parts("all_gather", output, input, len(peers.ranks), output)
    if len(peers.ranks) == 1:
        output.detach().view(-1).copy_(input.detach().view(-1))
        return
    # Bytes, as gloo and NCCL know fewer dtypes than torch. They are copies of views that negate or conjugate.
    whole, own = (real(one).view(-1) for one in (output, input))
    parts = whole.view(torch.uint8).chunk(len(peers.ranks))
    parts[peers.rank].copy_(own.view(torch.uint8))
    with peers.meeting(f"all_gather({described(input)})"):
        peers.sums.all_gather(parts)
    write_real(whole.view_as(real(output)), output)


def peers_of(group: ProcessGroup | None, how: Reduce) -> Peers:
    """Return what joins this rank to a group's, made at the first call, by all of them."""
    with _lock:
        of_group_lock, of_group = _by_group.setdefault(joined_group(group), (threading.Lock(), {}))
    with of_group_lock:  # to make one waits for the others, who may begin with another group
        if how not in of_group:
            of_group[how] = Peers(group, how, "call of a function")
        return of_group[how]


def described(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape, in words that all ranks compare."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def check_summand(tensor: Tensor, *, mean: bool, is_result: bool = True) -> None:
    """Refuse what can't be added. What a rank alone finds wrong would be a failed message, and a lost rank, on the others.

    Args:
        tensor: This rank's terms.
        mean: Whether their mean is asked for.
        is_result: Whether the result replaces them.

    Raises:
        BatchError: Names what it is.
    """
    what = f"a {'mean' if mean else 'sum'} over ranks"
    _check_dense(what, tensor)
    summable = [*_FRACTIONS, *(() if mean else _WHOLE)]
    if tensor.dtype not in summable:
        names = ", ".join(str(one).removeprefix("torch.") for one in summable)
        raise BatchError(f"{what} of {described(tensor)}: expected a dtype of {names}")
    if is_result:
        _check_writable(what, tensor)


def _check_dense(call: str, tensor: Any) -> None:
    """Refuse what has no values in memory of its own."""
    # Subclasses with a dispatcher, as DTensor, hold other tensors.
    its, of_tensors = (getattr(one, _DISPATCHER, None) for one in (type(tensor), Tensor))
    if not isinstance(tensor, Tensor) or its is not of_tensors:
        kind = type(tensor).__name__
    elif tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor"
    else:
        kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "meta": tensor.is_meta}
        kind = next((f"{name} tensor" for name, is_so in kinds.items() if is_so), "")
    if kind:
        raise BatchError(
            f"{call} of a {kind}: expected a dense tensor with values; a DTensor has to_local(), a sparse one to_dense()"
        )


def _check_writable(call: str, tensor: Tensor) -> None:
    """Refuse what no result can be written to."""
    problem = ""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        problem = "which was made within torch.inference_mode()"
    elif tensor.numel() and any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        problem = "whose elements share memory, as expand() leaves them"
    if problem:
        raise BatchError(f"{call} in {described(tensor)} {problem}: expected a tensor that can be written; clone() makes one")


def _check_parts(call: str, whole: Tensor, part: Tensor, count: int, output: Tensor) -> None:
    for tensor in (whole, part):
        _check_dense(call, tensor)
    _check_writable(call, output)
    if (
        whole.dtype != part.dtype
        or whole.numel() != part.numel() * count
        or not (whole.is_contiguous() and part.is_contiguous())
    ):
        raise BatchError(
            f"{call} of {described(whole)} and {described(part)} over {count} ranks: expected contiguous tensors of one dtype, "
            f"the first with {count} times the elements of the second"
        )
