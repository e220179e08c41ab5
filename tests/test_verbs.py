"""The delegate over real verbs: soft-RoCE devices of the lab, see tests/rxe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inside
import pytest
import rdma_bodies as bodies

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(120)]


def call_on_hosts(name: str, hosts: int) -> list[Any]:
    """Call a body of rdma_bodies on every host of the lab."""
    with inside.on_hosts(hosts, getattr(bodies, name), hosts) as processes:
        return [process.result(90) for process in processes]


def test_every_transport_test_holds_over_verbs(in_lab: Callable[..., Any]) -> None:
    assert in_lab(call_on_hosts, "run_matrix", 2, timeout=110.0) == [{}, {}]
