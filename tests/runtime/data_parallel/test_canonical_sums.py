"""Sums over replicas have the bits of the left fold in one process, in any rounds, buckets, dtypes and order of arrival."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Batch, Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.nn import functional
from training import adam, call, compiled, loss_of, microbatches_of

import adaptra
from adaptra.collectives.algorithms import sum_schedule
from adaptra.collectives.buckets import (
    LEAST_BYTES,
    MESSAGE_BYTES,
    TensorRange,
    best_bucket_bytes,
    bucket_bytes,
    make_buckets,
    part_of,
)
from adaptra.collectives.rounds import ALGORITHMS, Algorithm, TermMessage, direct
from adaptra.graph.ops.random_state import RandomKey, reference_randomness
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.data_parallel.collectives.memory import SpareMemory
from adaptra.runtime.data_parallel.collectives.terms import Terms
from adaptra.runtime.transports.process_groups import Members, end_group, new_group
from adaptra.simulation.links import Link

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
HALVES = (torch.bfloat16, torch.float16)


def terms_of(replica: int, seed: int, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[Tensor]:
    """One replica's tensors: the second of two is a transposed view."""
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return [one.t().contiguous().t() if one.dim() == 2 else one for one in made]


def left_fold(terms: list[list[Tensor]], mean: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The expression, in plain torch on whole tensors; complex numbers as pairs."""
    found: list[Tensor] = []
    for column in zip(*terms, strict=True):
        total = column[0].to(dtype if column[0].dtype in HALVES else None)
        for term in column[1:]:
            total = total + term
        if mean:
            total = torch.view_as_complex(torch.view_as_real(total) / len(terms)) if total.is_complex() else total / len(terms)
        found.append(total.to(column[0].dtype))
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


def with_late_rank(name: str, late: int) -> Algorithm:
    """The algorithm in which one rank is late; direct where there are too few.

    ``swap`` is not among them: its late rank makes a result, in the memory of its own term, while it still sends that term.
    """

    def algorithm(replicas: int, parts: int, rank: int | None) -> Iterator[TermMessage]:
        if replicas < 3 or not parts:
            return direct(replicas, parts, rank)
        return iter(sum_schedule(name, replicas, parts, (late % replicas,)).messages)

    return algorithm


algorithms = st.sampled_from([*ALGORITHMS.values()]) | st.builds(
    with_late_rank, st.sampled_from(["streamed", "merge"]), st.integers(0, 7)
)


@given(cases(), algorithms, st.sampled_from((None, torch.float32)))
@settings(max_examples=40, deadline=None)
def test_any_order_of_arrival_gives_the_left_fold(
    case: tuple[Any, ...], algorithm: Algorithm, dtype: torch.dtype | None
) -> None:
    replicas, shapes, dtypes, limit, mean, seed = case
    given_terms = [terms_of(replica, seed, shapes, dtypes) for replica in range(replicas)]
    expected = left_fold(given_terms, mean, dtype)
    given_terms = [[one.contiguous() for one in mine] for mine in given_terms]
    real = [[torch.view_as_real(one) if one.is_complex() else one for one in mine] for mine in given_terms]
    buckets = make_buckets([(one.numel(), one.element_size(), one.dtype) for one in real[0]], limit)
    ranks = [
        Terms(mine.__getitem__, mine, buckets, replicas, rank, mean, SpareMemory(), dtype) for rank, mine in enumerate(real)
    ]
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


def test_buckets_are_cut_at_tensors() -> None:
    assert make_buckets([(10, 4, "a"), (5, 4, "a"), (1, 4, "a"), (2, 2, "b"), (40, 4, "a")], 64) == [
        (TensorRange(0, 0, 10), TensorRange(1, 0, 5), TensorRange(2, 0, 1)),
        (TensorRange(3, 0, 2),),
        (TensorRange(4, 0, 16),),
        (TensorRange(4, 16, 32),),
        (TensorRange(4, 32, 40),),
    ]
    assert bucket_bytes(8) == 8 * MESSAGE_BYTES
    assert [part_of(5, 3, one) for one in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 5)]


@pytest.mark.parametrize(("nbytes", "replicas", "latency", "per_byte"), [(1 << 30, 8, 3e-6, 2e-12), (1 << 26, 2, 1e-4, 1e-8)])
def test_the_chosen_bucket_is_the_cheapest(nbytes: int, replicas: int, latency: float, per_byte: float) -> None:
    def seconds(bucket: float) -> float:
        """Of the buckets' rounds: each costs its latency and the time of a part, for one bucket more than there are."""
        return (nbytes / bucket + 1) * (replicas - 1) * (latency + bucket / replicas * per_byte)

    best = best_bucket_bytes(nbytes, replicas, Link(latency, per_byte))
    assert seconds(best) <= min(seconds(best * 1.1**step) for step in range(-20, 20))


def test_buckets_are_no_smaller_than_what_a_processor_handles_well() -> None:
    assert best_bucket_bytes(1 << 20, 2, Link(1e-6, 1e-9)) == LEAST_BYTES
    assert best_bucket_bytes(1 << 20, 2, Link(1e-6, 0.0)) == 1 << 20


def sum_in_processes(rank: int) -> list[str]:
    """Groups of 1 to 4 ranks, each with every algorithm."""
    dist.init_process_group("gloo")
    wrong: list[str] = []
    shapes: list[tuple[int, ...]] = [(3,), (), (70, 50), (20_001,), (0,), (7, 2, 3)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    for replicas in (1, 2, 3, 4):
        # The second one begins the messages of a round together, as one of NCCL does.
        groups = [new_group(Members(f"{replicas} {one}", rank, replicas)) for one in range(2)] if rank < replicas else []
        ways = [
            (index, one, limit, dtype)
            for index, limit in ((0, None), (0, 4096), (1, 4096))
            for one in ALGORITHMS
            for dtype in (None, torch.float32)
        ]
        for index, name, limit, dtype in ways if rank < replicas else []:
            total = GroupSum(groups[index], algorithm=ALGORITHMS[name], limit=limit, dtype=dtype)
            total._through_host = index == 0
            for seed in range(2):  # the second one uses memory again
                mine = terms_of(rank, seed, shapes, dtypes)
                total.combine(mine, mean=True)
                expected = left_fold([terms_of(one, seed, shapes, dtypes) for one in range(replicas)], True, dtype)
                wrong += [
                    f"{replicas} replicas, {name}, {limit}, {dtype}: tensor {index}"
                    for index, (one, other) in enumerate(zip(mine, expected, strict=True))
                    if not same_bits(one, other)
                ]
        for group in groups:
            end_group(group)
        dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.processes
def test_processes_get_the_left_fold() -> None:
    assert run_processes(sum_in_processes, 4) == [[]] * 4


ROWS, STEPS, MICROBATCHES, REPLICAS, STAGES = 4, 2, 2, 3, 2


class Small(nn.Module):
    """A tied weight and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(torch.tanh(self.first(x)), 0.2, self.training)
        return self.last(functional.dropout(torch.tanh(self.middle(hidden)), 0.2, self.training))


def weighted_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the positive targets, and their number."""
    counted = targets > 0
    return ((outputs - targets).square() * counted).sum(), counted.sum()


SMALL = Example("small", Small, vectors(8), square_loss)
WEIGHTED = Example("weighted", Small, vectors(8), weighted_loss)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Variant:
    """What is trained, and how it is added."""

    example: Example = SMALL
    dtype: torch.dtype = torch.float32
    added_in: torch.dtype | None = None
    accumulates: bool = False


VARIANTS = {
    "bfloat16, accumulated": Variant(dtype=torch.bfloat16, accumulates=True),
    "bfloat16 in float32": Variant(dtype=torch.bfloat16, added_in=torch.float32),
    "weighted": Variant(WEIGHTED, accumulates=True),
}


def parts_of(variant: Variant, step: int) -> list[Batch]:
    """The batch of each replica."""
    return microbatches_of(variant.example.rows(REPLICAS * ROWS, step, variant.dtype), REPLICAS)


def train_replicas(rank: int) -> dict[str, list[dict[str, Any]]]:
    """Losses, gradients and parameters of the steps of each variant on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, variant in VARIANTS.items():
        how: dict[str, Any] = {"reduction": "weighted"} if variant.example is WEIGHTED else {}
        how["options"] = adaptra.Options(adapt=False, captured="accept", reduce=adaptra.Reduce(dtype=variant.added_in))
        shape = variant.example.rows(ROWS, 0, variant.dtype)
        with compiled(variant.example, shape, stages=STAGES, microbatches=MICROBATCHES, dtype=variant.dtype, **how) as pipe:
            assert pipe.replicas == REPLICAS
            optimizer = adam(pipe.parameters())
            found[name] = []
            for step in range(STEPS):
                args, kwargs = call(parts_of(variant, step)[pipe.replica])
                pipe.step(*args, **kwargs)
                left = what_is_left(pipe.microbatch_losses, pipe, optimizer, variant, step)
                found[name].append({key: one.float().numpy() for key, one in left.items()})
    return found


def what_is_left(
    losses: Tensor, model: Any, optimizer: torch.optim.Optimizer, variant: Variant, step: int
) -> dict[str, Tensor]:
    """Losses, gradients and then parameters of a step, after which the optimizer may run."""
    found = {f"gradient of {name}": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    if not variant.accumulates or step == STEPS - 1:
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: one.detach().clone() for name, one in model.named_parameters()} | {"losses": losses.clone()}


def train_alone(variant: Variant) -> list[dict[str, Tensor]]:
    """The same in one process: replicas one after the other, and the left fold of what they give."""
    model = variant.example.make(variant.dtype)
    optimizer = adam(model.parameters())
    weighted = variant.example is WEIGHTED
    found: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        before = [None if one.grad is None else one.grad for one in model.parameters()]
        gradients: list[list[Tensor]] = []
        losses: list[Tensor] = []
        for replica, part in enumerate(parts_of(variant, step)):
            for parameter, earlier in zip(model.parameters(), before, strict=True):
                parameter.grad = None if earlier is None or weighted else earlier.clone()
            own: list[Tensor] = []
            for k, microbatch in enumerate(microbatches_of(part, MICROBATCHES)):
                with reference_randomness(RandomKey(0, step, replica * MICROBATCHES + k)):
                    loss: Any = loss_of(variant.example, model, microbatch)
                (loss[0] if weighted else loss / MICROBATCHES).backward()
                own.append(torch.stack(loss).detach() if weighted else loss.detach())
            gradients.append([one.grad for one in model.parameters() if one.grad is not None])
            losses.append(torch.stack(own))
        (all_losses,) = left_fold([[one] for one in losses], not weighted, variant.added_in)
        results = left_fold(gradients, not weighted, variant.added_in)
        for parameter, result, earlier in zip(model.parameters(), results, before, strict=True):
            if weighted:
                result = result / all_losses[:, 1].sum().item()
                result = result if earlier is None else earlier + result
            parameter.grad = result
        found.append(what_is_left(all_losses, model, optimizer, variant, step))
    return found


@pytest.mark.processes
def test_replicas_train_bitwise_as_one_process_does(one_thread: None) -> None:
    alone = {name: train_alone(variant) for name, variant in VARIANTS.items()}
    ranks = run_processes(train_replicas, REPLICAS * STAGES, timeout=220.0)
    compared: set[str] = set()
    for name, expected_steps in alone.items():
        for steps in [rank[name] for rank in ranks]:
            for step, (found, expected) in enumerate(zip(steps, expected_steps, strict=True)):
                compared |= found.keys()
                wrong = [key for key, one in found.items() if not same_bits(torch.from_numpy(one), expected[key].float())]
                assert wrong == [], f"{name}, step {step}"
    assert compared == alone["bfloat16, accumulated"][0].keys()
