"""The captured structure of a batch. It flattens later batches of the user, or says how they differ from the capture."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adaptra.errors import BatchError, CaptureError
from adaptra.graph.capture.containers import ContainerType, closed, opened_outputs, path_text
from adaptra.graph.ops.specs import MessageSpec, TensorSpec, dtype_name
from adaptra.graph.ops.weighted_loss import WeightedLoss

LossFunction = Callable[[Any, Any], Any]
"""``loss(outputs, targets)`` returns a scalar tensor."""

_OTHER_SIZES: Final = "; for other sizes, every rank needs inputs and targets, and a model that adaptra.compile cuts itself"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One leaf of a captured structure: a tensor's spec and device, or a constant that is part of the graph."""

    label: str
    spec: TensorSpec | None
    constant: Any = None
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class _Shown:
    """A leaf's text in the description of a structure."""

    text: str

    def __repr__(self) -> str:
        return self.text


def beside(value: Tensor, device: torch.device, what: str) -> Tensor:
    """Return a tensor of a batch on the device of the training, to which only what lies on the host is copied.

    Args:
        value: The tensor.
        device: The device. On the meta device there is nothing to copy.
        what: The tensor's name, which begins the error.

    Raises:
        BatchError: It is on another device.
    """
    if value.device == device or "meta" in (device.type, value.device.type):
        return value
    if value.device.type != "cpu":
        raise BatchError(f"{what} is on {value.device}: expected {device}, where the model is, or the host")
    return value.to(device, non_blocking=True)


def all_beside(batch: Any, device: torch.device, what: str) -> Any:
    """Return a batch, any nest of tensors, with each of them as :func:`beside` returns it; itself if all lie there."""
    if all(leaf.device == device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)):
        return batch
    return pytree.tree_map_only(Tensor, lambda leaf: beside(leaf, device, what), batch)


