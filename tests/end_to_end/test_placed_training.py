"""Several stages on each rank: bitwise one process, adapted like any plan, and what such a pipeline can't do is told."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES, Example, begin_blocks, tied_blocks
from torch import nn
from training import MIXED, Step, adam, call, compiled, differences, run_step, train, train_alone

import adaptra
from adaptra.errors import AdaptraError
from adaptra.frontend.arguments.placing import placed_on
from adaptra.program.placement import v_shaped
from adaptra.runtime.transports import local
from adaptra.runtime.transports.base import Identity, Pending
from adaptra.sizes import MemoryLimit

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES, ROWS = 4, 24

DOCUMENTED = {
    "placement": (
        "placement=…: expected 'straight', 'v', 'interleaved', 'interleaved-N' for N stages on each rank, or a list with the "
        "rank of each stage"
    ),
    "chunks": "placement=… with stages=…: expected a multiple of …, the stages of each rank",
    "length": "placement=… with stages=…: expected one rank for every stage, not …",
    "numbering": (
        "placement=…: expected ranks numbered 0, 1, … in the order of their first stages; mesh= says which ranks of the job "
        "these are"
    ),
    "schedule": "placement …: … places stages on ranks …",
    "edge": "…: stages … and … are both on rank …: expected an edge between ranks",
    "alone": "roles: this job has one replica: expected several, whose ranks can change places",
    "queue": (
        "placement=… over a transport with one queue between two ranks, where both ways would be in line: expected 'straight', "
        "or a transport whose contract says in_order=False or one_way=True"
    ),
    "memory": (
        "memory=…: rank … with its … stages needs … for one microbatch, and keeps … of it from F to I: expected at least what "
        "it needs; half the rows per microbatch or twice the stages need about …, activation checkpointing keeps … or more"
    ),
}


@pytest.mark.parametrize("schedule", [None, "zbv"])
@pytest.mark.parametrize("name", ["gpt_tied", "gpt_dropout", "skip_mlp", "resnet", "mixed", "frozen_upstream"])
def test_a_pipeline_placed_as_a_v_trains_bitwise_as_one_process(name: str, schedule: str | None) -> None:
    """Also parameters that the first and the last stage share, which are one on their rank."""
    example = (EXAMPLES | {"mixed": MIXED})[name]
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    options = adaptra.Options(schedule=schedule)
    with compiled(example, batches[0], stages=STAGES, microbatches=6, placement="v", options=options) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 6)) == []
        assert pipe.plan.program.placement == v_shaped(2)


MANY = {
    "interleaved": (0, 1, 0, 1),
    "interleaved-2": (0, 1, 0, 1),
    "interleaved-3": (0, 1, 0, 1, 0, 1),
    "straight": (0, 1, 2),
    "v": (0, 1, 1, 0),
}
UNEVEN = [(0, 1, 1, 0, 0, 1), (0, 1, 2, 0, 1, 2, 0), (0, 0, 1, 1), (0, 1, 2, 1)]


@pytest.mark.parametrize(("placement", "ranks"), [*MANY.items(), *((list(one), one) for one in UNEVEN)])
def test_a_placement_says_the_rank_of_each_stage(placement: Any, ranks: tuple[int, ...]) -> None:
    assert placed_on(placement, len(ranks)) == ranks


@pytest.mark.parametrize(
    ("name", "placement", "stages", "schedule"),
    [
        ("skip_mlp", "interleaved", 4, None),
        ("gpt_dropout", "interleaved-3", 6, None),
        ("gpt_dropout", "interleaved-3", 6, "interleaved"),
        ("resnet", "interleaved", 6, "interleaved"),
        ("skip_mlp", "interleaved-4", 8, None),
        *(("skip_mlp", one, len(one), None) for one in UNEVEN),
    ],
)
def test_more_stages_on_a_rank_train_bitwise_as_one_process(
    name: str, placement: Any, stages: int, schedule: str | None
) -> None:
    """In turn, there and back and there again, and ranks with more stages than others; evaluation runs them too."""
    example = EXAMPLES[name]
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    options = adaptra.Options(schedule=schedule)
    with compiled(example, batches[0], stages=stages, microbatches=6, placement=placement, options=options) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 6)) == []
        assert pipe.plan.program.placement == placed_on(placement, stages)
        assert pipe.plan.program.name == (schedule or "adapted")
        args, kwargs = call(batches[0])
        assert pipe.eval_step(*args, **kwargs).isfinite() and "makespan" in pipe.explain()
        assert pipe.clip_grad_norm_(1.0) >= 0 and pipe.report().count("│") > stages


def test_three_uses_of_a_parameter_on_one_rank_add_up_as_autograd_adds_them() -> None:
    """Of three contributions of each microbatch two are on the last stage and one on the first."""
    example = tied_blocks(2, 14)
    batches = [example.rows(ROWS, seed) for seed in range(2)]
    with compiled(example, batches[0], stages=2, microbatches=6, placement="v", split=["blocks.1"]) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 6)) == []
        assert len(list(pipe.parameters())) == len(list(example.make().parameters()))


def test_evaluation_state_and_norms_are_those_of_one_process() -> None:
    """Evaluation runs each microbatch through both stages of every rank; results are where the last stage is."""
    example = EXAMPLES["gpt_tied"]
    batches = [example.rows(ROWS, seed) for seed in range(2)]
    model = example.make()
    alone = copy.deepcopy(model)
    args, *_ = batches[0]
    with compiled(example, batches[0], model=model, stages=STAGES, microbatches=6, placement="v") as pipe:
        outputs = pipe.eval_step(*args)
        with torch.no_grad():
            expected = torch.cat([alone.eval()(*(one[k : k + 4] for one in args)) for k in range(0, ROWS, 4)])
        assert torch.equal(outputs, expected)
        assert pipe.eval_step(*call(batches[0])[0]).isfinite()
        alone.train()
        train_alone(example, batches[:1], 6, model=alone)
        pipe.step(*call(batches[0])[0])
        norm = pipe.clip_grad_norm_(0.1)
        assert norm > 0.1 and set(pipe.state_dict()) == set(alone.state_dict())
        report, timeline = pipe.report(), pipe.timeline()
        assert report.count("│") > 5 * STAGES and timeline is not None and timeline.program.ranks == 2
        assert "makespan" in pipe.explain()


def test_norms_count_every_parameter_once() -> None:
    example = EXAMPLES["gpt_tied"]
    batch = example.rows(ROWS, 0)
    norms: list[torch.Tensor] = []
    for placement, stages in (("straight", 2), ("v", STAGES)):
        with compiled(example, batch, stages=stages, microbatches=6, placement=placement) as pipe:
            args, kwargs = call(batch)
            pipe.step(*args, **kwargs)
            norms.append(pipe.clip_grad_norm_(1.0))
    assert torch.equal(*norms)


@pytest.mark.timed
def test_a_slow_link_is_slow_on_both_of_its_edges_and_the_plan_adapts() -> None:
    """The link between two ranks carries two edges each way; numbers stay those of one process, before and after."""
    example = EXAMPLES["skip_mlp"]
    batches = [example.rows(ROWS, seed) for seed in range(100)]  # on a busy machine a plan takes many steps
    options = adaptra.Options(
        emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004), faults=["delay 0-1 20ms @6", "delay 2-3 20ms @6"]
    )
    edges = ((0, 1), (1, 0), (2, 3), (3, 2))
    with compiled(example, batches[0], stages=STAGES, microbatches=6, placement="v", memory=4, options=options) as pipe:
        before, optimizer, steps, flights = pipe.plan, adam(pipe.parameters()), list[Step](), list[float]()
        for batch in batches:
            steps.append(run_step(pipe, optimizer, batch))
            built: Any = pipe._session
            cost = built.workers[0].controller.measured_cost
            flights = [cost.latency(*edge) + cost.occupancy(*edge) for edge in edges]
            if pipe.plan.version > before.version and min(flights) > 0.015:
                break
        else:
            pytest.fail(f"after {len(steps)} steps: plan {pipe.plan.version}, messages take {flights}")
        assert pipe.plan.case.cost.latency(1, 2) == pipe.plan.case.cost.latency(2, 1) == 0.0
        assert differences(steps, train_alone(example, batches[: len(steps)], 6)) == []


@pytest.mark.timed
def test_a_slow_edge_of_interleaved_stages_is_measured() -> None:
    """Three edges go from rank 0 to rank 1 and two come back. Numbers stay, whatever the plan."""
    example = EXAMPLES["skip_mlp"]
    batches = [example.rows(ROWS, seed) for seed in range(30)]
    options = adaptra.Options(emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004), faults=["delay 0-1 40ms @4"])
    arguments: dict[str, Any] = {"stages": 6, "microbatches": 6, "placement": "interleaved-3", "memory": 4, "options": options}
    with compiled(example, batches[0], **arguments) as pipe:
        optimizer, steps, flight = adam(pipe.parameters()), list[Step](), 0.0
        for batch in batches:
            steps.append(run_step(pipe, optimizer, batch))
            built: Any = pipe._session
            cost = built.workers[0].controller.measured_cost
            flight = cost.latency(0, 1) + cost.occupancy(0, 1)
            if flight > 0.03:
                break
        else:
            pytest.fail(f"after {len(steps)} steps a message takes {flight}")
        assert differences(steps, train_alone(example, batches[: len(steps)], 6)) == []


def test_memory_counts_both_stages_of_a_rank() -> None:
    """In microbatches, each held for half of a rank's layers by either stage; in bytes, what both keep."""
    example = EXAMPLES["skip_mlp"]
    batch = example.rows(ROWS, 0)
    with compiled(example, batch, stages=STAGES, microbatches=12, placement="v", memory=2) as pipe:
        cost = pipe.plan.case.cost
        assert cost.memory_limit == MemoryLimit((2.0, 2.0)) and cost.memory_forward == (0.5,) * STAGES
        for order in pipe.plan.program.orders:
            held = most = 0
            for op in order:
                held += {"F": 1, "W": -1}.get(op.kind.value, 0)
                most = max(most, held)
            assert 2 < most <= 6  # halves; what I frees makes room for more
    with compiled(example, batch, stages=STAGES, microbatches=12, placement="v", memory="64 KiB") as pipe:
        cost = pipe.plan.case.cost
        assert cost.memory_limit is not None and len(cost.memory_limit) == 2
        args, kwargs = call(batch)
        pipe.step(*args, **kwargs)


