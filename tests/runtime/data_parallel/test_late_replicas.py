"""Jobs whose replicas come late to the sums of gradients: other algorithms take over and leave again, and no bit differs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import nn
from training import compiled

import adaptra
from adaptra.collectives.algorithms import LATE
from adaptra.collectives.late_ranks import LEAST_REMEMBERED, LateRanks
from adaptra.collectives.ports import measured_ports
from adaptra.collectives.rounds import direct
from adaptra.errors import ControlError
from adaptra.program.roles import Roles
from adaptra.report import perfetto
from adaptra.report.run_records import load_run
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.data_parallel import gradient_averaging
from adaptra.runtime.data_parallel.arrivals import Arrivals
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.runtime.launch.launch import HOST
from adaptra.runtime.world.world import WorkerId, World
from adaptra.simulation.links import Link

pytestmark = [pytest.mark.processes, pytest.mark.alone]

REPLICAS, STAGES, WIDTH, ROWS, SLOW = 3, 2, 1400, 4, 1
LINK = Link(1e-4, 5e-8)
"""So slow that a late replica matters. The links of one machine are faster, and differ from run to run."""
FIRST_LATE = LEAST_REMEMBERED + 2
WELL_AGAIN = FIRST_LATE + 5
STEPS = WELL_AGAIN + 6
STATED, TURNS_NARROW, NARROW = 56, 50, 2


OTHER_WAYS = (
    "replicas … and … would add gradients in different ways: replica … by … (digest …), replica … by digest …: expected the "
    "same parameters, links, options and steps on all replicas of a stage"
)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


LAYERS = Example("layers", two_layers, vectors(WIDTH), square_loss)


def over_slow_links(*_: object) -> dict[tuple[int, int], Link]:
    return {(0, 1): LINK}


def train(_rank: int, folder: str) -> dict[str, Any]:
    """Train with direct sums, then with a late replica and sums that are chosen; what a rank reports of them."""
    dist.init_process_group("gloo")
    gradient_averaging.measure_links = over_slow_links
    found: dict[str, Any] = {}
    slow = [f"slow {SLOW}.{stage} 200ms @{FIRST_LATE}..{WELL_AGAIN}" for stage in range(STAGES)]
    for algorithm in ("direct", "auto"):
        events: list[adaptra.ControlEvent] = []
        options = adaptra.Options(
            adapt=False,
            reduce=adaptra.Reduce(algorithm=algorithm),
            faults=slow if algorithm == "auto" else (),
            telemetry=adaptra.Telemetry(folder=Path(folder) / algorithm),
            on_event=events.append,
        )
        torch.manual_seed(0)
        batch = LAYERS.rows(ROWS, 0)
        (inputs,), _, targets = batch
        with compiled(LAYERS, batch, stages=STAGES, microbatches=1, split=["1"], options=options) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
            losses, explained = [], []
            for _ in range(STEPS):
                losses.append(float(pipe.step(inputs, targets)))
                optimizer.step()
                optimizer.zero_grad()
                explained.append(next((line for line in pipe.explain().splitlines() if "gradients of this rank" in line), ""))
            pipe.save_trace(Path(folder) / f"{algorithm}.json")
            found[algorithm] = {
                "losses": losses,
                "weights": [one.detach().numpy().tobytes() for one in pipe.parameters()],
                "late": [(one.step, one.text) for one in events if one.kind is EventKind.LATE],
                "explained": explained,
                "reduces": [str(one) for one in pipe.reduces],
            }
    return found


def test_a_job_adds_round_a_late_replica_and_no_bit_differs(tmp_path: Path) -> None:
    results = run_processes(train, REPLICAS * STAGES, str(tmp_path))
    for found in results:
        plain, chosen = found["direct"], found["auto"]
        assert plain["losses"] == chosen["losses"]
        assert plain["weights"] == chosen["weights"], "plans never change numbers"
        assert (plain["late"], plain["explained"]) == ([], [""] * STEPS)
        (onset, taken), (end, left) = chosen["late"]
        assert onset == FIRST_LATE + 2, "the fourth late step is the first of the other algorithm"
        assert WELL_AGAIN + 2 <= end <= WELL_AGAIN + 4
        assert f"replica {SLOW} last, " in taken and "by streamed in " in taken and f", {SLOW} own nothing" in taken
        assert "direct " in taken.partition("(")[2], "what the others would take"
        assert "by direct" in left
        assert "ms more than direct" in chosen["explained"][onset + 1] and "50 ms" not in chosen["explained"][0]
        assert all("; " in one and "by direct in 3 parts" in one for one in chosen["reduces"])
    stages = [{tuple(one[0] for one in found["auto"]["late"]) for found in results[stage::STAGES]} for stage in range(STAGES)]
    assert all(len(steps) == 1 for steps in stages), "all replicas of a stage change at one step"
    run = load_run(tmp_path / "auto" / "replica-0")
    ways = [[one.choice.way for one in step.stages if one.choice is not None] for step in run.reduces]
    assert {way.algorithm for step in ways[:FIRST_LATE] for way in step} == {"direct"}
    assert all(way.late == (SLOW,) and way.algorithm in LATE for way in ways[WELL_AGAIN - 1]) and ways[WELL_AGAIN - 1]
    slow = [one.choice.lateness for one in run.reduces[WELL_AGAIN - 1].stages if one.choice is not None]
    assert all(one[SLOW] > 0.1 for one in slow)
    timeline = perfetto.load(tmp_path / "auto.json")
    assert all(one.choice is not None and "by direct" in one.choice for one in timeline.reduces)


def with_a_narrow_port(*_: object) -> dict[tuple[int, int], Link]:
    return {pair: Link(LINK.latency, LINK.per_byte * (2 if NARROW in pair else 1)) for pair in ((0, 1), (0, 2), (1, 2))}


def add_with_arrivals(rank: int) -> list[Any]:
    """Sums of gradients and losses whose replicas come at stated times, until the last replica decides from other arguments.

    In the last steps they take longer, as one port has turned narrow.
    """
    dist.init_process_group("gloo")
    gradient_averaging.measure_links = with_a_narrow_port
    replicas = Replicas(World.of_roles(Roles.initial(REPLICAS, 1)), WorkerId(rank), "test", HOST)
    replicas.add_by(direct, limit=1 << 18, dtype=None)
    size, clock, found = 300_001, [0.0], []
    made = torch.Generator().manual_seed(rank)

    def arrivals_with(memory: int) -> Arrivals:
        return Arrivals(replicas, LateRanks(16 << 20, measured_ports({(0, 1): LINK}, REPLICAS), memory), lambda: clock[0])

    arrivals = arrivals_with(16 << 20)
    for step in range(STATED):
        late = 0 if 14 <= step < 20 else 2 if 20 <= step < 26 else 1 if 26 <= step < 32 else None
        own = [torch.randn(size, generator=made), torch.randn(7, 3, generator=made)]
        expected = [one.clone() for one in own]
        everyone = [[torch.empty_like(one) for one in own] for _ in range(REPLICAS)]
        for number, one in enumerate(own):
            dist.all_gather([each[number] for each in everyone], one)
        expected = [(everyone[0][number] + everyone[1][number] + everyone[2][number]) / REPLICAS for number in range(len(own))]
        began = clock[0] + (2.0 if rank == late else 1.0)
        arrivals.take(began, began + (1.5 if step >= TURNS_NARROW else 0.5))
        replicas.combine_gradients(own, own.__getitem__)
        told = arrivals.told()
        replicas.combine_losses(torch.ones(2), beside=[told])
        clock[0] += 3.0
        way = arrivals.choice.way
        arrivals.meet(told, mean=True)
        found.append((way.algorithm, way.late, way.narrow, all(map(torch.equal, own, expected))))
    other = arrivals_with((8 << 20) if rank == 2 else 16 << 20)
    told = other.told()
    replicas.combine_losses(torch.ones(2), beside=[told])
    try:
        other.meet(told, mean=True)
    except ControlError as error:
        found.append(str(error))
    replicas.end()
    return found


def test_replicas_decide_alike_from_the_arrivals_that_they_tell_and_refuse_another_decision() -> None:
    begun = time.monotonic()
    results = run_processes(add_with_arrivals, REPLICAS)
    errors = [found.pop() for found in results]
    assert results[0] == results[1] == results[2]
    assert all(is_equal for *_, is_equal in results[0]), "each sum is the left fold, to the bit"
    late = [late for _, late, *_ in results[0]]
    assert late[:17] == [()] * 17
    assert (late[17:20], late[23:26], late[29:32]) == ([(0,)] * 3, [(2,)] * 3, [(1,)] * 3)
    assert late[35 : TURNS_NARROW + 3] == [()] * (TURNS_NARROW - 32)
    assert [way[:3] for way in results[0][TURNS_NARROW + 3 :]] == [("streamed", (NARROW,), (NARROW,))] * 3
    assert {name for name, *_ in results[0]} - {"direct"} <= {*LATE}
    for error in errors:
        check_documented(ControlError.__name__, error, OTHER_WAYS)
    assert errors[0].startswith(
        "replicas 0 and 2 would add gradients in different ways: replica 0 by direct in 3 parts (digest "
    )
    assert errors[2].startswith("replicas 2 and 0 ")
    assert time.monotonic() - begun < 60
