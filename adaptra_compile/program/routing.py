"""Routing: the workers of several replicas, and the routes that their microbatches take.

A route is the path of workers that a range of one replica's microbatches takes. In a healthy job each replica has one route,
through its own workers. If a worker is lost or slow, a range of its microbatches goes through another replica's worker of the
same stage. So the routing alone says who computes a microbatch of a stage::

    workers 0,1,2,3 4,5,-,7 8,9,10,11
    route 0 0-5 by 0,1,2,3
    route 1 0-2 by 4,5,2,7
    route 1 3-5 by 4,5,10,7
    route 2 0-5 by 8,9,10,11
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from adaptra.errors import ProgramTextError, ScheduleError

NUMBER: Final = "(?:0|[1-9][0-9]{0,8})"
"""The form of every number in a program's text."""


class TextLine(NamedTuple):
    """A line of a program's text without its comment and the blanks around it.

    Attributes:
        number: Its number in the text, counted from one.
        column: The column of its first character, counted from one.
        text: What it says.
    """

    number: int
    column: int
    text: str

    def error(self, reason: str, offset: int = 0) -> ProgramTextError:
        """Return the error of what stands ``offset`` characters behind the line's first one."""
        return ProgramTextError(reason, line=self.number, column=self.column + offset)


Grid = tuple[tuple[int | None, ...], ...]
"""``grid[replica][stage]`` is the worker that has the stage's parameters, or None if it is lost."""


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a range of one replica's microbatches.

    Attributes:
        replica: The replica whose microbatches take it.
        microbatches: The microbatches, in ascending order.
        workers: The worker of each stage.
    """

    replica: int
    microbatches: range
    workers: tuple[int, ...]

    def __str__(self) -> str:
        return f"route {self.replica} {_text_of(self.microbatches)} by {','.join(map(str, self.workers))}"


class Away(NamedTuple):
    """A microbatch that a worker of another replica computes on a stage, and the worker at home."""

    replica: int
    microbatch: int
    home: int
    holder: int


@dataclass(frozen=True)
class Routing:
    """The workers of all replicas, and the routes of their microbatches.

    Attributes:
        workers: ``workers[replica][stage]`` is the worker that has the stage's parameters, or None if it is lost.
        routes: The routes. Each microbatch of each replica takes exactly one.
        microbatches: The number of microbatches of each replica in one step.

    Raises:
        ScheduleError: The workers make no grid, two replicas share a worker, a route leaves its stages' workers, or a
            microbatch has no route or several.
    """

    workers: Grid
    routes: tuple[Route, ...]
    microbatches: int

    def __post_init__(self) -> None:
        _check_workers(self.workers)
        if self.microbatches < 1 or not self.stays_at_home:
            self._check_routes()

    def _check_routes(self) -> None:
        replicas, stages = len(self.workers), self.stages
        seen: dict[tuple[int, int], Route] = {}
        for route in self.routes:
            if not 0 <= route.replica < replicas:
                raise ScheduleError(f"{route}: replica {route.replica} does not exist: expected 0..{replicas - 1}")
            if not route.microbatches or route.microbatches.step < 1 or route.microbatches.start < 0:
                raise ScheduleError(f"{route}: expected microbatches in ascending order, at least one")
            if route.microbatches[-1] >= self.microbatches:
                last = self.microbatches - 1
                raise ScheduleError(f"{route}: microbatch {route.microbatches[-1]} does not exist: expected 0..{last}")
            if len(route.workers) != stages:
                raise ScheduleError(f"{route}: {len(route.workers)} workers: expected one for each of {stages} stages")
            for stage, worker in enumerate(route.workers):
                if stage not in self.stages_of(worker):
                    live = ", ".join(map(str, self.column(stage))) or "none, all are lost"
                    raise ScheduleError(f"{route}: worker {worker} does not have stage {stage}: expected one of {live}")
            for microbatch in route.microbatches:
                other = seen.setdefault((route.replica, microbatch), route)
                if other is not route:
                    raise ScheduleError(
                        f"microbatch {microbatch} of replica {route.replica} takes two routes: {other} and {route}"
                    )
        for replica in range(replicas):
            for microbatch in range(self.microbatches):
                if (replica, microbatch) not in seen:
                    raise ScheduleError(f"microbatch {microbatch} of replica {replica} has no route: expected exactly one")

    @staticmethod
    def healthy(replicas: int, stages: int, microbatches: int) -> Routing:
        """Return the routing in which every replica computes its own microbatches, by the workers replica · stages + stage."""
        return Routing.at_home(range(stages), replicas, microbatches)

    @staticmethod
    def at_home(placement: Sequence[int], replicas: int, microbatches: int) -> Routing:
        """Return the same for any placement: rank r of replica p is worker p · ranks + r."""
        ranks = max(placement) + 1
        grid = tuple(tuple(replica * ranks + rank for rank in placement) for replica in range(replicas))
        return Routing.of_paths(grid, [[path] * microbatches for path in grid])

    @staticmethod
    @lru_cache(maxsize=64)
    def of_pipeline(placement: tuple[int, ...], microbatches: int) -> Routing:
        """Return the routing of one pipeline, ``placement[stage]`` being the stage's rank: the same one for equal arguments."""
        return Routing((placement,), (Route(0, range(microbatches), placement),), microbatches)

    @staticmethod
    def of_paths(workers: Grid, paths: Sequence[Sequence[tuple[int, ...]]]) -> Routing:
        """Return the routing of ``paths[replica][microbatch]``, with one route for each run of equal paths."""
        routes: list[Route] = []
        for replica, of_microbatch in enumerate(paths):
            start = 0
            for path, run in groupby(of_microbatch):
                stop = start + len(list(run))
                routes.append(Route(replica, range(start, stop), path))
                start = stop
        return Routing(workers, tuple(routes), len(paths[0]))

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.workers)

    @property
    def stages(self) -> int:
        """The number of stages of each replica."""
        return len(self.workers[0])

    def holder(self, replica: int, stage: int, microbatch: int) -> int:
        """Return the worker that computes a microbatch of a replica on a stage."""
        return self.path_of[replica][microbatch][stage]

    def away(self, stage: int) -> Iterator[Away]:
        """Yield the microbatches that leave their home on a stage, by replica and number. A lost worker is nobody's home."""
        for replica, row in enumerate(self.workers):
            home = row[stage]
            for microbatch in range(self.microbatches):
                holder = self.holder(replica, stage, microbatch)
                if home is not None and holder != home:
                    yield Away(replica, microbatch, home, holder)

    def peers(self, workers: Collection[int]) -> frozenset[int]:
        """Return these workers and all with which they may exchange messages.

        Those are neighbours on a route, workers of consecutive microbatches, and the homes of what a worker computes.
        """
        asked, linked = set(workers), set[tuple[int | None, int | None]]()
        for row, paths in zip(self.workers, self.path_of, strict=True):
            for path in set(paths):
                linked.update(pairwise(path))
                linked.update(zip(row, path, strict=True))
            for before, path in set(pairwise(paths)):
                linked.update(zip(before, path, strict=True))
        return frozenset(end for ends in linked for end in ends if end is not None and not asked.isdisjoint(ends))

    def column(self, stage: int) -> tuple[int, ...]:
        """Return the live workers that have a stage's parameters, by replica."""
        return self._columns[stage]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages whose parameters a worker has; none if there is no such worker."""
        return self._held.get(worker, (0, ()))[1]

    def replica_of(self, worker: int) -> int:
        """Return the replica to which a worker belongs."""
        return self._held[worker][0]

    @cached_property
    def is_one_pipeline(self) -> bool:
        """Whether there is one replica, on the ranks 0 … R-1."""
        return self.stays_at_home and self.replicas == 1 and set(self.workers[0]) == set(range(self.ranks))

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage in its replica: stages that share a worker share the rank."""
        if self.is_one_pipeline:
            return self.routes[0].workers
        rank_of: dict[int, int] = {}
        placement: list[int] = []
        for column in self._columns:
            rank = next((rank_of[worker] for worker in column if worker in rank_of), max(placement, default=-1) + 1)
            placement.append(rank)
            rank_of |= dict.fromkeys(column, rank)
        return tuple(placement)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The live workers, in ascending order."""
        return tuple(sorted(self._held))

    @property
    def ranks(self) -> int:
        """The number of workers, lost ones included but for those behind the last live one."""
        return self.live[-1] + 1

    @cached_property
    def stays_at_home(self) -> bool:
        """Whether each replica has one route, of all its microbatches through its own workers."""
        return len(self.routes) == len(self.workers) and all(
            route.replica == replica
            and route.workers == path
            and None not in path
            and route.microbatches == range(self.microbatches)
            for replica, (route, path) in enumerate(zip(self.routes, self.workers, strict=True))
        )

    @cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(worker for worker in column if worker is not None) for column in zip(*self.workers, strict=True))

    @cached_property
    def _held(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        held: dict[int, tuple[int, tuple[int, ...]]] = {}
        for replica, path in enumerate(self.workers):
            for stage, worker in enumerate(path):
                if worker is not None:
                    _, before = held.get(worker, (replica, ()))
                    held[worker] = (replica, (*before, stage))
        return held

    @cached_property
    def path_of(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """``path_of[replica][microbatch][stage]`` is the worker that computes it."""
        if self.stays_at_home:
            return tuple((route.workers,) * self.microbatches for route in self.routes)
        paths: list[list[tuple[int, ...]]] = [[()] * self.microbatches for _ in self.workers]
        for route in self.routes:
            for microbatch in route.microbatches:
                paths[route.replica][microbatch] = route.workers
        return tuple(map(tuple, paths))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text form: the workers, then one line per route."""
        grid = (",".join("-" if worker is None else str(worker) for worker in path) for path in self.workers)
        yield f"workers {' '.join(grid)}"
        yield from map(str, self.routes)

    @staticmethod
    def parse(header: TextLine, lines: Sequence[TextLine], stages: int, microbatches: int) -> Routing:
        """Read the lines of the text form, which stand behind the header.

        Raises:
            ProgramTextError: A line is invalid, or the lines don't fit together. The error names it and the expected form.
        """
        if not lines or not lines[0].text.startswith("workers "):
            raise header.error("expected a line 'workers 0,1 2,-' behind the header: per replica the worker of each stage")
        text = lines[0].text
        if not _WORKERS.fullmatch(text):
            raise lines[0].error(f"{text!r}: expected per replica the worker of each stage, such as 'workers 0,1 2,-'")
        grid = tuple(tuple(None if one == "-" else int(one) for one in path.split(",")) for path in text.split()[1:])
        if len(grid[0]) != stages:
            raise lines[0].error(f"replica 0 has {len(grid[0])} stages: expected {stages}, as the header says")
        routes: list[Route] = []
        for line in lines[1:]:
            match = _ROUTE.fullmatch(line.text)
            if match is None:
                raise line.error(f"{line.text!r}: expected a route such as 'route 1 0-2 by 4,5,2,7'")
            first = int(match["first"])
            last, step = int(match["last"] or first), int(match["step"] or 1)
            if last < first or step < 1:
                raise line.error(f"{line.text!r}: expected microbatches in ascending order")
            workers = tuple(map(int, match["workers"].split(",")))
            routes.append(Route(int(match["replica"]), range(first, last + 1, step), workers))
        try:
            return Routing(grid, tuple(routes), microbatches)
        except ScheduleError as error:
            raise lines[0].error(str(error)) from None