class Structure:
    """A nest of tuples, lists and dicts whose leaves are tensors or constants.

    Args:
        example: The values by argument name, as captured.
        what: ``inputs`` or ``targets``, the first word of every error.
    """

    def __init__(self, example: Mapping[str, Any], what: str) -> None:
        self._what = what
        leaves, self._tree = pytree.tree_flatten_with_path(dict(example))
        self._shape = pytree.tree_map(_shown, dict(example))
        self._leaves = tuple(_leaf(_label(path), value) for path, value in leaves)
        self._is_opened = any(isinstance(leaf.constant, ContainerType) for leaf in self._leaves)

    @property
    def specs(self) -> MessageSpec:
        """The tensors of one microbatch, in flat order."""
        return tuple(leaf.spec for leaf in self._leaves if leaf.spec is not None)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the tensors in the user's call, in flat order."""
        return tuple(leaf.label for leaf in self._leaves if leaf.spec is not None)

    def flatten(self, batch: Mapping[str, Any], *, any_size: bool = False) -> list[Tensor]:
        """Return the tensors of a batch, in flat order.

        Args:
            batch: Values by argument name. Tensors may have any size in their first dimension: a batch is many microbatches.
            any_size: Whether they may have any size in the other dimensions too.

        Raises:
            BatchError: The structure, a dtype, a dimension other than the first, a device, or a constant differs from the
                capture.
        """
        leaves, tree = pytree.tree_flatten_with_path(dict(batch))
        if tree != self._tree:
            raise BatchError(
                f"{self._what}: given {_structure_of(batch)}: expected the structure the "
                f"pipeline was compiled for, {_structure_of(self._shape)}"
            )
        tensors: list[Tensor] = []
        for leaf, (_, value) in zip(self._leaves, leaves, strict=True):
            if leaf.spec is None:
                self._check_constant(leaf, value)
            else:
                tensors.append(self._beside(leaf, self._check_tensor(leaf.label, leaf.spec, value, any_size)))
        return tensors

    def unflatten(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the structure with these tensors and the captured constants, with the user's own containers."""
        remaining = iter(tensors)
        leaves = [leaf.constant if leaf.spec is None else next(remaining) for leaf in self._leaves]
        nest = pytree.tree_unflatten(leaves, self._tree)
        return closed(nest) if self._is_opened else nest

    def _check_constant(self, leaf: _Leaf, value: Any) -> None:
        if not _is_equal(leaf.constant, value):
            shown = _describe(value) if isinstance(value, Tensor) else repr(value)
            raise BatchError(
                f"{self._what}: {leaf.label} is {shown}, but the pipeline was compiled with "
                f"{leaf.label}={leaf.constant!r} as a "
                "constant: pass that value, compile again for this one, or pass a tensor in both places"
            )

    def _beside(self, leaf: _Leaf, value: Tensor) -> Tensor:
        """Return a tensor on the device of the captured one."""
        return value if leaf.device is None else beside(value, leaf.device, f"{self._what}: {leaf.label}")

    def _check_tensor(self, label: str, spec: TensorSpec, value: Any, any_size: bool) -> Tensor:
        if not isinstance(value, Tensor):
            shown = "None" if value is None else _describe(value)
            raise BatchError(f"{self._what}: {label} is {shown}: expected a tensor of {dtype_name(spec.dtype)}")
        is_alike = value.dtype == spec.dtype and value.dim() == len(spec.shape)
        if is_alike and (any_size or tuple(value.shape[1:]) == spec.shape[1:]):
            return value
        sizes = ["any" if any_size else str(one) for one in spec.shape[1:]]
        rows = ", ".join(["batch", *sizes] if spec.shape else [])
        raise BatchError(
            f"{self._what}: {label} is {_describe(value)}: expected {dtype_name(spec.dtype)}[{rows}], as when the "
            f"pipeline was compiled{_OTHER_SIZES if is_alike else ''}"
        )


class InputFormat:
    """The model's inputs as captured: its arguments by name, defaults filled in.

    ``model(x, mask=m)`` and ``model(x, m)`` are the same call, and an argument left out is its default.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._signature = inspect.signature(model.forward)
        self._structure = Structure(self._bind(args, kwargs), "inputs")

    @property
    def specs(self) -> MessageSpec:
        """The tensors of one microbatch, in flat order."""
        return self._structure.specs

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the tensors in the user's call, in flat order."""
        return self._structure.labels

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, any_size: bool = False) -> list[Tensor]:
        """Return the tensors of a call in flat order. The first dimension is not checked, since a batch is many microbatches.

        Raises:
            BatchError: The call is not the one the pipeline was compiled for. The text names the argument and both values.
        """
        return self._structure.flatten(self._bind(args, kwargs), any_size=any_size)

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the model with these tensors in the captured structure."""
        args, kwargs = self.arguments(tensors)
        return model(*args, **kwargs)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call with these tensors in the captured structure."""
        bound = inspect.BoundArguments(self._signature, self._structure.unflatten(tensors))  # type: ignore[arg-type]  # a dict has the order that is asked for
        return bound.args, bound.kwargs

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BatchError(f"inputs: {error}: expected arguments of forward{self._signature}") from None
        bound.apply_defaults()
        return dict(bound.arguments)


class TargetFormat:
    """The loss's targets as captured: any nest of tensors, or nothing."""

    def __init__(self, targets: Any) -> None:
        self._structure = Structure({"targets": targets}, "targets")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the tensors in the user's call, in flat order."""
        return self._structure.labels

    @property
    def specs(self) -> MessageSpec:
        """The tensors of one microbatch, in flat order."""
        return self._structure.specs

    def flatten(self, targets: Any, *, any_size: bool = False) -> list[Tensor]:
        """Return the tensors in flat order. The first dimension is not checked, since a batch is many microbatches.

        Raises:
            BatchError: The targets are not those the pipeline was compiled for.
        """
        return self._structure.flatten({"targets": targets}, any_size=any_size)

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with these tensors."""
        return self._structure.unflatten(tensors)["targets"]


class OutputFormat:
    """The structure of the model's outputs, in training or in evaluation mode."""

    def __init__(self, example: Any) -> None:
        self._dataclass = type(example) if dataclasses.is_dataclass(example) and not isinstance(example, type) else None
        with_paths, self._tree = pytree.tree_flatten_with_path(self._open(example))
        self._constants = tuple(None if isinstance(leaf, Tensor) else (leaf,) for _, leaf in with_paths)
        self.labels: Final = tuple(f"outputs{path_text(path)}" for path, leaf in with_paths if isinstance(leaf, Tensor))

    def is_like(self, other: OutputFormat) -> bool:
        """Return whether two formats return the same structure and the same values that are no tensors."""
        return self._tree == other._tree and repr(self._constants) == repr(other._constants)

    def flatten(self, outputs: Any) -> list[Tensor]:
        """Return the tensors in the model's outputs."""
        return [leaf for leaf in pytree.tree_leaves(self._open(outputs)) if isinstance(leaf, Tensor)]

    def flatten_alike(self, outputs: Any) -> list[Tensor]:
        """Return the tensors in outputs that have this structure, and the same values that are no tensors.

        Raises:
            BatchError: They differ. Merged outputs would contain values of the example then.
        """
        leaves, tree = pytree.tree_flatten(self._open(outputs))
        known = zip(self._constants, leaves, strict=True) if tree == self._tree else ()
        fits = [isinstance(leaf, Tensor) if one is None else _is_equal(one[0], leaf) for one, leaf in known]
        if tree != self._tree or not all(fits):
            raise BatchError(
                f"outputs: the model returned {_structure_of({'outputs': outputs})} with this batch: expected what it "
                "returned with the example, with tensors for values that vary"
            )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the model's outputs with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if constant is None else constant[0] for constant in self._constants]
        tree = pytree.tree_unflatten(leaves, self._tree)
        return closed(tree) if self._dataclass is None else self._dataclass(**closed(tree))

    def _open(self, outputs: Any) -> Any:
        if self._dataclass is None:
            return opened_outputs(outputs)
        return {field.name: opened_outputs(getattr(outputs, field.name)) for field in dataclasses.fields(outputs)}


