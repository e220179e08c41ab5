"""Batches of other shapes over processes: bitwise as in one, a rank with another batch is told, and replicas keep weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes

pytestmark = pytest.mark.processes

SHAPES = [(8, 6), (10, 6), (8, 9), (3, 6), (1, 5), (10, 6), (8, 6)]

Given = tuple[int, int] | None
"""The rows and the length of a rank's batch; None for no batch."""


def set_up(stages: int, reduction: str = "mean", **how: Any) -> Any:
    import torch.distributed as dist
    from shaped import LOSSES, MICROBATCHES, batch, make

    import adaptra

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return adaptra.compile(
        make(),
        stages=stages,
        microbatches=MICROBATCHES,
        example_inputs=batch(8, 6),
        loss=LOSSES[reduction],
        reduction=reduction,
        **how,
    )


def run_shapes(rank: int, stages: int, how: dict[str, Any]) -> list[tuple[float, float, list[list[float]]]]:
    import torch
    from shaped import batch

    found = []
    with set_up(stages, **how) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        for number, (rows, length) in enumerate(SHAPES):
            loss = pipe.step(*batch(rows, length, number)).item()
            evaluated = pipe.eval_step(*batch(rows, length, number)).item()
            outputs = pipe.eval_step(batch(rows, length, number)[0])
            assert (outputs is not None and outputs.shape[:2] == (rows, length)) == (rank == pipe.plan.case.placement[-1])
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss, evaluated, [[name, one.double().sum().item()] for name, one in pipe.named_parameters()]))
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", [{}, {"placement": "v"}])
def test_ranks_of_processes_train_all_shapes_bitwise_as_threads(how: dict[str, Any]) -> None:
    import torch
    from shaped import LOSSES, batch, make

    import adaptra

    stages = 4 if how else 2
    results = run_processes(run_shapes, 2, stages, how)
    with adaptra.compile(make(), stages=stages, microbatches=4, example_inputs=batch(8, 6), loss=LOSSES["mean"], **how) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
        for number, (rows, length) in enumerate(SHAPES):
            loss = pipe.step(*batch(rows, length, number)).item()
            evaluated = pipe.eval_step(*batch(rows, length, number)).item()
            optimizer.step()
            optimizer.zero_grad()
            state = {name: one.double().sum().item() for name, one in pipe.named_parameters()}
            for result in results:
                assert result[number][:2] == (loss, evaluated), (rows, length)
                assert [name for name, value in result[number][2] if state[name] != value] == [], (rows, length)


def step_apart(rank: int, before: Sequence[Given], given: Sequence[Given]) -> tuple[str, str] | None:
    from shaped import batch

    with set_up(3) as pipe:
        for one in before:
            pipe.step(*batch(*one)) if one is not None else pipe.step()
        try:
            own = given[rank]
            pipe.step(*batch(*own)) if own is not None else pipe.step()
        except Exception as error:
            return type(error).__name__, str(error)
    return None


NEW = (
    "rank … has a batch of …, a shape that is new to it, rank … one of a known shape: expected one shape on all ranks of a "
    "replica; give each of them the same inputs and targets, not None"
)
OTHER = (
    "rank … has a batch of …, rank … one of …: expected one shape on all ranks of a replica; give each of them the same inputs "
    "and targets, not None"
)
MESSAGE = "receive of …: got …, of a batch of another shape: expected batches of one shape on all ranks of a replica"


@pytest.mark.parametrize(
    ("before", "given", "row"),
    [
        ([], [(8, 9), None, (8, 9)], NEW),
        ([], [(8, 6), (8, 6), (6, 6)], NEW),
        ([(8, 9)], [(8, 9), None, (8, 9)], MESSAGE),
        ([], [(8, 9), (8, 7), (8, 9)], OTHER),
    ],
)
def test_ranks_with_batches_of_different_shapes_are_told(before: list[Given], given: list[Given], row: str) -> None:
    results = run_processes(step_apart, 3, before, given)
    assert None not in results
    told = [(kind, text) for kind, text in results if kind != "PeerLostError"]
    assert told, results
    for kind, text in told:
        check_documented(kind, text, row)


def train_replicas(rank: int, reduction: str, rows: list[int]) -> Any:
    from shaped import batch, gradients

    with set_up(2, reduction) as pipe:
        try:
            loss = pipe.step(*batch(rows[pipe.replica], 5, pipe.replica))
        except Exception as error:
            return type(error).__name__, str(error)
        timeline = pipe.timeline()  # of the whole job, whose replicas may have had other numbers of microbatches
        computed = None if timeline is None else [len({one.op.microbatch for one in ops}) for ops in timeline.ops]
        return loss.item(), {name: one.tolist() for name, one in gradients(pipe).items()}, computed


