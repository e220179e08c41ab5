"""Programs of several replicas are executed as their routes say, and no number depends on the routes (rule 9)."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jobs import random_case, random_job_program
from pair_of_stages import SHAPES, SOON, WITH_BUFFERS, Doubling, routed_executor
from paths import GOLDEN
from torch import Tensor

from adaptra.errors import ScheduleError
from adaptra.passes import InsertComm, InsertCrossing
from adaptra.program import Kind, Program
from adaptra.program.dependencies import SENT_BY, other_end
from adaptra.program.verify import verify
from adaptra.report.perfetto import load, write
from adaptra.runtime.measuring.measurement import ReduceTimes
from adaptra.runtime.measuring.monitor import Monitor, merge_timelines
from adaptra.runtime.transports.local import LocalHub
from adaptra.runtime.worker.step.program_messages import MessageShapes
from adaptra.simulation.cost import CostModel

RECEIVES = ("ahead", "late")
LATE = 0.5
"""Seconds."""

Outcome = tuple[dict[tuple[int, int], float], dict[tuple[int, int], float], dict[tuple[int, int], float]]
"""Losses by (replica, microbatch), and the weight gradients and the buffer by (replica, stage)."""


def job_program(seed: int) -> Program:
    """A random program of a healthy job, of two replicas at least."""
    case = random_case(seed, shapes=True)
    case = replace(case, replicas=max(2, case.replicas), lost=frozenset(), slow={}, hands_over=True)
    return random_job_program(case, seed)


def with_messages(program: Program, receives: str, changing: Sequence[int] = ()) -> Program:
    """The program with all its messages."""
    cost = CostModel.uniform(program.stages, 1.0, 1.0, 1.0)
    crossing = InsertCrossing(buffers=tuple(changing), receives=receives)
    program = crossing.apply(InsertComm(receives).apply(program, cost), cost)
    verify(program, changing=changing)
    return program


def numbers(program: Program, salt: int) -> dict[int, list[tuple[Tensor]]]:
    """Per replica one random number for each microbatch."""
    generator = torch.Generator().manual_seed(salt)
    return {
        replica: [(torch.randn(1, generator=generator),) for _ in range(program.microbatches)]
        for replica in range(program.routing.replicas)
    }


def run(program: Program, shapes: MessageShapes, monitors: Sequence[Monitor | None] | None = None) -> Outcome:
    """Run one step of all workers on threads. Gradients and buffers are read at home."""
    routing = program.routing
    hub = LocalHub(program.ranks)
    inputs, targets = numbers(program, 0), numbers(program, 1)
    stages: list[dict[tuple[int, int], Doubling]] = [
        {
            (replica, stage): Doubling(last=stage == program.stages - 1)
            for replica in range(routing.replicas)
            for stage in routing.stages_of(worker)
        }
        for worker in range(program.ranks)
    ]
    executors = [
        routed_executor(program, worker, hub.transport(worker), stages[worker], shapes=shapes, monitor=monitor)
        for worker, monitor in enumerate(monitors or [None] * program.ranks)
    ]
    homes = [routing.replica_of(worker) for worker in range(program.ranks)]
    losses: dict[tuple[int, int], float] = {}
    with ThreadPoolExecutor(program.ranks) as pool:
        runs = [
            pool.submit(executor.run, 0, inputs[home], targets[home]) for executor, home in zip(executors, homes, strict=True)
        ]
        for home, one in zip(homes, runs, strict=True):
            losses |= {(home, number): result[0].item() for number, result in one.result(SOON).items()}
    gradients: dict[tuple[int, int], float] = {}
    buffers: dict[tuple[int, int], float] = {}
    for replica, row in enumerate(routing.workers):
        for stage, home in enumerate(row):
            assert home is not None, "no worker is lost"
            gradients[replica, stage] = stages[home][replica, stage].hand_over()[0].item()
            buffers[replica, stage] = stages[home][replica, stage].buffer.item()
    return losses, gradients, buffers


def computed_alone(program: Program) -> Outcome:
    """The same numbers computed in one place: each sum is the left fold over the microbatches of a replica."""
    inputs, targets = numbers(program, 0), numbers(program, 1)
    factor = 2.0 ** (program.stages - 1)
    losses = {
        (replica, number): (2 * (one * factor) + target).item()
        for replica, of_replica in inputs.items()
        for number, ((one,), (target,)) in enumerate(zip(of_replica, targets[replica], strict=True))
    }
    gradients = {
        (replica, stage): functools.reduce(torch.add, (one * factor for (one,) in of_replica)).item()
        for replica, of_replica in inputs.items()
        for stage in range(program.stages)
    }
    buffers = {
        (replica, stage): functools.reduce(
            lambda buffer, one, stage=stage: buffer / 2 + one[0] * 2.0**stage, of_replica, torch.ones(1)
        ).item()
        for replica, of_replica in inputs.items()
        for stage in range(program.stages)
    }
    return losses, gradients, buffers


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000))
def test_any_valid_program_of_a_job_is_executed_with_the_same_bits(seed: int) -> None:
    """Also where other replicas' workers have the first stage, the last stage, or a part of the sums."""
    program = with_messages(job_program(seed), RECEIVES[seed % 2])
    assert run(program, SHAPES)[:2] == computed_alone(program)[:2]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000))
