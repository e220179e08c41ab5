"""Refusal of models that are already wrapped, sharded or compiled. The error says what to give instead.

Such wrappers average, gather or shard inside forward and backward. A pipeline runs neither as the wrapper expects, so gradients
would be wrong, mostly silently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import currentframe
from typing import Any, Final

from torch import nn

from adaptra.errors import OptionError
from adaptra.graph.capture.hooks import refuse_backward_hooks

_WRAPPERS: Final = (
    (
        "torch.nn.parallel.distributed",
        "DistributedDataParallel",
        "give model.module, the plain one: the pipeline averages the gradients of its replicas itself",
    ),
    (
        "torch.nn.parallel.data_parallel",
        "DataParallel",
        "give model.module, the plain one: the pipeline splits the batch itself",
    ),
    (
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        "build the model without it: each rank keeps the parameters of its own stage only",
    ),
    (
        "torch.distributed.fsdp",
        "FSDPModule",
        "build the model without fully_shard: each rank keeps the parameters of its own stage only",
    ),
)
_COMPILED: Final = (
    (
        "torch._dynamo.eval_frame",
        "OptimizedModule",
        "give the module before torch.compile (its ._orig_mod); Options(inner=...) compiles the stages",
    ),
    ("torch.jit", "ScriptModule", "give the Python module that it was made of"),
)


def refuse_wrapped(model: nn.Module, *, stages_as_given: bool = False) -> None:
    """Refuse a model with a module that is wrapped, sharded or compiled, or has hooks in the backward pass.

    Args:
        model: The model.
        stages_as_given: Whether the stages are modules that run unchanged. Then they may be compiled and have hooks.

    Raises:
        OptionError: A module is refused. The text names the module, its kind, and what to give instead.
    """
    _refuse(model.named_modules(), _WRAPPERS if stages_as_given else _WRAPPERS + _COMPILED)
    if stages_as_given:
        return
    refuse_backward_hooks(model.named_modules())
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:  # pyright: ignore[reportPrivateUsage]
            raise OptionError(
                f"model: {_placed('a compiled module', name)}: expected it without module.compile(); Options(inner=...) "
                "compiles the stages"
            )


def refuse_wrapped_callers(tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuse wrapped modules, as :func:`refuse_wrapped` does, when torch.compile passes a graph during the model's call.

    The graph shows only the model's forward. So the modules whose calls are under way are checked: the compiled module with all
    its submodules, and each module that calls it without them.

    Args:
        tensors: The graph's inputs with their names.

    Raises:
        OptionError: As :func:`refuse_wrapped`.
    """
    for number, module in enumerate(_under_way()):
        compiled = getattr(module, "_orig_mod", module if number == 0 else None)
        if isinstance(compiled, nn.Module):
            _refuse(compiled.named_modules(), _WRAPPERS)
            refuse_backward_hooks(compiled.named_modules())
        _refuse([("", module)], _WRAPPERS)
    _refuse_distributed(tensors)


def _under_way() -> Iterator[nn.Module]:
    """Yield the modules whose calls are under way, innermost first."""
    frame = currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:  # pyright: ignore[reportPrivateUsage]
            yield frame.f_locals["self"]
        frame = frame.f_back


def _refuse(named: Iterable[tuple[str, nn.Module]], kinds: tuple[tuple[str, str, str], ...]) -> None:
    found = [(_class(home, name), name, instead) for home, name, instead in kinds]
    for path, module in named:
        for kind, name, instead in found:
            if kind is not None and isinstance(module, kind):
                article = "an" if name in ("FSDPModule", "OptimizedModule") else "a"
                raise OptionError(
                    f"model: {_placed(f'{article} {name}', path)}: expected a module that nothing wraps; {instead}"
                )
        prefix = f"{path}." if path else ""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        _refuse_distributed((prefix + name, tensor) for name, tensor in own)
        if isinstance(module, nn.SyncBatchNorm):
            raise OptionError(
                f"model: {_placed('a SyncBatchNorm', path)}: expected a BatchNorm, as the model has before "
                "convert_sync_batchnorm: it averages over the ranks of one forward call, and the ranks of a pipeline hold "
                "different stages; a GroupNorm or a LayerNorm needs no other rows"
            )


def _refuse_distributed(tensors: Iterable[tuple[str, Any]]) -> None:
    kind = _class("torch.distributed.tensor", "DTensor")
    for name, tensor in tensors:
        if kind is not None and isinstance(tensor, kind):
            raise OptionError(
                f"model: {name!r} is a DTensor: expected ordinary tensors; build the model without parallelize_module or "
                "distribute_tensor: each rank keeps the parameters of its own stage whole"
            )


def _placed(what: str, path: str) -> str:
    return f"{what} at {path!r}" if path else what


def _class(home: str, name: str) -> Any:
    """Return a class, or a placeholder if its module is not imported: then it has no instances, and the import is slow."""
    return getattr(sys.modules.get(home), name, None)
