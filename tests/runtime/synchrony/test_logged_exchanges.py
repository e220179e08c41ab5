"""What the log of a rank's exchanges gives again, and whose log it has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from errors_table import check_documented

from adaptra.errors import StateError
from adaptra.runtime.synchrony.logged_exchanges import LoggedExchanges
from adaptra.runtime.synchrony.votes import Ballot, Vote

NOT_OURS = (
    "log of exchanges: entry … is of stage … and sites …: expected this rank's pipe.exchange_log, of stages … and with site … "
    "of … in each"
)


def entry(steps: int, stage: int = 0, sites: tuple[int, ...] = (0, 1), last: tuple[int, ...] = ()) -> dict[str, Any]:
    votes = tuple(Vote(site, 1, 8.0, is_last=site in last) for site in sites)
    return {"steps": steps, "stage": stage, **Ballot(1, votes).to_json()}


def logged(*entries: dict[str, Any], stages: range = range(1), steps: int = 0) -> LoggedExchanges:
    return LoggedExchanges(entries, stages, 1, 2, steps)


def test_entries_come_once_in_their_order() -> None:
    log = logged(entry(4), entry(4, 1), entry(5, 1, last=(0, 1)), stages=range(2))
    assert [log.in_step(steps) for steps in range(4)] == [[]] * 4
    assert [stage for stage, _ in log.in_step(4)] == [0, 1]
    assert log.in_step(4) == []
    log.check_exchange(5)
    assert log.in_exchange(5)[0] == 1
    assert (log.in_step(5), log.end) == ([], 5)


def test_a_log_without_exchanges_ends_where_it_begins() -> None:
    assert logged(steps=7).end == 7


REFUSED: list[tuple[str, Callable[[], object]]] = [
    (NOT_OURS, lambda: logged(entry(4, 1))),
    (NOT_OURS, lambda: logged(entry(4, sites=(0,)))),
    (NOT_OURS, lambda: logged(entry(4, sites=(1, 2)))),
    ("a step after … steps: the log that is replayed has none there", lambda: logged(entry(4, last=(1,))).in_step(4)),
    ("exchange() after … steps: the log that is replayed has none there", lambda: logged(entry(4, last=(0,))).in_exchange(4)),
    ("exchange() after … steps: the log that is replayed has none there", lambda: logged(entry(4)).check_exchange(5)),
]


@pytest.mark.parametrize(("row", "call"), REFUSED)
def test_what_a_log_does_not_have_is_refused(row: str, call: Callable[[], object]) -> None:
    with pytest.raises(StateError) as caught:
        call()
    check_documented("StateError", str(caught.value), row)
