"""The numbers of a plan of one pipeline, and the bubble equations filled with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaptra.equations.bubble import equations
from adaptra.equations.warm_up import WarmUp, edge_times
from adaptra.planning.explaining.lines import Line
from adaptra.program import Kind, Program
from adaptra.simulation.cost import MEMORY_TOLERANCE, CostModel


def warm_up_of(program: Program) -> tuple[int, ...]:
    """Return the forwards before the first I or B of each stage."""
    counts = [0] * program.stages
    turned = [False] * program.stages
    for order in program.orders:
        for op in order:
            if op.kind is Kind.F and not turned[op.stage]:
                counts[op.stage] += 1
            elif op.kind in (Kind.I, Kind.B):
                turned[op.stage] = True
    return tuple(counts)


def limits_of(program: Program, cost: CostModel) -> tuple[int, ...] | None:
    """Return A_i: the number of microbatches that fit the memory of each stage's rank, if the rank had no other stage."""
    if cost.memory_limit is None:
        return None
    limits: list[int] = []
    for stage, rank in enumerate(program.placement):
        held = cost.memory_forward[stage]
        fitting = int((cost.memory_limit[rank] + MEMORY_TOLERANCE) / held) if held > 0 else program.microbatches
        limits.append(max(1, min(fitting, program.microbatches)))
    return tuple(limits)


def edge_lines(cost: CostModel, microbatches: int, x: Sequence[int], asked: WarmUp) -> Iterator[Line]:
    """Yield the equations of slack and warm-up at each edge and stage."""
    model = equations()
    edges = range(cost.stages - 1)
    busy = [edge for edge in edges if cost.forward[edge + 1] + cost.input_grad[edge + 1] > 0]

    def name(edge: int) -> str:
        return f"edge {edge}-{edge + 1}"

    for edge in edges:
        yield Line.of(model.slackness, name(edge), x[edge] - x[edge + 1], x[edge], x[edge + 1])
    for edge in busy:
        yield Line.of(model.needed_slack, name(edge), *edge_times(cost, edge))
    for edge in busy:
        yield Line.of(model.warm_up_slack, name(edge), *edge_times(cost, edge), microbatches)
    for edge in busy:
        yield Line.of(model.no_cascade, name(edge), *edge_times(cost, edge), x[edge] - x[edge + 1])
    for edge in busy:
        yield Line.of(model.steady_slack, name(edge), *edge_times(cost, edge), cost.weight_grad[edge + 1])
    for stage in range(cost.stages):
        yield Line.of(model.budget, f"stage {stage}", x[stage], asked.limit[stage], microbatches)


def bound_lines(cost: CostModel, microbatches: int, limits: Sequence[int]) -> Iterator[Line]:
    """Yield each bound at the stage or edge where it is greatest."""
    model = equations()
    head, down, tail = _heads_and_tails(cost)
    forward, input_grad, weight_grad = cost.forward, cost.input_grad, cost.weight_grad
    stages = range(cost.stages)

    def stage_values(stage: int) -> tuple[float, ...]:
        return head[stage], forward[stage], down[stage], input_grad[stage], tail[stage], microbatches

    def first(edge: int) -> tuple[float, ...]:
        return head[edge], forward[edge]

    def second(edge: int) -> tuple[float, ...]:
        return forward[edge + 1], down[edge + 1], input_grad[edge + 1]

    candidates: list[list[Line]] = [
        [
            Line.of(model.bound_load, f"stage {s}", head[s], forward[s], input_grad[s], weight_grad[s], microbatches)
            for s in stages
        ],
        [Line.of(model.bound_drain, f"stage {s}", head[s], forward[s], input_grad[s], tail[s], microbatches) for s in stages],
        [Line.of(model.bound_chain, f"stage {s}", *stage_values(s)) for s in stages],
        [Line.of(model.bound_memory, f"stage {s}", *stage_values(s), limits[s]) for s in stages],
        [
            Line.of(
                model.bound_link_forward,
                f"edge {edge}-{edge + 1}",
                *(*first(edge), cost.occupancy_forward[edge], cost.latency_forward[edge] + cost.occupancy_forward[edge]),
                *(*second(edge), tail[edge + 1], microbatches),
            )
            for edge in stages[:-1]
            if cost.occupancy_forward[edge] > 0
        ],
        [
            Line.of(
                model.bound_link_backward,
                f"edge {edge}-{edge + 1}",
                *(*first(edge), cost.latency_forward[edge] + cost.occupancy_forward[edge], *second(edge)),
                *(cost.occupancy_backward[edge], cost.latency_backward[edge] + cost.occupancy_backward[edge]),
                *(input_grad[edge], tail[edge], microbatches),
            )
            for edge in stages[:-1]
            if cost.occupancy_backward[edge] > 0
        ],
    ]
    for lines in candidates:
        if lines:
            yield max(lines, key=lambda line: line.result)


def _heads_and_tails(cost: CostModel) -> tuple[list[float], list[float], list[float]]:
    """Return h_i, d_i and r_i of all stages."""
    stages = cost.stages
    there = [latency + taken for latency, taken in zip(cost.latency_forward, cost.occupancy_forward, strict=True)]
    back = [latency + taken for latency, taken in zip(cost.latency_backward, cost.occupancy_backward, strict=True)]
    head, down, tail = [0.0] * stages, [0.0] * stages, list(cost.weight_grad)
    for stage in range(1, stages):
        head[stage] = head[stage - 1] + cost.forward[stage - 1] + there[stage - 1]
        tail[stage] = max(tail[stage], back[stage - 1] + cost.input_grad[stage - 1] + tail[stage - 1])
    for stage in reversed(range(stages - 1)):
        down[stage] = there[stage] + cost.forward[stage + 1] + down[stage + 1] + cost.input_grad[stage + 1] + back[stage]
    return head, down, tail
