"""The case of a job from what each replica has measured on its own: which worker is slow, which link narrow or late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from adaptra.errors import CaseError
from adaptra.program.placement import Edge, in_turn
from adaptra.simulation.case import Case, WorkerLink
from adaptra.simulation.cost import CostModel
from adaptra.sizes import MemoryLimit, MemoryUnit

NOISE: Final = 0.05
"""The fraction of F + I + W by which workers that are alike may differ, and the unit in which a slow one's factor is given."""

LINK_NOISE: Final = 0.2
"""The fraction of a message's flight by which links that are alike may differ."""

FORWARD_NOISE: Final = 0.1
"""The same as a fraction of the mean F. Either is enough: a short flight is measured by clocks of an op's resolution."""

Ends = tuple[int, int]
"""A directed link: (sending worker, receiving worker)."""


@dataclass(frozen=True, slots=True)
class UpdateSeconds:
    """Seconds of a step's end, which no replica's cost model has.

    Attributes:
        step: Of STEP, the optimizer, one per stage.
        reduce: Of REDUCE, one per stage.
        hand_over: From the departure of an accumulator of weight gradients to its arrival at another worker.
        barrier: Whether every STEP waits for the REDUCE of all workers, as :attr:`Case.barrier` says.
    """

    step: tuple[float, ...]
    reduce: tuple[float, ...]
    hand_over: float = 0.0
    barrier: bool = False


def measured_case(
    costs: Sequence[CostModel],
    microbatches: int,
    updates: UpdateSeconds,
    *,
    placement: tuple[int, ...] = (),
    memory: tuple[int, ...] | None = None,
    crossing: Mapping[Ends, WorkerLink] | None = None,
) -> Case:
    """Return the case of a job, in seconds, from the measured costs of each replica.

    Costs that all replicas share are those of the healthy ones. A value is healthy if it is as low as the least one but for
    twice the noise, and the median of these counts. So most workers of a stage may be slow at once.

    A worker whose F + I + W are within :data:`NOISE` of the shared ones counts as equal to them. Another one is slow by a
    factor, in units of :data:`NOISE`. So replicas that are alike stay alike, and are planned once.

    A link whose latency or occupancy differs by more than noise is a link of its two workers. That noise is the greater of
    :data:`LINK_NOISE` of the shared flight and :data:`FORWARD_NOISE` of the mean F.

    Links between workers of different replicas are not measured before a route uses them. They count as shared ones, with one
    exception. A worker with links to at least two others, all narrower or later than the shared ones, has a port at fault.
    Then its links to all workers of the same stages are like its own. A worker with only one link can't be judged: its port
    counts as healthy, so that a detour is tried.

    Args:
        costs: One measured cost model per replica, of the same stages, in seconds.
        microbatches: The number of microbatches of each replica in one step.
        updates: The seconds of a step's end.
        placement: The rank of each stage in its replica; stage i on rank i if empty.
        memory: Per rank, the most microbatches that its worker holds, as of :class:`Case`; None for no limit.
        crossing: Links that have been measured between any two workers. They replace what is assumed.

    Raises:
        CaseError: There are no costs, they have different stages, or the case is not possible.
    """
    if not costs:
        raise CaseError("measured_case: no costs: expected one cost model per replica")
    stages = costs[0].stages
    for replica, cost in enumerate(costs):
        if cost.stages != stages:
            raise CaseError(f"measured_case: replica {replica} has {cost.stages} stages: expected {stages}, as replica 0")
    placement = placement or in_turn(stages)
    shared = replace(_shared_cost(costs), update=())  # they are among ``updates``
    healthy = Case(
        shared,
        microbatches,
        placement,
        "measured",
        updates.barrier,
        replicas=len(costs),
        step=updates.step,
        reduce=updates.reduce,
        hand_over=updates.hand_over,
        memory=memory,
    )
    own = _own_links(healthy, costs)
    links = own | _links_of_ports(healthy, own)
    for ends, link in (crossing or {}).items():
        links.pop(ends, None)
        if any(_differs(shared, edge, link) for edge in _edges_between(healthy, ends)):
            links[ends] = link
    return replace(healthy, slow=_slow(healthy, costs), links=links)


def pipeline_case(case: Case, replica: int) -> Case:
    """Return the case of one replica that computes its own microbatches, as the planner of one pipeline takes it.

    A limit of memory counts microbatches from the start of F to the end of W.
    """
    cost = case.cost
    for stage in range(case.stages):
        slow = case.slow.get(case.worker(replica, stage), 1.0)
        times = (cost.forward[stage], cost.input_grad[stage], cost.weight_grad[stage])
        cost = cost.with_stage(stage, *(slow * time for time in times))
    for source, destination in _directed(case.stages):
        here, there = case.worker(replica, source), case.worker(replica, destination)
        link = case.link(here, there, (source, destination))
        port = max(case.ports.get(here, 0.0), case.ports.get(there, 0.0)) if here != there else 0.0
        cost = cost.with_latency(source, destination, link.latency)
        cost = cost.with_occupancy(source, destination, max(link.occupancy, port))
    limit = None if case.memory is None else MemoryLimit(tuple(map(float, case.memory)), MemoryUnit.MICROBATCHES)
    cost = replace(cost, memory_forward=(1.0,) * case.stages, memory_input_grad=(0.0,) * case.stages, memory_limit=limit)
    return Case(cost, case.microbatches, case.placement, case.name)


