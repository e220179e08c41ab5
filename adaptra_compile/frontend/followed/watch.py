"""The watch over a model and its loss: what has changed since the stages were compiled of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from adaptra.errors import PipelineError
from adaptra.frontend.followed.marks import Mark, differences, is_elsewhere, shown
from adaptra.frontend.followed.survey import Survey

_NO_MODE: Final = Mark("")


class Watch:
    """Compares a model and its loss with what they were when they were last compiled.

    Args:
        model: The model. Of a list of stages, a ModuleList of them.
        loss: The user's loss, or None.
        is_list: Whether the model's children are the stages, and the list itself is nobody's.
        keeps: Whether to keep the model. Otherwise it is held weakly, so that a rank may free the parameters of other ranks.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, *, is_list: bool, keeps: bool) -> None:
        self._is_list = is_list
        self._loss = loss
        roots = dict(model.named_children()) if is_list else {"": model}
        self._roots = {name: weakref.ref(one) for name, one in roots.items()}
        self._kept = roots if keeps else None
        self._parts: dict[str, Survey] | None = None
        self.accept()

    def model(self) -> nn.Module | None:
        """Return the model, or None if it is gone."""
        roots = self._living()
        if roots is None:
            return None
        return nn.ModuleList(roots.values()) if self._is_list else roots[""]

    def accept(self) -> None:
        """Take what there is now for what the stages are compiled of."""
        roots = self._living()
        assert roots is not None, "a model that is gone was not compiled"
        self._survey = self._now = Survey(roots, self._loss)
        self._trained = {name for name, one in roots.items() if one.training}
        self._state = {name: (weakref.ref(one), one.requires_grad) for name, one in _state_of(self.model()).items()}

    def changes(self, *, evaluates: bool) -> dict[str, str]:
        """Return what has changed, as a text by place. In an evaluation the modules' modes don't count.

        Raises:
            PipelineError: The model is gone, and a part of it that is still there has changed.
        """
        if self._survey.is_current():
            return {}
        roots = self._living()
        if roots is None:
            self._refuse_parts()
            return {}
        self._now = now = Survey(roots, self._loss)
        changes = differences(self._survey.marks, now.marks)
        if evaluates:
            changes = {place: text for place, text in changes.items() if not now.marks.get(place, _NO_MODE).is_mode}
        elif not changes:
            self._survey = now
        return changes

    def _refuse_parts(self) -> None:
        """Refuse changes of parts of a model that is gone."""
        if self._parts is not None and all(part.is_current() for part in self._parts.values()):
            return
        parts = self._parts = {place: Survey({place: one}, None) for place, one in self._survey.living().items()}
        for part in parts.values():
            marks = [(name, self._survey.marks.get(name), mark) for name, mark in part.marks.items()]
            known = [(name, old, new) for name, old, new in marks if old and not is_elsewhere(old) and not is_elsewhere(new)]
            changes = differences({name: old for name, old, _ in known}, {name: new for name, _, new in known})
            if changes:
                self._parts = None
                raise PipelineError(
                    f"the model is gone, and a part of it has changed: {shown(changes)}: expected one that is kept where the "
                    "loop changes it, as it is compiled anew then"
                )

    def addresses(self) -> set[int]:
        """Return the addresses of all tensors of the model and its loss, as they were found last."""
        found = [one() for one in self._now.tensors]
        return {one.untyped_storage().data_ptr() for one in found if one is not None and not one.is_meta}

    def left_training(self) -> list[str]:
        """Return the names of the roots that were in training mode and are not any more."""
        return [name for name, one in (self._living() or {}).items() if name in self._trained and not one.training]

    def replaced(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that are other tensors with values than before, by all their names."""
        now = {name: one for name, one in _state_of(self.model()).items() if not one.is_meta}
        return {name: one for name, one in now.items() if name not in self._state or self._state[name][0]() is not one}

    def switched(self) -> dict[str, bool]:
        """Return whether tensors require a gradient now, by name, of those of which it has changed."""
        now = _state_of(self.model())
        return {
            name: one.requires_grad
            for name, one in now.items()
            if name in self._state and self._state[name][1] is not one.requires_grad
        }

    def _living(self) -> dict[str, nn.Module] | None:
        found = {name: one() for name, one in self._roots.items()}
        living = {name: one for name, one in found.items() if one is not None}
        return living if len(living) == len(found) else None


def _state_of(model: nn.Module | None) -> Mapping[str, Tensor]:
    if model is None:
        return {}
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
