"""Plans and the agreement: one plan per step on all ranks, a new one only when all have confirmed it."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from adaptra.errors import BatchError, ControlError
from adaptra.program import Program
from adaptra.program.schedules import gpipe, one_f_one_b
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.control.plans.plan_log import Agreement, Coverage, Entry, Log
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

CASE = Case(CostModel.uniform(2, 0.02, 0.02, 0.01), 4, (0, 1))


def plan(version: int, program: Program | None = None) -> Plan:
    return Plan(version, program or gpipe(2, 4), CASE, 0.3, 0.25, f"reason {version}")


def test_a_plan_survives_the_wire() -> None:
    assert Plan.from_json(plan(3).to_json()) == plan(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "0" * 64}, "plan 3: the program's digest is"),
        ({"program": str(one_f_one_b(2, 4))}, "plan 3: the program's digest is"),
        ({"program": "rm -rf"}, "plan: line 1, column 1: header 'rm -rf'"),
        ({"case": {"S": 2}}, "plan: missing field 'M'"),
        ({"predicted": float("nan")}, "plan: field 'predicted': expected a finite number"),
        ({"more": 1}, "plan: unknown field 'more'"),
    ],
)
def test_a_plan_that_is_not_one_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ControlError) as caught:
        Plan.from_json(plan(3).to_json() | change)
    assert str(caught.value).startswith(message)


def test_a_plan_with_communication_ops_is_refused() -> None:
    lowered = Program.parse("schedule t placement=0,1 microbatches=1\n0: 0F0 0SEND_F0\n1: 1RECV_F0 1F0\n")
    with pytest.raises(ControlError, match="plan 1: expected compute ops only"):
        Plan.from_json(plan(1, lowered).to_json())


def test_all_readers_of_the_log_see_the_same_entries_and_old_ones_are_removed() -> None:
    store = dist.HashStore()
    writer, first, second = Log(store, 4), Log(store, 4), Log(store, 4)
    entries = [Entry(2, 0), Entry(3, 0), Entry(5, 1)]
    assert all(map(writer.append, entries))
    assert list(first.read()) == entries
    assert list(first.read()) == list(writer.read()) == []
    assert list(second.read()) == entries
    assert store.num_keys() == 3
    writer.forget(3)
    assert store.num_keys() == 1
    assert writer.append(Entry(6, 1))
    assert list(first.read()) == list(second.read()) == [Entry(6, 1)]
    # Whoever goes on with the log removes what others wrote.
    first.forget(6)
    assert store.num_keys() == 0


def test_two_ranks_that_append_write_one_log() -> None:
    store = dist.HashStore()
    one, other = Log(store, 4), Log(store, 4)
    assert one.append(Entry(2, 0))
    assert not other.append(Entry(2, 1))
    assert list(other.read()) == [Entry(2, 0)]
    assert other.append(Entry(3, 1))
    assert not one.append(Entry(4, 0))
    # The same entry again is a request whose answer was lost.
    assert one.append(Entry(3, 1))
    assert list(Log(store, 4).read()) == [Entry(2, 0), Entry(3, 1)]


def test_what_is_told_of_the_log_is_taken_once_and_in_order_and_only_what_was_missed_is_read() -> None:
    store = dist.HashStore()
    writer, log = Log(store, 4), Log(store, 4)
    entries = [Entry(2, 0), Entry(3, 0), Entry(5, 1)]
    assert list(log.hear(0, entries[0])) == entries[:1], "the store needn't be asked: it has nothing yet"
    assert list(log.hear(0, entries[0])) == []
    assert all(map(writer.append, entries)) and writer.position == 3
    assert list(log.hear(2, entries[2])) == entries[1:]
    assert list(log.hear(1, entries[1])) == list(log.read()) == []


def test_an_entry_whose_reading_fails_is_not_lost() -> None:
    store = dist.HashStore()
    log = Log(store, 4)
    store.set("log/0", '{"until": 2, "version": 0}')
    store.set("log/1", "")
    found = []
    with pytest.raises(ControlError, match="log entry 1: not JSON"):
        found.extend(log.read())
    store.set("log/1", '{"until": 3, "version": 0}')
    assert [*found, *log.read()] == [Entry(2, 0), Entry(3, 0)]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"until": -1, "version": 0}', '{"until": 1}', '{"until": 1, "version": 0, "x": 0}']
)
def test_a_log_entry_that_is_none_is_refused(text: str) -> None:
    store = dist.HashStore()
    store.set("log/0", text)
    with pytest.raises(ControlError, match="log entry 0: "):
        list(Log(store, 4).read())


def confirm_all(agreement: Agreement, ranks: int, one: Plan) -> None:
    for rank in range(ranks):
        assert agreement.confirm(rank, one.version, one.digest) == (rank == ranks - 1)


def test_nothing_runs_before_all_ranks_hold_the_first_plan() -> None:
    agreement = Agreement(2)
    agreement.propose(plan(0))
    assert agreement.advance() is None
    agreement.confirm(1, 0, plan(0).digest)
    assert (agreement.advance(), agreement.missing) == (None, (0,))
    agreement.confirm(0, 0, plan(0).digest)
    assert agreement.advance() == Entry(2, 0)
    assert agreement.advance() is None


def test_the_log_stays_ahead_of_the_slowest_rank() -> None:
    agreement = Agreement(2, first_step=10, ahead=3)
    agreement.propose(plan(0))
    confirm_all(agreement, 2, plan(0))
    assert agreement.advance() == Entry(13, 0)
    agreement.report(0, 10)
    agreement.report(0, 11)
    assert agreement.advance() is None
    agreement.report(1, 10)
    assert agreement.advance() == Entry(14, 0)
    # What is told twice, or late, changes nothing.
    agreement.report(0, 10)
    agreement.report(1, 10)
    assert agreement.advance() is None
    with pytest.raises(ControlError, match="rank 1 reports step 14: expected one before 14, where the log ends"):
        agreement.report(1, 14)


def test_a_coordinator_goes_on_from_what_another_wrote() -> None:
    agreement = Agreement(2)
    agreement.adopt(5, plan(3))
    assert (agreement.current, agreement.until, agreement.advance()) == (plan(3), 5, None)
    agreement.report(0, 3)
    agreement.report(1, 4)
    assert agreement.advance() == Entry(6, 3)
    # A plan that all have confirmed here outlives an entry that names an earlier one, a proposal does not outlive a later one.
    agreement.propose(plan(4))
    confirm_all(agreement, 2, plan(4))
    agreement.propose(plan(6))
    agreement.adopt(7, plan(3))
    assert (agreement.current, agreement.proposal) == (plan(4), plan(6))
    agreement.adopt(8, plan(7))
    assert (agreement.current, agreement.proposal) == (plan(7), None)


def test_a_rank_with_another_program_is_named() -> None:
    agreement = Agreement(2)
    agreement.propose(plan(0))
    with pytest.raises(ControlError, match=r"rank 1 holds program .* as plan 0: expected"):
        agreement.confirm(1, 0, plan(0, one_f_one_b(2, 4)).digest)


@given(st.lists(st.tuples(st.sampled_from(["report", "confirm", "propose", "withdraw"]), st.integers(0, 2)), max_size=200))
def test_whatever_the_order_of_events_a_version_is_named_only_after_all_have_confirmed_it(
    events: list[tuple[str, int]],
) -> None:
    """Random interleavings of reports, confirmations (late ones too), proposals and withdrawals of three ranks."""
    ranks, version = 3, 0
    agreement = Agreement(ranks)
    agreement.propose(plan(0))
    confirmed: dict[int, set[int]] = {0: set()}
    reported = [-1] * ranks
    entries: list[Entry] = []
    for event, rank in events:
        match event:
            case "report" if reported[rank] + 1 < agreement.until:
                reported[rank] += 1
                agreement.report(rank, reported[rank])
            case "confirm":
                late = max(0, version - rank)
                for one in {late, version}:
                    agreement.confirm(rank, one, plan(one).digest)
                    confirmed[one].add(rank)
            case "propose" if agreement.proposal is None:
                version += 1
                confirmed[version] = set()
                agreement.propose(plan(version))
            case "withdraw" if version > 0:
                agreement.withdraw()
            case _:
                pass
        entry = agreement.advance()
        if entry is not None:
            entries.append(entry)
            assert confirmed[entry.version] == set(range(ranks))
            assert entry.until == min(reported) + 3
    assert [entry.until for entry in entries] == sorted({entry.until for entry in entries})
    assert [entry.version for entry in entries] == sorted(entry.version for entry in entries)


def test_coverage_answers_for_the_steps_it_has_read() -> None:
    coverage = Coverage()
    coverage.extend(2, plan(0))
    coverage.extend(3, plan(0))
    coverage.extend(6, plan(1))
    assert [coverage.plan_for(step).version for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert coverage.wait_for(5, 0.0) and not coverage.wait_for(6, 0.0)
    with pytest.raises(ControlError, match=r"step 6 has no plan: the log covers the steps before 6"):
        coverage.plan_for(6)
    with pytest.raises(ControlError, match="step 1 has no plan: it lies before step 3"):
        coverage.plan_for(1)
    with pytest.raises(ControlError, match="log entry ends at step 6: expected an end after 6"):
        coverage.extend(6, plan(1))


@pytest.mark.parametrize("end", ["extend", "fail"])
def test_a_rank_that_waits_is_woken(end: str) -> None:
    coverage = Coverage()
    found: list[object] = []

    def wait() -> None:
        try:
            assert coverage.wait_for(0, 30.0)
            found.append(coverage.plan_for(0).version)
        except ControlError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    if end == "extend":
        coverage.extend(1, plan(0))
    else:
        coverage.fail(ValueError("no more"))
        coverage.fail(ValueError("never mind"))
    thread.join(100)
    assert found == ([0] if end == "extend" else ["step 0 has no plan: no more"])


def test_ranks_with_other_rows_are_told_by_the_step_that_waits_for_its_plan() -> None:
    """The error keeps its class, as where a step computes when it arrives."""
    coverage = Coverage()
    coverage.fail(BatchError("step 0: rank 1 was given other inputs"))
    with pytest.raises(BatchError, match=r"^step 0: rank 1"):
        coverage.plan_for(0)