def _shared_cost(costs: Sequence[CostModel]) -> CostModel:
    """Return the costs of healthy workers and links, with the rest of the first replica's cost model."""
    shared = costs[0]
    for stage in range(shared.stages):
        totals = [_total(cost, stage) for cost in costs]
        alike = [cost for cost, total in zip(costs, totals, strict=True) if total <= (1 + 2 * NOISE) * min(totals)]
        kinds = ([getattr(cost, kind)[stage] for cost in alike] for kind in ("forward", "input_grad", "weight_grad"))
        shared = shared.with_stage(stage, *map(median, kinds))
    for edge in _directed(shared.stages):
        flights = [cost.latency(*edge) + cost.occupancy(*edge) for cost in costs]
        most = min(flights) + 2 * _link_noise(shared, min(flights))
        alike = [cost for cost, flight in zip(costs, flights, strict=True) if flight <= most]
        shared = shared.with_latency(*edge, median(cost.latency(*edge) for cost in alike))
        shared = shared.with_occupancy(*edge, median(cost.occupancy(*edge) for cost in alike))
    return shared


def _total(cost: CostModel, stage: int) -> float:
    return cost.forward[stage] + cost.input_grad[stage] + cost.weight_grad[stage]


def _slow(case: Case, costs: Sequence[CostModel]) -> dict[int, float]:
    """Return the factors of the workers that differ from the shared costs. Those of all its stages count."""
    factors: dict[int, float] = {}
    for replica, cost in enumerate(costs):
        for worker in dict.fromkeys(case.worker(replica, stage) for stage in range(case.stages)):
            shared = sum(_total(case.cost, stage) for stage in case.stages_of(worker))
            own = sum(_total(cost, stage) for stage in case.stages_of(worker))
            if shared > 0 and own > 0 and abs(own / shared - 1) > NOISE:
                factors[worker] = round(max(round(own / shared / NOISE), 1) * NOISE, 6)
    return factors


def _own_links(case: Case, costs: Sequence[CostModel]) -> dict[Ends, WorkerLink]:
    """Return the links between workers of one replica that differ from the shared ones.

    Of several edges between the same two workers the link has the longest times.
    """
    links: dict[Ends, WorkerLink] = {}
    for replica, cost in enumerate(costs):
        for edge in _directed(case.stages):
            ends = case.worker(replica, edge[0]), case.worker(replica, edge[1])
            link = WorkerLink(cost.latency(*edge), cost.occupancy(*edge))
            if ends[0] != ends[1] and _differs(case.cost, edge, link):
                before = links.get(ends, link)
                links[ends] = WorkerLink(max(before.latency, link.latency), max(before.occupancy, link.occupancy))
    return links


def _links_of_ports(case: Case, own: Mapping[Ends, WorkerLink]) -> dict[Ends, WorkerLink]:
    """Return the links to other replicas of workers whose own ones, to at least two workers, are all worse than shared ones."""
    links: dict[Ends, WorkerLink] = {}
    for worker in sorted({end for ends in own for end in ends}):
        beside = _beside(case, worker)
        others = {case.worker(case.replica_of(worker), near) for _, near in beside}
        ends = [one for other in others for one in ((worker, other), (other, worker))]
        if len(others) < 2 or not all(one in own and _is_worse(case, own[one], one) for one in ends):
            continue
        for _, near in beside:
            home = case.worker(case.replica_of(worker), near)
            for other in (case.worker(replica, near) for replica in range(case.replicas)):
                if other != home:
                    for there, like in (((worker, other), (worker, home)), ((other, worker), (home, worker))):
                        links[there] = _worst(own[like], links.get(there))
    return links


def _worst(link: WorkerLink, other: WorkerLink | None) -> WorkerLink:
    return link if other is None else max(link, other, key=lambda one: one.latency + one.occupancy)


def _is_worse(case: Case, link: WorkerLink, ends: Ends) -> bool:
    edges = _edges_between(case, ends)
    return all(link.latency + link.occupancy > case.cost.latency(*edge) + case.cost.occupancy(*edge) for edge in edges)


def _beside(case: Case, worker: int) -> list[Edge]:
    """Return the pairs of a worker's stage and a stage beside it on another worker of its replica."""
    stages = case.stages_of(worker)
    pairs = [(stage, near) for stage in stages for near in (stage - 1, stage + 1)]
    return [(stage, near) for stage, near in pairs if 0 <= near < case.stages and near not in stages]


def _edges_between(case: Case, ends: Ends) -> list[Edge]:
    """Return the directed edges of stages whose messages the link between two workers carries."""
    sending, receiving = case.stages_of(ends[0]), case.stages_of(ends[1])
    return [edge for edge in _directed(case.stages) if edge[0] in sending and edge[1] in receiving]


def _differs(shared: CostModel, edge: Edge, link: WorkerLink) -> bool:
    latency, occupancy = shared.latency(*edge), shared.occupancy(*edge)
    noise = _link_noise(shared, latency + occupancy)
    return abs(link.latency - latency) > noise or abs(link.occupancy - occupancy) > noise


def _link_noise(shared: CostModel, flight: float) -> float:
    """Return by how many seconds links may differ that are alike."""
    return max(LINK_NOISE * flight, FORWARD_NOISE * fmean(shared.forward))


def _directed(stages: int) -> Iterator[Edge]:
    for stage in range(stages - 1):
        yield stage, stage + 1
        yield stage + 1, stage
