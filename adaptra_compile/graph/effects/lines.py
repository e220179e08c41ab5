"""The lines of a model's code after which something has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import currentframe
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import nn

from adaptra.graph.effects.keepers import is_library


def user_line(frames: Iterable[tuple[FrameType, int]], names: Mapping[int, str]) -> tuple[str, str] | None:
    """Return the innermost module of the model in these frames, and the innermost line of code outside torch.

    ``frames`` begin with the innermost one. No further out than that module, they are not looked at.
    """
    line: str | None = None
    for frame, number in frames:
        file = frame.f_code.co_filename
        if line is None and not _is_torchs(file) and "adaptra" not in frame.f_globals.get("__name__", ""):
            line = f"{Path(file)}:{number}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            module = f"module {names[id(owner)] or '(the model itself)'} ({type(owner).__name__})"
            return module, line or "a line of torch's own modules"
    return None


@cache
def _is_torchs(file: str) -> bool:
    return Path(torch.__file__).parent in Path(file).parents


@contextmanager
def lines_after_which(changed: Callable[[], bool], model: nn.Module) -> Generator[list[str]]:
    """Collect the modules and lines of users' code, run in this context, after which something has changed.

    Args:
        changed: Returns whether it has changed since the last call.
        model: The model whose modules are named.
    """
    names = {id(module): name for name, module in model.named_modules()}
    places: list[str] = []
    last = ""

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last
        if last and changed():
            places.append(last)
        here = frame.f_back if event == "return" else frame
        last = "" if here is None else _place(here, names)
        return look

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        return None if is_library(name) or name.startswith("adaptra.") else look

    before = sys.gettrace()
    changed()
    sys.settrace(enter)
    try:
        yield places
    finally:
        sys.settrace(before)


def place_now() -> str:
    """Return the line of the loss function that runs now."""
    own = (frame for frame, _ in walk_stack(currentframe()) if not frame.f_globals.get("__name__", "").startswith("adaptra."))
    return _place(next(own), {})


def _place(frame: FrameType, names: Mapping[int, str]) -> str:
    # No further out: a look at the locals of the user's own functions would keep alive objects that they delete.
    inside = takewhile(lambda one: not one[0].f_globals.get("__name__", "").startswith("adaptra."), walk_stack(frame))
    own = [one for one in inside if not _is_standard(one[0])]
    place = user_line(own, names)
    if place is not None:
        return f"{place[0]} at {place[1]}"
    line = next(
        (f"{one.f_code.co_filename}:{number}" for one, number in own if not is_library(one.f_globals.get("__name__", ""))), ""
    )
    return f"the loss function at {line}"


def _is_standard(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return is_library(name) and not name.startswith("torch")
