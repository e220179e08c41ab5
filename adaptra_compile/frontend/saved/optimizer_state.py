"""An optimizer's state by the names of its parameters, and the check that a saved one fits before anything changes.

An optimizer has no state of a parameter before it first steps it. Such a parameter has placeholders in a saved state: see
:mod:`adaptra.frontend.saved.absent_state`. The state also says that they are none, so that loading leaves it without state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adaptra.checks import is_whole
from adaptra.errors import StateError
from adaptra.frontend.saved.absent_state import AbsentState


@dataclass(frozen=True, slots=True)
class NamedState:
    """An optimizer's state by the names of parameters.

    Attributes:
        entries: The state of each parameter, or placeholders of its form.
        groups: The settings of each group, such as its learning rate.
        optimized: The index of each parameter's group, and whether it has state.
    """

    entries: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    optimized: dict[str, list[Any]]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> NamedState:
        """Return the state of an optimizer. Nothing of it changes, and no hook of its runs.

        Args:
            optimizer: The optimizer.
            names: The names of its parameters. Others are left out.

        Raises:
            StateError: The form of a parameter's state can't be found.
        """
        state = NamedState({}, [_settings(group) for group in optimizer.param_groups], {})
        forms = _Forms(optimizer, state.groups)
        for index, parameter, name in _named(optimizer, names):
            entries: dict[str, Any] = dict(optimizer.state.get(parameter, {}))
            state.optimized[name] = [index, bool(entries)]
            if not entries:
                entries = forms.placeholders(index, parameter)
            if entries:
                state.entries[name] = entries
        return state


@dataclass(frozen=True, slots=True)
class FittingState:
    """A saved state that fits an optimizer.

    Attributes:
        states: The parameters, each with its state, empty where it has none.
        groups: The settings of each group.
    """

    states: list[tuple[Tensor, dict[str, Any]]]
    groups: list[dict[str, Any]]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, Any]) -> FittingState:
        """Return what is to be loaded of a saved state. Nothing changes yet.

        Args:
            optimizer: The optimizer.
            names: The names of its parameters.
            saved: ``optimizer``, ``groups`` and ``optimized``, the attributes of a :class:`NamedState`.

        Raises:
            StateError: It is the state of another optimizer, or a part of it is missing. The text names it.
        """
        entries, optimized, groups = (saved[key] for key in ("optimizer", "optimized", "groups"))
        for key, one in (("optimizer", entries), ("optimized", optimized)):
            if not isinstance(one, Mapping):
                raise StateError(f"training state: its {key!r} is a {type(one).__name__}: expected a dict by parameters' names")
        settings = _fitting_groups(optimizer, groups)
        forms = _Forms(optimizer, settings)
        states: list[tuple[Tensor, dict[str, Any]]] = []
        for index, parameter, name in _named(optimizer, names):
            match optimized.get(name):
                case None:
                    raise StateError(
                        f"training state: {name} is in group {index} of this optimizer, and was in none when it was saved: "
                        "expected an optimizer of the same parameters"
                    )
                case [int(saved_index), bool(has_state)]:
                    pass
                case other:
                    raise StateError(f"training state: {name} has {other!r:.80} in 'optimized': expected a group and a bool")
            if saved_index != index:
                raise StateError(
                    f"training state: {name} was in group {saved_index} of the optimizer, and is in group {index}: expected "
                    "the same groups as when it was saved, in the same order"
                )
            own: Mapping[str, Any] = optimizer.state.get(parameter, {})
            wanted: dict[str, Any] = {}
            if has_state:
                form = forms.of(index, parameter, own)
                wanted = _fitting_entries(name, parameter, form, entries.get(name), own)
            states.append((parameter, wanted))
        return FittingState(states, settings)

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this state. Parameters without state have none then."""
        for parameter, entries in self.states:
            if entries:
                optimizer.state[parameter] = entries
            else:
                optimizer.state.pop(parameter, None)
        for group, settings in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(settings)


def _named(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[int, Tensor, str]]:
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in names:
                yield index, parameter, names[parameter]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _fitting_groups(optimizer: torch.optim.Optimizer, saved: Any) -> list[dict[str, Any]]:
    own = optimizer.param_groups
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        count = len(saved) if isinstance(saved, list | tuple) else f"a {type(saved).__name__}"
        raise StateError(f"training state: its groups are {count}: expected {len(own)}, the groups of this optimizer")
    groups: list[dict[str, Any]] = []
    for index, settings in enumerate(saved):
        absent = list(optimizer.defaults) if not isinstance(settings, Mapping) else optimizer.defaults.keys() - settings.keys()
        if absent:
            raise StateError(
                f"training state: group {index} lacks {', '.join(sorted(absent))}: expected the settings of a "
                f"{type(optimizer).__name__}, as saved"
            )
        groups.append(copy.deepcopy(_settings(settings)))
    return groups


