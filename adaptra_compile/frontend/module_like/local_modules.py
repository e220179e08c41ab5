"""The modules of the user's model as one process of a pipeline has them: same names, same classes, its own tensors.

They are for whatever reads modules: groups of parameters by the kind of their layer, averages of weights, counts. They share
the pipeline's tensors and can't be called, since a pipeline runs ops, of which each rank has a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from adaptra.errors import PipelineError
from adaptra.frontend.module_like.never_wrapped import GUARDS


@dataclass(slots=True)
class ModuleOutline:
    """A module's class, plain attributes, names and children, without references to its tensors or to other objects.

    Attributes:
        kind: The module's class.
        attributes: Its attributes that are numbers, texts, dtypes, devices, None, or sequences of these.
        parameters, buffers: The names that it registers, and whether there is a tensor.
        non_persistent: The buffers that are not in its state_dict.
        children: The outlines of its children by name.
    """

    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    parameters: Mapping[str, bool]
    buffers: Mapping[str, bool]
    non_persistent: frozenset[str]
    children: dict[str, ModuleOutline | None] = field(default_factory=dict)

    @staticmethod
    def of(module: nn.Module, known: dict[int, ModuleOutline] | None = None) -> ModuleOutline:
        """Return the outline of a module and of all modules in it. A module at two places has one."""
        known = {} if known is None else known
        if id(module) not in known:
            parts: Any = module  # whose dictionaries are torch's own
            own = frozenset(vars(nn.Module())) - {"training"}
            known[id(module)] = outline = ModuleOutline(
                type(module),
                {name: value for name, value in vars(module).items() if name not in own and _is_plain(value)},
                {name: one is not None for name, one in parts._parameters.items()},
                {name: one is not None for name, one in parts._buffers.items()},
                frozenset(parts._non_persistent_buffers_set),
            )
            for name, child in parts._modules.items():
                outline.children[name] = None if child is None else ModuleOutline.of(child, known)
        return known[id(module)]

    def filled(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Return new modules with these tensors, and with those modules alone that have any.

        Modules that have no tensor in the model are there if the module around them is.

        Args:
            state: Parameters and buffers under each of their names in the model.
        """
        return self._filled("", state, {}) or nn.Module()

    def _filled(self, prefix: str, state: Mapping[str, Tensor], known: dict[int, nn.Module | None]) -> nn.Module | None:
        if id(self) in known:
            return known[id(self)]
        # Not the class's own call: a model's __init__ would make its tensors, and a GraphModule's makes another class.
        module: Any = object.__new__(self.kind)
        nn.Module.__init__(module)
        hooks = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook")]
        vars(module).update(self.attributes, forward=_refuse_call, **dict.fromkeys(hooks, _refuse_hook), **GUARDS)
        module._non_persistent_buffers_set |= self.non_persistent
        module._parameters |= {name: state.get(prefix + name) for name in self.parameters}
        module._buffers |= {name: state.get(prefix + name) for name in self.buffers}
        is_here = any(one is not None for one in (*module._parameters.values(), *module._buffers.values()))
        for name, child in self.children.items():
            filled = None if child is None else child._filled(f"{prefix}{name}.", state, known)
            if filled is not None or child is None:
                module._modules[name] = filled
            is_here |= filled is not None and child is not None and child.has_tensors
        known[id(self)] = module if is_here or not self.has_tensors else None
        return known[id(self)]

    @property
    def has_tensors(self) -> bool:
        """Whether the module, or one in it, has a tensor in the model."""
        return any(any((*one.parameters.values(), *one.buffers.values())) for one in self._all())

    def _all(self) -> Iterator[ModuleOutline]:
        yield self
        for child in self.children.values():
            if child is not None:
                yield from child._all()


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device)


def _refuse_call(*_: Any, **__: Any) -> NoReturn:
    """Stand for the forward of a module that a pipeline runs in parts.

    Raises:
        PipelineError: Always.
    """
    raise PipelineError(
        "a module of a pipeline was called: expected pipe(inputs), pipe.step or pipe.eval_step, as each rank runs the ops "
        "of its stages and no modules; load pipe.full_state_dict() into the plain model to call that"
    )


def _refuse_hook(*_: Any, **__: Any) -> NoReturn:
    """Stand for the registration of a module's hook, which would never run.

    Raises:
        PipelineError: Always.
    """
    raise PipelineError(
        "a hook of a module of a pipeline was registered, which would never run: expected hooks of pipe.parameters(), or "
        "forward hooks of the model's modules before adaptra.compile"
    )