def test_a_checkpoint_of_either_placement_is_one_of_the_other() -> None:
    example = EXAMPLES["gpt_tied"]
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    expected = train_alone(example, batches, 6)
    with compiled(example, batches[0], stages=STAGES, microbatches=6, placement="v") as pipe:
        optimizer = adam(pipe.parameters())
        run_step(pipe, optimizer, batches[0])
        state = copy.deepcopy(adaptra.TrainingState(pipe, optimizer).state_dict())
    with compiled(example, batches[0], stages=2, microbatches=6) as pipe:
        optimizer = adam(pipe.parameters())
        adaptra.TrainingState(pipe, optimizer).load_state_dict(state)
        steps = [run_step(pipe, optimizer, batch) for batch in batches[1:]]
        assert differences(steps, expected[1:]) == []


def nothing(_: adaptra.Pipeline) -> object:
    return None


def step_and(change: Callable[[adaptra.Pipeline], object]) -> Callable[[adaptra.Pipeline], object]:
    """Change something after a step."""

    def run(pipe: adaptra.Pipeline) -> object:
        args, kwargs = call(EXAMPLES["skip_mlp"].rows(ROWS, 0))
        pipe.step(*args, **kwargs)
        return change(pipe)

    return run


def optimizer_of(pipe: adaptra.Pipeline) -> torch.optim.Optimizer:
    return adam(pipe.parameters())


