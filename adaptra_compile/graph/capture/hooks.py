"""Errors for hooks that a pipeline of graphs can't run, which torch would omit silently; and what others see in a capture."""

# pyright: reportPrivateUsage=false
# Torch has no other way to ask whether there are hooks.

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import currentframe
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as modules

from adaptra.errors import CaptureError, OptionError

_WHILE_IT_RUNS: Final = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


def refuse_backward_hooks(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules that have hooks in the backward pass.

    Args:
        named: The modules with their names.

    Raises:
        OptionError: A module has such a hook. The text names the module.
    """
    for name, module in named:
        if module._backward_hooks or module._backward_pre_hooks:
            raise OptionError(_refusal(f"a backward hook of the module {name!r}" if name else "a backward hook of the model"))
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        raise OptionError(_refusal("a backward hook of all modules (torch.nn.modules.module)"))


@contextmanager
def refusing_tensor_hooks() -> Generator[None]:
    """Raise a CaptureError, within this context, if the model's code hooks a tensor. The error names the line."""
    tensor: Any = torch.Tensor
    before = {name: getattr(tensor, name) for name in _WHILE_IT_RUNS}
    for name, method in before.items():
        setattr(tensor, name, _refusing(name, method, get_ident()))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(tensor, name, method)


@contextmanager
def hiding_wrappers() -> Generator[None]:
    """Let hooks of all modules see none of adaptra's or torch.export's within this context.

    They are those of ``register_module_forward_hook`` and ``register_module_forward_pre_hook``.
    """
    registered: tuple[Any, ...] = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
    before = [(hooks, key, getattr(hook, "original", hook)) for hooks in registered for key, hook in hooks.items()]
    for hooks, key, hook in before:
        hooks[key] = _OfUsersModules(hook)
    try:
        yield
    finally:
        for hooks, key, hook in before:
            if key in hooks:
                hooks[key] = hook


@dataclass(frozen=True, slots=True)
class _OfUsersModules:
    original: Callable[..., Any]

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        is_wrapper = type(module).__module__.startswith(("adaptra.", "torch.export.", "torch._export."))
        return None if is_wrapper else self.original(module, *args)


def _refusing(name: str, method: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:  # another pipeline may train meanwhile
            return method(*args, **kwargs)
        here = currentframe()
        caller = None if here is None else here.f_back
        where = "" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}: "
        raise CaptureError(
            f"{where}the model calls {name} of a tensor while it runs, which a graph can't hold: expected hooks of parameters "
            "alone, registered before or after adaptra.compile; they run once per step"
        )

    return refuse


def _refusal(what: str) -> str:
    return (
        f"model: {what}: expected none, as a pipeline runs the backward pass of its own graphs, not of modules; hooks of "
        "parameters (register_hook) run once per step"
    )
