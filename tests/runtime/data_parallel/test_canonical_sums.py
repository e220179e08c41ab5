"""Sums over replicas have the bits of the left fold in one process, in any rounds, buckets, dtypes and order of arrival."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from adaptra.collectives.algorithms import LATE, AlgorithmWithout, algorithm_of
from adaptra.collectives.buckets import (
    LEAST_BYTES,
    MESSAGE_BYTES,
    Bucket,
    TensorRange,
    best_bucket_bytes,
    bucket_bytes,
    make_buckets,
    make_owned_buckets,
    part_of,
)
from adaptra.collectives.rounds import ALGORITHMS, Algorithm, TermMessage, Value, direct
from adaptra.graph.ops.random_state import RandomKey, reference_randomness
from adaptra.runtime.data_parallel.collectives import terms as terms_module
from adaptra.runtime.data_parallel.collectives.carriers import TransportPosts
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.data_parallel.collectives.fold import fold
from adaptra.runtime.data_parallel.collectives.memory import SpareMemory
from adaptra.runtime.data_parallel.collectives.moves import Moves, SumTurn, take_again
from adaptra.runtime.data_parallel.collectives.sum_layout import layout_of
from adaptra.runtime.data_parallel.collectives.terms import Terms
from adaptra.runtime.transports.process_groups import Members, end_group, new_group
from adaptra.runtime.transports.registry import create_transport
from adaptra.runtime.world.world import WorkerId
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
        wide = torch.float32 if mean and column[0].dtype == torch.float16 else dtype
        total = column[0].to(wide if column[0].dtype in HALVES else None)
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


def with_late_rank(name: str, late: int, replicas: int) -> Algorithm:
    """The algorithm in which one rank is late, for ``swap`` the last, or two neighbours; direct where there are too few.

    Of an even number it is not late: its port is narrow.
    """
    if name in ALGORITHMS or replicas < 3:
        return ALGORITHMS.get(name, direct)
    ranks = {replicas - 1 if name == "swap" else late % replicas}
    if name == "streamed" and late > 3 and replicas > 3:
        ranks.add((late + 1) % replicas)
    without = tuple(sorted(ranks))
    return algorithm_of(name, without, without if late % 2 == 0 else ())


algorithms = st.builds(partial, st.just(with_late_rank), st.sampled_from([*ALGORITHMS, *LATE]), st.integers(0, 7))


Ends = tuple[deque[tuple[TermMessage, Tensor]], deque[tuple[TermMessage, Tensor]]]
"""The begun sends and receives from one rank to another. The first send meets the first receive, as with gloo."""


class Wire:
    """One rank's end of wires that carry nothing by themselves."""

    def __init__(self, rank: int, ends: defaultdict[tuple[int, int], Ends], order: random.Random) -> None:
        self._rank = rank
        self._ends = ends
        self._order = order

    @property
    def has_ended(self) -> bool:
        return self._order.random() < 0.5

    def begin(self, messages: Sequence[tuple[TermMessage, Tensor]]) -> None:
        for message, tensor in messages:
            ends = self._ends[message.source, message.destination]
            ends[message.destination == self._rank].append((message, tensor))

    def next(self) -> tuple[TermMessage, Tensor]:
        raise NotImplementedError  # the test draws what ends


def move_in_any_order(ranks: Sequence[Moves], order: random.Random) -> int:
    """Begin and end messages in a drawn order. A value is read when it arrives, and its sender knows later that it was.

    With luck the messages of one rank, or all senders' knowledge, come behind all else that may happen. At times a rank has
    nothing else to do than to add up. Returns how often one then did.
    """
    late, tells_late = order.choice((None, *range(len(ranks)))), order.random() < 0.5
    ends = defaultdict[tuple[int, int], Ends](lambda: (deque(), deque()))
    wires = [Wire(rank, ends, order) for rank in range(len(ranks))]
    sent: list[tuple[TermMessage, Tensor]] = []
    idle = added = 0
    while any(rank.left for rank in ranks):
        for rank in order.sample(range(len(ranks)), len(ranks)):
            ranks[rank].begin(wires[rank])
            while order.random() < 0.7 and ranks[rank].add_ahead():
                added += 1
        met = [lane for lane, (sends, receives) in ends.items() if sends and receives]
        idle = 0 if met or sent else idle + 1
        assert idle < 100, f"nobody can go on: {[rank.left for rank in ranks]}"
        if met and (not sent or tells_late or order.random() < 0.5):
            lane = order.choice([lane for lane in met if late not in lane] or met)
            (message, value), (expected, place) = (each.popleft() for each in ends[lane])
            assert message == expected
            place.copy_(value)
            ranks[message.destination].handle(message, place)
            sent.append((message, value))
        elif sent:
            message, value = sent.pop(order.randrange(len(sent)))
            ranks[message.source].handle(message, value)
    return added


