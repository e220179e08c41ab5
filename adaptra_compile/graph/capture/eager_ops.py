"""The ops that eager torch runs for one microbatch, forward and backward.

They run on fake parameters, without compute or memory. The example's inputs are real, so that a model that reads them takes the
same code path as in eager torch.
"""

# pyright: reportPrivateUsage=false
# The function that replaces a module's state by other tensors has no public name.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.graph.capture.as_eager import as_eager
from adaptra.graph.capture.op_signature import Signature, is_set_aside, signatures
from adaptra.graph.ops.fake import fake_like
from adaptra.graph.ops.ops import memory_of, written_by


@dataclass(frozen=True, slots=True)
class EagerOp:
    """One op that eager torch runs.

    Attributes:
        signature: The parts of the call that are compared.
        where: The module and line of the model that called it; empty in the backward pass.
    """

    signature: Signature
    where: str


def eager_ops(
    step: nn.Module, state: Mapping[str, Tensor], trainable: Iterable[str], examples: Any, where: Callable[[], str]
) -> tuple[EagerOp, ...]:
    """Return the ops of one microbatch in order, without views and without ops that no result depends on.

    Args:
        step: Called with ``examples``. Returns the tensors from which the backward pass starts. It is not changed.
        state: Parameters and buffers of ``step`` by name. Several names may have the same tensor.
        trainable: The names of the parameters that get gradients.
        examples: The arguments, real tensors.
        where: Returns the module and the line of the model that are running.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _attributes_kept(step):
        made = {id(tensor): fake_like(tensor) for tensor in state.values()}
        fakes = {name: made[id(tensor)] for name, tensor in state.items()}
        wanted = list({id(fakes[name]): fakes[name].requires_grad_() for name in trainable}.values())
        # Libraries check for the meta device as they check for fake tensors.
        faked = pytree.tree_map_only(Tensor, lambda one: fake_like(one, one.requires_grad) if one.is_meta else one, examples)
        wanted += [one for one in pytree.tree_leaves(faked) if isinstance(one, Tensor) and one.requires_grad]
        record = _RecordOps(where)
        with _reparametrize_module(step, fakes), as_eager(), record, torch.enable_grad():
            results = step(*faked)
            record.where = str
            roots = [one for one in results if one.requires_grad]
            # Not recorded: a pipeline gets the gradient of the loss as an input.
            with record.paused():
                starts = [torch.ones_like(one) for one in roots]
            gradients: list[Tensor] = []
            if roots and wanted:
                gradients = _tensors(torch.autograd.grad(roots, wanted, starts, allow_unused=True))
        return record.live([*results, *gradients, *fakes.values()])


@dataclass(slots=True)
class _RanOp:
    """One op that was run, and the memory that it read and wrote. The memory is kept alive, so that no number is reused."""

    found: tuple[EagerOp, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    held: list[Tensor] = field(default_factory=list[Tensor])


class _RecordOps(TorchDispatchMode):
    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self.where = where
        self._runs: list[_RanOp] = []
        self._on = True

    @contextmanager
    def paused(self) -> Generator[None]:
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Before it runs, since an op in place may change the strides and shapes of its arguments.
        described = () if not isinstance(func, OpOverload) or is_set_aside(func) else signatures(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._on and isinstance(func, OpOverload):
            inputs, outputs = _tensors((args, kwargs)), _tensors(result)
            written = [*outputs, *_tensors(written_by(func, args, kwargs))]
            where = self.where() if described else ""
            self._runs.append(
                _RanOp(tuple(EagerOp(one, where) for one in described), _memory(inputs), _memory(written), [*inputs, *outputs])
            )
        return result

    def live(self, results: Sequence[Tensor]) -> tuple[EagerOp, ...]:
        """Return the ops that these tensors depend on, in the order of execution."""
        needed = set(_memory(results))
        ops: list[EagerOp] = []
        for run in reversed(self._runs):
            if run.writes & needed:
                needed |= run.reads
                ops += reversed(run.found)
        return tuple(reversed(ops))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(memory_of(tensor) for tensor in tensors)


@contextmanager
def _attributes_kept(step: nn.Module) -> Generator[None]:
    """Restore the model's attributes on exit, since a model may keep results, and fake ones must not stay there."""
    before = [(module, dict(vars(module))) for module in step.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
