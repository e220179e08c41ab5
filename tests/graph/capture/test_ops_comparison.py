"""The ops that stages run are compared with those of eager torch, and where they differ it is said.

That they don't, for every architecture, is tested with what these compute, in ``tests/end_to_end/test_architectures.py``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES, Batch, Example, generator, square_loss
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training import compiled

import adaptra
from adaptra.errors import CaptureError, OptionError
from adaptra.graph.capture.batch import InputFormat, TargetFormat
from adaptra.graph.capture.capture import list_eager_ops, state_names
from adaptra.graph.capture.op_signature import Signature, is_set_aside, signatures
from adaptra.graph.compile import compile_stages

DOCUMENTED = {
    "differ": "the captured stages run other ops than eager torch: …",
    "option": "captured=…: expected 'warn', 'error' or 'accept'",
}


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_stages_run_the_ops_of_eager_torch(name: str, stages: int) -> None:
    """Also with tied and frozen parameters, changes in place, buffers and random numbers."""
    example = EXAMPLES[name]
    args, kwargs, targets = example.rows(3, 0)
    made = compile_stages(example.make(), args, kwargs, stages=stages, loss=example.loss, targets=targets, compare=True)
    assert made.difference is None, str(made.difference)


class Listing(TorchDispatchMode):
    """The ops that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Signature] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if not is_set_aside(func):
            self.found.update(signatures(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt_tied", "gpt_dropout", "resnet", "frozen_upstream"])
def test_what_is_listed_of_eager_torch_is_what_it_runs(name: str) -> None:
    example = EXAMPLES[name]
    model, (args, kwargs, targets) = example.make(), example.rows(3, 0)
    assert example.loss is not None
    with Listing() as real:
        loss = example.loss(model(*args, **kwargs), targets)
        torch.autograd.grad(loss, [one for one in model.parameters() if one.requires_grad], torch.ones(()), allow_unused=True)
    form, target_form = InputFormat(model, args, kwargs), TargetFormat(targets)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    listed = list_eager_ops(
        model,
        tuple(form.flatten(args, kwargs)),
        form,
        tuple(target_form.flatten(targets)),
        target_form,
        example.loss,
        names=state_names(model),
    )
    found = Counter(one.signature for one in listed)
    assert found and not found - real.found, found - real.found
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before


class Masked(nn.Module):
    """Looks at a mask where it may, as libraries do, and leaves it out if nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not isinstance(mask, FakeTensor) and bool((mask == 1).all()):
            return torch.tanh(self.layer(x))
        return torch.sigmoid(self.layer(x)) * mask


def masked(rows: int, seed: int) -> Batch:
    drawn = torch.randn(2, rows, 4, generator=generator(seed))
    return (drawn[0], torch.ones(rows, 4)), {}, drawn[1]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, mask)


def test_a_difference_is_warned_of_explained_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    example = Example("masked", Whole, masked, square_loss)
    lines = open(__file__).read().splitlines()  # noqa: SIM115, PTH123 - closed at once, read only
    number = next(index for index, line in enumerate(lines, 1) if "return torch.tanh(self.layer(x))" in line)
    said = (
        f"the captured stages run other ops than eager torch: module inner (Masked) at {__file__}:{number}: eager torch runs "
        "aten.tanh.default(self=float32[3, 4])"
    )
    with caplog.at_level(logging.WARNING, "adaptra"):
        with compiled(example, masked(6, 0), stages=1, microbatches=2) as pipe:
            assert said in pipe.explain()
        assert [record.message.startswith(said) for record in caplog.records] == [True]
        caplog.clear()
        accepted = adaptra.Options(captured="accept")
        with compiled(example, masked(6, 0), stages=1, microbatches=2, options=accepted) as pipe:
            assert "other ops" not in pipe.explain()
        assert not caplog.records
    with pytest.raises(CaptureError, match=r"module inner \(Masked\) at .*: eager torch runs aten.tanh.default") as caught:
        compiled(example, masked(6, 0), stages=1, microbatches=2, options=adaptra.Options(captured="error")).__enter__()
    check_documented("CaptureError", str(caught.value), DOCUMENTED["differ"])


def test_an_unknown_wish_is_refused() -> None:
    wrong: Any = "ignore"
    with pytest.raises(OptionError, match="captured='ignore': expected 'warn', 'error' or 'accept'") as caught:
        adaptra.Options(captured=wrong)
    check_documented("OptionError", str(caught.value), DOCUMENTED["option"])
