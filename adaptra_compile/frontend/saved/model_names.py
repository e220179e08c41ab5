"""What a model's own state_dict has beside the names of its tensors: extra state of modules, and hooks that rename.

A rank has some of the tensors, so it can't call the model's ``state_dict`` and ``load_state_dict`` themselves. The names that
the model saves are found at compilation. Extra state is asked of the modules when it is saved, as long as they live. Names that
are loaded pass through the hooks of the modules first.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any, Final

from torch import Tensor, nn

from adaptra.errors import StateError
from adaptra.graph.capture.skeleton import skeleton

_EXTRA: Final = "_extra_state"


class ModelNames:
    """The names of a model's state_dict that are no tensors of a pipeline. It keeps no tensor of the model.

    Args:
        model: The model.
        saved: The names of its tensors in its state_dict.

    Attributes:
        loaded: The names under which the modules load tensors, also those that hooks leave out of the state_dict.
    """

    def __init__(self, model: nn.Module, saved: Collection[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        own = {
            _under(path, _EXTRA): weakref.ref(module)
            for path, module in modules.items()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        beside = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in saved}
        # A hook may have renamed them. They are in the order of the modules then too.
        renamed = iter([name for name in own if name not in beside])
        extras = [name for name in beside if name.rpartition(".")[2] == _EXTRA]
        self._raw_names = {name: name if name in own else next(renamed, name) for name in extras}
        self._modules = own
        self._last = {name: value for name, value in beside.items() if name in extras or not isinstance(value, Tensor)}
        self._computed = sorted(beside.keys() - self._last.keys())
        self._hooked: nn.Module | None = None
        self.loaded = {_under(path, name) for path, module in modules.items() for name in _tensors_in_state(module)}
        if any(map(_is_hooked, modules.values())):
            self._hooked = _without_tensors(model)

    def require_plain(self) -> None:
        """Refuse a model whose hooks compute tensors, of which a rank has parts only.

        Raises:
            StateError: Names the tensors.
        """
        if self._computed:
            raise StateError(
                f"state_dict: {', '.join(self._computed)}: a hook of the model's state_dict makes it: expected hooks that "
                "rename tensors, or leave some out, as each rank has its own stages; load pipe.named_parameters() into the "
                "plain model"
            )

    def extras(self) -> dict[str, Any]:
        """Return what is no tensor of the model, by its name in the state_dict: the modules' extra state as it is now."""
        self._last |= {
            name: module.get_extra_state() for name, raw in self._raw_names.items() if (module := self._module(raw)) is not None
        }
        return dict(self._last)

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state under the names that the modules load, as their hooks make them of the given ones."""
        if self._hooked is None:
            return state
        adapted = dict(state)
        metadata: Any = getattr(state, "_metadata", None) or {}
        for path, module in self._hooked.named_modules(remove_duplicate=False):
            prefix = _under(path, "")
            hooks: Any = module
            for hook in hooks._load_state_dict_pre_hooks.values():
                hook(adapted, prefix, metadata.get(path, {}), True, [], [], [])
        return adapted

    def given_extras(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the extra state in a state, by its names in the state_dict."""
        return {
            name: state[one]
            for name in self._last
            if (one := next((key for key in (name, self._raw_names.get(name, name)) if key in state), None)) is not None
        }

    def knows(self, name: str) -> bool:
        """Return whether a name is that of extra state."""
        return name in self._last or name in self._raw_names.values()

    @property
    def required(self) -> Collection[str]:
        """The names of extra state, which a whole state has."""
        return self._raw_names

    def take(self, extras: Mapping[str, Any]) -> None:
        """Give modules their extra state."""
        for name, value in extras.items():
            self._last[name] = value
            module = self._module(self._raw_names.get(name, name))
            if module is not None:
                module.set_extra_state(value)

    def _module(self, raw: str) -> nn.Module | None:
        return self._modules[raw]() if raw in self._modules else None


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tensors_in_state(module: Any) -> Collection[str]:
    """Return the names of a module's own parameters and persistent buffers."""
    return [*module._parameters, *(module._buffers.keys() - module._non_persistent_buffers_set)]


def _is_hooked(module: Any) -> bool:
    return bool(module._load_state_dict_pre_hooks)


def _without_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of the modules for their hooks, which know their modules; the model itself if it can't be copied."""
    try:
        return skeleton(model)
    except Exception:  # copies run the user's code
        return model
