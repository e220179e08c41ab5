"""Keywords of functions that have another name now. The former one still works, with a warning that names the present one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=Callable[..., Any])


def former_keyword(former: str, present: str) -> Callable[[C], C]:
    """Return a decorator that makes a function, or the initialiser of a class, take a keyword by its former name too.

    Args:
        former: The former name. With it and the present one, a call raises TypeError.
        present: The present name.
    """

    def decorate(target: C) -> C:
        function: Callable[..., Any] = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009 - see pyright

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if former in keywords:
                if present in keywords:
                    raise TypeError(f"{target.__name__}() got both {present!r} and {former!r}, its former name")
                warnings.warn(f"{target.__name__}({former}=…) is now {present}=…", DeprecationWarning, stacklevel=2)
                keywords[present] = keywords.pop(former)
            return function(*args, **keywords)

        if isinstance(target, type):
            setattr(target, "__init__", call)  # noqa: B010 - see pyright
            return cast("C", target)
        return cast("C", call)

    return decorate