MISTAKES: list[tuple[str, dict[str, Any], Callable[[adaptra.Pipeline], object]]] = [
    *(
        ("placement", {"placement": given}, nothing)
        for given in ("w", None, 3, "interleaved-0", "interleaved3", [], [0, "1", 1, 0], [False, True, True, False])
    ),
    ("chunks", {"stages": 3}, nothing),
    ("chunks", {"placement": "interleaved-3"}, nothing),
    ("length", {"placement": [0, 1, 0]}, nothing),
    *(("numbering", {"placement": given}, nothing) for given in ([1, 0, 1, 0], [0, 2, 2, 0], [0, 1, 0, -1])),
    ("schedule", {"options": adaptra.Options(schedule="interleaved")}, nothing),
    ("schedule", {"placement": "interleaved", "options": adaptra.Options(schedule="zbv")}, nothing),
    ("schedule", {"placement": [0, 1, 0, 0], "options": adaptra.Options(schedule="1f1b")}, nothing),
    ("edge", {"options": adaptra.Options(faults=["delay 1-2 5ms"])}, nothing),
    ("edge", {"options": adaptra.Options(delegate=[(2, 1)])}, nothing),
    ("edge", {"options": adaptra.Options(expected_delays={(1, 2): {0.0: 0.5, 0.06: 0.5}})}, nothing),
    ("edge", {"placement": [0, 0, 1, 1], "options": adaptra.Options(faults=["rate 2>3 5MB"])}, nothing),
    ("memory", {"memory": "1 KiB"}, nothing),
    ("alone", {}, step_and(lambda pipe: pipe.settle_roles(optimizer_of(pipe)))),
]


