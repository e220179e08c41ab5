"""Settings of optimizers tell apart what differs, and nothing that is the same in another process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from adaptra.runtime.exchange.optimizer_settings import settings_of


class Bound:
    """Has its address in its text."""

    def norm(self, one: float) -> float:
        return one


class CallableBound(Bound):
    def __call__(self, one: float) -> float:
        return self.norm(one)


def text_of(value: Any) -> str:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups: Any = [{"params": [first], "given": value}, {"params": [second], "lr": 0.2}]
    one, other = settings_of(torch.optim.SGD(groups, lr=0.1))
    assert "params" not in one and one["lr"] == "0.1" and other["lr"] == "0.2"
    return one["given"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.00101), torch.tensor(0.00104)),
        (torch.tensor(1.0), torch.tensor(1)),
        (torch.zeros(2000), torch.cat([torch.zeros(1000), torch.ones(1), torch.zeros(999)])),
        ((torch.tensor(0.90001), 0.999), (torch.tensor(0.90002), 0.999)),
        (1, True),
        (Bound.norm, Bound().norm(0.1)),
        (Bound.norm, text_of),
        (partial(text_of, 1), partial(text_of, 2)),
        ([0.1], (0.1,)),
        ({"a": 1}, {"a": 2}),
        ({"a"}, {"b"}),
        (None, 0),
    ],
)
def test_what_differs_is_told_apart(one: Any, other: Any) -> None:
    assert text_of(one) != text_of(other)


def make() -> Callable[[float], float]:
    return lambda one: one


@pytest.mark.parametrize(
    ("create", "text"),
    [
        (make, f"{__name__}.make.<locals>.<lambda>"),
        (lambda: Bound().norm, f"{__name__}.Bound.norm"),
        (CallableBound, f"{__name__}.CallableBound"),
        (Bound, f"<{__name__}.Bound object>"),
        (lambda: [partial(make(), 2)], f"[partial({__name__}.make.<locals>.<lambda>, (2), {{}})]"),
        (lambda: torch.tensor(0.00101), f"tensor({torch.tensor(0.00101).item()})"),
        (lambda: torch.float32, "torch.float32"),
        (lambda: {"b", "a"}, "set('a', 'b')"),
        (lambda: torch.device("cuda", 1), "cuda"),
    ],
)
def test_what_lies_elsewhere_in_another_process_is_the_same(create: Callable[[], Any], text: str) -> None:
    kept = create()
    assert text_of(kept) == text_of(create()) == text
