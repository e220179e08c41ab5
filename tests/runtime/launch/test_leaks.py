"""Compiling, moving cuts and roles, and looking at timelines over and over leaves nothing behind."""

import pytest
from leaking import RANKS, repeat_all
from processes import run_processes


@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_job_holds_no_more_after_five_rounds_than_after_two() -> None:
    """By rank descriptors, threads and groups, and keys of all ranks. A key more may be one that is just being answered."""
    early_rounds, late_rounds = 2, 5
    for found in run_processes(repeat_all, RANKS, (early_rounds, late_rounds), timeout=800):
        for what, (early, late) in found.items():
            for kind, count in late.items():
                spare = late_rounds - early_rounds - 1 if kind == "keys" else 0  # a leak leaves one a round
                assert count <= early[kind] + spare, (what, kind, early, late)
