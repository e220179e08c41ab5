"""The epochs of a job: what the processes of one say when it breaks, and what follows. It asks nobody, and never waits.

A job's calls run in an epoch. It breaks where a connection does or a process ends. Then no call of it goes on. Each process
says once how far it has come: see :class:`Census`. A call is certain once all processes have completed it. So none returns from
a call that another may have to do again. The lowest process that is left reads what all others have said, and decides. The
store keeps the first record alone, so all follow one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from adaptra.errors import DataLostError, StageLostError
from adaptra.runtime.world.world import ProcessId, World

FAILED: Final = "failed"
"""The kind of an end: a process's own exception."""
LOST: Final = "lost"
"""The kind of an end: all processes of a stage are lost."""
DATA_LOST: Final = "data lost"
"""The kind of an end: all processes that are given a replica's batch are lost."""


@dataclass(frozen=True, slots=True)
class Census:
    """What a process says of itself when an epoch breaks. It says it once, and completes no call of that epoch afterwards.

    Attributes:
        completed: The number of the last call that it has completed. All before are certain.
        failure: Its own exception, which ends the job; None if it can go on.
    """

    completed: int
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the processes follow from the break of one epoch to that of the next.

    Attributes:
        world: The workers and the processes that host them, with the number of the epoch.
        call: The number of the last call that counts. The next one is the first of this epoch.
    """

    world: World
    call: int


@dataclass(frozen=True, slots=True)
class End:
    """The end of the job, as no epoch can follow.

    Attributes:
        kind: ``FAILED``, ``LOST`` or ``DATA_LOST``.
        why: What happened, for users.
        process: The process that failed; None of a loss.
        call: The number of the last call that counts, for those that are left and wait to know it. 0 if a process failed.
    """

    kind: str
    why: str
    process: int | None = None
    call: int = 0


class Progress:
    """How far one process has come in the calls of an epoch.

    Attributes:
        completed: The number of the last call that it has completed.
        has_said: Whether it has said so, so that it completes no further one.
    """

    def __init__(self, completed: int = 0) -> None:
        self.completed = completed
        self.has_said = False

    def complete(self, call: int) -> bool:
        """Complete a call, before it waits for the others. Returns False if this epoch has broken."""
        if not self.has_said:
            self.completed = call
        return not self.has_said

    def say(self, failure: str | None = None) -> Census:
        """Return what this process says of itself. How far it has come is the same every time."""
        self.has_said = True
        return Census(self.completed, failure)


def leader(world: World, gone: Collection[int]) -> ProcessId | None:
    """Return the process that decides: the lowest one that has not certainly ended. None if all have."""
    return next((process for process in world.processes if process not in gone), None)


def decide(world: World, said: Mapping[int, Census], gone: Mapping[int, str]) -> Epoch | End | None:
    """Return what follows an epoch that has broken, or None as long as a process may still say something.

    Args:
        world: The world of that epoch.
        said: By process, what it has said.
        gone: The processes that have certainly ended, each with the reason.
    """
    failed = next((process for process in world.processes if process in said and said[process].failure is not None), None)
    if failed is not None:
        return End(FAILED, f"{said[failed].failure}", failed)
    left = [process for process in world.processes if process not in gone]
    if not left or not all(process in said for process in left):
        return None
    # Where one is certain of a call, all have completed it. So the least of them is the last call that counts.
    call = min(said[process].completed for process in left)
    try:
        follower = world.without(frozenset(world.processes) - frozenset(left))
    except (StageLostError, DataLostError) as error:
        why = "; ".join(f"rank {process} {reason}" for process, reason in sorted(gone.items()) if process in world.processes)
        return End(LOST if isinstance(error, StageLostError) else DATA_LOST, f"{error} ({why})", call=call)
    return Epoch(follower, call)


def text_of(record: Census | Epoch | End) -> str:
    """Return a record as the store keeps it."""
    if isinstance(record, Epoch):
        return json.dumps({"world": asdict(record.world), "call": record.call})
    return json.dumps(asdict(record))


def census_of(text: str) -> Census:
    """Return what a process has said."""
    return Census(**json.loads(text))


def follower_of(text: str) -> Epoch | End:
    """Return the record of an epoch, or of the end."""
    fields: dict[str, Any] = json.loads(text)
    if "world" not in fields:
        return End(**fields)
    world = fields["world"]
    hosts = tuple(map(ProcessId, world["hosts"]))
    of_world = world["epoch"], world["places"], hosts, tuple(world["homes"]), world["needs_homes"]
    return Epoch(World(*of_world), fields["call"])
