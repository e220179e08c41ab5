"""Finding the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from errors_table import check_documented

from adaptra.errors import LaunchError
from adaptra.runtime.launch.first_world import Wanted, first_world
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.launch.launch import launch
from adaptra.runtime.transports.c10d.c10d import C10dTransport

ARGUMENTS = {"stages": "1"}


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
    assert (launched.replicas[0].count, launched.replicas[0].any_has(True), launched.roles) == (1, True, None)


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
    assert f"start {stages} processes, ask" in str(caught.value)


def test_replicas_take_a_launcher_and_a_gpu_of_their_own_under_nccl() -> None:
    with pytest.raises(LaunchError) as alone:
        launch(2, None, ARGUMENTS, 5, wanted=Wanted(roles=3))
    check_documented("LaunchError", str(alone.value), "replicas=…: expected 1 without a launcher; start … to … processes")
    with pytest.raises(LaunchError) as on_one_gpu:
        first_world(2, 3, 2, "nccl")
    row = "transport 'nccl' with … ranks for … workers: expected transport='delegate', as NCCL takes a GPU once"
    check_documented("LaunchError", str(on_one_gpu.value), row)
