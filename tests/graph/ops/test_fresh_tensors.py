"""Sums that reuse memory, and gradients that need no copy: which tensors have their memory to themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import adaptra
from adaptra.graph.ops.fake import fake_mode
from adaptra.graph.ops.fresh_tensors import fresh_results, reuse_sums


def traced(function: Callable[..., list[Tensor]], *examples: Tensor) -> fx.GraphModule:
    with fake_mode() as mode:
        return make_fx(function)(*map(mode.from_tensor, examples))


def ops(graph: fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def both_ways(function: Callable[..., list[Tensor]], *examples: Tensor) -> fx.Graph:
    """The graph after :func:`reuse_sums`, which computes what it did before and leaves what it is given."""
    module = traced(function, *examples)
    wanted = module(*examples)
    reuse_sums(module.graph)
    module.recompile()
    given = [one.clone() for one in examples]
    for one, other in zip(module(*given), wanted, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert all(map(torch.equal, given, examples))
    return module.graph


X, Y = torch.randn(4, 4), torch.randn(4, 4)


def test_a_chain_of_sums_uses_the_memory_of_its_first_product() -> None:
    graph = both_ways(lambda x, y: [x @ y + y @ x + x.exp()], X, Y)
    assert ops(graph)["aten.add_.Tensor"] == 2
    assert ops(graph)["aten.add.Tensor"] == 0


def test_the_second_of_two_is_used_where_the_first_is_not_ours() -> None:
    assert ops(both_ways(lambda x, y: [x + x @ y], X, Y))["aten.add_.Tensor"] == 1


def test_a_view_of_a_whole_product_is_as_good() -> None:
    graph = both_ways(lambda x, y: [((x @ y).view(2, 8) + (y @ x).view(2, 8)).sum(0)], X, Y)
    assert ops(graph)["aten.add_.Tensor"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x + y],
        lambda x, y: [(p := x @ y) + y.exp().t(), p],
        lambda x, y: [(p := (x @ y).t()) + x[0], p.t().exp()],
        lambda x, y: [(x @ y)[0] + x[0]],
        lambda x, y: [(p := x @ y) + p],
        lambda x, y: [(x @ y).sum(0).expand(4, 4) + x],
        lambda x, y: [(x @ y).half() + x],
        lambda x, y: [torch.add(x @ y, x, alpha=2)],
    ],
    ids=["given", "returned", "used_later", "a_part", "itself", "expanded", "another_dtype", "scaled"],
)
def test_what_something_else_needs_or_does_not_fit_is_left(function: Any) -> None:
    both_ways(function, X, Y)


@pytest.mark.parametrize(
    ("function", "fresh"),
    [
        (lambda x, y: [x @ y, x.sum(0)], (True, True)),
        (lambda x, y: [p := x @ y, p], (False, False)),
        (lambda x, y: [p := x @ y, p.t()], (False, False)),
        (lambda x, y: [x, y.view(2, 8)], (False, False)),
        (lambda x, y: [(x @ y)[:2], (y @ x).t()], (False, True)),
        (lambda x, y: [x.conj_physical()], (False,)),
        (lambda x, y: list((x @ y).split(2)), (False, False)),
    ],
    ids=["new", "twice", "seen_by_another", "given", "part_and_whole", "maybe_given", "parts"],
)
def test_a_result_is_fresh_that_nothing_else_refers_to(function: Any, fresh: tuple[bool, ...]) -> None:
    assert fresh_results(traced(function, X, Y).graph) == fresh


class TwoBiases(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp() + (self.first + self.second)


def test_gradients_that_are_one_tensor_become_two() -> None:
    model = TwoBiases()
    batch = torch.randn(6, 4), torch.randn(6, 4)
    with adaptra.compile(model, stages=1, microbatches=2, example_inputs=batch, loss=nn.functional.mse_loss) as pipe:
        pipe.step(*batch)
        held = dict(pipe.named_parameters())
        assert held["first"].grad is not None
        assert held["second"].grad is not None
        assert torch.equal(held["first"].grad, held["second"].grad)
        assert held["first"].grad.data_ptr() != held["second"].grad.data_ptr()
        gradients = {name: one.grad.clone() for name, one in held.items() if one.grad is not None}
        pipe.step(*batch)
        assert all(torch.allclose(one.grad, 2 * gradients[name]) for name, one in held.items() if one.grad is not None)
