"""Finding the ranks of a pipeline, and what they agree on before anything runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from errors_table import check_documented

from adaptra.errors import LaunchError
from adaptra.runtime.launch.launch import Launch, agree, disagree, gather, launch
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.transports.c10d.c10d import C10dTransport
from adaptra.runtime.transports.local import LocalHub

ARGUMENTS = {"stages": "1"}


def on_all_ranks(run: Callable[[Transport], Any], ranks: int = 3) -> list[Any]:
    """What ``run`` returns or raises on every rank of a hub, by rank."""
    hub = LocalHub(ranks)

    def caught(rank: int) -> Any:
        try:
            return run(hub.transport(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(caught, range(ranks)))


@contextmanager
def process_group() -> Generator[None, None, None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def close(launched: Launch) -> None:
    for transport in launched.transports:
        transport.close()


def test_without_a_launcher_all_ranks_are_threads_of_this_process() -> None:
    launched = launch(3, None, ARGUMENTS, 5)
    assert [(transport.rank, transport.world_size) for transport in launched.transports] == [(0, 3), (1, 3), (2, 3)]
    assert launched.replicas is None


def test_under_a_launcher_a_process_has_one_rank() -> None:
    """However often it is asked, and unless threads are asked for."""
    with process_group():
        for _ in range(2):
            launched = launch(1, None, ARGUMENTS, 5)
            assert [type(transport) for transport in launched.transports] == [C10dTransport]
            close(launched)
        assert len(launch(2, "local", ARGUMENTS, 5).transports) == 2


@pytest.mark.parametrize("stages", [2, 3])
def test_ranks_that_do_not_fit_the_stages_are_refused(stages: int) -> None:
    with process_group(), pytest.raises(LaunchError) as caught:
        launch(stages, None, ARGUMENTS, 5)
    assert f"1 ranks for a pipeline of {stages}: expected a multiple of {stages} ranks" in str(caught.value)
    assert f"start {stages} processes or" in str(caught.value)


def test_ranks_that_hold_the_same_facts_agree() -> None:
    assert on_all_ranks(lambda transport: agree(transport, "plan", {"a": [1, "x"]}, 5)) == [None] * 3


def test_ranks_that_differ_are_named_on_all_ranks() -> None:
    for error in on_all_ranks(lambda transport: agree(transport, "plan", transport.rank % 2, 5)):
        assert isinstance(error, LaunchError) and "plan: rank 1 compiled something else than rank 0" in str(error)


def test_a_rank_that_fails_instead_is_told_to_the_others() -> None:
    def run(transport: Transport) -> None:
        if transport.rank == 2:
            disagree(transport, "plan", ValueError("no such layer"))
            return
        agree(transport, "plan", 1, 5)

    first, second, third = on_all_ranks(run)
    assert third is None
    for error in (first, second):
        assert isinstance(error, LaunchError) and str(error) == "plan: rank 2 failed: ValueError: no such layer"


def test_a_rank_that_does_not_answer_is_named() -> None:
    came = threading.Barrier(2)

    def run(transport: Transport) -> None:
        if transport.rank != 1:
            came.wait()
            agree(transport, "plan", 1, 0.2)

    first, _, third = on_all_ranks(run)
    for error in (first, third):
        check_documented(type(error).__name__, str(error), "…: rank … did not answer within … s")
        assert "rank 1 did not answer within 0.2 s" in str(error)


def test_comparisons_of_several_names_do_not_meet() -> None:
    def run(transport: Transport) -> None:
        agree(transport, "first", 1, 5)
        agree(transport, "second", 2, 5)

    assert on_all_ranks(run) == [None] * 3


def test_gathering_brings_everything_to_the_first_rank() -> None:
    found = on_all_ranks(lambda transport: gather(transport, "ranks", {"rank": transport.rank}, 5))
    assert found == [[{"rank": 0}, {"rank": 1}, {"rank": 2}], None, None]