def _check_workers(workers: tuple[tuple[int | None, ...], ...]) -> None:
    if not workers or not workers[0]:
        raise ScheduleError("workers: expected at least one replica of at least one stage")
    stages = len(workers[0])
    owner: dict[int, int] = {}
    for replica, path in enumerate(workers):
        if len(path) != stages:
            raise ScheduleError(f"workers: replica {replica} has {len(path)} stages: expected {stages}, as replica 0 has")
        for worker in path:
            if worker is not None and owner.setdefault(worker, replica) != replica:
                raise ScheduleError(f"workers: worker {worker} is in the replicas {owner[worker]} and {replica}: expected one")


def _text_of(microbatches: range) -> str:
    if len(microbatches) == 1:
        return str(microbatches[0])
    stride = "" if microbatches.step == 1 else f"/{microbatches.step}"
    return f"{microbatches[0]}-{microbatches[-1]}{stride}"


_PATH = f"(?:{NUMBER}|-)(?:,(?:{NUMBER}|-))*"
_WORKERS = re.compile(rf"workers(?: {_PATH})+")
_ROUTE = re.compile(
    rf"route (?P<replica>{NUMBER}) (?P<first>{NUMBER})(?:-(?P<last>{NUMBER})(?:/(?P<step>{NUMBER}))?)?"
    rf" by (?P<workers>{NUMBER}(?:,{NUMBER})*)"
)
