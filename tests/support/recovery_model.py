"""All orders of events in which a few processes can meet breaks and deaths: a model checker of what calls survive.

What is stepped is :class:`adaptra.runtime.survival.recovery.Recovery` itself, with the census, the decision and the worlds that
it uses. The model supplies what lies around it. Main threads run calls, complete them, wait for the others in a barrier, hand
results to their users, and connect anew. A barrier returns at some processes and breaks at others. Keepers hear news, find that
a process has ended, and make requests to the store one by one. So another process may act, or this one die, between any two of
them, and what was read may be old when it is used. A frozen process may be taken for lost, wake up and go on from where it
stood. Connections break without a death. A process may fail by its own exception. It may leave once its calls are done.

In every state reached:

- all that hand a call to their users have run it in the same epoch, and each of them has completed it;
- no process runs a call again that any other has handed over, a fenced one among them;
- an epoch has one record, nobody connects in one whose world is without it, and all have come before any runs a call in it;
- there is a next event, and an end is still possible without another fault;
- at an end all have handed all calls, the job has ended by a fault that was there, or a frozen one is fenced.

Each process hands its calls in order by construction. What holds of a fenced one is this. It may hand over one call late: one
that all the others have completed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from exploring import Trace, ViolationError, explore

from adaptra.errors import DataLostError, FencedError, StageLostError
from adaptra.runtime.survival.recovery import Recovery
from adaptra.runtime.world.world import World


@dataclass(frozen=True, slots=True)
class Faults:
    """How many faults of each kind a run may have.

    Attributes:
        deaths: Processes that die.
        freezes: Processes that do nothing for a while, so that others may take them for lost.
        breaks: Connections that break.
        failures: Processes that meet an exception of their own.
    """

    deaths: int = 0
    freezes: int = 0
    breaks: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large the runs are.

    Attributes:
        world: The first world.
        calls: How many calls each process makes.
        faults: What may go wrong.
        leaving: Whether a process may leave once its calls are done.
        eager: Whether a main thread gives up a call at once when its keeper knows that the epoch has broken. It then learns
            of a death from its keeper only. Far fewer states.
        mortal: The processes that faults happen to, but for breaks; None for all.
    """

    world: World
    calls: int
    faults: Faults
    leaving: bool = False
    eager: bool = False
    mortal: tuple[int, ...] | None = None


class Process(NamedTuple):
    """One process in a state.

    Attributes:
        recovery: The number of an equal :class:`Recovery`.
        members: The processes of the world that its main thread is in.
        life: ``alive``, ``frozen`` or ``dead``.
        does: What its main thread does: it ``runs`` a call, or has ``met`` the others in its barrier. It ``enters`` an epoch,
            ``waits`` for one, ``fails``, or is ``done``. Or it is the error by which it has ended.
        call: The call that its main thread is in.
        epoch: The epoch that its main thread is in.
        holds: Whether it has completed that call there.
        entered: By epoch, the last barrier that it has come to: 0 to connect, else the number of the call.
        gone: Those of which it knows that they have ended, or takes it for certain.
        heard: The epochs of which it has got the news that they have broken.
        record: What it is about to write.
    """

    recovery: int
    members: tuple[int, ...]
    life: str = "alive"
    does: str = "runs"
    call: int = 1
    epoch: int = 0
    holds: bool = False
    entered: tuple[int, ...] = (0,)
    gone: frozenset[int] = frozenset()
    heard: frozenset[int] = frozenset()
    record: str | None = None


class State(NamedTuple):
    """One state; ``counted`` has the epoch in which each call was run that a process has handed over."""

    processes: tuple[Process, ...]
    store: frozenset[tuple[str, str]]
    news: frozenset[int]
    counted: tuple[int, ...]
    faults: Faults

    def with_process(self, number: int, process: Process, **others: Any) -> State:
        """Return a state with one process changed, and what else is given."""
        processes = (*self.processes[:number], process, *self.processes[number + 1 :])
        return self._replace(processes=processes, **others)


class ModelStore:
    """The store of one state, and what it holds after the requests."""

    def __init__(self, items: frozenset[tuple[str, str]]) -> None:
        self.values = dict(items)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there."""
        return [self.get(key) for key in keys]

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self.values[key] = value

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it has the expected value."""
        if self.values.get(key, "") == expected:
            self.values[key] = value
        return self.get(key)


Event = tuple[str, str, State]
"""Its name, the kind of fault it is if any, and the state after it."""


