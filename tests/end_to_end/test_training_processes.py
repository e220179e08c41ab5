"""Training over processes and gloo is bitwise training in one process; what test_training.py shows for threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from processes import run_processes

if TYPE_CHECKING:
    pass

ExampleCase = tuple[str, str, int, Any, list[str] | None]
"""An example's name, a dtype, microbatches, a schedule and a split."""

pytestmark = pytest.mark.processes

STAGES = 4
ROWS = 24
STAGES_PER_RANK = {"straight": 1, "v": 2, "interleaved-3": 3}
"""The size of a message that compares two clocks."""


def train_examples(
    rank: int, world_size: int, cases: Sequence[ExampleCase], transport: str = "c10d", placement: str = "straight"
) -> dict[Any, Any]:
    """Per case, what differs from one process and the names of the state on this rank."""
    import torch
    import torch.distributed as dist
    from models import EXAMPLES, tied_blocks
    from training import MIXED, compiled, differences, train, train_alone

    import adaptra
    from adaptra.program.schedules import one_f_one_b

    dist.init_process_group("gloo")
    found = {}
    for name, dtype, microbatches, schedule, split in cases:
        example = (EXAMPLES | {"mixed": MIXED, "tied_blocks": tied_blocks(world_size, 14)})[name]
        dtype = getattr(torch, dtype)
        batches = [example.rows(ROWS, seed, dtype) for seed in range(2)]
        expected = train_alone(example, batches, microbatches, dtype=dtype)
        if schedule == "1f1b, fused":
            schedule = one_f_one_b(world_size, microbatches, split=False)
        with compiled(
            example,
            batches[0],
            stages=STAGES_PER_RANK[placement] * world_size,
            microbatches=microbatches,
            dtype=dtype,
            split=split,
            transport=transport,
            placement=placement,
            options=adaptra.Options(schedule=schedule),
        ) as pipe:
            steps = train(pipe, batches)
            found[name, str(dtype), microbatches, str(schedule)] = (
                differences(steps, expected, whole=False),
                sorted(steps[-1].state),
                sorted(expected[-1].state),
            )
    return found


def check(results: list[Any]) -> None:
    for case in results[0]:
        assert [found[case][0] for found in results] == [[]] * len(results), case
        held = [name for found in results for name in found[case][1]]
        assert set(held) == set(results[0][case][2]), case


FOUR = [
    ("gpt_dropout", "bfloat16", 2, "zb_h1", None),
    ("skip_mlp", "float32", 8, "gpipe", None),
    ("resnet", "float32", 4, None, None),
    ("tied_twice", "bfloat16", 6, "1f1b, fused", None),
    ("tied_blocks", "float32", 8, "zb_h1", ["blocks.1", "blocks.2", "blocks.3"]),
    ("mixed", "float32", 3, "zb_h2", None),
    ("mixed", "float32", 12, "1f1b, fused", None),
    ("views", "float32", 1, "1f1b", ["layers.1", "layers.2", "layers.3"]),
    ("frozen_upstream", "float32", 4, "zb_h1", ["layers.2", "layers.4", "layers.6"]),
]


@pytest.mark.parametrize(("cases", "is_fresh"), [(FOUR[:4], False), (FOUR[4:], True)])
def test_models_train_bitwise_as_one_process_on_four_ranks(cases: Sequence[ExampleCase], is_fresh: bool) -> None:
    """Also with fewer microbatches than stages, tied parameters of three stages, and stages that end in a view.

    Half of them in interpreters as launchers start them.
    """
    check(run_processes(train_examples, 4, 4, cases, is_fresh=is_fresh))


TWO = [
    ("gpt_tied", "float32", 8, "zb_h2", None),
    ("tied_blocks", "bfloat16", 8, None, ["blocks.1"]),
    *(
        (name, "float32", microbatches, schedule, None)
        for name in ("tied_twice", "mixed")
        for microbatches, schedule in ((8, None), (6, "1f1b, fused"), (1, "gpipe"))
    ),
]


def test_tied_parameters_train_bitwise_on_two_ranks() -> None:
    """The two ranks exchange activations, gradients, parts and sums of tied gradients, and losses, all at a time."""
    check(run_processes(train_examples, 2, 2, TWO))


