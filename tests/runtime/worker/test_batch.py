"""Batches are split into microbatches of the compiled shapes, or refused with what to change."""

from __future__ import annotations

import pytest
import torch

from adaptra.errors import BatchError
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.worker.batch import example_microbatch, split_batch


def test_the_example_is_the_first_microbatch_of_every_tensor() -> None:
    batch = ({"x": torch.arange(6).reshape(6, 1)}, [torch.arange(6), torch.tensor(3.0)], 7)
    nest, (labels, scale), constant = example_microbatch(batch, 3, "example_inputs")
    assert nest["x"].tolist() == [[0], [1]]
    assert labels.tolist() == [0, 1]
    assert scale.item() == 3.0
    assert constant == 7


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    with pytest.raises(BatchError, match=r"example_inputs: a batch of 10 rows .* 4 microbatches: use a batch of 8 rows or"):
        example_microbatch((torch.zeros(10, 2),), 4, "example_inputs")


def test_tensors_of_different_first_dimensions_are_refused() -> None:
    with pytest.raises(BatchError, match=r"one tensor has 4 rows, another has shape \(5, 5\): .* buffer of the model"):
        example_microbatch((torch.zeros(4, 2), torch.zeros(5, 5)), 2, "example_inputs")


def test_a_batch_is_split_in_order_and_scalars_go_to_all() -> None:
    specs = (TensorSpec((2, 1), torch.int64), TensorSpec((), torch.float32))
    parts = split_batch([torch.arange(6).reshape(6, 1), torch.tensor(1.5)], specs, 3, "inputs")
    assert [part[0].flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part[1].item() for part in parts] == [1.5] * 3


def test_a_smaller_last_batch_is_refused() -> None:
    with pytest.raises(
        BatchError, match=r"targets: a batch of 4 rows: expected 6, 3 microbatches of the 2 rows .* every rank needs"
    ):
        split_batch([torch.zeros(4)], (TensorSpec((2,), torch.float32),), 3, "targets")
