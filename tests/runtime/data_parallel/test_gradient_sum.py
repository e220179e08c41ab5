"""The sum of gradients that begins while the last W runs, in processes of real replicas."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor

from adaptra.collectives.buckets import LEAST_BYTES
from adaptra.collectives.rounds import direct
from adaptra.errors import PeerLostError
from adaptra.program.roles import Roles
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.data_parallel.gradient_sum import GradientSum
from adaptra.runtime.launch.launch import HOST
from adaptra.runtime.world.world import WorkerId, World

pytestmark = pytest.mark.processes

RANKS = 3
NAMES = [f"layer {number}" for number in range(9)]
SIZES = [40, 3, 0, 70, 1, 128, 9, 60, 5]
BUCKET = 256
"""Bytes, so that there are several buckets, and a tensor that alone is larger."""


def replicas_of(rank: int) -> Replicas:
    """A job whose pipelines have one stage each."""
    dist.init_process_group("gloo")
    return Replicas(World.of_roles(Roles.initial(RANKS, 1)), WorkerId(rank), "test", HOST)


def gradients_of(rank: int, step: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(size, generator=made) for name, size in zip(NAMES, SIZES, strict=True)}


def sum_of(
    replicas: Replicas, late: Collection[str] = (), *, bucket: int = BUCKET, mean: bool = True
) -> tuple[GradientSum, Accumulators]:
    parameters = {name: torch.zeros(size, requires_grad=True) for name, size in zip(NAMES, SIZES, strict=True)}
    replicas.add_by(direct, limit=bucket, dtype=None)
    sums = Accumulators(parameters)
    return GradientSum(replicas, sums, late, bucket, mean, time.monotonic), sums


def add_in_any_order(rank: int) -> list[str]:
    """In the order of W and in others, with some gradients that nobody announces before the end."""
    chance, late, wrong = random.Random(rank), {NAMES[4]}, list[str]()
    summed, sums = sum_of(replicas_of(rank), late)
    assert summed.overlaps
    for step in range(8):
        sums.begin_step()
        summed.begin_step()
        for name in NAMES[::-1] if step < 2 else chance.sample(NAMES, len(NAMES)):
            sums.put(name, gradients_of(rank, step)[name])
            if name not in late and (step != 3 or chance.random() < 0.5):
                summed.complete(name)
            time.sleep(chance.choice((0.0, 0.002)))
        begun, ended, nbytes = summed.end_step()
        assert begun <= ended and nbytes == 4 * sum(SIZES)
        terms = [gradients_of(one, step) for one in range(RANKS)]
        for name in NAMES:
            expected = sum((one[name] for one in terms[1:]), start=terms[0][name]) / RANKS
            wrong += [] if torch.equal(sums.total(name), expected) else [f"step {step}: {name}"]
    return wrong


def test_gradients_that_come_one_by_one_have_the_bits_of_the_fold() -> None:
    assert run_processes(add_in_any_order, RANKS) == [[]] * RANKS


def add_before_the_last_is_there(rank: int) -> tuple[bool, int]:
    """Whether the first bucket had its sum while the last gradient was missing, and the threads of a sum without buckets."""
    replicas = replicas_of(rank)
    summed, sums = sum_of(replicas, mean=False)
    mine, last = gradients_of(rank, 0), NAMES[-1]
    summed.begin_step()
    for name in NAMES[:0:-1]:
        sums.put(name, mine[name])
        summed.complete(name)
    expected = sum((gradients_of(one, 0)[last] for one in range(1, RANKS)), start=gradients_of(0, 0)[last])
    deadline = time.monotonic() + 30
    while not (is_there := torch.equal(sums.total(last), expected)) and time.monotonic() < deadline:
        time.sleep(0.001)
    sums.put(NAMES[0], mine[NAMES[0]])
    summed.complete(NAMES[0])
    summed.end_step()

    whole, sums = sum_of(replicas, bucket=1 << 20)
    threads = threading.active_count()
    summed.close()
    while threading.active_count() == threads:
        time.sleep(0.001)
    before = threading.active_count()
    sums.begin_step()
    whole.begin_step()
    for name in NAMES:
        sums.put(name, mine[name])
        whole.complete(name)
    whole.end_step()
    return is_there and not whole.overlaps, threading.active_count() - before


def test_the_first_bucket_has_its_sum_before_the_last_gradient_exists() -> None:
    assert run_processes(add_before_the_last_is_there, RANKS) == [(True, 0)] * RANKS


def bucket_of(rank: int) -> list[int]:
    replicas = replicas_of(rank)
    return [replicas.best_bucket(nbytes) for nbytes in (1 << 30, 1 << 10)]


def test_replicas_choose_one_bucket_from_the_links_that_they_measure() -> None:
    chosen = run_processes(bucket_of, RANKS)
    (large, small), *others = chosen
    assert others == [[large, small]] * (RANKS - 1)
    assert small <= large and large >= LEAST_BYTES


def lose_a_replica(rank: int) -> int | str | None:
    """The last rank's step fails after its first gradients."""
    replicas = replicas_of(rank)
    summed, sums = sum_of(replicas)
    summed.begin_step()
    for name in NAMES[::-1]:
        sums.put(name, gradients_of(rank, 0)[name])
        if rank < RANKS - 1 or name == NAMES[-1]:
            summed.complete(name)
    if rank == RANKS - 1:
        summed.close()
        replicas.abort()
        return "left"
    with pytest.raises(PeerLostError) as lost:
        summed.end_step()
    replicas.abort()  # as every rank does that learns of a loss: a third one may wait for this one
    return lost.value.rank


def test_the_end_of_the_step_names_the_replica_that_ended_the_sum() -> None:
    """Or another one that lost it: no rank waits for ever, and none names itself or nobody."""
    *others, last = run_processes(lose_a_replica, RANKS)
    assert last == "left" and all(isinstance(lost, int) and lost != rank for rank, lost in enumerate(others)), others
