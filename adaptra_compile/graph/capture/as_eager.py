"""Capture of the ops that eager torch would run: the model's code sees the same answers as in eager torch.

Libraries take other code paths while they are exported or compiled, or if a tensor is fake, since they may not read values
then. So while the model's own code runs, torch's flags say that nothing is traced. Tensors that depend only on constants and
shapes are real and may be read. Inputs, parameters and tensors that depend on them stay fake, and their values can't be read.
"""

# pyright: reportPrivateUsage=false
# Torch's flags have no public name, nor has the function that identifies a tensor's memory.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.graph.ops.fake import fake_like
from adaptra.graph.ops.ops import memory_of, reads_values, written_by


class ValueReadError(RuntimeError):
    """The model's code reads a value that depends on inputs or on parameters."""


@contextmanager
def as_eager(written: Callable[[Tensor], None] = lambda _: None) -> Generator[None]:
    """Let a model's code run in this context as in eager torch. Enter it inside a fake mode.

    Args:
        written: Called with each real tensor before an op changes it. An error keeps it as it is.

    Raises:
        ValueReadError: The code reads a value that depends on inputs or parameters.
    """
    compiler: Any = torch.compiler
    proxies: Any = get_proxy_mode()
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = False
    strict = getattr(proxies, "_error_on_data_dependent_ops", None)
    if proxies is not None:
        # Only real tensors are ever read, and values of constants may become part of the graph.
        proxies._error_on_data_dependent_ops = False
    try:
        with _outside_fx_tracing(), RealConstants(None if proxies is None else proxies.tracer.graph, written):
            yield
    except GuardOnDataDependentSymNode as error:
        # For torch's own error, torch.export prints the graph so far, twice, before it raises it.
        raise ValueReadError("a choice by a shape, or a number, that depends on the values of tensors") from error
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before
        if proxies is not None:
            proxies._error_on_data_dependent_ops = strict
            _describe(proxies.tracer.graph.nodes)


@contextmanager
def _outside_fx_tracing() -> Generator[None]:
    """Let torch.fx say in this context that it traces nothing."""
    tracing: Any = _symbolic_trace
    if hasattr(tracing, "_is_fx_tracing_context"):  # Since torch 2.15 each thread has a flag of its own.
        with tracing._is_fx_tracing_context(False):
            yield
        return
    before = tracing._is_fx_tracing_flag
    tracing._is_fx_tracing_flag = False
    try:
        yield
    finally:
        tracing._is_fx_tracing_flag = before


def _describe(nodes: Iterable[fx.Node]) -> None:
    """Replace real tensors in the nodes' metadata by fake ones, as torch.export expects, and keep no reference to them."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            node.meta["val"] = fake_like(value)


class RealConstants(TorchDispatchMode):
    """Computes real results for ops without fake arguments, inside a fake mode that accepts real tensors too.

    A real tensor that is changed by a fake one no longer has valid values. It and all tensors that share its memory count as
    fake from then on, and their stale values are never read.
    """

    def __init__(self, graph: fx.Graph | None, written: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._graph = graph
        self._written = written
        # Keyed by address. The memory itself is kept, so that no other memory gets that address.
        self._untrue: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        changed = [one for one in pytree.tree_leaves(written_by(func, args, kwargs)) if isinstance(one, Tensor)]
        real = [one for one in changed if not isinstance(one, FakeTensor)]
        for tensor in real:
            self._written(tensor)
        if self._is_real(func, tensors, leaves):
            if self._graph is not None:
                # The nodes of the last op, whose results are recorded by now.
                _describe(islice(reversed(self._graph.nodes), 4))
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if reads_values(func):
            raise ValueReadError(f"{func} reads a value that depends on the model's inputs or parameters")
        for tensor in real:
            self._untrue[memory_of(tensor)] = tensor.untyped_storage()
        return func(*args, **kwargs)

    def _is_real(self, func: Any, tensors: list[Tensor], leaves: list[Any]) -> bool:
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        # A tensor on the meta device has only a shape, like a fake tensor.
        if any(isinstance(one, torch.device) and one.type == "meta" for one in leaves):
            return False
        return not any(isinstance(one, FakeTensor) or one.is_meta or memory_of(one) in self._untrue for one in tensors)
