"""Sums over replicas have the bits of the left fold in one process, in any rounds, buckets, dtypes and order of arrival."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_processes
from torch import Tensor
from training import MIXED, adam, call, compiled, loss_of, microbatches_of

from adaptra.graph.ops.random_state import RandomKey, reference_randomness
from adaptra.runtime.data_parallel.collectives.buckets import (
    LEAST_BYTES,
    TensorRange,
    bucket_bytes,
    make_buckets,
    part_of,
)
from adaptra.runtime.data_parallel.collectives.engine import combine
from adaptra.runtime.data_parallel.collectives.rounds import (
    Algorithm,
    TermMessage,
    Value,
    chain,
    check_rounds,
    direct,
)
from adaptra.runtime.data_parallel.collectives.terms import Terms

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
ALGORITHMS = (direct, chain)


def terms_of(replica: int, seed: int, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[Tensor]:
    """One replica's tensors: the second of two is a transposed view."""
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return [one.t().contiguous().t() if one.dim() == 2 else one for one in made]


def left_fold(terms: list[list[Tensor]], mean: bool) -> list[Tensor]:
    """The expression, in plain torch on whole tensors; complex numbers as pairs."""
    found = []
    for column in zip(*terms, strict=True):
        total = column[0].clone()
        for term in column[1:]:
            total = total + term
        if mean:
            total = torch.view_as_complex(torch.view_as_real(total) / len(terms)) if total.is_complex() else total / len(terms)
        found.append(total)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@st.composite
def cases(draw: Any) -> tuple[int, list[tuple[int, ...]], list[torch.dtype], int, bool, int]:
    count = draw(st.integers(1, 5))
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=count, max_size=count))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count))
    return draw(st.integers(1, 8)), shapes, dtypes, draw(st.integers(64, 600)), draw(st.booleans()), draw(st.integers(0, 999))


