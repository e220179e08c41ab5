"""Models that something else has wrapped, split or compiled already: refused at the door, with what to give instead.

Such wrappers average, gather or shard at moments of their own, inside of forward and backward. A pipeline runs neither of them
as the wrapper expects, so gradients would be wrong, mostly without a word.
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
    """Refuse a model of which any module is wrapped, sharded or compiled, or has hooks in the backward pass.

    Args:
        model: The model.
        stages_as_given: Whether modules run as they are; then they may be compiled and have hooks.

    Raises:
        OptionError: Names the module, what it is, and what to give instead.
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
    """What :func:`refuse_wrapped` does for a graph that torch.compile hands over while the model is called.

    Of the model itself only its forward is seen then. So the modules whose call is under way are looked at: what is compiled
    with all below it, what calls it for itself.

    Args:
        tensors: What the graph takes, and its names.

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
    """The modules whose call is under way, innermost first."""
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
    """A class, unless its module has not been imported: then nothing is of that class, and importing it takes long."""
    return getattr(sys.modules.get(home), name, None)