def check_sum(case: tuple[Any, ...], made: Callable[[int], Algorithm], dtype: torch.dtype | None, *, in_rounds: bool) -> int:
    """Compare a sum, whose messages come in an order that the case draws, with the left fold.

    Returns how often terms were added ahead of others.
    """
    replicas, shapes, dtypes, limit, mean, seed = case
    algorithm = made(replicas)
    given_terms = [terms_of(replica, seed, shapes, dtypes) for replica in range(replicas)]
    expected = left_fold(given_terms, mean, dtype)
    given_terms = [[one.contiguous() for one in mine] for mine in given_terms]
    real = [[torch.view_as_real(one) if one.is_complex() else one for one in mine] for mine in given_terms]
    buckets = make_buckets([(one.numel(), one.element_size(), one.dtype) for one in real[0]], limit)
    ranks: list[Moves] = []
    memories = [SpareMemory() for _ in real]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terms_module, "LEAST_AHEAD_BYTES", 1)
        for rank, mine in enumerate(real):
            terms = Terms(mine.__getitem__, mine, buckets, replicas, rank, mean, memories[rank], dtype)
            messages = [
                message
                for message in algorithm(replicas, len(buckets) * replicas, None)
                if rank in (message.source, message.destination) and terms.size(message.value.part)
            ]
            keeps_round = algorithm.keeps_round if isinstance(algorithm, AlgorithmWithout) else None
            moves = Moves(
                terms,
                messages,
                rank,
                terms.end_bucket,
                in_rounds=in_rounds,
                keeps_round=keeps_round,
                most_sent=1 + seed % 2,
            )
            ranks.append(moves)
        added = move_in_any_order(ranks, random.Random(seed)) if replicas > 1 else 0
    for mine in given_terms:
        assert all(same_bits(one, other) for one, other in zip(mine, expected, strict=True))
    assert not any(memory._taken for memory in memories), "all memory is back"
    return added