class Model:
    """Explores all states within the bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.endings: set[str] = set()
        """What processes have ended by."""
        self.last_epoch = 0
        """The last epoch of which a call was handed over."""
        self._recoveries: list[Recovery] = []
        self._numbers: dict[Any, int] = {}
        self._made: dict[Any, tuple[int, Any]] = {}
        self._trace: Trace = lambda: ""

    def explore(self) -> int:
        """Visit every reachable state and return how many there are.

        Raises:
            ViolationError: A property does not hold.
        """
        world = self.bounds.world
        processes = tuple(Process(self._number_of(Recovery(process, world)), world.processes) for process in world.processes)
        initial = State(processes, frozenset(), frozenset(), (), self.bounds.faults)
        return explore(initial, lambda state: state, self._successors, self._is_end)

    def _successors(self, state: State, trace: Trace) -> Iterator[tuple[str, bool, State]]:
        self._trace = trace
        for number, process in enumerate(state.processes):
            if process.life != "dead":
                for name, fault, after in self._events(state, number, process):
                    if fault:
                        after = after._replace(faults=_less(after.faults, fault))
                    yield f"{name} {number}", fault != "", self._forgetting(after) if name in LEAVING else after

    def _forgetting(self, state: State) -> State:
        """A state without what can't matter any more: of epochs that all have left, and of calls that all have handed over."""
        running = [process for process in state.processes if process.life != "dead" and process.does in RUNNING]
        epoch = min((process.epoch for process in running), default=0)
        call = min((process.call for process in running), default=1)
        keeping = [recovery for process in state.processes if process.life != "dead" for recovery in [self._recovery(process)]]
        known = min((recovery.number for recovery in keeping if recovery.end is None), default=0)
        if known:
            store = frozenset(item for item in state.store if int(item[0].partition("/")[0]) >= known)
            state = state._replace(store=store, news=frozenset(number for number in state.news if number >= known))
        if epoch:
            state = state._replace(processes=tuple(_left(process, epoch) for process in state.processes))
        counted = tuple(0 if number < call else there for number, there in enumerate(state.counted, 1))
        return state if counted == state.counted else state._replace(counted=counted)

    def _events(self, state: State, number: int, process: Process) -> Iterator[Event]:
        """Every event of one process."""
        is_over = process.does not in RUNNING
        if state.faults.deaths and self._may_fail(number):
            yield "death of", "deaths", state.with_process(number, _dead(number, process))
        if process.life == "frozen":
            yield "waking of", "", state.with_process(number, process._replace(life="alive"))
            return
        if process.does == "done" and self.bounds.leaving:
            yield "leaving of", "", state.with_process(number, _dead(number, process))
        if not is_over:
            yield from self._main(state, number, process)
        if self._recovery(process).end is None:
            yield from self._keeper(state, number, process)

    def _may_fail(self, number: int) -> bool:
        return self.bounds.mortal is None or number in self.bounds.mortal

    # The main thread

    def _main(self, state: State, number: int, process: Process) -> Iterator[Event]:
        recovery = self._recovery(process)
        if process.does in ("waits", "fails"):
            if process.does == "waits" and recovery.certain >= process.call:
                yield "record's certificate to", "", self._certified(state, number, process)
            elif recovery.end is not None:
                yield "end of", "", state.with_process(number, self._ended(process))
            elif process.does == "waits" and recovery.number > process.epoch:
                yield "following by", "", self.enter(state, number, process)
            return
        if process.does == "runs":
            yield f"completing {process.call} by", "", self._completing(state, number, process)
        elif self.all_have_entered(state, process):
            yield "barrier's return at", "", self._past(state, number, process)
        waiting = process._replace(does="waits")
        if recovery.number > process.epoch or recovery.why is not None or recovery.end is not None:
            yield "break at", "", state.with_process(number, waiting)
            return
        is_cut_off = not self.bounds.eager and any(state.processes[other].life == "dead" for other in process.members)
        if is_cut_off or process.gone.intersection(process.members):
            yield "loss noticed by", "", self._told(state, number, waiting)
        if state.faults.breaks:
            yield "break noticed by", "breaks", self._told(state, number, waiting)
        if state.faults.failures and process.does == "runs" and self._may_fail(number):
            failing = self._with(process, "fail", lambda recovery: setattr(recovery, "failure", "ValueError: no"))[0]
            yield "failure of", "failures", self._told(state, number, failing._replace(does="fails"))

    def _told(self, state: State, number: int, process: Process) -> State:
        """The state after a process has told all that its epoch has broken. Its own keeper hears it as the others do."""
        return state.with_process(number, process, news=state.news | {self._recovery(process).number})

    def _completing(self, state: State, number: int, process: Process) -> State:
        call, epoch = process.call, process.epoch
        after, goes_on = self._with(process, ("complete", call, epoch), lambda recovery: recovery.complete(call, epoch))
        if not goes_on:
            return state.with_process(number, after._replace(does="waits", holds=True))
        return self.complete(state, number, after._replace(does="met", holds=True))

    def complete(self, state: State, number: int, process: Process) -> State:
        """Come to the barrier of a call."""
        return state.with_process(number, _entering(process, process.call))

    def all_have_entered(self, state: State, process: Process) -> bool:
        """Whether the barrier that a process waits in can return. All have come to it, also who has died since."""
        barrier = process.call if process.does == "met" else 0
        return all(
            len(state.processes[other].entered) > process.epoch and state.processes[other].entered[process.epoch] >= barrier
            for other in process.members
        )

    def _past(self, state: State, number: int, process: Process) -> State:
        if process.does == "enters":
            entered = [state.processes[other].entered for other in process.members]
            if not all(len(barriers) > process.epoch and barriers[process.epoch] >= 0 for barriers in entered):
                raise ViolationError(f"rank {number} is in epoch {process.epoch}, where not all are, after {self._trace()}")
            return state.with_process(number, process._replace(does="runs"))
        return self.hand_over(state, number, process)

    def hand_over(self, state: State, number: int, process: Process) -> State:
        """Give a call's results to the user, who makes the next one, or none if it was the last."""
        call, counted = process.call, state.counted
        if not process.holds:
            raise ViolationError(f"rank {number} counts call {call}, which it has not completed, after {self._trace()}")
        if len(counted) >= call and counted[call - 1] != process.epoch:
            raise ViolationError(f"rank {number} hands over call {call} of another epoch than others, after {self._trace()}")
        self.last_epoch = max(self.last_epoch, process.epoch)
        if len(counted) < call:
            counted = (*counted, process.epoch)
        does = "done" if call == self.bounds.calls else "runs"
        return state.with_process(number, process._replace(does=does, call=call + 1, holds=False), counted=counted)

    def _certified(self, state: State, number: int, process: Process) -> State:
        """Hand over a call that counts by a record, and go on to where the next one breaks at once."""
        state = self.hand_over(state, number, process)
        after = state.processes[number]
        return state if after.does == "done" else state.with_process(number, after._replace(does="waits"))

    def enter(self, state: State, number: int, process: Process) -> State:
        """Come to where all connect in the newest epoch."""
        epoch = self._recovery(process).epoch
        if number not in epoch.world.processes:
            raise ViolationError(f"rank {number} enters epoch {epoch.world.epoch}, which is without it, after {self._trace()}")
        if len(state.counted) >= process.call and state.counted[process.call - 1] < epoch.world.epoch:
            raise ViolationError(f"rank {number} runs call {process.call} again, which was handed over, after {self._trace()}")
        members = epoch.world.processes
        process = process._replace(does="enters", epoch=epoch.world.epoch, members=members, holds=False)
        return state.with_process(number, _entering(process, 0))

    def _ended(self, process: Process) -> Process:
        end = type(self._recovery(process).end).__name__
        self.endings.add(end)
        return process._replace(does=end, call=0, epoch=0, members=(), holds=False)

    # The keeper's thread

    def _keeper(self, state: State, number: int, process: Process) -> Iterator[Event]:
        recovery = self._recovery(process)
        for epoch in state.news - process.heard:
            if epoch > recovery.number or (epoch == recovery.number and recovery.why is None):
                hearing = process._replace(heard=process.heard | {epoch})
                yield f"news of {epoch} to", "", self._hearing(state, number, hearing, epoch)
        for other in set(recovery.epoch.world.processes) - process.gone - {number}:
            yield from self._evidence(state, number, process, other)
        if recovery.why is None:
            if recovery.failure is not None and recovery.number not in state.news:
                yield "failure told by", "", self._told(state, number, process)
            return
        store = ModelStore(state.store)
        if process.record is not None:
            recovery.publish(cast(Any, store), process.record)
            yield "record of", "", self._written(state, number, process._replace(record=None), store)
        elif not store.check([f"{recovery.number}/census/{number}"]):
            yield "census of", "", self._hearing(state, number, process, recovery.number)
        elif store.check([f"{recovery.number}/record"]):
            key = ("follow", store.values[f"{recovery.number}/record"])
            after, _ = self._with(process, key, lambda recovery: recovery.follow(cast(Any, store)))
            ended = frozenset(other for other in process.gone if state.processes[other].life == "dead")
            yield "record read by", "", state.with_process(number, after._replace(gone=ended))
        else:
            record = _copied(recovery).decide(cast(Any, store), dict.fromkeys(process.gone, "has ended"))
            if record is not None:
                yield "decision of", "", state.with_process(number, process._replace(record=record))

    def _evidence(self, state: State, number: int, process: Process, other: int) -> Iterator[Event]:
        """A process learns that another has ended, or takes it for that since it is silent."""
        recovery, life = self._recovery(process), state.processes[other].life
        knowing = process._replace(gone=process.gone | {other})
        if life == "dead":
            if any(state.processes[lower].life == "alive" for lower in recovery.epoch.world.processes if lower < number):
                knowing = process  # as long as it decides nothing, it need only learn that something has broken
            if knowing is not process or recovery.why is None:
                yield f"evidence against {other} to", "", self._hearing(state, number, knowing, recovery.number)
        elif life == "frozen" or (state.faults.freezes and self._may_fail(other) and state.processes[other].does in RUNNING):
            frozen = state.with_process(other, state.processes[other]._replace(life="frozen"))
            yield f"silence of {other} to", "freezes" if life == "alive" else "", self._told(frozen, number, knowing)

    def _hearing(self, state: State, number: int, process: Process, epoch: int) -> State:
        """The state after a keeper has heard that an epoch has broken, and has said its census.

        What others do in between they may as well do before. It is one request, so a death in between is one before it.
        """
        after, _ = self._with(process, ("hear", epoch), lambda recovery: recovery.hear(epoch, "broken"))
        if self._recovery(after).number > epoch or self._recovery(after).why is None:
            return state.with_process(number, after)
        store = ModelStore(state.store)
        self._recovery(after).say(cast(Any, store))
        if self.bounds.eager and after.does == "runs":
            after = after._replace(does="waits")
        return self._written(state, number, after, store)

    def _written(self, state: State, number: int, process: Process, store: ModelStore) -> State:
        for key, value in state.store:
            if store.values[key] != value:
                raise ViolationError(f"{key} is written twice, after {self._trace()}")
        return state.with_process(number, process, store=frozenset(store.values.items()))

    # Recoveries, which are never changed but replaced by changed copies

    def _recovery(self, process: Process) -> Recovery:
        return self._recoveries[process.recovery]

    def _number_of(self, recovery: Recovery) -> int:
        progress = recovery._progress
        key = (
            recovery._process,
            recovery.epoch,
            recovery.why is None,
            recovery.failure,
            type(recovery.end),
            recovery.certain,
            progress.completed,
            progress.has_said,
            frozenset(recovery._news),
        )
        number = self._numbers.setdefault(key, len(self._recoveries))
        if number == len(self._recoveries):
            self._recoveries.append(recovery)
        return number

    def _with(self, process: Process, key: Any, act: Callable[[Any], Any]) -> tuple[Process, Any]:
        """A process after an act of its recovery, and what that returned. ``key`` is equal for equal acts."""
        made = self._made.get((process.recovery, key))
        if made is None:
            changed = _copied(self._recovery(process))
            returned = act(changed)
            made = self._made[process.recovery, key] = (self._number_of(changed), returned)
        return process._replace(recovery=made[0]), made[1]

    def _is_end(self, state: State, trace: Trace) -> bool:
        present = [process for process in state.processes if process.life == "alive"]
        if any(process.does in RUNNING for process in present):
            return False
        had = {kind: left < getattr(self.bounds.faults, kind) for kind, left in _by_kind(state.faults).items()}
        allowed = {
            "done": True,
            FencedError.__name__: had["freezes"],
            StageLostError.__name__: had["freezes"] or had["deaths"],
            DataLostError.__name__: had["freezes"] or had["deaths"],
            "PeerLostError": had["failures"],
        }
        for process in present:
            if not allowed[process.does]:
                raise ViolationError(f"a process ends by {process.does} without a cause, after {trace()}")
        return True