def test_buffers_change_in_the_order_of_their_replica_wherever_its_microbatches_are(seed: int) -> None:
    """So they end with the same bits at home. Orders that can't keep this order are found beforehand."""
    program = job_program(seed)
    try:
        verify(program, changing=range(program.stages))
    except ScheduleError as error:
        assume("deadlock" not in str(error))
        raise
    program = with_messages(program, RECEIVES[seed % 2], range(program.stages))
    assert run(program, WITH_BUFFERS) == computed_alone(program)


def test_all_messages_of_a_v_with_a_detour_are_drawn(tmp_path: Path) -> None:
    """Buffers and gradients go the same way between two workers. Nothing else crosses but sums, which come home."""
    text = (GOLDEN / "passes/insert_crossing/buffers_on_a_v.test").read_text()
    program = Program.parse(text[text.rindex("schedule v") :])
    monitors = [Monitor(worker, program.placement) for worker in range(program.ranks)]
    started = time.monotonic()
    _, gradients, buffers = run(program, WITH_BUFFERS, monitors)
    _, expected, changed = computed_alone(program)
    assert gradients == expected
    assert {stage: buffers[1, stage] for stage in (1, 2)} == {stage: changed[1, stage] for stage in (1, 2)}
    for monitor in monitors:
        monitor.end_step(0, started, time.monotonic())
    timeline = merge_timelines(program, [monitor.records(0) for monitor in monitors])
    sends = [op for order in program.orders for op in order if op.kind in SENT_BY.values()]
    ends = {(send, program.rank_of(send), program.rank_of(other_end(send))) for send in sends}
    assert {(one.send, *timeline.ends_of(one)) for one in timeline.messages} == ends
    assert len(timeline.messages) == len(sends)
    write([("v", timeline)], tmp_path / "v.json")
    assert load(tmp_path / "v.json") == timeline
    events = json.loads((tmp_path / "v.json").read_text())["traceEvents"]
    points = Counter(one["ph"] for one in events if one["ph"] in "stf")
    home = sum(other_end(one).microbatch == program.microbatches or one.kind is Kind.SEND_SUM for one in sends)
    assert home == 2
    assert (points["s"], points["t"], points["f"]) == (len(sends), len(sends), len(sends) - home)


class Late(Doubling):
    """A stage whose first W ends half a second late."""

    def weight_grad(self, microbatch: int, computed: Callable[[float], None]) -> None:
        time.sleep(LATE if microbatch == 0 else 0.0)
        super().weight_grad(microbatch, computed)


