"""What a capture can't follow is refused: state that the model's code keeps from call to call, and random numbers not torch's.

The code runs once for a capture, so what it draws or counts would become a constant of every microbatch. Snapshots before and
after tell whether it kept anything. If so it is captured again, from the state that the first call left. Equal graphs show that
this state does not matter: a result that is only stored, or a table that is computed once.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import currentframe
from itertools import dropwhile
from threading import get_ident
from traceback import walk_stack
from typing import Any, Final

import torch
from torch import nn

from adaptra.errors import CaptureError
from adaptra.graph.effects.generators import is_at, state_of
from adaptra.graph.effects.keepers import alike, is_library, same
from adaptra.graph.effects.lines import lines_after_which
from adaptra.graph.effects.same_graphs import first_difference
from adaptra.graph.effects.snapshot import ChangedValue, Snapshot

_CLOCKS: Final = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")

_KEYED: Final = (
    "expected torch's random ops (torch.rand, dropout), which a pipeline draws anew for each step and microbatch; in a choice "
    "between layers multiply by a mask, such as (torch.rand(()) > p), or give the model as a list of stages"
)
_STATELESS: Final = (
    "what it draws or counts would stay as it was at adaptra.compile: expected a registered buffer that ops change "
    "(register_buffer, then add_), an argument of the model, or a list of stages"
)


class Effects:
    """Watches the captures of one model, and puts back all that its code has changed.

    Args:
        model: The model.
        loss: The loss function, if any.
        state: The names of the parameters and buffers of what is captured.
    """

    def __init__(self, model: nn.Module, loss: Any, state: frozenset[str]) -> None:
        self._model = model
        self._loss = loss
        self._state = state
        self._asked = False
        self.before = Snapshot(model, loss)
        self.after = self.before
        # The code runs within this context. Torch.export stops tracing, so lines are looked for from within.
        self.running: Callable[[], AbstractContextManager[None]] = nullcontext

    def note(self) -> None:
        """Look at what the code has left. Call this when it has run, before torch.export puts attributes back."""
        self.after = Snapshot(self._model, self._loss, self.after)

    def settled(self, run: Callable[[], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
        """Return a capture whose values don't depend on what calls leave behind.

        Args:
            run: Captures the model from its state now. It calls :meth:`note`.

        Raises:
            CaptureError: They do. The text names the module, its line and what it changes.
        """
        self.after = self.before
        try:
            with self._noting_questions():
                program = run()
        finally:
            drawn = self.before.drawn()
            first = self.after
            self.before.restore()
        for generator, name, state in drawn:
            self._refuse_drawn(run, generator, name, state)
        changes = self.before.changes(first)
        if not changes and not self._asked:
            return program
        first.restore()
        self.after = first
        again, error = None, None
        try:
            again = run()
        except Exception as caught:  # the code uses what only the first call could know
            error = caught
        second = self.after
        self.before.restore()
        if again is None:
            raise self._refusal(run, changes) from error
        left = [one for one in first.changes(second) if not alike(one.before, one.after)]
        if left:
            raise self._refusal(run, left)
        place = first_difference(program, again, self._state)
        if place is not None:
            raise self._refusal(run, changes, place)
        return program

    def _refuse_drawn(self, run: Callable[[], Any], generator: Any, name: str, state: Any) -> None:
        last = state

        def changed() -> bool:
            nonlocal last
            if is_at(generator, last):
                return False
            last = state_of(generator)
            return True

        # Another thread may draw meanwhile, so a line counts if it did so each time.
        lines = [set(self._lines(changed, run)), set(self._lines(changed, run))]
        for place in sorted(set.intersection(*lines)):
            raise CaptureError(f"{place}: it draws from {name}: {_KEYED}")

    def _refusal(self, run: Callable[[], Any], changes: list[ChangedValue], place: str | None = None) -> CaptureError:
        if not changes:
            return CaptureError(f"{place}: it depends on the time or on the system's random numbers: {_STATELESS}")
        first = changes[0]
        keeper, key = first.keeper, first.key
        last = keeper.read()

        def changed() -> bool:
            nonlocal last
            now = keeper.read()
            keys = now.keys() | last.keys() if first.grows else [key]
            differs = not all(same(now.get(one), last.get(one)) for one in keys)
            last = now
            return differs

        lines = self._lines(changed, run)
        return CaptureError(
            f"{lines[0] if lines else first.keeper.where}: it changes {first.name} from call to call: {_STATELESS}"
        )

    def _lines(self, changed: Callable[[], bool], run: Callable[[], Any]) -> list[str]:
        places: list[str] = []

        @contextmanager
        def looking() -> Generator[None]:
            with lines_after_which(changed, self._model) as lines:
                try:
                    yield
                finally:
                    places.extend(lines)

        self.running = looking
        try:
            run()
        except CaptureError:
            return places
        finally:
            self.running = nullcontext
            self.before.restore()
        return places

    @contextmanager
    def _noting_questions(self) -> Generator[None]:
        """Note whether users' code asks for the time, or for random numbers of the system."""
        self._asked = False
        places: Mapping[str, Any] = dict.fromkeys(_CLOCKS, time) | {"urandom": os, "_urandom": random}
        before = {name: getattr(place, name) for name, place in places.items()}
        thread = get_ident()

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def ask(*args: Any, **kwargs: Any) -> Any:
                if get_ident() == thread and not self._asked:
                    self._asked = _is_asked_by_user()
                return function(*args, **kwargs)

            return ask

        for name, place in places.items():
            setattr(place, name, noting(before[name]))
        try:
            yield
        finally:
            for name, place in places.items():
                setattr(place, name, before[name])


def _is_asked_by_user() -> bool:
    for frame, _ in dropwhile(lambda one: one[0].f_code.co_filename == __file__, walk_stack(currentframe())):
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("torch", "adaptra.", "logging")):
            return False
        if not is_library(name):
            return True
    return False
