"""Keywords that a function doesn't know, answered with the nearest one that it does."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from adaptra.errors import OptionError

C = TypeVar("C", bound=Callable[..., Any])


def known_keywords(target: C) -> C:
    """Return a function, or a class, that refuses a keyword which it has not, and names the nearest.

    Raises:
        OptionError: When it is called with such a keyword.
    """
    function: Callable[..., Any] = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009 - see pyright
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, 1) or known
                raise OptionError(f"{target.__name__}({name}=…): there is no such argument: expected {', '.join(nearest)}")
        return function(*args, **keywords)

    if isinstance(target, type):
        setattr(target, "__init__", call)  # noqa: B010 - see pyright
        return cast("C", target)
    return cast("C", call)
