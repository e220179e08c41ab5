"""Errors for models that send tensors between ranks themselves, as expert, context and tensor parallelism do.

Each rank of a pipeline runs other layers, at other times and for other microbatches. So a collective inside the model waits for
ranks that never call it, or receives the values of another layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any, Final

from torch import fx
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.errors import CaptureError, OptionError
from adaptra.graph.ops.value_dependent import place_of

_SENDS: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor")
"""The namespaces of torch's ops that send tensors between ranks."""

_CALLS: Final = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""The methods of a process group that wait for other ranks. Not every version of torch has all of them."""

_EXPECTED: Final = (
    "expected a model that computes with the tensors of its own rank only, as the ranks of a pipeline run other layers at "
    "other times; use more stages or replicas in place of expert, context or tensor parallelism"
)


def refuse_collectives(nodes: Iterable[fx.Node]) -> None:
    """Refuse a captured graph with an op that sends tensors between ranks.

    Raises:
        CaptureError: There is such an op. The text names it, its module and its line.
    """
    for node in nodes:
        if node.op == "call_function" and _is_collective(node.target):
            raise _refusal(place_of(node), str(node.target))
        for inner in pytree.tree_leaves((node.args, node.kwargs)):
            owner = node.graph.owning_module
            if isinstance(inner, fx.Node) and inner.op == "get_attr" and owner is not None:
                held = getattr(owner, str(inner.target), None)
                if isinstance(held, fx.GraphModule):
                    refuse_collectives(held.graph.nodes)


@contextmanager
def refusing_collectives(where: Callable[[], str], *, is_captured: bool) -> Generator[None]:
    """Raise a CaptureError, within this context, if this thread calls a process group.

    Such calls leave no op in a graph if they return no tensor, or are within an autograd.Function.

    Args:
        where: Returns the module and line of the model that run now.
        is_captured: Whether the model is captured, so that :func:`refuse_collectives` finds the ops. Otherwise they are refused
            as they run.
    """
    kind = _process_group()
    before = {} if kind is None else {name: vars(kind)[name] for name in _CALLS if name in vars(kind)}
    thread = get_ident()

    def refusing(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:  # another pipeline may train meanwhile
                return method(*args, **kwargs)
            raise _refusal(where(), f"{name} of a process group")

        return refuse

    for name in before:
        setattr(kind, name, refusing(name))
    try:
        with nullcontext() if is_captured else _RefusingOps(where):
            yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


def refuse_context_parallel(what: str) -> None:
    """Refuse a call within torch's context_parallel, whose attention over several ranks no graph of a stage contains.

    Raises:
        OptionError: It is on. The text says what to do.
    """
    home: object = getattr(functional.scaled_dot_product_attention, "__module__", None)
    if isinstance(home, str) and home.startswith("torch.distributed."):
        raise OptionError(
            f"{what} within context_parallel: expected whole sequences on every rank, as each stage computes attention on its "
            "own rank; for longer sequences use more stages and microbatches, or checkpointing"
        )


class _RefusingOps(TorchDispatchMode):
    """A mode that refuses ops that send tensors between ranks."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_collective(func):
            raise _refusal(self._where(), str(func))
        return func(*args, **(kwargs or {}))


def _refusal(where: str, what: str) -> CaptureError:
    return CaptureError(f"{where}: the model calls {what} while it runs: {_EXPECTED}")


def _is_collective(op: Any) -> bool:
    return getattr(op, "namespace", None) in _SENDS


def _process_group() -> Any:
    from torch import distributed

    return distributed.ProcessGroup if distributed.is_available() else None
