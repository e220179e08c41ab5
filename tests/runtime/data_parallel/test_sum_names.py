"""Replicas that don't add alike: each gets an error that names two of them, and none a sum."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import compiled

from adaptra.collectives.algorithms import algorithm_of, sum_messages
from adaptra.collectives.rounds import Algorithm, TermMessage, chain, direct
from adaptra.errors import AdaptraError, TransportError
from adaptra.runtime.data_parallel.collectives.carriers import TransportPosts
from adaptra.runtime.data_parallel.collectives.engine import GroupSum
from adaptra.runtime.data_parallel.collectives.sum_names import name_of
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.process_groups import Members, new_group
from adaptra.runtime.transports.registry import create_transport
from adaptra.runtime.worker.ends import step_end
from adaptra.runtime.world.world import WorkerId

RANKS = 3
OTHER_SUM = "rank … adds …; rank … adds …: expected the same on all replicas of a stage"
SECONDS = 5.0
SILENCE = 10.0
"""After which a delegate gives up a rank that has closed its transport before a channel was open. A job's membership tells."""
LINEAR = Example("linear", lambda: nn.Linear(8, 8), vectors(8), square_loss)


def without_name(late: int) -> Algorithm:
    def algorithm(replicas: int, parts: int, rank: int | None) -> Iterator[TermMessage]:
        return sum_messages("streamed", replicas, parts, (late,))

    return algorithm


def over_all(transport: Transport) -> TransportPosts:
    return TransportPosts(transport, [*map(WorkerId, range(RANKS))], 0)


USUAL: dict[str, Any] = {"algorithm": direct, "limit": 4096, "dtype": None, "sizes": [3000, 5], "mean": True, "number": 7}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "algorithm": ({}, {"algorithm": chain}),
    "late rank": ({"algorithm": algorithm_of("streamed", (0,))}, {"algorithm": algorithm_of("streamed", (2,))}),
    "late or narrow": ({"algorithm": algorithm_of("streamed", (0,))}, {"algorithm": algorithm_of("streamed", (0,), (0,))}),
    "rounds of one name": ({"algorithm": without_name(0)}, {"algorithm": without_name(2)}),
    "someone late": ({}, {"algorithm": algorithm_of("streamed", (2,))}),
    "buckets": ({}, {"limit": 8192}),
    "dtype": ({}, {"dtype": torch.float64}),
    "sizes that make as many bytes": ({}, {"sizes": [5, 3000]}),
    "sum or mean": ({}, {"mean": False}),
    "a sum behind": ({}, {"number": 8}),
}


def differ(rank: int, over: str) -> list[tuple[str, str, float]]:
    """How a sum ends, by case: class and text of the error, and seconds. Rank 1 differs from the others."""
    dist.init_process_group("gloo")
    ends: list[tuple[str, str, float]] = []
    for name, (usual, other) in CASES.items():
        how = {**USUAL, **usual, **(other if rank == 1 else {})}
        group = new_group(Members(name, rank, RANKS))
        transport = create_transport(over)
        how_added = {one: how[one] for one in ("algorithm", "limit", "dtype")}
        total = GroupSum(group, **how_added, ranks=[10, 11, 12], over=over_all(transport))
        terms = [torch.ones(size) for size in how["sizes"]]
        dist.barrier()
        began = time.monotonic()
        try:
            total.combine_late(terms, terms.__getitem__, mean=how["mean"], number=how["number"])
            ends.append(("", "a sum", time.monotonic() - began))
        except RuntimeError as error:
            transport.abort(error)
            ends.append((type(error).__name__, str(error), time.monotonic() - began))
        dist.barrier()
    return ends


def fail_before_a_sum(rank: int) -> str:
    """How a sum ends that rank 1 never begins, which ends the waits of all instead, as a rank does that fails."""
    dist.init_process_group("gloo")
    group, terms, transport = new_group(Members("fails before", rank, RANKS)), [torch.ones(9000)], create_transport("c10d")
    total = GroupSum(group, over=over_all(transport))
    total.combine_late(terms, terms.__getitem__, mean=True, number=1)  # connected
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)  # what rank 0 sends has come
        transport.abort(TransportError("rank 1 fails"))
        time.sleep(0.3)  # gloo ends a process of which it reads what it doesn't expect
        return "it ended the waits"
    try:
        total.combine_late(terms, terms.__getitem__, mean=True, number=2)
    except RuntimeError:
        return "no sum"
    return "a sum"


@pytest.mark.processes
def test_what_nobody_hears_ends_no_process() -> None:
    assert run_processes(fail_before_a_sum, RANKS) == ["no sum", "it ended the waits", "no sum"]


@pytest.mark.processes
@pytest.mark.parametrize(("over", "seconds"), [("c10d", SECONDS), ("delegate", SECONDS + SILENCE)])
def test_replicas_that_add_otherwise_are_named_and_none_has_a_sum(over: str, seconds: float) -> None:
    told = run_processes(differ, RANKS, over)
    for number, case in enumerate(CASES):
        ends = [one[number] for one in told]
        assert all(kind and took < seconds for kind, _, took in ends), f"{case}: {ends}"
        named = [text for kind, text, _ in ends if kind == TransportError.__name__]
        assert named, f"{case}: {ends}"
        for text in named:
            check_documented(TransportError.__name__, text, OTHER_SUM)
            assert "rank 11 adds" in text, case


def train(rank: int) -> tuple[str, str, float]:
    """How a step of a job of three replicas ends where rank 1 takes one algorithm for the other: the error, and its seconds."""
    dist.init_process_group("gloo")
    if rank == 1:
        changed: Any = step_end
        changed.ALGORITHMS = {"direct": chain}
    batch = LINEAR.rows(4, 0)
    with compiled(LINEAR, batch, stages=1, microbatches=2) as pipe:
        (inputs,), _, targets = batch
        began = time.monotonic()
        try:
            pipe.step(inputs, targets)
        except AdaptraError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "", "a sum", 0.0


@pytest.mark.processes
def test_a_step_with_such_a_sum_fails_on_all_ranks() -> None:
    told = run_processes(train, RANKS)
    assert {kind for kind, *_ in told} == {"PeerLostError", "TransportError"}
    for _, text, seconds in told:
        # Rank 1 and the one after it find out, and the first of them tells all.
        assert "rank 1" in text and "2 tensors of 288 bytes by chain" in text and "2 tensors of 288 bytes by direct" in text
        assert seconds < SECONDS


def test_an_algorithm_is_named_with_what_it_was_given() -> None:
    assert name_of(direct) == "direct"
    assert name_of(algorithm_of("streamed", (1, 2), (2,))) == "streamed, 1+2 own nothing, 2 for a narrow port"
