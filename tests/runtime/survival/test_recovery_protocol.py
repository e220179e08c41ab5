"""What calls survive, model-checked: every order of events of a few processes, and planted errors that the checker must find.

See :mod:`recovery_model`, which steps the code that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from exploring import ViolationError
from recovery_model import Bounds, Faults, Model, Process, State

from adaptra.runtime.survival import recovery
from adaptra.runtime.survival.epochs import Census, End, Epoch, Progress, decide, follower_of
from adaptra.runtime.survival.recovery import Recovery
from adaptra.runtime.world.world import World

PAIR, TRIPLE = World.of_fewer(2, places=1, replicas=2), World.of_fewer(3, places=1, replicas=3)
"""Worlds that can't lose a process, since each is the last one with its replica's batch."""
HOSTED = World.of_fewer(3, places=2, replicas=2)
"""Two replicas on three processes. It can lose the first process, which decides."""
SQUARE = World.of_fewer(4, places=2, replicas=2)
"""It can lose any process, and then one of the other place and replica."""

RUNS: dict[str, tuple[Bounds, set[str], int]] = {
    "two processes, a break": (Bounds(PAIR, 2, Faults(breaks=1)), set(), 1),
    "two processes, two breaks": (Bounds(PAIR, 3, Faults(breaks=2)), set(), 2),
    "two processes that leave, two breaks": (Bounds(PAIR, 2, Faults(breaks=2), leaving=True), set(), 2),
    "two processes, a death": (Bounds(PAIR, 2, Faults(deaths=1)), {"DataLostError"}, 0),
    "two processes, one freezes": (Bounds(PAIR, 2, Faults(freezes=1)), {"DataLostError"}, 1),
    "two processes, one freezes, a break": (Bounds(PAIR, 1, Faults(freezes=1, breaks=1)), {"DataLostError"}, 2),
    "two processes, one fails, a break": (Bounds(PAIR, 2, Faults(failures=1, breaks=1)), {"PeerLostError"}, 1),
    "three processes, a break": (Bounds(TRIPLE, 2, Faults(breaks=1)), set(), 1),
    "three processes, two breaks": (Bounds(TRIPLE, 1, Faults(breaks=2), eager=True), set(), 2),
    "three processes that leave, a break": (Bounds(TRIPLE, 1, Faults(breaks=1), leaving=True), set(), 1),
    "three processes, the first dies": (Bounds(HOSTED, 3, Faults(deaths=1), mortal=(0,)), set(), 1),
    "three processes, the first dies, a break": (
        Bounds(HOSTED, 1, Faults(deaths=1, breaks=1), eager=True, mortal=(0,)),
        set(),
        2,
    ),
    "three processes, any two die": (Bounds(HOSTED, 2, Faults(deaths=2), eager=True), {"StageLostError", "DataLostError"}, 1),
    "three processes, the first freezes": (
        Bounds(HOSTED, 2, Faults(freezes=1), eager=True, mortal=(0,)),
        {"FencedError"},
        1,
    ),
    "four processes, a break": (Bounds(SQUARE, 1, Faults(breaks=1), eager=True), set(), 1),
    "four processes, the first dies": (Bounds(SQUARE, 1, Faults(deaths=1), eager=True, mortal=(0,)), set(), 1),
    "four processes, the last dies": (Bounds(SQUARE, 1, Faults(deaths=1), eager=True, mortal=(3,)), set(), 1),
    "four processes, the first and the last die": (
        Bounds(SQUARE, 1, Faults(deaths=2), eager=True, mortal=(0, 3)),
        set(),
        2,
    ),
}
"""By what happens: the bounds, the errors that processes end by, and the last epoch in which a call is handed over."""


@pytest.mark.parametrize(("bounds", "endings", "epoch"), RUNS.values(), ids=RUNS.keys())
def test_no_call_counts_twice_and_nothing_stands_still(bounds: Bounds, endings: set[str], epoch: int) -> None:
    model = Model(bounds)
    assert model.explore() > 100
    assert (model.endings, model.last_epoch) == (endings, epoch)


def complete_after_the_census(self: Progress, call: int) -> bool:
    self.completed = call
    return True


def say_anew(self: Progress, failure: str | None = None) -> Census:
    return Census(self.completed, failure)


def complete_in_any_epoch(self: Recovery, call: int, number: int) -> bool:
    return self._progress.complete(call)


def drop_news_of_later_epochs(self: Recovery, number: int, why: str) -> bool:
    return number == self.number and hear(self, number, why)


def write_over_a_record(self: Recovery, store: Any, record: str) -> None:
    store.set(self._record, record)


def go_on_though_fenced(self: Recovery, store: Any) -> bool:
    read = follow(self, store)
    if self.end is not None and isinstance(record := follower_of(store.get(self._record).decode()), Epoch):
        self.end = None
        self.enter(record)
    return read


def count_for_the_fenced(self: Recovery, store: Any) -> bool:
    read = follow(self, store)
    if isinstance(self.end, Exception) and isinstance(record := follower_of(store.get(self._record).decode()), End):
        self.certain = record.call
    return read


def decide_without_the_silent(self: Recovery, store: Any, gone: Mapping[int, str]) -> str | None:
    silent = [process for process in self.epoch.world.processes if not store.check([self._census_of(process)])]
    return decide_by_reading(self, store, {**gone, **dict.fromkeys(silent, "has said nothing")})


def count_what_any_has_completed(world: World, said: Mapping[int, Census], gone: Mapping[int, str]) -> Epoch | End | None:
    record = decide(world, said, gone)
    return Epoch(record.world, max(census.completed for census in said.values())) if isinstance(record, Epoch) else record


def decide_whoever_is_lower(world: World, gone: Mapping[int, str]) -> int | None:
    return None if gone else world.processes[0]


def end_without_the_last_call(world: World, said: Mapping[int, Census], gone: Mapping[int, str]) -> Epoch | End | None:
    record = decide(world, said, gone)
    return End(record.kind, record.why, record.process) if isinstance(record, End) else record


def hand_over_before_the_certificate(self: Model, state: State, number: int, process: Process) -> State:
    return self.hand_over(complete(self, state, number, process), number, process)


def connect_without_waiting(self: Model, state: State, process: Process) -> bool:
    return process.does == "enters" or all_have_entered(self, state, process)


def count_what_connects_as_met(self: Model, state: State, process: Process) -> bool:
    return all(process.epoch < len(state.processes[other].entered) for other in process.members)


complete, all_have_entered = Model.complete, Model.all_have_entered
hear, follow, decide_by_reading = Recovery.hear, Recovery.follow, Recovery.decide

MUTATIONS: list[tuple[object, str, Callable[..., Any], str, str]] = [
    (Progress, "complete", complete_after_the_census, "two processes, a break", "which was handed over"),
    (Progress, "say", say_anew, "two processes, a break", "which was handed over"),
    (Recovery, "complete", complete_in_any_epoch, "two processes, two breaks", "which was handed over"),
    (Recovery, "hear", drop_news_of_later_epochs, "two processes, two breaks", "deadlock"),
    (Recovery, "publish", write_over_a_record, "three processes, the first freezes", "is written twice"),
    (Recovery, "follow", go_on_though_fenced, "three processes, the first freezes", "which is without it"),
    (Recovery, "follow", count_for_the_fenced, "two processes, one freezes", "which it has not completed"),
    (Recovery, "decide", decide_without_the_silent, "two processes, a break", "without a cause"),
    (recovery, "decide", count_what_any_has_completed, "two processes, a break", "which it has not completed"),
    (recovery, "decide", end_without_the_last_call, "two processes that leave, two breaks", "without a cause"),
    (recovery, "leader", decide_whoever_is_lower, "three processes, the first dies", "no end can be reached|deadlock"),
    (Model, "complete", hand_over_before_the_certificate, "two processes, a break", "which was handed over"),
    (Model, "all_have_entered", connect_without_waiting, "two processes, a break", "where not all are"),
    (Model, "all_have_entered", count_what_connects_as_met, "two processes, a break", "which was handed over"),
]


@pytest.mark.parametrize(("where", "name", "wrong", "run", "message"), MUTATIONS, ids=[m[2].__name__ for m in MUTATIONS])
def test_the_checker_finds_planted_errors(
    where: object, name: str, wrong: Callable[..., Any], run: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(ViolationError, match=message):
        Model(RUNS[run][0]).explore()
