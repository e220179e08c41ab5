"""Finding the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from adaptra.errors import LaunchError
from adaptra.runtime.launch.launch import Launch, launch
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
    assert (launched.replicas.count, launched.replicas.any_has(True), launched.roles) == (1, True, None)


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
