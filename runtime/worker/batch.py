"""Batches split into microbatches, with every invalid batch refused first.

Tensors are split along their first dimension; every microbatch gets a tensor without dimensions as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from adaptra.checks import nearest_multiple
from adaptra.errors import BatchError
from adaptra.graph.ops.specs import MessageSpec


def example_microbatch(batch: Any, microbatches: int, what: str) -> Any:
    """Return the first microbatch of a batch: any nest of tuples, lists and dicts with tensors in it.

    Raises:
        BatchError: The tensors' first dimensions differ, or don't divide by the number of microbatches.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves:
        return batch
    rows = leaves[0].shape[0]
    for leaf in leaves:
        if leaf.shape[0] != rows:
            raise BatchError(
                f"{what}: one tensor has {rows} rows, another has shape {tuple(leaf.shape)}: expected all tensors of a batch "
                "to have the same first dimension; keep a tensor without a batch dimension as a buffer of the model"
            )
    if rows == 0:
        raise BatchError(f"{what}: a batch of 0 rows: expected at least one row for each of {microbatches} microbatches")
    if rows % microbatches:
        raise BatchError(
            f"{what}: a batch of {rows} rows does not divide into {microbatches} microbatches: use a batch of "
            f"{nearest_multiple(rows, microbatches)} rows or another number of microbatches"
        )
    return first_rows(batch, rows // microbatches)


def first_rows(batch: Any, rows: int) -> Any:
    """Return the first rows of a batch: any nest of tuples, lists and dicts with tensors in it."""

    def first(leaf: Any) -> Any:
        return leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

    return pytree.tree_map(first, batch)


def rows_of(batch: Any) -> int:
    """Return the rows of a batch: any nest of tuples, lists and dicts with tensors in it. 1 if none has a first dimension."""
    return next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def microbatch_rows(rows: int, microbatches: int) -> tuple[int, ...]:
    """Return the rows of each microbatch of a batch. The first ones have one more if the rows don't divide.

    A batch of fewer rows than microbatches has as many microbatches as rows.
    """
    count = min(rows, microbatches)
    size, more = divmod(rows, count)
    return (size + 1,) * more + (size,) * (count - more)


def rows_of_all(tensors: Sequence[Tensor], labels: Sequence[str]) -> int:
    """Return the rows of a batch's tensors.

    Raises:
        BatchError: They have different numbers of rows, or none.
    """
    named = [(label, one) for label, one in zip(labels, tensors, strict=True) if one.dim() > 0]
    if not named:
        raise BatchError("a batch without a tensor of rows: expected one, whose first dimension splits into microbatches")
    (first, tensor), *_ = named
    for label, other in named:
        if other.shape[0] != tensor.shape[0]:
            raise BatchError(
                f"{first} has {tensor.shape[0]} rows, {label} has {other.shape[0]}: expected all tensors of a batch to have "
                "the same first dimension"
            )
    if tensor.shape[0] == 0:
        raise BatchError(f"{first}: a batch of 0 rows: expected at least one row")
    return tensor.shape[0]


def split_rows(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Split a flat batch into microbatches of these numbers of rows."""
    columns = [tensor.split(list(rows)) if tensor.dim() else [tensor] * len(rows) for tensor in tensors]
    return [tuple(column[microbatch] for column in columns) for microbatch in range(len(rows))]


def split_batch(tensors: Sequence[Tensor], specs: MessageSpec, microbatches: int, what: str) -> list[tuple[Tensor, ...]]:
    """Split a flat batch into microbatches of exactly the shapes that were compiled.

    Args:
        tensors: The batch's tensors, which match their specs except in the first dimension.
        specs: The tensors of one microbatch.
        microbatches: The number of microbatches.
        what: ``inputs`` or ``targets``, for the error.

    Raises:
        BatchError: The batch has another number of rows than the pipeline was compiled for.
    """
    rows = 1
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.shape and tensor.shape[0] != spec.shape[0] * microbatches:
            raise BatchError(
                f"{what}: a batch of {tensor.shape[0]} rows: expected {spec.shape[0] * microbatches}, {microbatches} "
                f"microbatches of the {spec.shape[0]} rows the pipeline was compiled for; for another number "
                "of rows, every rank needs inputs and targets, and a model that adaptra.compile cuts itself"
            )
        rows = spec.shape[0] if spec.shape else rows
    return split_rows(tensors, [rows] * microbatches)


def require_no_gradient(batch: Sequence[Sequence[Tensor]], labels: Sequence[str], what: str) -> None:
    """Refuse a batch for a step if a tensor of it requires a gradient, because it would get none.

    Args:
        batch: The tensors per microbatch; empty on ranks that don't need them.
        labels: The name of each tensor.
        what: ``inputs`` or ``targets``.

    Raises:
        BatchError: Names the tensor.
    """
    for tensors in batch[:1]:
        for label, tensor in zip(labels, tensors, strict=True):
            if tensor.requires_grad:
                raise BatchError(
                    f"{what}: {label} requires a gradient, which a step gives to parameters alone: expected an input without; "
                    "give its detach(), or make it a parameter of the model"
                )