@pytest.mark.parametrize(("row", "given", "run"), MISTAKES)
def test_mistakes_have_their_documented_message(
    row: str, given: dict[str, Any], run: Callable[[adaptra.Pipeline], object]
) -> None:
    arguments: dict[str, Any] = {"stages": STAGES, "microbatches": 6, "placement": "v"} | given
    example = EXAMPLES["skip_mlp"]
    with pytest.raises(AdaptraError) as caught, compiled(example, example.rows(ROWS, 0), **arguments) as pipe:
        run(pipe)
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED[row])


@pytest.mark.parametrize(
    ("placement", "stages"), [("v", 4), ("interleaved", 4), ("interleaved-3", 6), ([0, 1, 0, 0, 2], 5), ([0, 1, 1, 2], 4)]
)
@pytest.mark.parametrize("name", ["tied_blocks", "mixed", "gpt_tied", "tied_twice"])
def test_parameters_that_several_ranks_share_train_bitwise(name: str, placement: Any, stages: int) -> None:
    """Ranks contribute from one stage or several, and the owner's rank may contribute from others than the owner too."""
    example = (EXAMPLES | {"mixed": MIXED, "tied_blocks": tied_blocks(stages, 14)})[name]
    batches = [example.rows(ROWS, seed) for seed in range(2)]
    split = begin_blocks(stages) if name == "tied_blocks" else None
    with compiled(example, batches[0], stages=stages, microbatches=6, placement=placement, split=split) as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 6)) == []
        args, kwargs = call(batches[0])
        assert pipe.eval_step(*args, **kwargs).isfinite()


@pytest.mark.parametrize("in_order", [False, True], ids=["gloo's", "one queue a channel"])
@pytest.mark.parametrize(("placement", "stages"), [("v", 4), ("interleaved-3", 6), ([0, 1, 2, 1, 0, 0], 6)])
def test_channels_are_received_in_the_order_of_their_sends(
    placement: Any, stages: int, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the contract of gloo, and of one queue a channel: no message waits for one behind it."""
    contract = replace(local.CONTRACT, send_waits_for_receiver=True, in_order=in_order, one_way=in_order)
    monkeypatch.setattr(local, "CONTRACT", contract)
    sent, received = defaultdict[object, list[object]](list), defaultdict[object, list[object]](list)
    send, receive = local.LocalTransport.send, local.LocalTransport.receive

    def sending(self: Any, to: int, identity: Identity, *args: Any, **kwargs: Any) -> Pending:
        sent[self.rank, to, identity.channel].append(identity.key)
        return send(self, to, identity, *args, **kwargs)

    def receiving(self: Any, source: int, identity: Identity) -> Pending:
        received[source, self.rank, identity.channel].append(identity.key)
        return receive(self, source, identity)

    monkeypatch.setattr(local.LocalTransport, "send", sending)
    monkeypatch.setattr(local.LocalTransport, "receive", receiving)
    batches = [MIXED.rows(ROWS, seed) for seed in range(2)]
    with compiled(MIXED, batches[0], stages=stages, microbatches=6, placement=placement) as pipe:
        assert differences(train(pipe, batches), train_alone(MIXED, batches, 6)) == []
        args, kwargs = call(batches[0])
        pipe.step(*args, **kwargs)
        pipe.clip_grad_norm_(1.0)
        pipe.eval_step(*args, **kwargs)
    assert sent == received and len(sent) > 3


def test_one_queue_between_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is taken by the threads' transport, told to be like that."""
    monkeypatch.setattr(local, "CONTRACT", replace(local.CONTRACT, in_order=True))
    example = EXAMPLES["skip_mlp"]
    with (
        pytest.raises(AdaptraError) as caught,
        compiled(example, example.rows(ROWS, 0), stages=STAGES, microbatches=6, placement="v"),
    ):
        pass
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["queue"])


def test_a_list_of_modules_can_be_placed_too() -> None:
    def stages() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(STAGES)]

    example = Example("stages", lambda: nn.Sequential(*stages()), MIXED.batch, MIXED.loss)
    batches = [example.rows(ROWS, seed) for seed in range(2)]
    model: Any = nn.ModuleList(example.make().children())
    with compiled(example, batches[0], model=model, stages=STAGES, microbatches=6, placement="v") as pipe:
        assert differences(train(pipe, batches), train_alone(example, batches, 6)) == []
