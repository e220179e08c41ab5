"""What must hold on every transport holds over NCCL as well, or is another way by NCCL's nature."""

from __future__ import annotations

from typing import Final

import pytest
import transport_bodies as bodies
from processes import run_processes

from adaptra.runtime.transports.base import Transport

OTHERWISE: Final = {
    "drops_what_is_late": "an attempt has communicators of its own: what was sent in an earlier one never comes",
    "stands_by_for_whatever_comes_next": "a posted receive occupies the device, so a send waits for the receive of its message",
    "refuses_other_shapes": "NCCL compares no sizes: what becomes of a message of another size is not defined",
}
"""Bodies that can't hold, with the reason. Messages of another order or content of the same size are refused all the same."""


def never_gets_what_is_late(transport: Transport) -> None:
    """See :func:`.drops_what_is_late`: nothing arrives that could be dropped."""
    bodies.drops_what_is_late(transport, dropped=0)


BODIES: Final = (*(body for body in bodies.MATRIX if body.__name__ not in OTHERWISE), never_gets_what_is_late)


OVER_GLOO: Final = (bodies.carries_every_dtype, bodies.many_in_flight_both_ways)

Failures = tuple[dict[str, str], dict[str, str]]
"""What went wrong on a rank over NCCL, and over gloo beside it."""


def run_on_devices(rank: int) -> Failures:
    """Run the bodies on a rank's device, where also their tensors are. The job's default group is NCCL's."""
    import torch
    from fake_cuda.made_by_tests import on_the_stand_in

    with on_the_stand_in(rank):
        torch.distributed.init_process_group("nccl")
        device = f"cuda:{rank}"
        return bodies.run_matrix(rank, "nccl", BODIES, device=device), bodies.run_matrix(rank, "c10d", OVER_GLOO, device=device)


@pytest.fixture(scope="module")
def matrix() -> list[Failures]:
    return run_processes(run_on_devices, 2)


@pytest.mark.parametrize("body", [body.__name__ for body in BODIES])
def test_matrix(matrix: list[Failures], body: str) -> None:
    assert not [failures[body] for failures, _ in matrix if body in failures]


def test_c10d_is_gloo_beside_a_job_over_nccl(matrix: list[Failures]) -> None:
    assert not [failures for _, failures in matrix if failures]


def test_what_is_otherwise_is_in_the_matrix() -> None:
    assert {*OTHERWISE} < {body.__name__ for body in bodies.MATRIX}