@pytest.mark.parametrize(("ranks", "cases"), [(4, [FOUR[0], FOUR[4]]), (2, TWO[:2])])
def test_models_train_bitwise_over_the_delegate(ranks: int, cases: Sequence[ExampleCase]) -> None:
    """Wherever messages travel, the numbers are those of one process."""
    check(run_processes(train_examples, ranks, ranks, cases, "delegate"))


PLACED = [
    ("gpt_tied", "float32", 8, None, None),
    ("mixed", "float32", 3, "zbv", None),
    ("skip_mlp", "bfloat16", 8, "zbv", None),
]


@pytest.mark.parametrize(("transport", "ranks"), [("c10d", 4), ("c10d", 2), ("delegate", 2)])
def test_two_stages_on_each_rank_train_bitwise_as_one_process(transport: str, ranks: int) -> None:
    """Both ways between two ranks each channel has messages; what the first and the last stage share stays on its rank."""
    cases = PLACED if ranks == 2 else [PLACED[0], PLACED[2]]
    check(run_processes(train_examples, ranks, ranks, cases, transport, "v"))


INTERLEAVED = [
    ("gpt_dropout", "float32", 8, "interleaved", None),
    ("skip_mlp", "bfloat16", 3, None, None),
    ("mixed", "float32", 6, "interleaved", None),
    ("tied_twice", "bfloat16", 6, None, None),
]


@pytest.mark.parametrize(("transport", "ranks"), [("c10d", 2), ("delegate", 2)])
def test_three_stages_on_each_rank_train_bitwise_as_one_process(transport: str, ranks: int) -> None:
    """One channel has the messages of several edges, of other sizes, and losses behind them."""
    check(run_processes(train_examples, ranks, ranks, INTERLEAVED, transport, "interleaved-3"))


def train_with_lanes(rank: int) -> tuple[list[str], tuple[tuple[int, int], ...], set[tuple[int, int]]]:
    """Both directions of one edge by the delegate, all else by gloo."""
    import torch.distributed as dist
    from training import MIXED, carried, compiled, differences, train, train_alone

    import adaptra

    dist.init_process_group("gloo")
    batches = [MIXED.rows(ROWS, seed) for seed in range(3)]
    options = adaptra.Options(schedule="zb_h1", delegate=[(1, 2), (2, 1)])
    with compiled(MIXED, batches[0], stages=STAGES, microbatches=8, options=options) as pipe:
        steps = train(pipe, batches)
        return differences(steps, train_alone(MIXED, batches, 8), whole=False), pipe.plan.delegated, carried(pipe)


def test_one_edge_by_the_delegate_changes_no_number() -> None:
    results = run_processes(train_with_lanes, STAGES)
    assert [found for found, _, _ in results] == [[]] * STAGES
    assert {edges for _, edges, _ in results} == {((1, 2), (2, 1))}
    assert [edges for *_, edges in results] == [set(), {(1, 2)}, {(2, 1)}, set()]


def cut_connections(host: str) -> int:
    """End every connection of this process from or to ``host``, as a network that fails does; how many those were."""
    import contextlib
    import socket

    from own_sockets import connected_sockets

    cut = 0
    for found, _, (peer, _) in connected_sockets():
        if peer == host:
            with contextlib.suppress(OSError):  # the other rank has cut it meanwhile
                found.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def train_while_paths_fail(rank: int) -> tuple[list[str], int, int, int]:
    """After every step each rank cuts all connections of one path, so that some are cut in the midst of the next."""
    import torch.distributed as dist
    from training import MIXED, adam, compiled, differences, run_step, train_alone

    import adaptra
    from adaptra.runtime.telemetry.records import PathsChanged

    dist.init_process_group("gloo")
    hosts = ("127.0.0.2", "127.0.0.3")
    batches = [MIXED.rows(ROWS, seed) for seed in range(10)]
    told = []
    options = adaptra.Options(schedule="zb_h1", addresses=hosts, telemetry=adaptra.Telemetry(on_record=told.append))
    steps, cut = [], 0
    with compiled(MIXED, batches[0], stages=STAGES, microbatches=8, options=options, transport="delegate") as pipe:
        optimizer = adam(pipe.parameters())
        for number, batch in enumerate(batches):
            steps.append(run_step(pipe, optimizer, batch))
            cut += cut_connections(hosts[(number + rank) % 2])
        assert pipe._session is not None
        transport: Any = pipe._session.workers[0]._context.transport
    # A thread of its own hands records on, the last as the pipeline closes: what was counted is read after them.
    failures = sum(channel[4]["path_failures"] for channel in transport.statistics())
    known = sum(one.record.failures for one in told if isinstance(one.record, PathsChanged))
    return differences(steps, train_alone(MIXED, batches, 8), whole=False), cut, known, failures


