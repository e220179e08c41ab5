"""Errors for backward passes and function transforms within a model's code, which no graph of forward ops holds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from adaptra.errors import CaptureError


@contextmanager
def refusing_gradients(where: Callable[[], str]) -> Generator[None]:
    """Refuse, within this context, a model's code that asks for gradients, or that torch can't capture for its transforms.

    Transforms of constants alone, such as masks made by vmap, are taken.

    Args:
        where: Returns the module and line of the model that run now.

    Raises:
        CaptureError: The text has the module and the line.
    """
    thread = get_ident()
    transforms: list[str] = []
    changed: list[tuple[Any, str, Any]] = []

    def replace(place: Any, name: str, note: Callable[[], None]) -> None:
        function = getattr(place, name, None)
        if function is None:  # another version of torch
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:  # another pipeline may train meanwhile
                note()
            return function(*args, **kwargs)

        changed.append((place, name, function))
        setattr(place, name, call)

    def refuse(name: str) -> Callable[[], None]:
        def note() -> None:
            raise CaptureError(
                f"{where()}: the model calls {name} while it runs, whose backward pass a graph of its forward pass can't hold: "
                "expected ops alone; give the model as a list of stages, which runs any code"
            )

        return note

    for name in ("grad", "backward"):
        replace(torch.autograd, name, refuse(f"torch.autograd.{name}"))
    replace(vmap, "_vmap_increment_nesting", lambda: transforms.append(f"{where()}: the model calls torch.func.vmap"))
    for name in ("_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting"):
        replace(eager_transforms, name, lambda: transforms.append(f"{where()}: the model calls a transform of torch.func"))
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if not transforms:
            raise
        raise CaptureError(
            f"{transforms[0]} while it runs, on tensors that depend on inputs or parameters: expected ops on whole batches, "
            "such as torch.einsum or broadcasting; or give the model as a list of stages, which runs any code"
        ) from error
    finally:
        for place, name, function in reversed(changed):
            setattr(place, name, function)