def test_a_wait_for_another_workers_sums_is_no_part_of_w() -> None:
    """Otherwise who continues them would look slow, and get a share for that."""
    shared = Program.parse(
        "schedule shared version=2 stages=1 microbatches=2\nworkers 0 1\nroute 0 0 by 1\nroute 0 1 by 0\nroute 1 0-1 by 1\n"
        "0: 0:0F1 0:0I1 0:0W1 0REDUCE 0STEP\n1: 0:0F0 0:0I0 0:0W0 1:0F0 1:0I0 1:0W0 1:0F1 1:0I1 1:0W1 0REDUCE 0STEP\n"
    )
    program = with_messages(shared, "ahead")
    hub, monitor = LocalHub(2), Monitor(0, (0,))
    home = routed_executor(program, 0, hub.transport(0), {(0, 0): Doubling(last=True)}, monitor=monitor)
    other: dict[tuple[int, int], Doubling] = {(0, 0): Late(last=True), (1, 0): Doubling(last=True)}
    peer = routed_executor(program, 1, hub.transport(1), other)
    inputs, targets = numbers(program, 0), numbers(program, 1)
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(one.run, 0, inputs[rank], targets[rank]) for rank, one in enumerate((home, peer))]
        for one in runs:
            one.result(SOON)
    measured = monitor.end_step(0, started, time.monotonic())
    (stage,) = measured.stages
    assert measured.seconds >= LATE
    assert stage.weight_grad is not None and stage.weight_grad < LATE / 2


def test_what_the_first_op_waits_for_counts_from_another_replica_too() -> None:
    """Worker 1 begins each step with a microbatch of replica 1, whose worker 2 sends it what that needs."""
    rerouted = Program.parse(
        "schedule shared version=2 stages=2 microbatches=2\nworkers 0,1 2,3\n"
        "route 0 0-1 by 0,1\nroute 1 0 by 2,1\nroute 1 1 by 2,3\n"
        "0: 0:0F0 0:0F1 0:0B0 0:0B1 0REDUCE 0STEP\n1: 1:1F0 1:1B0 0:1F0 0:1B0 0:1F1 0:1B1 1REDUCE 1STEP\n"
        "2: 1:0F0 1:0F1 1:0B0 1:0B1 0REDUCE 0STEP\n3: 1:1F1 1:1B1 1REDUCE 1STEP\n"
    )
    program = with_messages(rerouted, "ahead")
    inputs, targets, monitor = numbers(program, 0), numbers(program, 1), Monitor(1, (0, 1))

    def step(number: int, *, is_last: bool) -> None:
        """Worker 1 begins before the others, or once what it needs has arrived."""
        hub = LocalHub(4)
        transports = [hub.transport(rank) for rank in range(4)]
        stages: list[dict[tuple[int, int], Doubling]] = [
            {(0, 0): Doubling()},
            {(0, 1): Doubling(last=True), (1, 1): Doubling(last=True)},
            {(1, 0): Doubling()},
            {(1, 1): Doubling(last=True)},
        ]
        executors = [
            routed_executor(program, rank, transports[rank], stages[rank], monitor=monitor if rank == 1 else None)
            for rank in range(4)
        ]

        def begin(rank: int) -> Future[object]:
            return pool.submit(executors[rank].run, number, inputs[rank // 2], targets[rank // 2])

        with ThreadPoolExecutor(4) as pool:
            started = time.monotonic()
            runs = [] if is_last else [begin(1)]
            while not is_last and transports[1].waiting_for(2) is None:
                time.sleep(0.001)
            runs += [begin(0), begin(2), begin(3)]
            if is_last:
                assert stages[2][1, 0].has_run("F1"), "after it has sent microbatch 0"
                time.sleep(LATE / 5)
                runs.append(begin(1))
            for one in runs:
                one.result(SOON)
        ended = time.monotonic()
        monitor.reduce(ended, ended + LATE / 10, 64)
        found.append(monitor.end_step(number, started, ended).reduce)

    found: list[ReduceTimes | None] = []
    for number, is_last in enumerate([False, False, True]):
        step(number, is_last=is_last)
    first, before, behind = found
    assert first is None and before is not None and behind is not None
    assert (before.step, before.exposed) == (0, 0.0), "worker 1 would have waited anyway"
    assert (behind.step, behind.exposed) == (1, behind.seconds)
