"""Hypothesis strategies shared by test files: programs that are valid by construction, and cost models for them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from adaptra.program import Kind, Op, Program
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel


@st.composite
def placements(draw: st.DrawFn, max_stages: int = 5) -> tuple[int, ...]:
    """Stages on ranks 0..R-1, each rank holding at least one stage, in any arrangement."""
    stages = draw(st.integers(1, max_stages))
    ranks = draw(st.integers(1, stages))
    extra = draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))
    return tuple(draw(st.permutations([*range(ranks), *extra])))


@st.composite
def programs(
    draw: st.DrawFn,
    max_stages: int = 5,
    max_microbatches: int = 5,
    lowered: bool | None = None,
    split: bool | None = None,
    placed: st.SearchStrategy[tuple[int, ...]] | None = None,
) -> Program:
    """A valid training program, grown by running it: in each turn a random stage executes a random op that it could run now.

    Args:
        max_stages, max_microbatches: The largest size.
        lowered: Whether the program holds its SEND and RECV ops; None for either.
        split: True for I and W only, False for B only, None for any mixture.
        placed: Where placements come from; by default from :func:`placements`.
    """
    placement = draw(placements(max_stages) if placed is None else placed)
    microbatches = draw(st.integers(1, max_microbatches))
    communicates = draw(st.booleans()) if lowered is None else lowered
    stages = len(placement)
    orders: list[list[Op]] = [[] for _ in range(max(placement) + 1)]
    forwards, gradients = [0] * stages, [0] * stages
    weights: list[list[int]] = [[] for _ in range(stages)]

    def send(stage: int, send_kind: Kind, peer: int, receive_kind: Kind, microbatch: int) -> None:
        if communicates and 0 <= peer < stages and placement[peer] != placement[stage]:
            orders[placement[stage]].append(Op(stage, send_kind, microbatch))
            orders[placement[peer]].append(Op(peer, receive_kind, microbatch))

    def forward(stage: int) -> None:
        microbatch = forwards[stage]
        forwards[stage] += 1
        orders[placement[stage]].append(Op(stage, Kind.F, microbatch))
        send(stage, Kind.SEND_F, stage + 1, Kind.RECV_F, microbatch)

    def backward(stage: int, kind: Kind) -> None:
        microbatch = gradients[stage]
        gradients[stage] += 1
        orders[placement[stage]].append(Op(stage, kind, microbatch))
        if kind is Kind.I:
            weights[stage].append(microbatch)
        send(stage, Kind.SEND_B, stage - 1, Kind.RECV_B, microbatch)

    def weight(stage: int) -> None:
        orders[placement[stage]].append(Op(stage, Kind.W, weights[stage].pop(0)))

    while True:
        turns: list[tuple[Callable[..., None], tuple[int | Kind, ...]]] = []
        for stage in range(stages):
            if forwards[stage] < (microbatches if stage == 0 else forwards[stage - 1]):
                turns.append((forward, (stage,)))
            if gradients[stage] < min(forwards[stage], gradients[stage + 1] if stage + 1 < stages else microbatches):
                if split is not False:
                    turns.append((backward, (stage, Kind.I)))
                if split is not True and not weights[stage]:
                    turns.append((backward, (stage, Kind.B)))
            if weights[stage]:
                turns.append((weight, (stage,)))
        if not turns:
            return Program.of_pipeline("random", placement, microbatches, tuple(map(tuple, orders)))
        turn, arguments = draw(st.sampled_from(turns))
        turn(*arguments)


def times(whole: bool = False) -> st.SearchStrategy[float]:
    """Durations and delays: whole numbers whose sums are exact, or any moderate number; zero included."""
    if whole:
        return st.integers(0, 50).map(float)
    return st.floats(0, 100, allow_nan=False, allow_subnormal=False)


@st.composite
def cost_models(draw: st.DrawFn, stages: int, whole: bool = False) -> CostModel:
    """A cost model whose stages and directed edges all differ; no memory limit, no blocking, full duplex."""

    def some(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(times(whole), min_size=count, max_size=count)))

    forward, input_grad, weight_grad = (some(stages) for _ in range(3))
    there, back, busy_there, busy_back = (some(stages - 1) for _ in range(4))
    return CostModel(forward, input_grad, weight_grad, there, back, busy_there, busy_back)


@st.composite
def cases(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 6, whole: bool = False) -> Case:
    """A planning problem with one stage per rank."""
    stages = draw(st.integers(1, max_stages))
    return Case(draw(cost_models(stages, whole)), draw(st.integers(1, max_microbatches)), tuple(range(stages)))