LEAVING = {
    "death of",
    "leaving of",
    "barrier's return at",
    "record's certificate to",
    "following by",
    "end of",
    "record read by",
}
"""The events by which a process may be the last to leave a call or an epoch."""
RUNNING = ("runs", "met", "enters", "waits", "fails")
"""What a main thread does that has not come to an end."""


def _by_kind(faults: Faults) -> Mapping[str, int]:
    return {kind: getattr(faults, kind) for kind in ("deaths", "freezes", "breaks", "failures")}


def _less(faults: Faults, kind: str) -> Faults:
    left = {**_by_kind(faults)}
    left[kind] -= 1
    return Faults(**left)


def _entering(process: Process, barrier: int) -> Process:
    missing = process.epoch + 1 - len(process.entered)
    entered = [*process.entered, *[-1] * missing]
    entered[process.epoch] = barrier
    return process._replace(entered=tuple(entered))


def _left(process: Process, epoch: int) -> Process:
    """A process without what it entered before an epoch that all have come to."""
    entered = tuple(0 if number < epoch else barrier for number, barrier in enumerate(process.entered))
    return process if entered == process.entered else process._replace(entered=entered)


def _dead(number: int, process: Process) -> Process:
    """A process that has ended. What it had sent before may still arrive."""
    return Process(number, (), "dead", "dead", 0, 0, entered=process.entered)


def _copied(recovery: Recovery) -> Recovery:
    changed = copy(recovery)
    changed._progress, changed._said, changed._news = copy(recovery._progress), {}, dict(recovery._news)
    return changed
