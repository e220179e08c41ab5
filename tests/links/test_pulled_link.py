"""The links of a host fall silent in a step of a job that survives: the others go on, and it is fenced."""

from __future__ import annotations

import pytest
from errors_table import check_documented
from linked_hosts import LinkedHosts
from pulled_link import CUT_OFF, HOSTS, goes_on, trainings


@pytest.mark.root
@pytest.mark.timed
def test_a_host_that_is_cut_off_is_left_behind_and_fenced(linked_hosts: type[LinkedHosts]) -> None:
    """Measured by ``bench/cut_off_host.py``. A second of silence before breaks no epoch."""
    with linked_hosts(HOSTS) as hosts:
        undisturbed, pulled = trainings(hosts, 6.0)
    left, fenced = pulled[:CUT_OFF], pulled[CUT_OFF]
    assert [one["digest"] for one in left] == [one["digest"] for one in undisturbed[:CUT_OFF]]
    assert [one["epochs"] for one in left] == [1] * CUT_OFF
    kind, _, text = fenced["error"].partition(": ")
    check_documented(kind, text, "rank …: the others went on without it in epoch …")
    *_, silent, back = left[0]["moments"]
    assert goes_on(left, silent) - silent < 10
    assert 0 < fenced["ended"] - back < 2, "TCP alone takes longer"
