"""Values that a model's own modules compute: ``reset_parameters`` as one process would run it, on some of the tensors only.

In one process this would be ``model.to_empty(device=...)``, and then ``reset_parameters()`` of every module that has it, in the
order of ``model.modules()``. Here all these methods run on a copy of the modules, in which only the wanted tensors have memory.
Draws for the others advance torch's generator by as much as they would, a piece at a time. So each rank gets the values that
one process would draw, and needs no more than its own memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.errors import StateError
from adaptra.graph.ops.ops import memory_of, written_by

PIECE: Final = 2**20
"""Elements drawn at a time. A multiple of 16: the CPU draws normal numbers in blocks of 16."""

_BLOCK: Final = 16


def fresh_values(model: nn.Module, targets: Mapping[str, Tensor], device: torch.device, *, whole: bool) -> dict[str, Tensor]:
    """Compute the values of tensors of a model, as its modules do.

    Args:
        model: The model. Tensors without values are on the meta device. Nothing of it changes.
        targets: The wanted tensors by name, with memory.
        device: Their device, on which the draws for the others are repeated.
        whole: Whether all modules compute their values, in order. Otherwise only those with a wanted tensor do, and the
            generator stays as it was.

    Returns:
        The tensors with their values. A module may replace a buffer instead of writing into it.

    Raises:
        StateError: No module computes one of them, or a module needs the values of other stages. The text names it.
    """
    present = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    # Buffers with values are copied, since modules may read them.
    ghosts = {id(one): one for one in present.values() if one.is_meta or isinstance(one, nn.Parameter)}
    memo: dict[int, Any] = {key: _like(one, torch.empty_like(one, device="meta")) for key, one in ghosts.items()}
    memo |= {id(present[name]): _like(present[name], target) for name, target in targets.items()}
    work = copy.deepcopy(model, memo)
    owners = {name.rpartition(".")[0] for name in targets}
    draws = _Draws(device)
    with torch.no_grad(), torch.random.fork_rng(enabled=not whole):
        for path, module in work.named_modules():
            initialise = _initialiser(work, module, whole=whole)
            if initialise is None or not (whole or path in owners):
                continue
            try:
                with draws:
                    initialise()
            except (RuntimeError, NotImplementedError) as error:
                raise StateError(
                    f"weights: {path or 'the model itself'} ({type(module).__name__}) can't compute its values without those "
                    f"of other stages: {str(error).splitlines()[0]}; expected a reset_parameters that reads no other module's "
                    "values, or weights= with a checkpoint"
                ) from error
    computed = dict(work.named_parameters(remove_duplicate=False)) | dict(work.named_buffers(remove_duplicate=False))
    for name, target in targets.items():
        is_written = not computed[name].is_meta and (
            computed[name] is not memo[id(present[name])] or memory_of(target) in draws.written
        )
        if target.numel() and not is_written:
            _refuse(model, name, isinstance(present[name], nn.Parameter))
    return {name: computed[name].detach() for name in targets}


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _initialiser(root: nn.Module, module: nn.Module, *, whole: bool) -> Callable[[], object] | None:
    own: Any = getattr(module, "reset_parameters", None)
    if callable(own):
        return own
    # Models of transformers compute the buffers that no checkpoint has in a method of the whole model.
    of_model: Any = getattr(root, "_init_weights", None)
    return None if whole or not callable(of_model) else lambda: of_model(module)


def _refuse(model: nn.Module, name: str, is_parameter: bool) -> None:
    path = name.rpartition(".")[0]
    kind = type(model.get_submodule(path)).__name__
    if is_parameter:
        raise StateError(
            f"weights: {name}: no reset_parameters writes it: expected one in {path or 'the model'} ({kind}), or weights= with "
            "a checkpoint"
        )
    raise StateError(
        f"weights: {name}: a buffer on the meta device that checkpoints don't have: expected {kind} to compute it in "
        "reset_parameters, or a buffer with values: build it under torch.device('cpu')"
    )


class _Draws(TorchDispatchMode):
    """Repeats on a real device what random ops on the meta device would draw, and records which memory is written."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = pytree.tree_leaves((args, kwargs))
        on_meta = any(one.is_meta for one in leaves if isinstance(one, Tensor)) or torch.device("meta") in leaves
        if on_meta and torch.Tag.nondeterministic_seeded in func.tags:
            self._repeat(func, args, kwargs)
        for tensor in pytree.tree_leaves(written_by(func, args, kwargs)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                if on_meta:
                    raise RuntimeError(f"{func} reads a tensor without values")
                self.written.add(memory_of(tensor))
        return func(*args, **kwargs)

    def _repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        filled = args[0] if args and isinstance(args[0], Tensor) else None
        in_pieces = func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        if filled is not None and in_pieces and self._device.type == "cpu" and filled.is_contiguous():
            for size in pieces(filled.numel()):
                func(torch.empty(size, dtype=filled.dtype, device=self._device), *args[1:], **kwargs)
            return
        given = pytree.tree_map(self._real, (args, kwargs))
        func(*given[0], **given[1])

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=self._device)
        return self._device if value == torch.device("meta") else value


def pieces(elements: int) -> list[int]:
    """Return the sizes in which so many numbers are drawn with the same draws as at once.

    The CPU draws normal numbers in blocks of 16, and the last 16 again if they are not a whole block. So a piece is a multiple
    of 16, and the last piece has at least 16 elements.
    """
    whole = max(0, math.ceil((elements - _BLOCK) / PIECE) - 1) if elements > PIECE + _BLOCK else 0
    left = elements - whole * PIECE
    return [PIECE] * whole + ([left] if left else [])
