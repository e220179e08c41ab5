"""Compiling, moving cuts and roles, and looking at timelines over and over leaves nothing behind."""

import pytest
from leaking import RANKS, repeat_all
from processes import run_processes


@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_job_holds_no_more_after_five_rounds_than_after_two() -> None:
    """By rank descriptors, threads and groups, and keys of all ranks."""
    for found in run_processes(repeat_all, RANKS, (2, 5), timeout=800):
        for what, (early, late) in found.items():
            for kind, count in late.items():
                assert count <= early[kind], (what, kind, early, late)
