"""A model cut elsewhere while it trains: the numbers are those of a run in which no cut moved."""

import gc
import hashlib
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES, Batch, Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import MIXED, Step, call, compiled, differences, run_step, train_alone

import adaptra
from adaptra.errors import AdaptraError, PipelineError
from adaptra.frontend.arguments.placing import placed_on
from adaptra.graph import compile_stages
from adaptra.report.run_records import load_run
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.telemetry.options import Telemetry

ROWS, MICROBATCHES, STEPS = 16, 4, 6

DOCUMENTED = {
    "modules": (
        "split: the stages were given as modules, or the model's function returns no loss: expected a pipeline that "
        "adaptra.compile cut itself, which can be cut again"
    ),
    "early": "no step has run yet: a split is settled by what steps took",
}

SPLITS = (["middle.4"], ["middle.1"], ["norms.1"])


def batches(steps: int = STEPS) -> list[Batch]:
    return [MIXED.rows(ROWS, seed=step) for step in range(steps)]


def two_groups(pipe: adaptra.Pipeline) -> torch.optim.AdamW:
    """AdamW with two groups, so that parameters must stay in theirs."""
    return two_groups_of(pipe.parameters())


def two_groups_of(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    parameters = list(parameters)
    weights = [one for one in parameters if one.dim() > 1]
    others = [one for one in parameters if one.dim() == 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize("options", [{}, {"adapt": False, "schedule": "1f1b"}], ids=["adapting", "as asked for"])
def test_a_run_whose_cuts_move_is_bitwise_the_plain_model(options: dict[str, Any]) -> None:
    """Dropout, BatchNorm, skip connections, a tied weight on the first and last stage: cut anew before steps 2, 4."""
    model, found = MIXED.make(), []
    arguments: dict[str, Any] = {"stages": 3, "microbatches": MICROBATCHES, "split": ["middle.1", "middle.4"], "model": model}
    with compiled(MIXED, batches()[0], options=adaptra.Options(**options), **arguments) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for step, batch in enumerate(batches()):
            if step == 2:
                pipe.take_split(["middle.3", "middle.5"], optimizer)
                assert pipe.split == ("middle.3", "middle.5") and pipe.plan.program.stages == 3
            if step == 4:
                pipe.take_split(["middle.0", "middle.1"], optimizer)
            found.append(run_step(pipe, optimizer, batch))
            assert [id(one) for one in pipe.parameters()] == [id(one) for one in optimizer.param_groups[0]["params"]]
    assert differences(found, train_alone(MIXED, batches(), MICROBATCHES)) == []
    # Whoever holds the model goes on seeing it trained, as before the cuts moved.
    assert all(torch.equal(value, found[-1].state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("placement", "splits"),
    [
        ("v", [["norms.0", "middle.3", "norms.2"], ["middle.1", "middle.2", "middle.3"], ["middle.3", "middle.4", "middle.5"]]),
        (
            "interleaved",
            [["norms.0", "middle.3", "last"], ["middle.4", "norms.2", "last"], ["middle.0", "middle.1", "middle.2"]],
        ),
        (
            [0, 1, 2, 1],
            [["norms.0", "middle.3", "last"], ["middle.0", "middle.1", "middle.2"], ["middle.4", "norms.2", "last"]],
        ),
    ],
)
def test_cuts_move_between_ranks_with_several_stages(placement: Any, splits: list[list[str]]) -> None:
    """A cut between two stages of one rank moves no tensor, one between ranks does; the first and the last stage share one."""
    first, *others = splits
    found: list[Step] = []
    with compiled(
        MIXED, batches()[0], stages=4, microbatches=MICROBATCHES, split=first, placement=placement
    ) as pipe:  # fmt: skip
        optimizer = two_groups(pipe)
        for step, batch in enumerate(batches()):
            if step in (2, 4):
                pipe.take_split(others[step // 2 - 1], optimizer)
                assert pipe.split == tuple(others[step // 2 - 1])
            found.append(run_step(pipe, optimizer, batch))
            held = [one for group in optimizer.param_groups for one in group["params"]]
            assert {id(one) for one in held} == {id(one) for one in pipe.parameters()} == {id(one) for one in optimizer.state}
        assert pipe.plan.program.placement == placed_on(placement, 4)
    assert differences(found, train_alone(MIXED, batches(), MICROBATCHES, optimizer=two_groups_of)) == []


def test_cuts_of_interleaved_stages_move() -> None:
    """Three stages on each of two ranks, of which every cut is between ranks."""
    example = EXAMPLES["skip_mlp"]
    rows = [example.rows(ROWS, seed=step) for step in range(4)]
    found: list[Step] = []
    with compiled(example, rows[0], stages=6, microbatches=MICROBATCHES, placement="interleaved-3") as pipe:
        optimizer = two_groups(pipe)
        for step, batch in enumerate(rows):
            if step == 2:
                before = pipe.split
                pipe.take_split([f"layers.{layer}" for layer in (1, 2, 4, 5, 6)], optimizer)
                assert pipe.split != before
            found.append(run_step(pipe, optimizer, batch))
    assert differences(found, train_alone(example, rows, MICROBATCHES, optimizer=two_groups_of)) == []


class Shared(nn.Module):
    """A layer that is used at the beginning, in the middle and at the end, with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, other in enumerate(self.others):
            x = other(self.shared(x) if index in (0, 3, 5) else x)
        return x


def test_a_shared_parameter_gets_and_loses_copies() -> None:
    """Stage 1 uses it before and after, but not between: its copy is dropped and made again, with what the optimizer keeps."""
    shared, found, copies = Example("shared", Shared, vectors(8), square_loss), [], []
    rows = [shared.rows(ROWS, seed=step) for step in range(STEPS)]
    split = ["others.2", "others.4"]
    with compiled(shared, rows[0], stages=3, microbatches=MICROBATCHES, split=split) as pipe:
        optimizer = two_groups(pipe)
        for step, batch in enumerate(rows):
            if step in (2, 4):
                pipe.take_split({2: ["others.1", "others.2"], 4: split}[step], optimizer)
            found.append(run_step(pipe, optimizer, batch))
            copies.append([name for name, _ in pipe.named_parameters()].count("shared.weight"))
    assert copies == [3, 3, 2, 2, 3, 3]
    assert differences(found, train_alone(shared, rows, MICROBATCHES, optimizer=two_groups_of)) == []


def losses_with_gradients(change: bool) -> list[Tensor]:
    """Losses of a run that adds the gradients of two steps, with a moved cut between the two, and clips them."""
    found = []
    with compiled(MIXED, batches()[0], stages=2, microbatches=MICROBATCHES, split=["middle.4"]) as pipe:
        optimizer = two_groups(pipe)
        for step, batch in enumerate(batches()):
            if change and step % 2:
                pipe.take_split(SPLITS[step // 2], optimizer)
            args, kwargs = call(batch)
            pipe.step(*args, **kwargs)
            if change and step == 5:  # between the gradients and what is done with them
                pipe.take_split(SPLITS[0], optimizer)
                with pytest.raises(PipelineError, match="a timeline shows the last step"):
                    pipe.timeline()
            found += [pipe.microbatch_losses, pipe.eval_step(*args, **kwargs)]
            if step % 2:
                found.append(pipe.clip_grad_norm_(0.5))
                optimizer.step()
                optimizer.zero_grad()
        found += [pipe.state_dict()[name] for name in sorted(pipe.state_dict())]
    return found


def test_gradients_move_with_their_parameters() -> None:
    moved, undisturbed = losses_with_gradients(True), losses_with_gradients(False)
    assert len(moved) == len(undisturbed) and all(map(torch.equal, moved, undisturbed))


def test_a_copy_that_no_stage_needs_any_more_is_dropped_from_the_optimizer() -> None:
    """The tied weight is on both stages; the last stage's own parameters stay the same tensors."""
    with compiled(MIXED, batches()[0], stages=3, microbatches=MICROBATCHES, split=["middle.1", "middle.4"]) as pipe:
        optimizer = two_groups(pipe)
        run_step(pipe, optimizer, batches()[0])
        before = dict(pipe.named_parameters())
        pipe.take_split(["middle.2", "middle.4"], optimizer)
        after = dict(pipe.named_parameters())
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in after)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        assert {id(one) for one in held} == {id(one) for one in pipe.parameters()} == {id(one) for one in optimizer.state}


def test_a_run_keeps_its_name_where_cuts_move(tmp_path: Path) -> None:
    options = adaptra.Options(telemetry=Telemetry(folder=tmp_path))
    with compiled(MIXED, batches()[0], stages=2, microbatches=MICROBATCHES, split=SPLITS[0], options=options) as pipe:
        optimizer = two_groups(pipe)
        for batch, split in zip(batches(), (SPLITS[1], SPLITS[0]), strict=False):
            run_step(pipe, optimizer, batch)
            pipe.take_split(split, optimizer)
        run_step(pipe, optimizer, batches()[2])
    run = load_run(tmp_path)
    assert (run.earlier, [one.step for one in run.steps], run.unended) == (0, [0, 1, 2], ())


def test_what_is_kept_to_cut_again_does_not_hold_the_model() -> None:
    model, (inputs, _, targets) = MIXED.make(), batches()[0]
    compiled_stages = compile_stages(model, inputs, {}, stages=2, loss=MIXED.loss, targets=targets)
    tensors = [weakref.ref(one) for one in (model, *model.parameters(), *model.buffers())]
    del model
    gc.collect()
    assert [one() for one in tensors] == [None] * len(tensors)
    captured = compiled_stages.captured
    assert captured is not None
    again = captured.cut(captured.positions(["middle.1"]))
    assert again.train[1].parameters != compiled_stages.train[1].parameters and again.captured is captured


@pytest.mark.parametrize(
    ("split", "row"),
    [
        (["middle.1", "middle.2"], "split=…: … names for … stages: expected …, one per later stage"),
        (["nothing"], "split=…: no module '…' runs in this model: …"),
        ("middle.1", "split=…: expected a list of module names, one for every stage but the first"),
    ],
)
def test_a_split_that_can_not_be_changes_nothing(split: Any, row: str) -> None:
    with compiled(MIXED, batches()[0], stages=2, microbatches=MICROBATCHES, split=["middle.4"]) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        with pytest.raises(AdaptraError) as caught:
            pipe.take_split(split, optimizer)
        check_documented(type(caught.value).__name__, str(caught.value), row)
        assert pipe.split == ("middle.4",)
        found = [run_step(pipe, optimizer, batch) for batch in batches(1)]
    assert differences(found, train_alone(MIXED, batches(1), MICROBATCHES)) == []


def test_stages_given_as_modules_are_not_cut_again() -> None:
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    stages = [nn.Linear(8, 8), nn.Linear(8, 8)]
    with adaptra.compile(
        stages, stages=2, microbatches=2, example_inputs=(inputs, targets), loss=square_loss
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters())
        for change in (lambda: pipe.take_split(["1"], optimizer), lambda: pipe.settle_split(optimizer)):
            with pytest.raises(AdaptraError) as caught:
                change()
            check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["modules"])


def test_a_split_is_settled_by_steps() -> None:
    with compiled(MIXED, batches()[0], stages=2, microbatches=MICROBATCHES) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters())
        with pytest.raises(AdaptraError) as caught:
            pipe.settle_split(optimizer)
        check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["early"])
        run_step(pipe, optimizer, batches()[0])
        assert pipe.settle_split(optimizer) is None


class Waist(nn.Module):
    """Wide layers, and a narrow one before the last third."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 64, 64, 64, 8, 64, 64)
        self.layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


WAIST = Example("waist", Waist, vectors(64), square_loss)
SLOW = adaptra.Options(faults=["rate 0-1 40kB @0"], adapt=False)
"""A message of the wide layers occupies the edge for 50 ms, one of the waist for 6 ms."""


WAIST_STEPS = 16
"""Enough for a link to be measured beside what else the machine does, and some behind the cut."""


def settled(rank: int | None = None) -> tuple[list[float], tuple[str | None, ...], list[Any], dict[str, str]]:
    """Losses, the split, what settling told and how it was told, and digests of the state: a pipeline whose link is slow."""
    import torch.distributed as dist

    if rank is not None and not dist.is_initialized():
        dist.init_process_group("gloo")
    inputs, _, targets = WAIST.rows(4 * 8, seed=0)
    found, told = [], []
    with adaptra.compile(
        WAIST.make(), stages=2, microbatches=4, example_inputs=(inputs, targets), loss=WAIST.loss, split=["layers.2"],
        options=SLOW,
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for step in range(WAIST_STEPS):
            (inputs,), _, targets = WAIST.rows(4 * 8, seed=step)
            found.append(pipe.step(inputs, targets).item())
            optimizer.step()
            optimizer.zero_grad()
            if step == WAIST_STEPS - 4:
                told.append(str(pipe.settle_split(optimizer, horizon=10**5)))
                told += [event.text for event in pipe.events if event.kind is EventKind.SPLIT]
        state = {name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() for name, value in pipe.state_dict().items()}
        return found, pipe.split, told, state


def plain() -> tuple[list[float], dict[str, str]]:
    """The losses and the state of the plain model in the same steps."""
    steps = train_alone(WAIST, [WAIST.rows(4 * 8, seed=step) for step in range(WAIST_STEPS)], 4)
    state = {name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() for name, value in steps[-1].state.items()}
    return [one.losses.mean().item() for one in steps], state


@pytest.mark.alone
def test_a_cut_where_less_is_sent_is_taken_if_bandwidth_binds() -> None:
    found, split, told, state = settled()
    assert split == ("layers.4",) and told[0] == told[1]
    assert told[0].startswith("stage 1 beginning at 'layers.4' instead of 'layers.2': ") and "ms a step instead of" in told[0]
    assert (found, state) == plain()


@pytest.mark.processes
@pytest.mark.alone
def test_two_processes_settle_on_the_same_cut() -> None:
    results = run_processes(settled, 2)
    assert [split for _, split, *_ in results] == [("layers.4",)] * 2
    assert len({text for _, _, told, _ in results for text in told}) == 1
    losses, state = plain()
    assert [found for found, *_ in results] == [losses] * 2
    assert {**results[0][3], **results[1][3]} == state and len(results[0][3]) == 8


def changing(
    rank: int, splits: Mapping[int, Sequence[str]], stages: int, placement: str = "straight"
) -> tuple[list[float], dict[str, str], tuple[str | None, ...]]:
    """Losses and state of a rank of one or more replicas, whose cuts move before steps 1 and 3, the first with gradients."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    found = []
    with adaptra.compile(
        MIXED.make(), stages=stages, microbatches=MICROBATCHES, example_inputs=(inputs, targets), loss=MIXED.loss,
        split=["middle.1", "middle.4", "norms.2"][: stages - 1], placement=placement,
    ) as pipe:  # fmt: skip
        optimizer = two_groups(pipe)
        for step in range(4):
            if step in splits:
                pipe.take_split(splits[step], optimizer)
            (inputs,), _, targets = MIXED.rows(ROWS, seed=step + 10 * pipe.replica)
            found.append(pipe.step(inputs, targets).item())
            if step:
                optimizer.step()
                optimizer.zero_grad()
        state = {name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() for name, value in pipe.state_dict().items()}
        return found, state, pipe.split


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stages", "splits", "placement", "ranks", "count"),
    [
        (3, {1: ["middle.3", "middle.5"], 3: ["middle.0", "middle.1"]}, "straight", 3, 3),
        (2, {1: ["middle.4"], 3: ["middle.0"]}, "straight", 2, 4),
        (4, {1: ["middle.3", "middle.4", "middle.5"], 3: ["middle.0", "middle.1", "middle.4"]}, "v", 2, 4),
    ],
    ids=["three stages", "replicas of two stages", "replicas of two ranks as a V"],
)
def test_ranks_whose_cuts_move_go_on_bitwise(
    stages: int, splits: Mapping[int, Sequence[str]], placement: str, ranks: int, count: int
) -> None:
    moved = run_processes(changing, count, splits, stages, placement)
    undisturbed = run_processes(changing, count, {}, stages, placement)
    assert all(split == tuple(splits[3]) for *_, split in moved)
    for replica in range(count // ranks):
        ours, theirs = (some[replica * ranks : (replica + 1) * ranks] for some in (moved, undisturbed))
        assert [losses for losses, *_ in ours] == [losses for losses, *_ in theirs]
        assert {name: one for _, state, _ in ours for name, one in state.items()} == {
            name: one for _, state, _ in theirs for name, one in state.items()
        }


def different(rank: int) -> tuple[str, str] | None:
    """What a rank raises whose split is another one than that of the other rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    with adaptra.compile(
        MIXED.make(), stages=2, microbatches=MICROBATCHES, example_inputs=(inputs, targets), loss=MIXED.loss, split=["middle.4"]
    ) as pipe:  # fmt: skip
        try:
            pipe.take_split([["middle.1"], ["middle.2"]][rank], torch.optim.SGD(pipe.parameters()))
        except Exception as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.processes
def test_ranks_with_different_splits_are_told() -> None:
    row = (
        "pipeline: rank … compiled something else than rank 0: …: expected every rank to build the same model and to call "
        "adaptra.compile with the same arguments"
    )
    for kind, message in run_processes(different, 2):
        check_documented(kind, message, row)


def lose_a_rank(rank: int, lost_in: str) -> list[tuple[str, str] | None]:
    """What a rank raises, and what its pipeline says afterwards, when the one in the middle is lost in a move of a cut."""
    import torch.distributed as dist

    from adaptra.frontend.running import reconfiguration as built

    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    with adaptra.compile(
        MIXED.make(), stages=3, microbatches=MICROBATCHES, example_inputs=(inputs, targets), loss=MIXED.loss,
        split=["middle.1", "middle.4"], options=adaptra.Options(timeout=20.0 if lost_in == "regroup" else 8.0),
    ) as pipe:  # fmt: skip
        pipe.step(inputs[0], targets)
        if rank == 1:
            setattr(built, lost_in, lambda *_: os._exit(1))
        optimizer, found = torch.optim.SGD(pipe.parameters()), []
        for act in (lambda: pipe.take_split(["middle.3", "middle.5"], optimizer), lambda: pipe.step(inputs[0], targets)):
            try:
                act()
            except Exception as error:
                found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lost_in", "row"),
    [
        ("cut_transfers", "…: rank … did not answer within … s"),
        ("agree_here", "…: rank … did not answer within … s"),
        ("exchange", "…: a rank is lost: …"),
    ],
)
def test_a_rank_that_is_lost_while_a_cut_moves_ends_the_others(lost_in: str, row: str) -> None:
    """Before it has come, when all have met, and when state moves. The membership may know it before the wait has ended, and a
    rank that ends first tells the other.
    """
    early = {
        "rank 1 gave no sign of life": "rank … gave no sign of life for … s…",
        "rank 1 is lost, as": "rank … is lost…",
        "rank 0 failed": "rank … failed: …",
        "rank 2 failed": "rank … failed: …",
    }
    results = run_processes(lose_a_rank, 3, lost_in, may_die=(1,))
    for (kind, message), (after, said) in (results[0], results[2]):
        check_documented(kind, message, next((early[begin] for begin in early if message.startswith(begin)), row))
        assert after == "PipelineError" and said.startswith("this pipeline has failed") and kind in said


@pytest.mark.processes
def test_a_rank_that_is_lost_when_a_cut_has_moved_is_named_by_the_next_step() -> None:
    results = run_processes(lose_a_rank, 3, "regroup", may_die=(1,))
    for ((kind, message),) in (results[0], results[2]):
        assert kind == "PeerLostError"
        assert "rank 1" in message
