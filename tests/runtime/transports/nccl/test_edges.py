"""Which directed edges have a communicator, and the order in which ranks make them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from adaptra.errors import TransportError
from adaptra.program.placement import in_turn, v_shaped
from adaptra.runtime.transports.base import ChannelClass
from adaptra.runtime.transports.nccl.communicator import failure_of
from adaptra.runtime.transports.nccl.edges import Edge, edges_of

FORWARD, BACKWARD = ChannelClass.FORWARD, ChannelClass.BACKWARD


def test_neighbours_of_a_straight_pipeline_have_one_each_way() -> None:
    assert edges_of(in_turn(3), [(0, 1, 2)]) == (
        Edge(0, 1, FORWARD),
        Edge(1, 0, BACKWARD),
        Edge(1, 2, FORWARD),
        Edge(2, 1, BACKWARD),
    )


def test_replicas_have_their_own_and_none_between_them() -> None:
    found = edges_of(in_turn(2), [(0, 1), (2, 3)])
    assert {edge[:2] for edge in found} == {(0, 1), (1, 0), (2, 3), (3, 2)}


@pytest.mark.parametrize(("placement", "count"), [(in_turn(2, 2), 4), (v_shaped(2), 4), (v_shaped(4), 12), (in_turn(4, 2), 8)])
def test_several_stages_on_a_rank_have_all_edges_of_neighbouring_stages(placement: tuple[int, ...], count: int) -> None:
    found = edges_of(placement, [range(max(placement) + 1)])
    assert len(found) == len(set(found)) == count
    for place, after in pairwise(placement):
        assert place == after or {Edge(place, after, FORWARD), Edge(after, place, BACKWARD)} <= set(found)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_a_straight_pipeline_of_any_length_is_connected_in_rounds_of_pairs(ranks: int) -> None:
    """Each rank makes its own in the order that all share. What no rank waits for is made together: four rounds at most."""
    edges, done = edges_of(in_turn(ranks), [range(ranks)]), dict.fromkeys(range(ranks), 0)
    for source, destination, _ in edges:
        done[source] = done[destination] = max(done[source], done[destination]) + 1
    assert max(done.values()) <= 4


class Ended(torch.distributed.Work):
    """A work that has ended as the older or the newer backend tells it."""

    def __init__(self, error: Exception | None, success: bool | None) -> None:
        super().__init__()
        self._error, self._success = error, success

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        if self._success is None:
            raise NotImplementedError
        return self._success

    def exception(self) -> Exception | None:
        return self._error


@pytest.mark.parametrize("success", [None, True])
def test_what_succeeded_has_no_failure(success: bool | None) -> None:
    assert failure_of(Ended(None, success)) is None


@pytest.mark.parametrize("success", [None, False])
def test_what_failed_has_its_own_error(success: bool | None) -> None:
    error = RuntimeError("remote process exited")
    assert failure_of(Ended(error, success)) is error


def test_what_ended_without_success_or_error_is_a_failure() -> None:
    assert isinstance(failure_of(Ended(None, False)), TransportError)
