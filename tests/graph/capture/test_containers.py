"""Batches in containers of the user: followed with their own class, or refused by type. None trains on old rows."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from errors_table import check_documented
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import adaptra
from adaptra.errors import BatchError

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Plain:
    x: Tensor
    name: str = "plain"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


@dataclass
class Outer:
    inner: Frozen
    rest: dict[str, Tensor]


@dataclass
class Computed:
    x: Tensor
    double: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = self.x * 2


class Fields(NamedTuple):
    x: Tensor


class Derived(dict[str, Any]):
    pass


class AttributeDict(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Custom:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Marked(Tensor):
    pass


class Colour(Enum):
    RED = 1
    BLUE = 2


Read = Callable[[Any], Tensor]
TAKEN: dict[str, tuple[Callable[[Tensor], Any], Read]] = {
    "dict": (lambda x: {"x": x}, lambda one: one["x"]),
    "list": (lambda x: [x], lambda one: one[0]),
    "named tuple": (Fields, lambda one: one.x),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda one: one["x"]),
    "deque": (lambda x: deque([x]), lambda one: one[0]),
    "dataclass": (Plain, lambda one: one.x),
    "frozen dataclass with slots": (Frozen, lambda one: one.x),
    "nested dataclasses": (lambda x: Outer(Frozen(x), {"y": x}), lambda one: (one.inner.x + one.rest["y"]) / 2),
    "dataclass with computed field": (Computed, lambda one: one.double / 2),
    "UserDict": (lambda x: UserDict(x=x), lambda one: one["x"]),
    "BatchEncoding": (lambda x: BatchEncoding({"x": x}), lambda one: one.x),
    "ModelOutput": (lambda x: BaseModelOutput(last_hidden_state=x), lambda one: one.last_hidden_state),
    "class derived from dict": (lambda x: Derived(x=x), lambda one: one["x"]),
    "dict with attributes": (lambda x: AttributeDict(x=x), lambda one: one.x),
    "dataclasses in a list in a dict": (lambda x: {"all": [Frozen(x)]}, lambda one: one["all"][0].x),
}

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "custom class": (Custom, r"inputs\[0\] is a .*Custom, whose values could change unseen: expected tensors, in dicts"),
    "SimpleNamespace": (lambda x: SimpleNamespace(x=x), "is a types.SimpleNamespace"),
    "argparse": (lambda x: argparse.Namespace(x=x), "is an argparse.Namespace"),
    "set": (lambda x: {1, 2}, "is a set"),
    "in a dataclass": (lambda x: Plain(x, Custom(x)), r"inputs\[0\].name is a .*Custom"),  # type: ignore[arg-type]
    "numpy": (lambda x: x.numpy(), "is a numpy array: expected tensors"),
    "numpy in a dict": (lambda x: {"x": x.numpy()}, r"inputs\[0\]\['x'\] is a numpy array: expected tensors"),
    "generator": (lambda x: (one for one in [x]), "is a generator: expected one batch of it"),
    "iterator": (lambda x: iter([x]), "expected one batch of it"),
    "DataLoader": (lambda x: DataLoader([x]), "DataLoader: expected one batch of it"),  # type: ignore[arg-type]
    "module": (lambda x: nn.Linear(2, 2), "expected tensors; make a module"),
    "random numbers": (lambda x: torch.Generator(), "torch.*Generator: expected tensors"),
    "packed": (lambda x: pack_sequence(list(x)), "PackedSequence, whose tensors have no rows"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "nested tensor"),
    "sparse": (lambda x: x.to_sparse(), "layout torch.sparse_coo: expected a dense one"),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized tensor"),
    "class derived from Tensor": (lambda x: x.as_subclass(Marked), "Marked, a class derived from Tensor"),
    "list of a number per row": (lambda x: [0.5] * len(x), "a list of 4 values such as 0.5, as many as the batch has rows"),
    "counts": (lambda x: collections.ChainMap({"x": x}), "is a collections.ChainMap"),
}

OF_TENSOR = (
    "… is a …, a class derived from Tensor, whose own rules a graph would leave out: expected a plain tensor; give its "
    "as_subclass(torch.Tensor)"
)


class Model(nn.Module):
    def __init__(self, read: Read, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.read, self.kind = read, kind

    def forward(self, batch: Any) -> Tensor:
        assert type(batch) is self.kind, "the user's own class"
        return self.second(self.first(self.read(batch)).tanh())


def rows(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [*TAKEN, *REFUSED])
def test_a_container_that_the_loop_refills_is_followed_or_refused(kind: str) -> None:
    """As input and as targets, in steps and evaluation: each step's own rows count, or the type is named at compile."""
    if kind in REFUSED:
        make, expected = REFUSED[kind]
        with pytest.raises(BatchError, match=expected) as raised:
            adaptra.compile(
                Model(lambda one: one, Tensor),
                stages=2,
                microbatches=2,
                example_inputs=((make(rows(0)), rows(0)), rows(1)),
                loss=lambda out, _: out.mean(),
            )
        assert "\n" not in str(raised.value)
        if kind == "class derived from Tensor":
            check_documented("BatchError", str(raised.value), OF_TENSOR)
        return
    make, read = TAKEN[kind]
    of = type(make(rows(0)))

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        assert type(targets) is of
        return nn.functional.mse_loss(outputs, read(targets))

    model, plain = Model(read, of), Model(read, of)
    options = adaptra.Options(captured="accept")
    batch = (make(rows(0)),)  # a tuple alone would be several arguments
    with adaptra.compile(
        model, stages=2, microbatches=2, example_inputs=(batch, make(rows(1))), loss=loss, options=options
    ) as pipe:
        with torch.no_grad():
            whole = torch.stack([loss(plain(make(part)), make(part)) for part in rows(7).split(2)]).mean()
        assert torch.equal(pipe.eval_step((make(rows(7)),), make(rows(7))), whole)
        for seed in (2, 4):
            found = pipe.step((make(rows(seed)),), make(rows(seed + 1)))
            halves = [(rows(seed)[part], rows(seed + 1)[part]) for part in (slice(0, 2), slice(2, 4))]
            losses = [loss(plain(make(x)), make(y)) / 2 for x, y in halves]
            for one in losses:
                one.backward()
            assert torch.equal(found, torch.stack(losses).sum())
        for (name, one), (_, other) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name
        if kind in ("nested dataclasses", "BatchEncoding"):
            assert pipe.step((make(rows(0)[:3]),), make(rows(1)[:3])).isfinite(), "a batch of another shape"


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Any = None, batch: Any = None) -> Tensor:
        return self.layer(x).mean()


