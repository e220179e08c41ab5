"""Tensors of a model that are neither parameters nor buffers: none may be trained, and none may change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.errors import CaptureError
from adaptra.graph.effects.effects import Effects
from adaptra.graph.effects.lines import place_now
from adaptra.graph.effects.snapshot import Snapshot, kept
from adaptra.graph.ops.ops import memory_of, written_by


@dataclass(frozen=True, slots=True)
class Watched:
    """A capture whose effects are looked at while the code runs.

    Attributes:
        effects: The effects.
        plain: The memory of the tensors that are neither parameters nor buffers, with their names.
        where: Returns the module and line of the model that run now.
    """

    effects: Effects
    plain: Mapping[int, str]
    where: Callable[[], str]

    def refuse_write(self, tensor: Tensor) -> None:
        """Refuse a change of a tensor that is neither a parameter nor a buffer.

        Raises:
            CaptureError: The text has the line, and the tensor's name.
        """
        name = self.plain.get(memory_of(tensor))
        if name is not None:
            raise CaptureError(
                f"{self._place()}: it changes in place {name}, which is no buffer: expected register_buffer for a tensor that "
                "the model's code changes, so that it is kept, saved and restored with the model"
            )

    def _place(self) -> str:
        found = self.where()
        return found if " at " in found else place_now()

    def refuse_trained(self, results: Sequence[Tensor]) -> None:
        """Refuse results that depend on a tensor that requires a gradient and is no parameter of the model.

        Raises:
            CaptureError: There is one. The text has its name.
        """
        # A capture replaces all parameters and inputs by fake tensors.
        refuse_trained(results, (), self.effects.before)


def refuse_trained(results: Sequence[Tensor], known: Collection[int], held: Snapshot) -> None:
    """Refuse results that depend on a leaf that requires a gradient.

    Args:
        results: The tensors from which the backward pass starts.
        known: The identities of leaves that may require one. Fake tensors may, too.
        held: Knows the names of tensors.

    Raises:
        CaptureError: There is such a leaf. The text has its name.
    """
    for leaf in _leaves(results):
        if id(leaf) not in known and not isinstance(leaf, FakeTensor):
            name = held.name_of(leaf) or f"a tensor of shape {tuple(leaf.shape)}"
            raise CaptureError(
                f"{name}: it requires a gradient and is no parameter of the model, so nothing would train it: expected "
                "torch.nn.Parameter as an attribute of the model, or nn.ParameterList or ParameterDict; or its detach()"
            )


@contextmanager
def kept_with_values(model: nn.Module, loss: Any = None) -> Generator[None]:
    """Put back, on exit, all that code run on real tensors has changed in this context but parameters and buffers."""
    with kept(model, loss) as before, _KeepingValues(before.plain_tensors(model, loss)) as values:
        try:
            yield
        finally:
            values.put_back()


class _KeepingValues(TorchDispatchMode):
    """A mode that copies some memory before the first op that changes it."""

    def __init__(self, memory: Collection[int]) -> None:
        super().__init__()
        self._memory = memory
        self._saved: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for tensor in pytree.tree_leaves(written_by(func, args, kwargs)):
            if isinstance(tensor, Tensor) and memory_of(tensor) in self._memory:
                storage = tensor.untyped_storage()
                if memory_of(tensor) not in self._saved:
                    self._saved[memory_of(tensor)] = storage, storage.clone()
        return func(*args, **kwargs)

    def put_back(self) -> None:
        for storage, before in self._saved.values():
            storage.copy_(before)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides. One that has no memory of its own for each element is not copied."""
    if (
        tensor.is_meta
        or tensor.layout != torch.strided
        or any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ):
        return tensor.detach()
    made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _leaves(results: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors to which a backward pass brings gradients."""
    yield from (one for one in results if one.grad_fn is None and one.requires_grad)
    waiting: list[Any] = [one.grad_fn for one in results]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]
