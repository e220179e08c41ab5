"""Planning problems: costs, microbatches and a placement, of one pipeline or of several replicas of it.

One pipeline is a job of one replica. Several may have lost and slow workers and unequal links. They are read from
files by :mod:`adaptra.simulation.case_files`. Times may be in any unit as long as all share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from adaptra.errors import CaseError
from adaptra.program import refuse_size
from adaptra.program.placement import Edge, in_turn, stages_of
from adaptra.program.routing import Grid
from adaptra.simulation.cost import Blocking, CostModel

_MOST_WORKERS: Final = 100_000
"""The most workers of a case. More are refused before they fill the memory."""


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """The directed link between two workers.

    Attributes:
        latency: Latency of a message.
        occupancy: Time that a message occupies the link.
    """

    latency: float = 0.0
    occupancy: float = 0.0


@dataclass(frozen=True)
class Case:
    """One planning problem: of one pipeline, or of several replicas of it.

    Worker ``replica · ranks + placement[stage]`` has a stage of a replica. A message between two workers departs once their
    link and both workers' ports are free. It occupies each of them for its time, and arrives when all are free again, plus the
    latency. A port that it occupies for no time is always free. Between two stages of one worker a message takes no time; see
    :meth:`.CostModel.placed`.

    What plans one pipeline takes a case for which :attr:`is_one_pipeline` is true. It counts the memory of ``cost``, and what
    plans or simulates a job counts ``memory``; :meth:`of_replicas` makes the one from the other.

    Attributes:
        cost: The costs of each replica: durations per stage, latency and occupancy per edge. They hold for workers and messages
            about which the rest says nothing else.
        microbatches: The number of microbatches of each replica in one step.
        placement: ``placement[stage]`` is the rank in its replica of the worker that has the stage. Stage i on rank i if empty.
        name: A name for people.
        barrier: Whether ranks meet between steps. Then a step of one pipeline costs its makespan, otherwise the period of steps
            in a row. With several replicas every STEP waits for the REDUCE of all workers, as a norm of all gradients makes it.
            Otherwise it waits for its own stage's REDUCE alone, so that workers update at different times.
        replicas: The number of replicas.
        step: Duration of STEP, the optimizer, one per stage; none if empty.
        reduce: Duration of REDUCE, from the time at which the last worker of a stage has come to it, one per stage.
        links: Links by (sending worker, receiving worker).
        ports: Per worker, the time that a message occupies its port, in each direction; 0 for workers that are not named.
        slow: Per worker, the factor on the durations of its ops; 1 for workers that are not named.
        lost: The workers that are lost.
        guests: The workers that compute nothing, since their processes compute for other replicas. They take part in REDUCE.
        hand_over: Latency of an accumulator that passes from one worker to another.
        hands_over: Whether workers hand the accumulator over. If not, each adds up its own, and W ops wait for no other W.
        memory: Per rank of a replica, the most microbatches that its worker holds from the start of F to the end of W. Those
            of all its stages count. None for no limit.
        changing: The stages whose forwards change buffers, which workers hand over with the same latency. So an F waits for
            that of the microbatch before, whichever worker runs it.
        at_home: The stages whose microbatches no other replica's worker may compute.

    Raises:
        CaseError: A field is invalid; names it, the given value and the expected one.
    """

    cost: CostModel
    microbatches: int
    placement: tuple[int, ...] = ()
    name: str = "case"
    barrier: bool = False
    replicas: int = field(default=1, kw_only=True)
    step: tuple[float, ...] = field(default=(), kw_only=True)
    reduce: tuple[float, ...] = field(default=(), kw_only=True)
    links: Mapping[tuple[int, int], WorkerLink] = field(
        default_factory=dict[tuple[int, int], WorkerLink], hash=False, kw_only=True
    )
    ports: Mapping[int, float] = field(default_factory=dict[int, float], hash=False, kw_only=True)
    slow: Mapping[int, float] = field(default_factory=dict[int, float], hash=False, kw_only=True)
    lost: frozenset[int] = field(default=frozenset(), kw_only=True)
    guests: frozenset[int] = field(default=frozenset(), kw_only=True)
    hand_over: float = field(default=0.0, kw_only=True)
    hands_over: bool = field(default=True, kw_only=True)
    memory: tuple[int, ...] | None = field(default=None, kw_only=True)
    changing: frozenset[int] = field(default=frozenset(), kw_only=True)
    at_home: frozenset[int] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", in_turn(self.stages))
        for name in ("step", "reduce"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * self.stages)
        self._check_sizes()
        object.__setattr__(self, "cost", self.cost.placed(self.placement))
        if self.replicas > 1:
            self.check_edges()
            if any(self.cost.update):
                raise CaseError(f"{self.name}: t_update: expected none with several replicas, which have t_opt and t_reduce")
        self._check_workers()
        self._check_stages()

    def of_replicas(self, replicas: int, step: float = 0.0, reduce: float = 0.0) -> Case:
        """Return the case of several replicas of this pipeline, all alike.

        A limit of memory becomes one of whole microbatches, as if each held all of its memory from F to the end of W. The
        updates of the cost model become part of STEP.

        Args:
            replicas: The number of replicas.
            step, reduce: Durations of STEP and REDUCE, for all stages.

        Raises:
            CaseError: Edges are half duplex or communication blocks.
        """
        self.check_edges()
        cost, memory = self.cost, None
        if cost.memory_limit is not None:
            held_by = [max(cost.memory_forward[stage] for stage in held) for held in placement_lists(self.placement)]
            pairs = zip(cost.memory_limit, held_by, strict=True)
            most = replicas * self.microbatches * self.stages
            memory = tuple(most if held == 0.0 else int(limit / held + 1e-9) for limit, held in pairs)
        steps, reduces = tuple(step + update for update in cost.update), (reduce,) * self.stages
        cost = replace(cost, update=())
        return replace(self, cost=cost, replicas=replicas, step=steps, reduce=reduces, memory=memory)

    def check_edges(self) -> None:
        """Refuse ways of communication that only the simulator of one pipeline knows.

        Raises:
            CaseError: Edges are half duplex or communication blocks.
        """
        if self.cost.half_duplex or self.cost.blocking is not Blocking.NONE:
            raise CaseError(f"{self.name}: duplex or blocking_comm: expected neither with several replicas")

    def require_one_pipeline(self, what: str) -> None:
        """Refuse what the planner of one pipeline does not know.

        Args:
            what: What was asked for, which begins the error.

        Raises:
            CaseError: There are several replicas, or workers and links of their own.
        """
        if not self.is_one_pipeline:
            raise CaseError(f"{what}: {self.name} has {self.replicas} replicas or workers of their own: expected one pipeline")

    @property
    def is_one_pipeline(self) -> bool:
        """Whether there is one replica, whose workers and links are as ``cost`` says and whose steps end with the last op."""
        unlike = self.links or self.ports or self.slow or self.lost or any(self.step) or any(self.reduce)
        return self.replicas == 1 and not unlike and self.memory is None

    def fault_scaled(self, healthy: float) -> float:
        """Return the period of the healthy job, given as ``healthy``, scaled by the speed that is lost."""
        speeds = [0.0 if worker in self.lost else 1 / self.slow.get(worker, 1.0) for worker in range(self.workers)]
        return healthy * self.workers / sum(speeds)

    @property
    def is_healthy(self) -> bool:
        """Whether no worker is lost or slow."""
        return not self.lost and not self.slow

    @property
    def healthy(self) -> Case:
        """The same job with no worker lost or slow."""
        return replace(self, lost=frozenset(), slow={})

    @property
    def fold(self) -> str:
        """The form of ``hands_over`` in files and in the options of passes: ``handover`` or ``contributions``."""
        return "handover" if self.hands_over else "contributions"

    @property
    def stages(self) -> int:
        """The number of stages of each replica."""
        return self.cost.stages

    @property
    def workers(self) -> int:
        """The number of workers, lost ones included."""
        return self.replicas * self.ranks

    @cached_property
    def ranks(self) -> int:
        """The number of workers of each replica."""
        return max(self.placement) + 1

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The workers that may compute microbatches of each stage: all but lost ones and guests."""
        return tuple(
            tuple(worker for worker in column if worker is not None and worker not in self.guests)
            for column in zip(*self.grid, strict=True)
        )

    @cached_property
    def grid(self) -> Grid:
        """The worker of each stage of each replica, None where it is lost."""
        return tuple(
            tuple(None if (worker := self.worker(replica, stage)) in self.lost else worker for stage in range(self.stages))
            for replica in range(self.replicas)
        )

    def worker(self, replica: int, stage: int) -> int:
        """Return the worker that has a stage of a replica."""
        return replica * self.ranks + self.placement[stage]

    def replica_of(self, worker: int) -> int:
        """Return the replica to which a worker belongs."""
        return worker // self.ranks

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages that a worker has, lost or not."""
        return stages_of(worker % self.ranks, self.placement)

    def place_of(self, worker: int) -> str:
        """Return a worker as ``REPLICA.STAGE``, with the first of its stages."""
        return f"{self.replica_of(worker)}.{self.stages_of(worker)[0]}"

    def link(self, source: int, destination: int, edge: Edge) -> WorkerLink:
        """Return the directed link between two workers for the messages of a directed edge of stages.

        It is the workers' own, or else that of the edge. A message within one worker takes no time.
        """
        if source == destination:
            return WorkerLink()
        own = self.links.get((source, destination))
        return self._edges[edge] if own is None else own

    @cached_property
    def _edges(self) -> dict[Edge, WorkerLink]:
        """The links of workers without any of their own, by edge."""
        down = [(stage, stage + 1) for stage in range(self.stages - 1)]
        edges = [*down, *((after, before) for before, after in down)]
        return {edge: WorkerLink(self.cost.latency(*edge), self.cost.occupancy(*edge)) for edge in edges}

    def _check_sizes(self) -> None:
        if self.microbatches < 1:
            raise CaseError(f"M={self.microbatches}: expected at least one microbatch")
        if refused := refuse_size(self.replicas * self.stages, self.microbatches):
            raise CaseError(f"{'S, M' if self.replicas == 1 else 'P, S, M'}: {refused}")
        durations = "t_f, t_b, t_w, c_f, c_b, o_f, o_b" if self.replicas == 1 else "t_f, t_i, t_w, c, c_b, o, o_b"
        for names, one in ((durations, self.cost.once_through), ("mem_f", sum(self.cost.memory_forward))):
            if not math.isfinite(self.microbatches * one):
                raise CaseError(
                    f"{names}: {self.microbatches} microbatches add up to more than 1.8e308: expected a larger unit"
                )
        if len(self.placement) != self.stages or set(self.placement) != set(range(len(set(self.placement)))):
            raise CaseError(f"placement {list(self.placement)}: expected {self.stages} stages on ranks 0..R-1")
        if self.workers > _MOST_WORKERS:
            raise CaseError(f"P, S: {self.workers:,} workers: expected at most {_MOST_WORKERS:,}")
        for limit in (self.cost.memory_limit, self.memory):
            if limit is not None and len(limit) != self.ranks:
                raise CaseError(f"mem_cap: expected {self.ranks} numbers, one per rank, got {len(limit)}")

    def _check_stages(self) -> None:
        for what, stages in (("changing", self.changing), ("at_home", self.at_home)):
            for stage in stages:
                if not 0 <= stage < self.stages:
                    raise CaseError(f"{what}: stage {stage} does not exist: expected 0..{self.stages - 1}")
        for worker in sorted(self.lost | self.guests):
            if home := self.at_home.intersection(self.stages_of(worker)):
                what = "lost" if worker in self.lost else "guests"
                raise CaseError(
                    f"{what}: worker {self.place_of(worker)} has stage {min(home)}, which is in at_home: expected one whose "
                    "microbatches others may compute"
                )

    def _check_workers(self) -> None:
        for what, workers in (("slow", self.slow), ("ports", self.ports), ("lost", self.lost), ("guests", self.guests)):
            for worker in workers:
                self._check_worker(what, worker)
        for source, destination in self.links:
            self._check_worker("links", source)
            self._check_worker("links", destination)
        for worker, factor in self.slow.items():
            if not factor > 0:
                raise CaseError(
                    f"slow: {factor:g} for worker {worker}: expected a factor above 0, such as 2 for half the speed"
                )
        for stage in range(self.stages) if self.lost or self.guests else ():
            column = [self.worker(replica, stage) for replica in range(self.replicas)]
            if self.guests.union(self.lost).issuperset(column):
                raise CaseError(
                    f"lost: all {self.replicas} workers of stage {stage}, {column[0]} to {column[-1]}: expected one that lives "
                    "on each stage; only a checkpoint has its parameters then"
                )

    def _check_worker(self, what: str, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise CaseError(
                f"{what}: worker {worker} does not exist: expected 0..{self.workers - 1}, replica · {self.ranks} + rank"
            )


def placement_lists(placement: tuple[int, ...]) -> list[list[int]]:
    """Return the JSON form of a placement: one list of stages per rank."""
    return [list(stages_of(rank, placement)) for rank in range(max(placement) + 1)]
