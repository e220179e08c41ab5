"""Which of many failures came first, and the error that names it."""

from __future__ import annotations

import pytest

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.cause import awaited_report, cause_of, failure_error, lost_error, placed
from adaptra.runtime.membership.record import Failure


def failed(ordinal: int, lost: int | None = None) -> Failure:
    return Failure(ordinal, "ValueError: no", lost, None, None)


@pytest.mark.parametrize(
    ("failures", "cause", "awaited"),
    [
        ({3: failed(1)}, 3, None),
        ({3: failed(2), 5: failed(1)}, 5, None),
        # A report of a loss gives way to the lost rank's own, however late that is numbered.
        ({3: failed(1, lost=5)}, 3, 5),
        ({3: failed(1, lost=5), 5: failed(9)}, 5, None),
        # Rank 5 closed its connections because rank 7 is lost.
        ({3: failed(1, lost=5), 5: failed(2, lost=7)}, 5, 7),
        ({3: failed(1, lost=5), 5: failed(2, lost=7), 7: failed(3)}, 7, None),
        # Two ranks report each other.
        ({3: failed(1, lost=5), 5: failed(2, lost=3)}, 5, None),
    ],
)
def test_the_first_failure_or_what_it_reports_is_the_cause(
    failures: dict[int, Failure], cause: int, awaited: int | None
) -> None:
    assert cause_of(failures) == cause
    assert awaited_report(cause, failures) == awaited


def test_the_error_names_the_rank_that_failed_or_is_lost() -> None:
    own = failure_error(3, Failure(1, "ValueError: no", None, (2, 3), "1F3"), reader=0)
    assert (str(own), own.rank, own.edge, own.op) == ("rank 3 failed at 1F3 on edge 2→3: ValueError: no", 3, (2, 3), "1F3")
    reported = failure_error(3, failed(1, lost=5), reader=0)
    assert (str(reported), reported.rank) == ("rank 5 is lost, as rank 3 noticed: ValueError: no", 5)
    assert str(failure_error(3, failed(1, lost=5), reader=5)) == "rank 3 failed: ValueError: no"


def test_an_error_without_an_edge_gets_that_of_the_ranks_own_failure() -> None:
    own = Failure(0, "closed", None, (1, 2), "1SEND_F0")
    found = placed(PeerLostError("rank 1 failed", rank=1), own)
    assert (str(found), found.rank, found.edge) == ("rank 1 failed, noticed at 1SEND_F0 on edge 1→2", 1, (1, 2))
    complete = PeerLostError("rank 1 failed", rank=1, edge=(0, 1))
    assert placed(complete, own) is complete
    bare = lost_error(4, "rank 4 left the job", None)
    assert (str(bare), bare.rank, bare.edge) == ("rank 4 left the job", 4, None)
    assert placed(bare, failed(0)) is bare