@given(cases(), st.sampled_from(ALGORITHMS))
@settings(max_examples=40, deadline=None)
def test_any_order_of_arrival_gives_the_left_fold(case: tuple[Any, ...], algorithm: Algorithm) -> None:
    replicas, shapes, dtypes, limit, mean, seed = case
    given_terms = [terms_of(replica, seed, shapes, dtypes) for replica in range(replicas)]
    expected = left_fold(given_terms, mean)
    real = [[torch.view_as_real(one) if one.is_complex() else one for one in mine] for mine in given_terms]
    buckets = make_buckets([(one.numel(), one.element_size(), one.dtype) for one in real[0]], limit)
    ranks = [Terms(mine, buckets, replicas, rank, mean) for rank, mine in enumerate(real)]
    waiting = [one for one in algorithm(replicas, len(buckets) * replicas, None) if ranks[0].size(one.value.part)]
    order = random.Random(seed)
    # Each message leaves as soon as its source can make it; which of these is next is drawn. A copy is sent, as by a wire.
    while waiting:
        possible = [one for one in waiting if ranks[one.source].has(one.value)]
        assert possible, f"nobody can send: {waiting}"
        message = order.choice(possible)
        waiting.remove(message)
        sent = ranks[message.source].value(message.value).clone()
        arrived = ranks[message.destination].place(message.value)
        arrived.copy_(sent)
        ranks[message.destination].arrived(message.value, arrived)
    for rank in ranks:
        for bucket in range(len(buckets)):
            rank.end_bucket(bucket)
    for mine in given_terms:
        assert all(same_bits(one, other) for one, other in zip(mine, expected, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("replicas", range(2, 10))
def test_rounds_are_possible_and_complete(algorithm: Algorithm, replicas: int) -> None:
    for buckets in (1, 2, 5):
        parts = buckets * replicas
        messages = list(algorithm(replicas, parts, None))
        check_rounds(messages, replicas, parts)
        length = 1 + max(one.round for one in messages)
        pace = min(replicas - 1, 2)
        assert length == (2 * buckets * (replicas - 1) if algorithm is direct else pace * parts + 2 * replicas - 3)
        for rank in range(replicas):
            own = [one for one in messages if rank in (one.source, one.destination)]
            assert sorted(algorithm(replicas, parts, rank), key=str) == sorted(own, key=str)
        with pytest.raises(ValueError, match=r"in the end|can have by then"):
            check_rounds(messages[:-1], replicas, parts)


def test_rounds_that_are_impossible_are_named() -> None:
    whole = Value(0, 0, 3)
    with pytest.raises(ValueError, match="can have by then"):  # the term of replica 1 is not there
        check_rounds([TermMessage(0, 0, 2, whole)], 3, 1)
    with pytest.raises(ValueError, match="can have by then"):  # a fold begins with the first term
        check_rounds([TermMessage(0, 1, 2, Value(0, 1, 2)), TermMessage(1, 2, 0, Value(0, 1, 3))], 3, 1)
    with pytest.raises(ValueError, match="round 0: expected each replica"):
        check_rounds([TermMessage(0, 0, 2, Value(0, 0, 1)), TermMessage(0, 1, 2, Value(0, 1, 2))], 3, 1)


def test_buckets_are_cut_at_tensors_and_follow_the_rule() -> None:
    assert make_buckets([(10, 4, "a"), (5, 4, "a"), (1, 4, "a"), (2, 2, "b"), (40, 4, "a")], 64) == [
        (TensorRange(0, 0, 10), TensorRange(1, 0, 5), TensorRange(2, 0, 1)),
        (TensorRange(3, 0, 2),),
        (TensorRange(4, 0, 16),),
        (TensorRange(4, 16, 32),),
        (TensorRange(4, 32, 40),),
    ]
    assert bucket_bytes(100, 2) == LEAST_BYTES
    assert bucket_bytes(2**30, 8, 50e-6, 12.5e9) == pytest.approx(73e6, rel=0.01)
    assert [part_of(5, 3, one) for one in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 5)]


def sum_in_processes(rank: int) -> list[str]:
    """Ranks of a group of 2, 3 and 4, each with every algorithm."""
    dist.init_process_group("gloo")
    wrong: list[str] = []
    shapes: list[tuple[int, ...]] = [(3,), (), (70, 50), (200_001,), (0,), (7, 2, 3)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    for replicas in (1, 2, 3, 4):
        group: Any = dist.new_group(list(range(replicas)))
        for algorithm in ALGORITHMS:
            for limit in (None, 4096):
                if rank < replicas:
                    mine = terms_of(rank, replicas, shapes, dtypes)
                    combine(mine, group, mean=True, algorithm=algorithm, limit=limit)
                    expected = left_fold([terms_of(one, replicas, shapes, dtypes) for one in range(replicas)], mean=True)
                    where = f"{replicas} replicas, {algorithm.__name__}, {limit}"
                    wrong += [
                        f"{where}: tensor {index}"
                        for index, (one, other) in enumerate(zip(mine, expected, strict=True))
                        if not same_bits(one, other)
                    ]
        dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.processes
def test_processes_get_the_left_fold() -> None:
    assert run_processes(sum_in_processes, 4) == [[]] * 4


ROWS, STEPS, MICROBATCHES, REPLICAS = 4, 2, 2, 3


def train_three(rank: int) -> list[dict[str, Any]]:
    """Losses, gradients and parameters of the steps of one of three replicas."""
    dist.init_process_group("gloo")
    found: list[dict[str, Any]] = []
    with compiled(MIXED, MIXED.rows(ROWS, 0), stages=1, microbatches=MICROBATCHES) as pipe:
        assert (pipe.replicas, pipe.replica) == (REPLICAS, rank)
        optimizer = adam(pipe.parameters())
        for step in range(STEPS):
            args, kwargs = call(microbatches_of(MIXED.rows(REPLICAS * ROWS, step), REPLICAS)[rank])
            pipe.step(*args, **kwargs)
            left = what_is_left(pipe.microbatch_losses, pipe, optimizer)
            found.append({name: one.numpy() for name, one in left.items()})
    return found


def what_is_left(losses: Tensor, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Losses, gradients and then parameters of a step that the optimizer ends here."""
    found = {f"gradient of {name}": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return found | {name: one.detach().clone() for name, one in model.named_parameters()} | {"losses": losses.clone()}


def train_alone() -> list[dict[str, Tensor]]:
    """The same in one process: replicas one after the other, and the left fold of what they give."""
    model = MIXED.make()
    optimizer = adam(model.parameters())
    found: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        gradients: list[list[Tensor]] = []
        losses: list[Tensor] = []
        for replica, part in enumerate(microbatches_of(MIXED.rows(REPLICAS * ROWS, step), REPLICAS)):
            optimizer.zero_grad()
            own: list[Tensor] = []
            for k, microbatch in enumerate(microbatches_of(part, MICROBATCHES)):
                with reference_randomness(RandomKey(0, step, replica * MICROBATCHES + k)):
                    loss = loss_of(MIXED, model, microbatch)
                (loss / MICROBATCHES).backward()
                own.append(loss.detach())
            gradients.append([one.grad for one in model.parameters() if one.grad is not None])
            losses.append(torch.stack(own))
        for parameter, mean in zip(model.parameters(), left_fold(gradients, mean=True), strict=True):
            parameter.grad = mean
        (mean_losses,) = left_fold([[one] for one in losses], mean=True)
        found.append(what_is_left(mean_losses, model, optimizer))
    return found


@pytest.mark.processes
def test_three_replicas_train_bitwise_as_one_process_does(one_thread: None) -> None:
    alone = train_alone()
    for steps in run_processes(train_three, REPLICAS):
        for step, expected in zip(steps, alone, strict=True):
            assert step.keys() == expected.keys()
            assert [name for name, one in expected.items() if not same_bits(torch.from_numpy(step[name]), one)] == []
