"""The rows of all replicas, on every rank: which are a data set's, and what the model returned for them."""

# transformers' functions are loosely typed.
# pyright: basic

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from adaptra.errors import OptionError
from adaptra.frontend.api import Pipeline
from adaptra.runtime.control_store.schema import decode, encode
from adaptra.runtime.exchange.tensor_memory import TensorForm
from adaptra.runtime.worker.stages.loss_reduction import NO_LABEL

NOWHERE: Final = torch.empty(0)
"""Stands for what the rank of a replica's last stage has, on its other ranks."""

_LABELS: Final = ("labels", "shift_labels")


MULTIPLE: Final = 8
"""The number to whose multiples lengths are padded, so that batches have few shapes."""


def padding_to_few_sizes(collator: Any) -> Any:
    """Return a collator of transformers that pads to multiples of a number, if the user gave none. Others stay as they are."""
    if getattr(collator, "pad_to_multiple_of", MULTIPLE) is not None or getattr(collator, "padding", True) == "max_length":
        return collator
    made = copy.copy(collator)
    made.pad_to_multiple_of = MULTIPLE
    return made


class ReplicaRows:
    """The rows of a pipeline's replicas.

    Args:
        pipe: The pipeline.
        device: Where gathered tensors go.
    """

    def __init__(self, pipe: Pipeline, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device

    def counted_once(self, batch: dict[str, Any], real: int) -> dict[str, Any]:
        """Return a batch without the labels of its repeated rows.

        Each replica has as many rows as the others, so the data set's first rows fill up the last batch.

        Args:
            batch: The rows of this replica.
            real: The number of rows of all replicas that are not repeated.
        """
        counted = dict(batch)
        for name in _LABELS:
            if (labels := batch.get(name)) is not None:
                rows = labels.shape[0]
                counted[name] = labels.clone()
                counted[name][max(0, real - rows * self._pipe.replica) :] = NO_LABEL
        return counted

    def gather(self, nested: Any) -> Any:
        """Return tensors of all replicas, joined in the order of replicas. All ranks call this and get the same.

        Args:
            nested: A tensor, or tuples of them. Only what the ranks of last stages give counts.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return nested
        from transformers.trainer_pt_utils import nested_concat

        joined, *others = [self._from(rank, nested) for rank in self._sources()]
        for one in others:
            joined = nested_concat(joined, one, padding_index=NO_LABEL)
        return joined

    def _sources(self) -> list[int]:
        """Return the rank of each replica's last stage."""
        placement = self._pipe.plan.case.placement
        ranks = len(set(placement))
        return [self._pipe.workers[replica * ranks + placement[-1]] for replica in range(self._pipe.replicas)]

    def _from(self, rank: int, nested: Any) -> Any:
        """Return what one rank gives."""
        tensors: list[Tensor] = []
        text = b""
        if rank == dist.get_rank():
            structure = structure_of(nested, tensors)
            text = encode({"structure": structure, "tensors": [TensorForm.dense(one).told() for one in tensors]}).encode()
        length = self._sent(rank, torch.tensor([len(text)]))
        told = self._sent(rank, torch.tensor(list(text) or [0] * int(length.item()), dtype=torch.uint8))
        fields = decode(bytes(told.tolist()), f"rows of rank {rank}")
        forms = [TensorForm.read(fields, "tensors", one) for one in fields.items("tensors")]
        here = tensors or [torch.empty(form.shape, dtype=form.dtype) for form in forms]
        return built(fields.raw("structure"), [self._sent(rank, one) for one in here])

    def _sent(self, rank: int, tensor: Tensor) -> Tensor:
        there = tensor.detach().to(self._device).contiguous()
        dist.broadcast(there, rank)
        return there


def structure_of(nested: Any, tensors: list[Tensor]) -> Any:
    """Return the places of tensors in nested tuples, and append the tensors to a list.

    Raises:
        OptionError: Something else is among them.
    """
    if isinstance(nested, Tensor):
        tensors.append(nested)
        return len(tensors) - 1
    if isinstance(nested, Sequence) and not isinstance(nested, str):
        return [structure_of(one, tensors) for one in nested]
    raise OptionError(
        f"predictions: a {type(nested).__name__}: expected tensors, or tuples of them: name other outputs in ignore_keys="
    )


def built(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return nested tuples of tensors, as :func:`structure_of` got them."""
    if isinstance(structure, int):
        return tensors[structure]
    return tuple(built(one, tensors) for one in structure)
