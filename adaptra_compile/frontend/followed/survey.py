"""A survey of everything that a capture reads of a model and its loss beside the values of tensors.

A survey makes a mark of each value, by its place, and the reads that tell quickly that nothing has changed. A read collects
the identities of many values at the speed of C. What has an identity is held weakly, so that a model can be deleted. When it
goes, its identity may be another object's: so its end is noticed, and leads to another survey.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from adaptra.frontend.followed.marks import Mark, is_plain, mark_of, same_as, tensor_mark

_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS: Final = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_REGISTERED: Final = ("_parameters", "_buffers", "_modules")
_OWN: Final = frozenset(vars(nn.Module())) - {"training"}
_GLOBAL_HOOKS: Final = [f"_global_{one.removeprefix('_')}" for one in _HOOKS]
_MOST_ITEMS: Final = 10_000
_MOST_BYTES: Final = 1 << 16
_DEEPEST: Final = 6
_CLASS: Final = "class "
_FOREIGN: Final = frozenset(
    "torch builtins logging threading weakref multiprocessing concurrent asyncio queue socket io typing abc _thread _io "
    "adaptra numpy lightning pytorch_lightning lightning_fabric accelerate datasets tokenizers wandb mlflow tqdm rich".split()
)
"""Packages whose objects count by their identity: they change with every step, or hold what no forward reads."""
_dicts_of: Final = attrgetter("__dict__")
_registered_of: Final = itemgetter(*_REGISTERED)
_hooks_of: Final = itemgetter(*_HOOKS)
_flags_of: Final = attrgetter("requires_grad", "dtype")

Reach = Callable[[], Any]
"""Returns a value by way of what has it, so that the value need not be kept."""


class Survey:
    """Marks and reads of some modules and a loss, as they are now.

    Args:
        roots: The modules by the prefix of their names.
        loss: The loss of one microbatch, or None.

    Attributes:
        marks: The mark of each value by its place.
        tensors: The tensors that are found, parameters and buffers included, as weak references.
    """

    def __init__(self, roots: Mapping[str, nn.Module], loss: Callable[..., Any] | None) -> None:
        self.marks: dict[str, Mark] = {}
        self.tensors: list[weakref.ref[Tensor]] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._places: dict[str, weakref.ref[nn.Module]] = {}
        self._seen: dict[int, str] = {}
        self._reads: list[Callable[[], Any]] = []
        self._kept: list[object] = []
        self._ended: list[object] = []
        self._held: list[Any] = []
        for prefix, root in roots.items():
            self._module(prefix, root)
        if loss is not None:
            self._visit("loss", loss, 0)
        for name in _GLOBAL_HOOKS:
            hooks: dict[int, Any] = getattr(torch_modules, name)
            self._hooks(f"torch.nn.modules.module.{name}", hooks)
            self._read(partial(_ids_of_values, hooks))
        self._reads = [partial(_modules_read, self._modules), partial(_tensors_read, self.tensors), *self._reads]
        self._kept = [read() for read in self._reads]
        self._seen.clear()

    def living(self) -> dict[str, nn.Module]:
        """Return the modules that are still there, by place."""
        found = {place: of() for place, of in self._places.items()}
        return {place: one for place, one in found.items() if one is not None}

    def is_current(self) -> bool:
        """Return whether nothing can have changed. If False, marks tell."""
        if self._ended:
            return False
        try:
            return all(read() == kept for read, kept in zip(self._reads, self._kept, strict=True))
        except (AttributeError, KeyError, IndexError, TypeError, RuntimeError):  # something is gone, or of another kind
            return False

    def _read(self, read: Callable[[], Any]) -> None:
        self._reads.append(read)

    def _hold(self, value: Any) -> None:
        """Make sure that no other object gets this one's identity unnoticed."""
        ended = self._ended
        try:
            self._held.append(weakref.ref(value, lambda _: ended.append(None)))
        except TypeError:
            if not isinstance(value, dict | list | set | tuple | CellType | MethodType):  # their content is compared
                self._held.append(value)

    def _visit(self, place: str, value: Any, depth: int, reach: Reach | None = None) -> None:
        if is_plain(value) or _is_number_of_numpy(value):
            self._held.append(value)
            self.marks[place] = Mark(repr(value))
            return
        self._hold(value)
        if isinstance(value, Tensor):
            self._tensor(place, value, is_state=False)
        elif id(value) in self._seen:
            self.marks[place] = same_as(self._seen[id(value)])
        elif depth > _DEEPEST or isinstance(value, type | ModuleType):
            self.marks[place] = mark_of(value)
        else:
            self._open(place, value, depth, reach)

    def _open(self, place: str, value: Any, depth: int, reach: Reach | None) -> None:
        """Visit what is in a value."""
        self._seen[id(value)] = place
        match value:
            case nn.Module():
                self._module(place, value)
            case FunctionType():
                self._function(place, value, depth)
            case MethodType():
                self._visit(f"{place}.__func__", value.__func__, depth)
                self._visit(f"{place}.__self__", value.__self__, depth + 1)
            case partial():
                self._visit(f"{place}.func", value.func, depth)  # pyright: ignore[reportUnknownMemberType]
                self._visit(f"{place}.args", list(value.args), depth + 1)
                self._content(f"{place}.keywords", value.keywords, depth, None)
            case dict() | list() | tuple() | set() | frozenset() | deque():
                self._content(place, value, depth, reach)
                if hasattr(value, "__dict__"):
                    self._object(place, value, depth)
            case _ if _is_array_of_numpy(value) and value.nbytes <= _MOST_BYTES:
                self.marks[place] = Mark(f"{value.dtype}{list(value.shape)} {value.tobytes().hex()}")
                self._read(value.tobytes)
            case _:
                self._object(place, value, depth)

    def _module(self, place: str, module: nn.Module) -> None:
        self._seen[id(module)] = place
        self._hold(module)
        at = f"{place}." if place else ""
        of, parts = weakref.ref(module), vars(module)
        self._modules.append(of)
        self._places[place] = of
        self.marks[f"{at}__class__"] = mark_of(type(module))
        self._class(type(module))
        for name, value in parts.items():
            if name == "training":
                self.marks[f"{at}training"] = Mark(repr(value), is_mode=True)
            elif name not in _OWN:
                self._visit(f"{at}{name}", value, 1, partial(_attribute, of, name))
        for name in _HOOKS:
            if parts[name]:
                self._hooks(f"{at}{name}", parts[name], [parts[flags] for flags in _HOOK_FLAGS])
        for name in _REGISTERED:
            for key, child in parts[name].items():
                if child is None:
                    self.marks[f"{at}{key}"] = Mark("None")
                elif isinstance(child, Tensor):
                    self._hold(child)
                    self._tensor(f"{at}{key}", child, is_state=True)
                elif id(child) in self._seen:
                    self.marks[f"{at}{key}"] = same_as(self._seen[id(child)])
                else:
                    self._module(f"{at}{key}", child)

    def _tensor(self, place: str, tensor: Tensor, *, is_state: bool) -> None:
        self.marks[place] = tensor_mark(tensor, is_state=is_state)
        self.tensors.append(weakref.ref(tensor))

    def _hooks(self, place: str, hooks: Mapping[int, Any], flags: Iterable[Mapping[int, bool]] = ()) -> None:
        for number, (key, hook) in enumerate(hooks.items()):
            self._visit(f"{place}[{number}]", hook, 1)
            self.marks[f"{place}[{number}] flags"] = Mark(str([key in one for one in flags]))

    def _function(self, place: str, function: FunctionType, depth: int) -> None:
        if _is_installed(function):
            self.marks[place] = mark_of(function)
            return
        code = function.__code__
        self._held.append(code)
        self.marks[place] = Mark(f"{function.__qualname__} at {code.co_filename}:{code.co_firstlineno}", lambda: code)
        if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or not place.startswith(_CLASS):
            self._read(partial(_function_read, _weakly(function)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._visit(f"{place}.{name}", _content_of(cell), depth + 1)
        given = function.__defaults__ or ()
        for name, value in zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True):
            self._visit(f"{place}.{name}", value, depth + 1)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._visit(f"{place}.{name}", value, depth + 1)
        for name, value in vars(function).items():
            if not name.startswith("__"):
                self._visit(f"{place}.{name}", value, depth + 1)
        around = function.__globals__
        names = [one for one in code.co_names if one in around and _may_change(around[one])]
        if names:
            self._read(partial(_globals_read, around, names))
            for name in names:
                self._visit(f"{function.__module__}.{name}", around[name], depth + 1)

    def _class(self, kind: type) -> None:
        """Visit the attributes of a module's classes outside torch, once."""
        for base in kind.__mro__:
            if id(base) in self._seen or _is_foreign(base.__module__):
                continue
            self._seen[id(base)] = base.__qualname__
            self._hold(base)
            self._read(partial(_class_read, weakref.ref(base)))
            for name, value in vars(base).items():
                if not name.startswith("__") or name == "__call__":
                    self._visit(f"{_CLASS}{base.__qualname__}.{name}", getattr(value, "__func__", value), 2)

    def _content(self, place: str, value: Any, depth: int, reach: Reach | None) -> None:
        self.marks[place] = Mark(f"a {type(value).__qualname__} of {len(value)}")
        if len(value) > _MOST_ITEMS:
            self._read(partial(len, value))
            return
        is_dict = isinstance(value, dict)
        # What has a tensor or a module is not kept by this, if a module has it.
        kept = None if reach is None or all(map(is_plain, value.values() if is_dict else value)) else reach
        self._read(partial(_ids_of_dict if is_dict else _ids_of, kept or (lambda: value)))
        items: Iterable[tuple[Any, Any]] = value.items() if is_dict else enumerate(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        for key, one in items:
            self._held.append(key)
            self._visit(f"{place}[{key!r}]", one, depth + 1, kept and partial(_item, kept, key))

    def _object(self, place: str, value: Any, depth: int) -> None:
        kind = type(value)
        slots = [name for one in kind.__mro__ for name in _slots_of(one)]
        held = getattr(value, "__dict__", None)
        values = [*({} if held is None else held).values(), *(getattr(value, one, None) for one in slots)]
        if _is_foreign(kind.__module__) or not values:
            self.marks.setdefault(place, mark_of(value))
            return
        self.marks.setdefault(place, Mark(f"a {kind.__qualname__}"))
        of = _weakly(value)
        if held is not None:
            self._read(partial(_object_read, of))
        if slots:
            self._read(partial(_slots_read, of, slots))
        for name, one in {**(held or {}), **{name: getattr(value, name, None) for name in slots}}.items():
            self._visit(f"{place}.{name}", one, depth + 1)


def _ids_of(reach: Reach) -> tuple[int, ...]:
    return tuple(map(id, reach()))


def _ids_of_values(values: Mapping[Any, object]) -> tuple[int, ...]:
    return tuple(map(id, values.values()))


def _ids_of_dict(reach: Reach) -> tuple[tuple[int, ...], tuple[int, ...]]:
    values = reach()
    return tuple(map(id, values)), tuple(map(id, values.values()))


def _attribute(of: Reach, name: str) -> Any:
    return vars(of())[name]


def _item(of: Reach, key: Any) -> Any:
    values = of()
    return values[key] if not isinstance(values, set | frozenset) else next(one for at, one in enumerate(values) if at == key)


def _modules_read(modules: Iterable[weakref.ref[nn.Module]]) -> tuple[int, ...]:
    """Return the identities of all values of all modules, and of what they register and hook."""
    own = [_dicts_of(one()) for one in modules]
    registered = chain.from_iterable(map(_registered_of, own))
    hooks = filter(None, chain.from_iterable(map(_hooks_of, own)))
    return tuple(map(id, chain.from_iterable(map(dict.values, chain(own, registered, hooks)))))


def _tensors_read(tensors: Iterable[weakref.ref[Tensor]]) -> list[Any]:
    return [_flags_of(one()) for one in tensors]


def _function_read(of: Callable[[], Any]) -> tuple[int, ...]:
    function = of()
    parts = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values())
    return tuple(map(id, (function.__code__, *map(_content_of, function.__closure__ or ()), *parts)))


def _globals_read(around: Mapping[str, Any], names: Iterable[str]) -> tuple[int, ...]:
    return tuple([id(around[one]) for one in names])


def _class_read(of: Callable[[], Any]) -> tuple[int, ...]:
    return tuple(map(id, vars(of()).values()))


def _object_read(of: Callable[[], Any]) -> tuple[int, ...]:
    return tuple(map(id, of().__dict__.values()))


def _slots_read(of: Callable[[], Any], names: Iterable[str]) -> tuple[int, ...]:
    one = of()
    return tuple([id(getattr(one, name, None)) for name in names])


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not set yet
        return None


def _slots_of(kind: type) -> list[str]:
    given = vars(kind).get("__slots__", ())
    return [one for one in ([given] if isinstance(given, str) else given) if one not in ("__weakref__", "__dict__")]


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN


def _is_installed(function: FunctionType) -> bool:
    """Return whether a function is a library's, whose own parts no training loop changes."""
    return _is_foreign(function.__module__) or "site-packages" in function.__code__.co_filename


def _is_array_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray" and value.dtype != object


def _is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "item") and type(value).__name__ != "ndarray"


def _may_change(value: object) -> bool:
    """Return whether a global is a value that code computes with, and not a library's function, class or module."""
    if isinstance(value, Tensor | dict | list | set) or is_plain(value):
        return True
    return isinstance(value, FunctionType | partial) and not _is_foreign(value.__module__)