def test_paths_that_fail_all_the_time_change_no_number() -> None:
    results = run_processes(train_while_paths_fail, STAGES)
    assert [found for found, *_ in results] == [[]] * STAGES
    # Telemetry asks after every step, so it knows of all failures but those after the last one.
    for _, cut, known, failures in results:
        assert cut > 0
        assert 0 < known <= failures


def switch_plans(rank: int, transport: str = "c10d", delegate: bool = False) -> tuple[Any, ...]:
    """A link turns slow; train until three steps have run under a plan made for that, or for too long."""
    import torch.distributed as dist
    from training import MIXED, adam, call, carried, compiled, differences, run_step, train_alone

    import adaptra

    dist.init_process_group("gloo")
    options = adaptra.Options(
        schedule="1f1b",
        faults=["delay 1-2 40ms @6"],
        emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004),
        delegate=delegate,
    )
    first, steps, plans, after = MIXED.rows(ROWS, 0), [], [], 0
    with compiled(MIXED, first, stages=STAGES, microbatches=8, options=options, transport=transport) as pipe:
        optimizer = adam(pipe.parameters())
        # All ranks run every step under one plan, so all stop at the same step.
        while after < 3 and len(steps) < 60:
            steps.append(run_step(pipe, optimizer, MIXED.rows(ROWS, len(steps))))
            plans.append(pipe.plan)
            is_for_delay = "edge 1→2 slow" in pipe.plan.reason or "edge 2→1 slow" in pipe.plan.reason
            after += is_for_delay and (bool(pipe.plan.delegated) or not delegate)
            pipe.eval_step(*call(first)[0])
        switches = [(event.step, event.version) for event in pipe.events if event.kind.value == "switched"]
        delegated = pipe.plan.delegated, carried(pipe) if delegate else set()
    expected = train_alone(MIXED, [MIXED.rows(ROWS, seed) for seed in range(len(steps))], 8)
    return after, [plan.version for plan in plans], switches, delegated, differences(steps, expected, whole=False)


@pytest.mark.alone
@pytest.mark.parametrize(("transport", "delegate"), [("c10d", False), ("c10d", True)])
def test_a_switch_of_plans_changes_no_number_and_comes_at_one_step_on_all_ranks(transport: str, delegate: bool) -> None:
    """Rules 1 and 4: bitwise equal before, during and after, with evaluations in between."""
    results = run_processes(switch_plans, STAGES, transport, delegate)
    after, versions, switches, *_ = results[0]
    assert after == 3, f"no switch in {len(versions)} steps"
    assert versions == sorted(versions) and versions[0] == 0
    assert switches == [(versions.index(version), version) for version in sorted(set(versions)) if version > 0]
    for other in results[1:]:
        assert other[:3] == (after, versions, switches)
    assert [differences for *_, differences in results] == [[]] * STAGES
    # The slow edge moves alone, at the same step on both of its ranks.
    (edges,) = {edges for *_, (edges, _), _ in results}
    assert (set(edges) & {(1, 2), (2, 1)} != set()) == delegate
    for *_, (_, sent), _ in results:
        assert sent <= set(edges)
    assert set.union(*(sent for *_, (_, sent), _ in results)) == set(edges)