def expected_of(reduction: str, rows: Sequence[int]) -> tuple[float, dict[str, Any]]:
    """One process with the batches of all replicas as one: the loss and the gradients."""
    import torch
    from shaped import LOSSES, batch, gradients, make

    model = make()
    tokens, labels = (torch.cat(parts) for parts in zip(*(batch(one, 5, at) for at, one in enumerate(rows)), strict=True))
    found = LOSSES[reduction](model(tokens), labels)
    loss = found[0] / found[1] if reduction == "weighted" else found
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize(
    ("reduction", "rows"), [("mean", [7, 7]), ("mean", [3, 3]), ("sum", [7, 3]), ("weighted", [3, 10]), ("sum", [8, 1])]
)
def test_replicas_train_batches_of_other_shapes(reduction: str, rows: list[int]) -> None:
    import torch

    loss, wanted = expected_of(reduction, rows)
    results = run_processes(train_replicas, 4, reduction, rows)
    assert [one[2] for one in results] == [[min(rows[0], 4)] * 2 + [min(rows[1], 4)] * 2, None, None, None]
    for found_loss, found, _ in results:
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for name, one in found.items():
            assert torch.allclose(torch.tensor(one), wanted[name], rtol=1e-3, atol=1e-5), name


UNEQUAL = (
    "replica … has a batch of … rows, and others have other numbers, … on average: expected the same number on all replicas, "
    "as reduction='mean' gives each replica the same weight; reduction='sum' and 'weighted' take any numbers"
)


def step_with_rows(rank: int, rows: list[int]) -> tuple[str, str] | float:
    from shaped import batch

    with set_up(1) as pipe:
        assert pipe.replica == rank
        try:
            return pipe.step(*batch(rows[rank], 5, rank)).item()
        except Exception as error:
            return type(error).__name__, str(error)


def test_a_mean_over_replicas_with_different_rows_is_refused_on_all_of_them() -> None:
    """Also on the replica whose rows are the mean of all."""
    results = run_processes(step_with_rows, 3, [5, 6, 7])
    assert all(isinstance(one, tuple) for one in results), results
    assert {kind for kind, _ in results} <= {"BatchError", "PeerLostError"}
    told = [one for one in results if one[0] == "BatchError"]
    assert told
    for kind, text in told:
        check_documented(kind, text, UNEQUAL)


BEHIND_ROUTES = [((8, 6), (8, 6)), ((8, 7), (8, 7)), ((3, 6), (8, 6)), ((8, 6), (8, 6)), ((8, 6), (10, 5))]
"""The rows and lengths of both replicas' batches by step."""


def step_under_routes(rank: int) -> Any:
    """The losses, the outputs and the gradients of steps without routes and with them; and which steps left home."""
    from shaped import batch, gradients

    import adaptra
    from adaptra.planning.routes.job_planner import plan_job
    from adaptra.program.routing import Routing
    from adaptra.simulation.case import Case
    from adaptra.simulation.cost import CostModel

    case = Case(CostModel.uniform(2, 1.0, 1.0, 1.0), 4, (0, 1)).of_replicas(2)
    paths = [[(0, 1)] * 4, [(2, 3), (2, 1), (0, 3), (2, 1)]]
    routed = plan_job(case, routing=Routing.of_paths(((0, 1), (2, 3)), paths))
    found: list[Any] = []
    for schedule in ("1f1b", routed):
        away: list[bool] = []
        with set_up(2, "sum", options=adaptra.Options(schedule=schedule, adapt=False)) as pipe:
            trained: list[Any] = []
            for given in BEHIND_ROUTES:
                rows, length = given[pipe.replica]
                loss, outputs = pipe.step(*batch(rows, length, pipe.replica), outputs=True)
                trained.append((loss.item(), None if outputs is None else outputs.tolist()))
                if given[0] == given[1]:
                    assert (pipe.timeline() is not None) == (rank == 0)
                away.append(len(pipe.routes) > 2)
            found.append((trained, {name: one.tolist() for name, one in gradients(pipe).items()}, away))
    return found


def test_a_step_with_a_batch_of_another_shape_runs_at_home_on_all_replicas() -> None:
    """Also where one replica's alone has another shape. Steps behind it follow the given routes again."""
    for (at_home, gradients, stayed), (routed, same, away) in run_processes(step_under_routes, 4):
        assert (routed, same) == (at_home, gradients)
        assert stayed == [False] * 5
        assert away == [True, False, False, True, False]