@given(cases(), algorithms, st.sampled_from((None, torch.float32)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_order_of_arrival_gives_the_left_fold(
    case: tuple[Any, ...], made: Callable[[int], Algorithm], dtype: torch.dtype | None, in_rounds: bool
) -> None:
    assert check_sum(case, made, dtype, in_rounds=in_rounds) == 0 or not (in_rounds or case[0] < 3)


def two_owners(replicas: int, parts: int, rank: int | None) -> Iterator[TermMessage]:
    """Replicas 0 and 1 both add all terms, and the others have the results of replica 0."""
    for part in range(parts):
        for source, owner in ((source, owner) for source in range(replicas) for owner in (0, 1) if source != owner):
            yield TermMessage(2 * part, source, owner, Value(part, source, source + 1))
        for other in range(2, replicas):
            yield TermMessage(2 * part + 1, 0, other, Value(part, 0, replicas))


@pytest.mark.parametrize("name", [*LATE, "direct", "chain", "two owners", "passed on"])
def test_results_are_made_over_terms_that_nobody_needs_any_more(name: str) -> None:
    others: dict[str, Algorithm] = {**ALGORITHMS, "two owners": two_owners, "passed on": passed_on}
    added = 0
    for seed in range(20):
        dtype = (torch.float32, torch.bfloat16, torch.float64)[seed % 3]
        case = (3 + seed % 5, [(90,), (7,)], [dtype] * 2, 64, seed % 2 == 0, seed)
        made = partial(with_late_rank, name, seed) if name in LATE else lambda _: others[name]
        added += check_sum(case, made, None, in_rounds=False)
    assert added > 20, "where a rank has nothing else to do"


class Script:
    """What brings a rank the terms of others, rank r's being 2**r everywhere, and says when there is nothing else to do.

    Args:
        rank: The rank.
        order: The ranks as their terms arrive.
        busy: How many of them have ended before the rank asks.
    """

    def __init__(self, rank: int, order: Sequence[int], busy: int) -> None:
        self._rank = rank
        self._order = deque(order)
        self._busy = busy
        self._begun: list[tuple[TermMessage, Tensor]] = []
        self.log: list[str] = []

    @property
    def has_ended(self) -> bool:
        return self._busy > 0

    def begin(self, messages: Sequence[tuple[TermMessage, Tensor]]) -> None:
        self._begun += messages

    def next(self) -> tuple[TermMessage, Tensor]:
        """Sends end first, then receives of terms, and then those of results."""
        source = self._order[0] if self._order else -1
        begun = {one[0].source: one for one in reversed(self._begun)}
        message, tensor = found = begun.get(self._rank) or begun.get(source) or self._begun[0]
        self._begun.remove(found)
        if message.source == self._rank:
            return message, tensor
        is_term = message.value.end - message.value.first == 1
        tensor.fill_(2.0**message.source if is_term else 31.0)
        if is_term:
            self._order.popleft()
            self._busy -= 1
            self.log.append(f"term {message.source}")
        return message, tensor


def additions(
    order: Sequence[int],
    patch: pytest.MonkeyPatch,
    *,
    busy: int = 0,
    count: int = 1 << 18,
    of: torch.dtype = torch.float32,
    added_in: torch.dtype | None = None,
) -> tuple[list[str], list[int]]:
    """In which order rank 1 of 5 gets and adds terms, and the places for terms in use behind each addition and in the end.

    That is the same where it takes the turns of another sum again.
    """
    carrier = Script(1, order, busy)

    def recorded(terms: Sequence[Tensor], out: Tensor, divisor: int = 1, dtype: torch.dtype | None = None) -> None:
        fold(terms, out, divisor, dtype)
        carrier.log.append(f"sum {out[0].item():g}")

    patch.setattr(terms_module, "fold", recorded)

    def arrived(
        record: Callable[[Value, Tensor], None], memory: SpareMemory, places: list[int], value: Value, tensor: Tensor
    ) -> None:
        places.append(len(memory._taken))
        record(value, tensor)

    turns: list[SumTurn] | None = None
    found: list[tuple[list[str], list[int]]] = []
    for _ in range(2):
        memory, carrier, places = SpareMemory(), Script(1, order, busy), list[int]()
        own = torch.full((count,), 2.0, dtype=of)
        buckets = make_buckets([(count, own.element_size(), of)], own.nbytes)
        terms = Terms([own].__getitem__, [own], buckets, 5, 1, False, memory, added_in)
        patch.setattr(terms, "arrived", partial(arrived, terms.arrived, memory, places))
        if turns is None:
            turns = Moves(terms, [*direct(5, 5, 1)], 1, terms.end_bucket, in_rounds=False).run(carrier)
        else:
            take_again(turns, terms, 1, terms.end_bucket, carrier)
        assert own.eq(31.0).all()
        found.append((carrier.log, [*places, len(memory._taken), sum(map(len, memory._spare.values()))]))
    assert found[0] == found[1]
    return found[0]


def test_terms_are_added_while_nothing_else_is_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    log, places = additions([3, 0, 2, 4], monkeypatch)
    assert log == ["term 3", "term 0", "term 2", "sum 15", "term 4", "sum 31"]
    # At each term, at the four results, in the end, and how many there were ever: none is taken for a sum.
    assert places == [4, 4, 4, 2, *[2] * 4, 0, 4]
    log, _ = additions([0, 2, 3, 4], monkeypatch, of=torch.bfloat16)
    assert log == ["term 0", "term 2", "sum 7", "term 3", "sum 15", "term 4", "sum 31"]


@pytest.mark.parametrize(
    "how",
    [{"busy": 4}, {"count": 1 << 10}, {"of": torch.bfloat16, "added_in": torch.float32}],
    ids=["something else to do", "small", "the sum takes more memory than a term"],
)
def test_terms_are_added_at_once_elsewhere(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    log, places = additions([3, 0, 2, 4], monkeypatch, **how)
    assert log == ["term 3", "term 0", "term 2", "term 4", "sum 31"]
    assert places == [4, 4, 4, 4, *[4] * 4, 0, 4]


def passed_on(replicas: int, parts: int, rank: int | None) -> Iterator[TermMessage]:
    """Replica 0 adds all terms. It gets those of the third and later ones from the second, and passes on sums of them."""
    for part in range(parts):
        yield TermMessage(4 * part, 1, 0, Value(part, 1, 2))
        for source in range(2, replicas):
            yield TermMessage(4 * part, source, 1, Value(part, source, source + 1))
            yield TermMessage(4 * part + 1, 1, 0, Value(part, source, source + 1))
        yield TermMessage(4 * part + 2, 0, 2, Value(part, 0, 2))
        for other in range(1, replicas):
            yield TermMessage(4 * part + 3, 0, other, Value(part, 0, replicas))


def test_buckets_are_cut_at_tensors() -> None:
    assert make_buckets([(10, 4, "a"), (5, 4, "a"), (1, 4, "a"), (2, 2, "b"), (40, 4, "a")], 64) == [
        Bucket((TensorRange(0, 0, 10), TensorRange(1, 0, 5), TensorRange(2, 0, 1))),
        Bucket((TensorRange(3, 0, 2),)),
        Bucket((TensorRange(4, 0, 16),)),
        Bucket((TensorRange(4, 16, 32),)),
        Bucket((TensorRange(4, 32, 40),)),
    ]
    assert bucket_bytes(8) == 8 * MESSAGE_BYTES
    assert [part_of(5, 3, one) for one in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 5)]


def test_parts_of_owned_buckets_are_what_a_replica_owns() -> None:
    tensors = [(10, 4, "a"), (5, 4, "a"), (3, 4, "a"), (2, 2, "b"), (20, 4, "b")]
    assert make_owned_buckets(tensors, [1, 0, 1, 0, 2], 3, 3 * 40) == [
        Bucket((TensorRange(1, 0, 5), TensorRange(0, 0, 10)), (5, 15, 15)),
        Bucket((TensorRange(2, 0, 3),), (0, 3, 3)),
        Bucket((TensorRange(3, 0, 2), TensorRange(4, 0, 10)), (2, 2, 12)),
        Bucket((TensorRange(4, 10, 20),), (0, 0, 10)),
    ]
    assert Bucket((TensorRange(4, 10, 20),), (0, 0, 10)).parts(3) == [slice(0, 0), slice(0, 0), slice(0, 10)]


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
    """Groups of 1 to 4 ranks, each with every algorithm, and over transports of all ranks."""
    dist.init_process_group("gloo")
    terms_module.LEAST_AHEAD_BYTES = 1  # pyright: ignore[reportAttributeAccessIssue] - a constant elsewhere
    wrong: list[str] = []
    transports = {name: create_transport(name) for name in ("c10d", "delegate")}
    shapes: list[tuple[int, ...]] = [(3,), (), (70, 50), (20_001,), (0,), (7, 2, 3)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    for replicas in (1, 2, 3, 4):
        # The second one begins the messages of a round together, as one of NCCL does.
        groups = [new_group(Members(f"{replicas} {one}", rank, replicas)) for one in range(2)] if rank < replicas else []
        workers = [*map(WorkerId, range(replicas))]
        ways = [
            (index, over, one, limit, dtype)
            for index, over, limit in (
                *((0, None, None), (0, None, 4096), (1, None, 4096)),
                *((0, name, limit) for name in transports for limit in (None, 4096) if replicas > 1),
            )
            for one in (*ALGORITHMS, *(LATE if limit else ()))
            for dtype in (None, torch.float32)
        ]
        for way, (index, over, name, limit, dtype) in enumerate(ways if rank < replicas else []):
            layout_of.cache_clear()  # so that the first sum decides on its turns
            algorithm = with_late_rank(name, 1 if dtype is None else 2, replicas)
            posts = None if over is None else TransportPosts(transports[over], workers, 0)
            slow = Link(0.0, 1.0) if limit else None
            total = GroupSum(groups[index], algorithm=algorithm, limit=limit, dtype=dtype, over=posts, link=slow)
            if total._sends_one != (over == "c10d" and limit is not None):
                wrong.append(f"over {over} messages of {limit} bytes go one by one: {total._sends_one}")
            total._through_host = index == 0
            for seed in range(2):  # the second one uses memory again, and takes the turns of the first where they are the same
                mine = terms_of(rank, seed, shapes, dtypes)
                total.combine_late(mine, mine.__getitem__, mean=True, number=None if over is None else 2 * way + seed)
                expected = left_fold([terms_of(one, seed, shapes, dtypes) for one in range(replicas)], True, dtype)
                wrong += [
                    f"{replicas} replicas, {over}, {name}, {limit}, {dtype}: tensor {index}"
                    for index, (one, other) in enumerate(zip(mine, expected, strict=True))
                    if not same_bits(one, other)
                ]
        for group in groups:
            end_group(group)
        dist.barrier()
    for transport in transports.values():
        transport.close()
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.processes
def test_processes_get_the_left_fold() -> None:
    assert run_processes(sum_in_processes, 4) == [[]] * 4


PAUSE = 1.0


def sum_with_a_late_rank(rank: int, late: int) -> tuple[list[float], list[str]]:
    """When a rank has handled each message of a sum of three buckets, and whose messages they were.

    The late one begins after a pause. Rank 0 has the terms of its last bucket later still.
    """
    dist.init_process_group("gloo")
    group = new_group(Members("late", rank, 4))
    total = GroupSum(group, algorithm=with_late_rank("streamed", late, 4), limit=64)
    engine: Any = Moves
    handle, handled, began = engine.handle, list[tuple[float, str]](), 0.0

    def recorded(moves: Moves, message: TermMessage, tensor: Tensor) -> int | None:
        handled.append((time.monotonic() - began, f"{message.source}>{message.destination}"))
        return handle(moves, message, tensor)

    engine.handle = recorded
    terms = [torch.full((16,), float(rank)) for _ in range(3)]

    def term(number: int) -> Tensor:
        time.sleep(PAUSE if rank == 0 and number == 2 else 0.0)
        return terms[number]

    total.combine([torch.zeros(())], mean=False)  # connected
    dist.barrier()
    handled.clear()
    began = time.monotonic()
    time.sleep(2 * PAUSE if rank == late else 0.0)
    total.combine_late(terms, term, mean=False)
    assert all(one.eq(6.0).all() for one in terms)
    dist.barrier()
    return [seconds for seconds, _ in handled], [who for _, who in handled]


@pytest.mark.processes
def test_nobody_waits_for_a_late_rank_or_late_terms_who_can_do_something_else() -> None:
    late = 3
    for rank, (times, whose) in enumerate(run_processes(sum_with_a_late_rank, 4, late)):
        if rank in (0, late):
            continue
        early = [who for seconds, who in zip(times, whose, strict=True) if seconds < 0.9 * PAUSE]
        before = [who for seconds, who in zip(times, whose, strict=True) if seconds < 1.9 * PAUSE]
        other = 3 - rank
        assert early.count(f"{other}>{rank}") == early.count(f"{rank}>{other}") == 4, (rank, early)
        assert before.count(f"0>{rank}") == 4, (rank, before)


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
    ranks = run_processes(train_replicas, REPLICAS * STAGES)
    compared: set[str] = set()
    for name, expected_steps in alone.items():
        for steps in [rank[name] for rank in ranks]:
            for step, (found, expected) in enumerate(zip(steps, expected_steps, strict=True)):
                compared |= found.keys()
                wrong = [key for key, one in found.items() if not same_bits(torch.from_numpy(one), expected[key].float())]
                assert wrong == [], f"{name}, step {step}"
    assert compared == alone["bfloat16, accumulated"][0].keys()