def hold_one_stage(rank: int) -> tuple[Any, ...]:
    """Compile, let go of the model, and exchange checkpoints with the plain model both ways."""
    import torch
    import torch.distributed as dist
    from models import EXAMPLES
    from training import call, loss_of, microbatches_of, train, train_alone

    import adaptra
    from adaptra.errors import StateError

    dist.init_process_group("gloo")
    example = EXAMPLES["gpt_tied"]
    batch = example.rows(8, 0)
    model = example.make()
    references = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    given, _ = call(batch)
    with adaptra.compile(model, stages=STAGES, microbatches=4, example_inputs=given, loss=example.loss) as pipe:
        del model
        gc.collect()
        alive = {name for name, reference in references.items() if reference() is not None}
        own = {name for name, parameter in pipe.named_parameters()}
        trained = train(pipe, [batch])[-1]
        gathered: list[Any] = [None] * STAGES
        dist.all_gather_object(gathered, pipe.state_dict())
        saved = {name: value for one in gathered for name, value in one.items()}
        plain = example.make(seed=1)
        plain.load_state_dict(saved)
        expected = train_alone(example, [batch], 4)[-1]
        into_plain = [name for name, value in plain.state_dict().items() if not torch.equal(value, expected.state[name])]
        refused = None
        try:
            pipe.load_state_dict({name: value[:1] for name, value in saved.items()})
        except StateError as error:
            refused = str(error)
        unchanged = all(torch.equal(value, trained.state[name]) for name, value in pipe.state_dict().items())
        other = example.make(seed=2).state_dict()
        pipe.load_state_dict(other)
        from_plain = all(torch.equal(value, other[name]) for name, value in pipe.state_dict().items())
        plain.load_state_dict(other)
        with torch.no_grad():
            alone = torch.stack([loss_of(example, plain.eval(), part) for part in microbatches_of(batch, 4)]).mean()
        is_same_loss = torch.equal(pipe.eval_step(*given), alone)
        return sorted(alive), sorted(own), sorted(pipe.state_dict()), into_plain, refused, unchanged, from_plain, is_same_loss


def test_each_rank_keeps_its_own_stage_and_checkpoints_fit_the_plain_model() -> None:
    """The other stages' parameters are freed with the model; what the ranks save together is the plain model's state."""
    from models import EXAMPLES

    results = run_processes(hold_one_stage, STAGES)
    plain = EXAMPLES["gpt_tied"].make()
    for alive, own, saved, into_plain, refused, unchanged, from_plain, is_same_loss in results:
        assert alive == own, "of the tied weight the last rank holds the plain model's own tensor too"
        assert into_plain == []
        assert refused is not None and "has shape" in refused
        assert unchanged and from_plain and is_same_loss
        assert 0 < len(own) < len(list(plain.parameters()))
        assert ("head.weight" in saved) == ("tokens.weight" in saved)
    assert "tokens.weight" in results[0][1] and "tokens.weight" in results[-1][1]
    assert {name for result in results for name in result[2]} == set(plain.state_dict())


def receive_in_another_order(rank: int) -> tuple[tuple[str, list[str]] | None, list[str]]:
    """Rank 0 sends the activations of microbatch 0 first, rank 1 receives microbatch 1's first."""
    import torch
    from pair_of_stages import PAIR, Doubling, executor_of

    from adaptra.program import Program
    from adaptra.runtime.transports.c10d.c10d import C10dTransport

    transport = C10dTransport()
    program = Program.parse(PAIR)
    if rank == 1:
        order = program.orders[1]
        swapped = (order[5], order[0], *order[1:5], *order[6:])
        program = Program.of_pipeline("swapped", program.placement, program.microbatches, (program.orders[0], swapped))
    stage = Doubling(last=rank == 1)
    executor = executor_of(program, rank, transport, {rank: stage}, timeout=5.0)
    message = None
    try:
        executor.run(0, [(torch.ones(1),)] * 2, [()] * 2)
    except RuntimeError as error:
        message = str(error), error.__notes__
    if rank == 1:
        transport.store.set("refused", "")
    transport.store.wait(["refused"])
    transport.close()
    return message, stage.ran


def test_receives_reordered_against_sends_never_give_one_op_the_data_of_another() -> None:
    """The verifier proves that this can't be; if it happens all the same, the message's own identity gives it away."""
    from pair_of_stages import PAIR

    from adaptra.errors import ScheduleError
    from adaptra.program import Program
    from adaptra.program.verify import verify

    text = PAIR.replace("1: 1RECV_F0 1F0", "1: 1RECV_F1 1RECV_F0 1F0").replace(" 1RECV_F1 1F1", " 1F1")
    with pytest.raises(ScheduleError, match="order"):
        verify(Program.parse(text))
    _, ((message, notes), ran) = run_processes(receive_in_another_order, 2)
    assert "0SEND_F" in message and "got 0SEND_F" in message
    assert notes == ["in step 0: rank 1 at 1F0"]
    assert ran == []
