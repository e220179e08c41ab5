"""Reallocation: what shares bring in a case, what detours bring on a job's links, and cases that do not go together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaptra.errors import CaseError
from adaptra.planning.synchrony.case import SynchronyCase
from adaptra.planning.synchrony.clock import draw_times
from adaptra.planning.synchrony.reallocation import reallocation
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import case_from_json

SLOW = SynchronyCase(2, 1000, {0: 2.0}, microbatches=12, exchange=0.5)
JOB = {"P": 2, "S": 2, "M": 8, "t_f": 1, "t_i": 1, "t_w": 1, "c": 0.1}


def job(**fields: object) -> Case:
    return case_from_json(JOB | fields, "j")


def test_shares_save_what_equal_numbers_wait_for() -> None:
    found = reallocation(SLOW, draw_times(SLOW))
    assert found.equal == 2.5 and found.shared == pytest.approx(0.5 + 16 / 12)  # 8 of 24 at double time
    first, second = found.lines()
    assert first == "shares of microbatches: 1.83333 s an update instead of 2.5 (26.7% less)" and "--job FILE" in second
    assert found.to_json()["job"] is None


def test_nothing_slow_gains_nothing() -> None:
    healthy = replace(SLOW, slow={})
    found = reallocation(healthy, draw_times(healthy), job())
    assert found.equal == found.shared and found.job is not None
    data = found.to_json()["job"]
    assert data["refused"] == {"share": "no slow worker", "detour": "no narrow or late link"}


def test_a_narrow_link_is_gone_round_and_a_slow_worker_gives_away() -> None:
    narrow = reallocation(SLOW, draw_times(SLOW), job(links={"0-1": {"c": 4, "o": 3}})).to_json()["job"]
    seconds = {one["kind"]: one["seconds"] for one in narrow["candidates"]}
    assert narrow["choice"] == "detour" and seconds["detour"] < 0.8 * seconds["reorder"] < seconds["keep"]
    slow = reallocation(SLOW, draw_times(SLOW), job(slow={"0.1": 2})).to_json()["job"]
    assert slow["choice"] == "share" and slow["refused"]["detour"] == "no narrow or late link"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (job(P=3), "job j: 3 replicas: expected 2, as in the case of the modes"),
        (job(placement=[[0, 1]]), "job j: placement (0, 0): expected a rank for each stage, for 1F1B"),
        (
            job(lost=["0.1"]),
            "compare_remedies: worker 0.1 is lost: expected workers that live; decide() plans around lost ones",
        ),
    ],
)
def test_a_job_that_does_not_go_with_the_case_is_refused(other: Case, message: str) -> None:
    with pytest.raises(CaseError) as raised:
        reallocation(SLOW, draw_times(SLOW), other)
    assert str(raised.value) == message
