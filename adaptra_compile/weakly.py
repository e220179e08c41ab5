"""Methods that are called back by what their object holds, without a reference cycle between the two."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a method of an object, and does not keep the object alive.

    It raises ReferenceError once the object is gone.
    """
    held, name = weakref.WeakMethod(method), method.__qualname__

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if (bound := held()) is None:
            raise ReferenceError(f"{name}: its object is gone")
        return bound(*args, **kwargs)

    return call