@pytest.mark.parametrize(
    ("constant", "other"),
    [
        (1, 2),
        (1, True),
        (0.5, [0.5]),
        ("a", "b"),
        (None, 1.0),
        (Colour.RED, Colour.BLUE),
        (torch.float32, torch.float16),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.4]),
        (np.float64(1.0), np.float64(2.0)),
        (torch.sin, torch.cos),
        (Plain(rows(0), "one"), Plain(rows(0), "other")),
        (Plain(rows(0)), Derived(x=rows(0))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # not a place in memory, which differs between workers
)
def test_a_step_with_another_constant_is_refused(constant: Any, other: Any) -> None:
    """Constants are those of the example, also ones within a list that the loop refills."""
    with adaptra.compile(
        WithConstant(), stages=1, microbatches=2, example_inputs=rows(0), example_kwargs={"factor": constant}
    ) as pipe:
        pipe.step(rows(0), factor=constant)
        with pytest.raises(BatchError, match="factor"):
            pipe.step(rows(0), factor=other)
        if isinstance(constant, list):
            constant[0] = 7.0
            with pytest.raises(BatchError, match=r"factor\[0\] is 7.0"):
                pipe.step(rows(0), factor=constant)
        with pytest.raises(BatchError, match="factor is a numpy array"):
            pipe.step(rows(0), factor=np.ones(3))


def test_a_constant_that_is_not_a_number_is_equal_to_itself() -> None:
    nan = float("nan")
    with adaptra.compile(
        WithConstant(), stages=1, microbatches=2, example_inputs=rows(0), example_kwargs={"factor": nan}
    ) as pipe:
        pipe.step(rows(0), factor=float("nan"))


def test_the_door_writes_fields_as_the_user_does() -> None:
    with adaptra.compile(
        WithConstant(),
        stages=1,
        microbatches=2,
        example_inputs=rows(0),
        example_kwargs={"batch": Outer(Frozen(rows(0)), {"y": rows(0)})},
    ) as pipe:
        with pytest.raises(BatchError, match=r"inputs: batch.inner.x is float16\[4, 4\]"):
            pipe.step(rows(0), batch=Outer(Frozen(rows(0).half()), {"y": rows(0)}))
        with pytest.raises(BatchError, match=r"batch.rest\['y'\] is a numpy array"):
            pipe.step(rows(0), batch=Outer(Frozen(rows(0)), {"y": np.ones(3)}))  # type: ignore[dict-item]