class _Forms:
    """The forms of parameters' state after a first step, each found once for parameters that are alike.

    Args:
        optimizer: The optimizer.
        groups: The settings of its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._known: dict[Any, dict[str, Any]] = {}

    def of(self, index: int, parameter: Tensor, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the form of a parameter's state in a group. ``own`` is the state that it has.

        Raises:
            StateError: It can't be found.
        """
        key = index, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        if key not in self._known:
            try:
                self._known[key] = _first_state(self._optimizer, self._groups[index], parameter)
            except StateError:
                if own:  # an optimizer such as Adagrad has state from the start
                    return own
                raise
        return self._known[key]

    def placeholders(self, index: int, parameter: Tensor) -> dict[str, Any]:
        """Return placeholders for a parameter's state, or nothing for one that can't be trained, such as of whole numbers.

        Raises:
            StateError: The form of its state can't be found.
        """
        try:
            form = self.of(index, parameter, {})
        except StateError:
            if parameter.requires_grad:
                raise
            return {}
        return {key: AbsentState.like(one) if isinstance(one, Tensor) else one for key, one in form.items()}


def _fitting_entries(
    name: str, parameter: Tensor, form: Mapping[str, Any], saved: Any, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a parameter as tensors of its own, where those of ``own`` stay the same objects."""
    if not isinstance(saved, Mapping) or form.keys() - saved.keys():
        absent = sorted(form.keys() - saved.keys()) if isinstance(saved, Mapping) else sorted(form)
        raise StateError(
            f"training state: the optimizer's state of {name} lacks {', '.join(absent)}: expected all that was saved of an "
            "optimizer of the same kind"
        )
    fitting: dict[str, Any] = {}
    for key, entry in saved.items():
        value = entry.loaded if isinstance(entry, AbsentState) else entry
        expected = form.get(key)
        is_tensor = isinstance(value, Tensor)
        if isinstance(expected, Tensor) and (not is_tensor or value.shape != expected.shape):
            shape = f"shape {list(value.shape)}" if is_tensor else f"no shape: it is a {type(value).__name__}"
            raise StateError(
                f"training state: the optimizer's {key} of {name} has {shape}: expected {list(expected.shape)}, as for a "
                f"parameter of shape {list(parameter.shape)}"
            )
        if not is_tensor:
            fitting[key] = copy.deepcopy(value)
        elif value is own.get(key):
            fitting[key] = value
        else:
            # Every stage that uses a shared parameter has a copy of it, and each copy its own optimizer state.
            like = expected if isinstance(expected, Tensor) else value
            fitting[key] = value.detach().to(like.device, like.dtype, copy=True)
    return fitting


def _first_state(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer's first step of a parameter gives it, for its form.

    A step runs on a stand-in for the parameter, with a gradient of zeros. So neither the parameter nor the optimizer changes,
    and no hook or scheduler takes it for a step.

    Raises:
        StateError: The step fails.
    """
    # Not a copy by its class, which would leave out what a user's optimizer keeps beside state and groups.
    shadow: Any = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    vars(shadow).pop("step", None)  # as a scheduler replaces it
    shadow.state = defaultdict(dict)
    step: Any = type(optimizer).step
    try:
        stand_in = nn.Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.zeros_like(parameter)
        shadow.param_groups = [{**settings, "params": [stand_in]}]
        with torch.random.fork_rng(devices=[]):
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(shadow)
    except Exception as error:  # whatever a user's optimizer raises
        raise StateError(
            f"optimizer {type(optimizer).__name__}: a step of one parameter alone, by which the form of its state is found, "
            f"fails: {type(error).__name__}: {error}: expected one whose step takes no closure and each parameter for itself"
        ) from error
    return dict(shadow.state[stand_in])


def check_step(saved: Any) -> tuple[int, int]:
    """Return the number of the training's step that was saved, and that of updates, if it is another.

    Raises:
        StateError: It is none.
    """
    step, updates = saved if isinstance(saved, list | tuple) and len(saved) == 2 else (saved, saved)
    if not (is_whole(step) and is_whole(updates) and min(step, updates) >= 0):
        raise StateError(
            f"training state: its step is {saved!r}: expected the number of steps that TrainingState.state_dict() has "
            "saved, by which dropout goes on"
        )
    return step, updates
