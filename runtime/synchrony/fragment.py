"""A fragment: the parameters of one stage, what they were after the last exchange, and the outer optimizer.

What a site has learnt is the difference between the two. The outer optimizer takes the mean of what all sites have learnt for a
gradient (Douillard et al., 2023, DiLoCo). It works in float32 or better, in memory of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from adaptra.errors import StateError
from adaptra.planning.synchrony.modes import Outer

_HOST: Final = torch.device("cpu")


class Fragment:
    """One rank's copy of a fragment.

    Args:
        parameters: Its parameters by name, in the same order on all ranks that have it.
        owned: The names of those that this rank exchanges.
        outer: The outer optimizer's settings.

    Attributes:
        parameters: As given.
    """

    def __init__(self, parameters: Mapping[str, Tensor], owned: Sequence[str], outer: Outer) -> None:
        self.parameters = parameters
        self._owned = {name: parameters[name] for name in owned}
        self._outer = outer
        self._after = [torch.empty_like(one, dtype=_precise(one), device=_HOST) for one in self._owned.values()]
        self.begin()

    def begin(self) -> None:
        """Take the parameters as they are for those after an exchange, with an outer optimizer that has made no update."""
        # A replica of a site may own none of the parameters, which torch refuses but in a group.
        self._optimizer = torch.optim.SGD(
            [{"params": self._after}], lr=self._outer.lr, momentum=self._outer.momentum, nesterov=self._outer.nesterov
        )
        for after, parameter in zip(self._after, self._owned.values(), strict=True):
            after.copy_(parameter.detach())

    @property
    def nbytes(self) -> int:
        """The bytes that this rank adds up in an exchange."""
        return sum(one.nbytes for one in self._after)

    def learnt(self) -> list[Tensor]:
        """Return by how much the parameters were greater after the last exchange: what a gradient would take off them.

        Training went on from what was rounded to their dtype. What the rounding took off is not learnt, and stays in the copies
        of higher precision, where small updates add up.
        """
        pairs = zip(self._after, self._owned.values(), strict=True)
        return [after.to(one.dtype).to(after.dtype) - one.detach().to(after) for after, one in pairs]

    def update(self, learnt: Sequence[Tensor]) -> None:
        """Replace owned parameters by what the outer optimizer makes of the mean of what sites have learnt."""
        for after, gradient in zip(self._after, learnt, strict=True):
            after.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for after, parameter in zip(self._after, self._owned.values(), strict=True):
                parameter.copy_(after)

    @property
    def state(self) -> list[Tensor]:
        """The owned parameters after the last exchange, and the momentum of each: the tensors themselves."""
        return [one for part in self._parts for one in part]

    def take(self, state: Sequence[Tensor]) -> None:
        """Go on from another rank's :attr:`state`. The parameters stay what they are."""
        for own, value in zip(self.state, state, strict=True):
            own.copy_(value)

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """Return what the fragment needs to go on after a restart: the tensors themselves, by parameter."""
        after, momentum = (dict(zip(self._owned, part, strict=True)) for part in self._parts)
        return {"parameters": dict(self.parameters), "after": after, "momentum": momentum}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :func:`check_saved` has taken."""
        with torch.no_grad():
            for part, own in self.saved().items():
                for name, value in saved[part].items():
                    own[name].copy_(value)

    @property
    def _parts(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return self._after, [self._momentum_of(one) for one in self._after]

    def _momentum_of(self, after: Tensor) -> Tensor:
        # A momentum of zeros gives the bits of none: 0.9 · 0 + g is g.
        state = self._optimizer.state[after]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(after)
        return state["momentum_buffer"]


def check_saved(fragment: Fragment, saved: Any) -> None:
    """Refuse what is no saved state of a fragment.

    Raises:
        StateError: It does not fit the fragment; names what.
    """
    for part, own in fragment.saved().items():
        expected, shapes = _shapes(own), _shapes(saved.get(part) if isinstance(saved, Mapping) else None)
        wrong = [name for name in {**expected, **shapes} if shapes.get(name) != expected.get(name)]
        if wrong:
            raise StateError(
                f"outer state: {part} of {wrong[0]}: of shape {shapes.get(wrong[0])}: expected {expected.get(wrong[0])}"
            )


def _shapes(tensors: Any) -> dict[str, object]:
    return {name: getattr(one, "shape", None) for name, one in tensors.items()} if isinstance(tensors, Mapping) else {}


def _precise(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
