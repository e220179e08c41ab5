"""The planning problem of a job: several replicas of a pipeline, with lost and slow workers and unequal links.

``docs/formats.md`` documents its JSON form. Times may be in any unit as long as all share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from adaptra.errors import CaseError
from adaptra.program import refuse_size
from adaptra.program.placement import Edge, in_turn, stages_of
from adaptra.program.routing import Grid
from adaptra.simulation.case_fields import CaseFields
from adaptra.simulation.cost import Blocking, Case, CostModel, placement_lists

FORMAT_VERSION: Final = 2
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
class JobCase:
    """One planning problem of several replicas.

    Worker ``replica · ranks + placement[stage]`` has a stage of a replica. A message between two workers departs once their
    link and both workers' ports are free. It occupies each of them for its time, and arrives when all are free again, plus the
    latency. Between two stages of one worker a message takes no time.

    Attributes:
        cost: The costs of each replica: durations per stage, latency and occupancy per edge. They hold for workers and messages
            about which the rest says nothing else. Its memory counts nothing here.
        replicas: The number of replicas.
        microbatches: The number of microbatches of each replica in one step.
        step: Duration of STEP, the optimizer, one per stage.
        reduce: Duration of REDUCE, from the time at which the last worker of a stage has come to it, one per stage.
        links: Links by (sending worker, receiving worker).
        ports: Per worker, the time that a message occupies its port, in each direction; 0 for workers that are not named.
        slow: Per worker, the factor on the durations of its ops; 1 for workers that are not named.
        lost: The workers that are lost.
        hand_over: Latency of an accumulator that passes from one worker to another.
        hands_over: Whether workers hand the accumulator over. If not, each adds up its own, and W ops wait for no other W.
        memory: Per rank of a replica, the most microbatches that its worker holds from the start of F to the end of W. Those
            of all its stages count. None for no limit.
        placement: ``placement[stage]`` is the rank in its replica of the worker that has the stage. Stage i on rank i if empty.
        barrier: Whether every STEP waits for the REDUCE of all workers, as a norm of all gradients makes it. Otherwise it
            waits for its own stage's REDUCE alone, so that workers update at different times.
        changing: The stages whose forwards change buffers, which workers hand over with the same latency. So an F waits for
            that of the microbatch before, whichever worker runs it.
        at_home: The stages whose microbatches no other replica's worker may compute.
        name: A name for people.

    Raises:
        CaseError: A field is invalid; names it, the given value and the expected one.
    """

    cost: CostModel
    replicas: int
    microbatches: int
    step: tuple[float, ...]
    reduce: tuple[float, ...]
    links: Mapping[tuple[int, int], WorkerLink] = field(default_factory=dict[tuple[int, int], WorkerLink])
    ports: Mapping[int, float] = field(default_factory=dict[int, float])
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    lost: frozenset[int] = frozenset()
    hand_over: float = 0.0
    hands_over: bool = True
    memory: tuple[int, ...] | None = None
    placement: tuple[int, ...] = ()
    barrier: bool = False
    changing: frozenset[int] = frozenset()
    at_home: frozenset[int] = frozenset()
    name: str = "case"

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", in_turn(self.stages))
        if len(self.placement) != self.stages or set(self.placement) != set(range(self.ranks)):
            raise CaseError(f"placement {list(self.placement)}: expected {self.stages} stages on ranks 0..R-1")
        object.__setattr__(self, "cost", self.cost.placed(self.placement))
        if self.memory is not None and len(self.memory) != self.ranks:
            raise CaseError(f"mem_cap {list(self.memory)}: expected one number for each of {self.ranks} ranks")
        if self.cost.half_duplex or self.cost.blocking is not Blocking.NONE:
            raise CaseError(f"{self.name}: duplex or blocking_comm: expected neither with several replicas")
        if refused := refuse_size(self.replicas * self.stages, self.microbatches):
            raise CaseError(f"P, S, M: {refused}")
        if self.workers > _MOST_WORKERS:
            raise CaseError(f"P, S: {self.workers:,} workers: expected at most {_MOST_WORKERS:,}")
        self._check_workers()
        self._check_stages()
        for stage in range(self.stages):
            column = [self.worker(replica, stage) for replica in range(self.replicas)]
            if self.lost.issuperset(column):
                raise CaseError(
                    f"lost: all {self.replicas} workers of stage {stage}, {column[0]} to {column[-1]}: expected one that lives "
                    "on each stage; only a checkpoint has its parameters then"
                )

    @staticmethod
    def of(case: Case, replicas: int, step: float = 0.0, reduce: float = 0.0) -> JobCase:
        """Return the case of several replicas of one pipeline, all alike.

        A limit of memory becomes one of whole microbatches, as if each held all of its memory from F to the end of W.

        Args:
            case: The case of one pipeline.
            replicas: The number of replicas.
            step, reduce: Durations of STEP and REDUCE, for all stages.

        Raises:
            CaseError: Edges are half duplex or communication blocks.
        """
        cost = case.cost
        memory = None
        if cost.memory_limit is not None:
            held_by = [max(cost.memory_forward[stage] for stage in held) for held in placement_lists(case.placement)]
            pairs = zip(cost.memory_limit, held_by, strict=True)
            most = replicas * case.microbatches * case.cost.stages
            memory = tuple(most if held == 0.0 else int(limit / held + 1e-9) for limit, held in pairs)
        step_times, reduce_times = (step,) * cost.stages, (reduce,) * cost.stages
        return JobCase(
            cost, replicas, case.microbatches, step_times, reduce_times, memory=memory, placement=case.placement, name=case.name
        )

    def fault_scaled(self, healthy: float) -> float:
        """Return the period of the healthy job, given as ``healthy``, scaled by the speed that is lost."""
        speeds = [0.0 if worker in self.lost else 1 / self.slow.get(worker, 1.0) for worker in range(self.workers)]
        return healthy * self.workers / sum(speeds)

    @property
    def is_healthy(self) -> bool:
        """Whether no worker is lost or slow."""
        return not self.lost and not self.slow

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

    @staticmethod
    def from_json(data: Mapping[str, Any], name: str = "case") -> JobCase:
        """Read a case from its JSON object."""
        fields = CaseFields(data)
        fields.only(_FIELDS)
        if fields.given("version", FORMAT_VERSION) != FORMAT_VERSION:
            raise CaseError(f"version {data['version']!r}: a case with replicas, P, has version {FORMAT_VERSION}")
        replicas, stages, microbatches = fields.count("P"), fields.count("S"), fields.count("M")
        if refused := refuse_size(replicas * stages, microbatches):
            raise CaseError(f"P, S, M: {refused}")
        fold = fields.one_of("fold", ("handover", "contributions"))
        placement = fields.placement(stages)
        caps = None if fields.given("mem_cap", None) is None else fields.numbers("mem_cap", max(placement) + 1)
        cost = CostModel(
            forward=fields.numbers("t_f", stages),
            input_grad=fields.numbers("t_i", stages),
            weight_grad=fields.numbers("t_w", stages),
            latency_forward=fields.numbers("c", stages - 1, 0),
            latency_backward=fields.numbers("c_b", stages - 1, fields.given("c", 0)),
            occupancy_forward=fields.numbers("o", stages - 1, 0),
            occupancy_backward=fields.numbers("o_b", stages - 1, fields.given("o", 0)),
        )
        return JobCase(
            cost,
            replicas,
            microbatches,
            fields.numbers("t_opt", stages, 0),
            fields.numbers("t_reduce", stages, 0),
            _links(fields),
            {worker_of("ports", one, placement): value for one, value in fields.numbers_by_name("ports").items()},
            {worker_of("slow", one, placement): value for one, value in fields.numbers_by_name("slow").items()},
            frozenset(worker_of("lost", one, placement) for one in fields.texts("lost")),
            fields.number("handover", 0),
            fold == "handover",
            None if caps is None else tuple(map(_whole_cap, caps)),
            placement,
            fields.flag("barrier"),
            frozenset(fields.indices("changing")),
            frozenset(fields.indices("at_home")),
            str(fields.given("name", name)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object from which :meth:`from_json` reads an equal case."""
        return {
            "version": FORMAT_VERSION,
            "name": self.name,
            "P": self.replicas,
            "S": self.stages,
            "M": self.microbatches,
            "t_f": list(self.cost.forward),
            "t_i": list(self.cost.input_grad),
            "t_w": list(self.cost.weight_grad),
            "t_opt": list(self.step),
            "t_reduce": list(self.reduce),
            "c": list(self.cost.latency_forward),
            "c_b": list(self.cost.latency_backward),
            "o": list(self.cost.occupancy_forward),
            "o_b": list(self.cost.occupancy_backward),
            "links": {f"{a}-{b}": {"c": link.latency, "o": link.occupancy} for (a, b), link in self.links.items()},
            "ports": {str(worker): value for worker, value in self.ports.items()},
            "slow": {str(worker): value for worker, value in self.slow.items()},
            "lost": [self.place_of(worker) for worker in sorted(self.lost)],
            "handover": self.hand_over,
            "fold": self.fold,
            "mem_cap": None if self.memory is None else list(self.memory),
            "placement": placement_lists(self.placement),
            "barrier": self.barrier,
            "changing": sorted(self.changing),
            "at_home": sorted(self.at_home),
        }

    def _check_stages(self) -> None:
        for what, stages in (("changing", self.changing), ("at_home", self.at_home)):
            for stage in stages:
                if not 0 <= stage < self.stages:
                    raise CaseError(f"{what}: stage {stage} does not exist: expected 0..{self.stages - 1}")
        for worker in sorted(self.lost):
            if home := self.at_home.intersection(self.stages_of(worker)):
                raise CaseError(
                    f"lost: worker {self.place_of(worker)} has stage {min(home)}, which is in at_home: expected one whose "
                    "microbatches others may compute"
                )

    def _check_workers(self) -> None:
        for what, workers in (("slow", self.slow), ("ports", self.ports), ("lost", self.lost)):
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

    def _check_worker(self, what: str, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise CaseError(
                f"{what}: worker {worker} does not exist: expected 0..{self.workers - 1}, replica · {self.ranks} + rank"
            )


_FIELDS: Final = frozenset(
    "version name P S M placement t_f t_i t_w t_opt t_reduce c c_b o o_b links ports slow lost handover".split()
) | {"fold", "mem_cap", "barrier", "changing", "at_home"}
_PLACE: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


def worker_of(what: str, text: str, placement: Sequence[int]) -> int:
    """Read a worker: its number, or ``REPLICA.STAGE``, the worker that has this stage.

    Raises:
        CaseError: The text is neither; ``what`` begins the error.
    """
    if match := _PLACE.fullmatch(text):
        replica, stage = int(match[1]), int(match[2])
        if stage >= len(placement):
            raise CaseError(f"{what}: {text!r}: stage {stage} does not exist: expected 0..{len(placement) - 1}")
        return replica * (max(placement) + 1) + placement[stage]
    if _INDEX.fullmatch(text):
        return int(text)
    raise CaseError(f"{what}: {text!r}: expected a worker such as '1.2' for stage 2 of replica 1, or its number")


def _links(fields: CaseFields) -> dict[tuple[int, int], WorkerLink]:
    found: dict[tuple[int, int], WorkerLink] = {}
    for name, value in fields.objects("links").items():
        ends = name.split("-")
        if len(ends) != 2 or not all(_INDEX.fullmatch(end) for end in ends):
            raise CaseError(f"links: {name!r}: expected two workers such as '1-2', from 1 to 2")
        link = CaseFields(value, f"links {name}: ")
        link.only(frozenset({"c", "o"}))
        found[int(ends[0]), int(ends[1])] = WorkerLink(link.number("c", 0), link.number("o", 0))
    return found


def _whole_cap(given: float) -> int:
    if given < 1 or given != int(given):
        raise CaseError(f"mem_cap: {given:g}: expected a whole number of microbatches, at least 1")
    return int(given)
