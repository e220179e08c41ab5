"""Ranks that compare what they computed, and those that failed at it."""

from __future__ import annotations

import threading

from errors_table import check_documented
from hub_ranks import on_all_ranks

from adaptra.errors import LaunchError
from adaptra.runtime.launch.agreement import agree, disagree
from adaptra.runtime.transports.base import Transport
from adaptra.runtime.world.world import Attempt


def test_ranks_that_hold_the_same_facts_agree() -> None:
    assert on_all_ranks(lambda transport: agree(transport, "plan", {"a": [1, "x"]}, 5)) == [None] * 3


def test_ranks_that_differ_are_named_on_all_ranks() -> None:
    for error in on_all_ranks(lambda transport: agree(transport, "plan", {"a": 1, "the ops": transport.rank % 2, "b": 2}, 5)):
        assert isinstance(error, LaunchError)
        assert "plan: rank 1 compiled something else than rank 0: the ops: expected every rank" in str(error)


def test_a_fact_that_one_rank_alone_has_is_named() -> None:
    def run(transport: Transport) -> None:
        agree(transport, "plan", {"a": 1} | ({"module x": 2} if transport.rank == 2 else {}), 5)

    for error in on_all_ranks(run):
        assert isinstance(error, LaunchError) and "rank 2 compiled something else than rank 0: module x:" in str(error)


def test_a_rank_that_fails_instead_is_told_to_the_others() -> None:
    def run(transport: Transport) -> None:
        if transport.rank == 2:
            disagree(transport, "plan", ValueError("no such layer"))
            return
        agree(transport, "plan", {"a": 1}, 5)

    first, second, third = on_all_ranks(run)
    assert third is None
    for error in (first, second):
        assert isinstance(error, LaunchError) and str(error) == "plan: rank 2 failed: ValueError: no such layer"


def test_a_rank_that_does_not_answer_is_named() -> None:
    came = threading.Barrier(2)

    def run(transport: Transport) -> None:
        if transport.rank != 1:
            came.wait()
            agree(transport, "plan", {"a": 1}, 0.2)

    first, _, third = on_all_ranks(run)
    for error in (first, third):
        check_documented(type(error).__name__, str(error), "…: rank … did not answer within … s")
        assert "rank 1 did not answer within 0.2 s" in str(error)


def test_what_an_earlier_attempt_compared_is_not_read_by_a_later_one() -> None:
    def run(transport: Transport) -> None:
        agree(transport, "plan", {"a": 1}, 5)
        transport.begin(Attempt(0, 1))
        agree(transport, "plan", {"a": 1 + transport.rank // 2}, 5)

    for error in on_all_ranks(run):
        assert isinstance(error, LaunchError) and "rank 2 compiled something else than rank 0: a:" in str(error)


def test_comparisons_of_several_names_do_not_meet() -> None:
    def run(transport: Transport) -> None:
        agree(transport, "first", {"a": 1}, 5)
        agree(transport, "second", {"a": 2}, 5)

    assert on_all_ranks(run) == [None] * 3