def _is_equal(value: Any, other: Any) -> bool:
    if type(value) is not type(other) or isinstance(other, Tensor):
        return False
    return value is other or bool(value == other) or repr(value) == repr(other) == "nan"


def loss_of(outputs: Any, loss: LossFunction | None, form: TargetFormat, targets: Sequence[Tensor]) -> Tensor:
    """Return the scalar loss of a model's outputs; for a weighted loss its sum and weight, of shape (2,).

    Raises:
        CaptureError: ``loss`` returns something else, or it is None and the outputs contain no loss.
    """
    if isinstance(loss, WeightedLoss):
        return loss(outputs, form.unflatten(targets))
    if loss is None:
        return find_loss(outputs)
    loss_value = loss(outputs, form.unflatten(targets))
    if not isinstance(loss_value, Tensor) or loss_value.dim() != 0:
        shown = f"shape {tuple(loss_value.shape)}" if isinstance(loss_value, Tensor) else type(loss_value).__name__
        raise CaptureError(f"the loss function returned {shown}: expected a scalar tensor, such as the mean of the losses")
    return loss_value


def find_loss(outputs: Any) -> Tensor:
    """Return the scalar loss in a model's outputs: the outputs themselves, their ``loss``, or their first element.

    Raises:
        CaptureError: There is no loss. The text says what was returned and what is expected.
    """
    candidate = outputs
    if isinstance(outputs, Mapping):
        candidate = outputs.get("loss", next(iter(outputs.values()), None))
    elif not isinstance(outputs, Tensor) and hasattr(outputs, "loss"):
        candidate = outputs.loss
    elif isinstance(outputs, tuple | list) and outputs:
        candidate = outputs[0]
    if isinstance(candidate, Tensor) and candidate.dim() == 0 and candidate.is_floating_point():
        return candidate
    raise CaptureError(
        f"the model returned {_describe(outputs)}: without loss= the model must return a scalar loss, or a dict, tuple or "
        "dataclass whose first element or .loss is the scalar loss; is loss= missing?"
    )


def _leaf(label: str, value: Any) -> _Leaf:
    if isinstance(value, Tensor):
        return _Leaf(label, TensorSpec(tuple(value.shape), value.dtype, False), device=value.device)
    return _Leaf(label, None, value)


def _shown(value: Any) -> _Shown:
    return value if isinstance(value, _Shown) else _Shown("tensor" if isinstance(value, Tensor) else repr(value))


def _structure_of(given: Mapping[str, Any]) -> str:
    """Return a nest by argument name as text, with a word instead of every tensor."""
    shown = pytree.tree_map(_shown, dict(given))
    return ", ".join(f"{name}={value!r}" for name, value in shown.items()) or "nothing"


def _label(path: tuple[Any, ...]) -> str:
    return str(path[0].key) + path_text(path[1:])


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
