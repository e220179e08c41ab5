"""A sharded optimizer computes the bits of one without shards, and each rank keeps the state of what it owns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from errors_table import check_documented, error_of
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import MIXED, compiled

import adaptra
from adaptra.collectives.owners import balanced_owners
from adaptra.frontend.pipeline.sharded_optimizer import Sharding

ROWS, MICROBATCHES, STEPS = 8, 2, 4

FOREIGN = "optimizer: … of its parameters are not this pipeline's: expected an optimizer over pipe.parameters()"
NO_CLASS = "shard: …: expected a class of optimizers, such as torch.optim.AdamW"
LBFGS = "shard: LBFGS steps all parameters as one vector: expected an optimizer that steps each by itself"
TWICE = "shard: … is in a sharded optimizer already: expected each parameter in one group of one"
OTHERS = (
    "shard: replica … shards another optimizer than replica …, or other groups: expected the same class and the same "
    "parameters in the same groups on every rank"
)
SETTINGS = "shard: replica … was given …, and replica … …: expected the same settings on every rank"
UNCOVERED = (
    "…: in no optimizer of pipe.shard, where others are: expected all trainable parameters in sharded optimizers, or none"
)
MOVES = (
    "…: this pipeline has … sharded optimizers, and was given a …: expected a single one, and that one, where parameters move "
    "between ranks"
)
ADDED = (
    "optimizer.step: this sharded optimizer has other parameters than pipe.shard gave it: expected the same; give pipe.shard "
    "all groups, and not add_param_group"
)
SURVIVES = (
    "shard: Options(survive=True): expected a job without it, as a lost rank takes its part of the optimizer's state with it"
)
GUESTS = (
    "shard: … ranks host the … workers of this job: expected a rank for each worker, as each owns a part of the "
    "optimizer's state"
)

Make = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer of a class, parameters and settings: with shards or without."""


class Orthogonal(torch.optim.Optimizer):
    """Looks at whole matrices, as Muon does: the step is the momentum by its spectral norm. A user's own class."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                momentum.mul_(0.9).add_(one.grad)
                length = torch.linalg.matrix_norm(momentum.flatten(1), 2) if one.dim() > 1 else momentum.abs().max()
                one.addcdiv_(momentum, length + 1e-6, value=-group["lr"])


def matrices(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the others."""
    found = [*parameters]
    return [one for one in found if one.dim() == 2], [one for one in found if one.dim() != 2]


def adamw(make: Make, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    of_matrices, others = matrices(parameters)
    groups = [{"params": of_matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [make(torch.optim.AdamW, groups, lr=0.01)]


def sgd(make: Make, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [make(torch.optim.SGD, parameters, lr=0.05, momentum=0.9, nesterov=True)]


def muon(make: Make, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    of_matrices, others = matrices(parameters)
    return [make(torch.optim.Muon, of_matrices, lr=0.02), make(torch.optim.AdamW, others, lr=0.01)]


def orthogonal(make: Make, parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [make(Orthogonal, parameters)]


def plain(kind: Callable[..., torch.optim.Optimizer], parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return kind(parameters, **settings)


class Uneven(nn.Module):
    """Parameters of many sizes and dimensions; one that is laid out otherwise, one without use, one of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(8, 33)
        self.mix = nn.Conv2d(3, 5, 3, padding=1)
        self.mix.weight = nn.Parameter(self.mix.weight.detach().contiguous(memory_format=torch.channels_last))
        self.narrow = nn.Linear(55, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.widen(x)).view(-1, 3, 11, 1)
        return self.narrow(self.mix(wide).flatten(1)) * self.scale


UNEVEN = Example("uneven", Uneven, vectors(8), square_loss)


@dataclass
class Run:
    """What a training leaves on one rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def differences(self, expected: Run) -> list[str]:
        """What isn't bitwise as in a run without shards. Gradients of parameters owned elsewhere are None."""
        found = [f"loss {n}" for n, pair in enumerate(zip(self.losses, expected.losses, strict=True)) if not torch.equal(*pair)]
        found += [f"norm {n}" for n, pair in enumerate(zip(self.norms, expected.norms, strict=True)) if not torch.equal(*pair)]
        for number, (mine, theirs) in enumerate(zip(self.gradients, expected.gradients, strict=True)):
            for name, one in theirs.items():
                own = mine[name]
                if own is not None and (one is None or not torch.equal(own, one)):
                    found.append(f"gradient {number} of {name}")
        for number, (mine, theirs) in enumerate(zip(self.states, expected.states, strict=True)):
            found += [f"state {number} {name}" for name, one in theirs.items() if not torch.equal(mine[name], one)]
        return found

    @property
    def owned(self) -> set[str]:
        """The parameters that had gradients here, the same in all steps."""
        by_step = [{name for name, one in each.items() if one is not None} for each in self.gradients]
        assert all(one == other for one, other in pairwise(by_step)), by_step
        return by_step[0]


def rows_of(example: Example, pipe: adaptra.Pipeline, step: int) -> tuple[Tensor, Tensor]:
    (inputs,), _, targets = example.rows(ROWS * pipe.replicas, step, next(pipe.parameters()).dtype)
    mine = slice(ROWS * pipe.replica, ROWS * (pipe.replica + 1))
    return inputs[mine], targets[mine]


def train(
    pipe: adaptra.Pipeline,
    example: Example,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: Iterable[int] = range(STEPS),
    *,
    every: int = 1,
    clip: float | None = 0.05,
    set_to_none: bool = True,
) -> Run:
    """Train with a scheduler and clipping; the optimizers step once in ``every`` steps."""
    found = Run()
    schedulers = [torch.optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5) for one in optimizers]
    for step in steps:
        pipe.step(*rows_of(example, pipe, step))
        found.losses.append(pipe.microbatch_losses)
        if clip is not None:
            found.norms.append(pipe.clip_grad_norm_(clip))
        found.gradients.append({name: None if one.grad is None else one.grad.clone() for name, one in pipe.named_parameters()})
        if (step + 1) % every == 0:
            for one in optimizers:
                one.step()
                one.zero_grad(set_to_none=set_to_none)
            for one in schedulers:
                one.step()
        found.states.append({name: one.detach().clone() for name, one in pipe.state_dict().items()})
    return found


def cases(replicas: int) -> Iterator[tuple[str, Example, Any, dict[str, Any], adaptra.Options]]:
    small, usual = adaptra.Options(reduce=adaptra.Reduce(bucket=600)), adaptra.Options()
    yield "adamw, accumulated", MIXED, adamw, {"every": 2}, small
    yield "muon", UNEVEN, muon, {}, usual
    if replicas == 3:
        yield "adamw", MIXED, adamw, {}, usual
        yield "sgd", UNEVEN, sgd, {"clip": None}, small
        yield "sgd, zeros", UNEVEN, sgd, {"set_to_none": False}, usual
        yield "orthogonal, accumulated", UNEVEN, orthogonal, {"every": 2}, small
        yield "chain", MIXED, sgd, {}, adaptra.Options(reduce=adaptra.Reduce(bucket=600, algorithm="chain"))
        wider = adaptra.Options(reduce=adaptra.Reduce(dtype=torch.float32))
        yield "wider sums", UNEVEN, sgd, {"dtype": torch.bfloat16}, wider


def train_both_ways(rank: int, stages: int, replicas: int) -> dict[str, tuple[int, int, set[str], list[str]]]:
    """For each case: the place, what this rank owns, and what differs between the trainings."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, tuple[int, int, set[str], list[str]]] = {}
    for name, example, make, how, options in cases(replicas):
        runs: list[Run] = []
        dtype = how.pop("dtype", torch.float32)
        for is_sharded in (False, True):
            with compiled(
                example,
                example.rows(ROWS, 0, dtype),
                stages=stages,
                microbatches=MICROBATCHES,
                options=options,
                dtype=dtype,
            ) as pipe:
                assert pipe.replicas == replicas
                optimizers = make(pipe.shard if is_sharded else plain, pipe.parameters())
                runs.append(train(pipe, example, optimizers, **how))
                if is_sharded:
                    stated = {id(one) for optimizer in optimizers for one in optimizer.state}
                    holds = {one for one, tensor in pipe.named_parameters() if id(tensor) in stated}
                    assert holds == runs[1].owned, "state of what it owns only"
                place = rank % stages, pipe.replica
        expected, sharded = runs
        assert len(expected.losses) == STEPS
        found[name] = (*place, sharded.owned, sharded.differences(expected))
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (1, 3)])
def test_a_sharded_optimizer_gives_the_bits_of_one_without_shards(stages: int, replicas: int) -> None:
    results = run_processes(train_both_ways, stages * replicas, stages, replicas)
    for name, example, *_ in cases(replicas):
        owned: dict[int, list[str]] = {}
        for found in results:
            stage, _, mine, different = found[name]
            assert not different, (name, different)
            owned.setdefault(stage, []).extend(mine)
        for stage, names in owned.items():
            assert len(names) == len(set(names)), f"{name}: stage {stage} has a parameter with two owners"
        trained = {one for one, _ in example.make().named_parameters()} - {"unused"}
        assert {one for names in owned.values() for one in names} == trained, name


class Steep(nn.Module):
    """In float16 the gradients of the first layer overflow at scales at which the others' don't."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 9)
        self.last = nn.Linear(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.float16):
            return self.last(torch.tanh(self.first(x * 30.0))).float()


STEEP = Example("steep", Steep, vectors(8), square_loss)


def scaled(pipe: adaptra.Pipeline, is_sharded: bool) -> tuple[list[float], dict[str, Tensor], list[bool]]:
    """Train in float16, at first with too large a scale: the scales, the parameters, and whether own gradients overflowed."""
    (optimizer,) = adamw(pipe.shard if is_sharded else plain, pipe.parameters())
    scaler = pipe.grad_scaler(init_scale=2.0**22, growth_interval=3)
    scales: list[float] = []
    overflowed: list[bool] = []
    for step in range(16):
        pipe.step(*rows_of(STEEP, pipe, step))
        present = [one.grad for one in pipe.parameters() if one.grad is not None]
        overflowed.append(not all(one.isfinite().all() for one in present))
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, {name: one.detach().clone() for name, one in pipe.named_parameters()}, overflowed


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def flip(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = -parameter.grad


def hooked(pipe: adaptra.Pipeline) -> None:
    """Hooks of both kinds."""
    for number, (_, one) in enumerate(pipe.named_parameters()):
        if number % 3 == 0:
            one.register_hook(halve)
        elif number % 3 == 1:
            one.register_post_accumulate_grad_hook(flip)


def opened(example: Example = UNEVEN, **arguments: Any) -> Any:
    how: dict[str, Any] = {"stages": 1, "microbatches": MICROBATCHES, **arguments}
    return compiled(example, example.rows(ROWS, 0), **how)


def weighted(outputs: Tensor, targets: Tensor) -> Any:
    """A sum and its weight, which differs from microbatch to microbatch."""
    counted = (targets[:, :1] > 0).to(outputs.dtype)
    return ((outputs - targets).square() * counted).sum(), counted.sum() + 1


WEIGHTED = Example("weighted", Uneven, vectors(8), weighted)


def saved_at(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, folder: str) -> None:
    dcp.save({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=folder)


def loaded_from(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, folder: str) -> None:
    dcp.load({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=folder)


def use_with_the_rest(rank: int, folder: str) -> dict[str, Any]:
    """Three replicas: a scaler, hooks, a weighted loss; checkpoints with and without shards are read both ways."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    runs: dict[bool, dict[str, Run]] = {False: {}, True: {}}
    by_scaler: dict[bool, tuple[list[float], dict[str, Tensor], list[bool]]] = {}
    for is_sharded in (False, True):
        make, name = ("shard", "sharded") if is_sharded else ("plain", "plain")
        with opened(STEEP) as pipe:
            by_scaler[is_sharded] = scaled(pipe, is_sharded)
        with opened(MIXED) as pipe:
            hooked(pipe)
            optimizers = adamw(pipe.shard if make == "shard" else plain, pipe.parameters())
            runs[is_sharded]["hooks"] = train(pipe, MIXED, optimizers, range(4), every=2)
        with opened(UNEVEN, model=(model := UNEVEN.make())) as pipe:
            optimizers = adamw(pipe.shard if make == "shard" else plain, pipe.parameters())
            train(pipe, UNEVEN, optimizers, range(2))
            model.scale.requires_grad_(False)
            model.narrow.requires_grad_(False)
            runs[is_sharded]["frozen later"] = train(pipe, UNEVEN, optimizers, range(2, 4))
        with opened(WEIGHTED, reduction="weighted") as pipe:
            optimizers = sgd(pipe.shard if make == "shard" else plain, pipe.parameters())
            runs[is_sharded]["weighted"] = train(pipe, WEIGHTED, optimizers, range(4), every=2)
        with opened(MIXED) as pipe:
            (optimizer,) = adamw(pipe.shard if make == "shard" else plain, pipe.parameters())
            train(pipe, MIXED, [optimizer], range(2))
            saved_at(pipe, optimizer, f"{folder}/{name}")
            runs[is_sharded]["saved"] = train(pipe, MIXED, [optimizer], range(2, 4))
    for is_sharded in (False, True):
        with opened(MIXED) as pipe:
            (optimizer,) = adamw(pipe.shard if is_sharded else plain, pipe.parameters())
            loaded_from(pipe, optimizer, f"{folder}/{'plain' if is_sharded else 'sharded'}")
            runs[is_sharded]["loaded"] = train(pipe, MIXED, [optimizer], range(2, 4))
    (scales, parameters, overflows), (own_scales, own_parameters, own_overflows) = by_scaler[False], by_scaler[True]
    assert any(overflows) and not all(overflows), "steps are skipped, and others are not"
    assert own_scales == scales
    assert not [name for name, one in parameters.items() if not torch.equal(own_parameters[name], one)]
    found["overflows"] = own_overflows
    for key, expected in runs[False].items():
        found[key] = runs[True][key].differences(expected)
    with opened(stages=2, replicas=2) as pipe:
        found["guests"] = error_of(lambda: pipe.shard(torch.optim.SGD, lr=0.1))
    found["went on"] = runs[True]["loaded"].differences(runs[False]["saved"])
    return found


def go_on_by_two(rank: int, folder: str) -> list[str]:
    """What three replicas have saved, two go on with, with shards and without."""
    torch.distributed.init_process_group("gloo")
    runs: list[Run] = []
    for is_sharded in (False, True):
        with opened(MIXED) as pipe:
            (optimizer,) = adamw(pipe.shard if is_sharded else plain, pipe.parameters())
            loaded_from(pipe, optimizer, f"{folder}/sharded")
            runs.append(train(pipe, MIXED, [optimizer], range(2, 5)))
    return runs[1].differences(runs[0])


@pytest.mark.processes
def test_a_sharded_optimizer_goes_with_scalers_hooks_weights_and_checkpoints(tmp_path: Path) -> None:
    results = run_processes(use_with_the_rest, 3, str(tmp_path))
    for found in results:
        kind, message = found["guests"]
        check_documented(kind, message, GUESTS)
        for key in ("hooks", "frozen later", "weighted", "saved", "loaded", "went on"):
            assert not found[key], key
    by_rank = {tuple(found["overflows"]) for found in results}
    assert len(by_rank) > 1, "not every rank finds by itself that a step is to be skipped"
    assert run_processes(go_on_by_two, 2, str(tmp_path)) == [[], []]


class Clamping(torch.optim.SGD):
    """Changes its parameters behind the step of its base, whose hooks run too where torch has seen the base before."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        clamp(self)
        return result


def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """As hooks and loops clamp weights: those in the optimizer's groups only, and unseen by autograd's version counters."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.data.clamp_(-0.05, 0.05)


def change_outside(rank: int) -> dict[str, list[str]]:
    """Two replicas: what differs from an optimizer without shards where more than its step changes parameters."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, list[str]] = {}
    if rank == 0:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # from here on torch runs hooks of steps of SGD itself too
    for way, kind in (("hook", torch.optim.SGD), ("subclass", Clamping), ("later", torch.optim.SGD)):
        runs: list[Run] = []
        for is_sharded in (False, True):
            with opened() as pipe:
                make: Make = pipe.shard if is_sharded else plain
                optimizer = make(kind, pipe.parameters(), lr=0.05, momentum=0.9)
                if way == "hook":
                    optimizer.register_step_post_hook(clamp)
                run = Run()
                for number in range(3):
                    pipe.step(*rows_of(UNEVEN, pipe, number))
                    run.losses.append(pipe.microbatch_losses)
                    if way == "later":
                        run.states.append({name: one.detach().clone() for name, one in pipe.named_parameters()})
                    optimizer.step()
                    optimizer.zero_grad()
                    if way == "later":
                        clamp(optimizer)
                    else:
                        run.states.append({name: one.detach().clone() for name, one in pipe.named_parameters()})
                runs.append(run)
                shards = pipe._require().local.shards
                assert len(shards) == is_sharded
                del optimizer, make
                assert not shards, "an optimizer ends with the user's last reference to it"
        found[way] = runs[1].differences(runs[0])
    return found


@pytest.mark.processes
def test_what_changes_parameters_beside_the_step_itself_reaches_all_replicas() -> None:
    for found in run_processes(change_outside, 2):
        assert found == {"hook": [], "subclass": [], "later": []}


def move_both_ways(rank: int) -> tuple[list[str], int, set[str], set[str]]:
    """What differs between two trainings in which roles and cuts change; then its place, what it owns, and has state of."""
    torch.distributed.init_process_group("gloo")
    runs: list[Run] = []
    place, owned, stated = 0, set[str](), set[str]()
    for is_sharded in (False, True):
        with compiled(MIXED, MIXED.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES, split=["middle.1"]) as pipe:
            (optimizer,) = adamw(pipe.shard if is_sharded else plain, pipe.parameters())
            assert pipe.roles is not None
            # Gradients of one step are there at each change, to which the next step adds.
            runs.append(train(pipe, MIXED, [optimizer], range(3), every=2))
            pipe.take_roles(pipe.roles.swapped(1, 2), optimizer)
            runs.append(train(pipe, MIXED, [optimizer], range(3, 5), every=2))
            pipe.take_split(["middle.4"], optimizer)
            runs.append(train(pipe, MIXED, [optimizer], range(5, 8), every=2))
            pipe.take_roles(pipe.roles.swapped(0, 1), optimizer)
            pipe.take_split(["middle.1"], optimizer)
            runs.append(train(pipe, MIXED, [optimizer], range(8, 10), every=2))
            stated = {name for name, one in pipe.named_parameters() if one in optimizer.state}
            if is_sharded:
                assert re.search(r"optimizer is sharded; .* have one owner, which takes .* ms to send", pipe.explain())
            (worker,) = pipe._require().workers
            place = worker.rank
            owned = {name for name, owner in worker.owners.items() if owner == pipe.replica}
    plainly, sharded = runs[:4], runs[4:]
    return [one for pair in zip(sharded, plainly, strict=True) for one in pair[0].differences(pair[1])], place, owned, stated


@pytest.mark.processes
def test_shards_go_with_their_parameters_where_roles_and_cuts_change() -> None:
    kept = list[tuple[int, str]]()
    for different, place, owned, stated in run_processes(move_both_ways, 4):
        assert not different
        assert stated == owned, "state of what it owns only"
        kept += [(place, name) for name in stated]
    assert len(kept) == len({*kept}), "each has one owner"
    assert {name for _, name in kept} == {name for name, _ in MIXED.make().named_parameters()}


def mistake(rank: int) -> dict[str, tuple[str, str]]:
    """Two replicas: what can't be sharded, or not like that."""
    torch.distributed.init_process_group("gloo")
    found: dict[str, tuple[str, str]] = {}
    with opened() as pipe:
        optimizer = pipe.shard(torch.optim.SGD, lr=0.1)
        found[TWICE] = error_of(lambda: pipe.shard(torch.optim.SGD, [dict(pipe.named_parameters())["scale"]], lr=0.1))
        pipe.step(*rows_of(UNEVEN, pipe, 0))
        found[MOVES] = error_of(lambda: pipe.settle_roles(torch.optim.SGD(pipe.parameters(), lr=0.1)))
        optimizer.step()
        optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
        found[ADDED] = error_of(optimizer.step)
    with opened() as pipe:
        of_matrices, _ = matrices(pipe.parameters())
        pipe.shard(torch.optim.SGD, of_matrices, lr=0.1)
        found[UNCOVERED] = error_of(lambda: pipe.step(*rows_of(UNEVEN, pipe, 0)))
    with opened() as pipe:
        parameters = sorted(pipe.parameters(), key=lambda one: one.numel(), reverse=rank == 1)
        found[OTHERS] = error_of(lambda: pipe.shard(torch.optim.SGD, parameters, lr=0.1))
    with opened() as pipe:
        found[SETTINGS] = error_of(lambda: pipe.shard(torch.optim.SGD, lr=torch.tensor(0.1 + rank), momentum=0.9))
    return found


def mistake_of_a_group(rank: int) -> tuple[str, str]:
    torch.distributed.init_process_group("gloo")
    with opened() as pipe:
        groups = [{"params": one, "betas": (0.9, 0.5 + rank / 4)} for one in matrices(pipe.parameters())]
        return error_of(lambda: pipe.shard(torch.optim.AdamW, groups, lr=0.1))


def mistake_in_a_job_that_survives(rank: int) -> tuple[str, str]:
    torch.distributed.init_process_group("gloo")
    with opened(options=adaptra.Options(survive=True)) as pipe:
        return error_of(lambda: pipe.shard(torch.optim.SGD, lr=0.1))


@pytest.mark.processes
def test_what_cannot_be_sharded_is_refused() -> None:
    found, other = run_processes(mistake, 2)
    for row, told in found.items():
        # Where a job fails, the other rank may be told of it before it finds the mistake itself.
        own = [(kind, message) for kind, message in (told, other[row]) if not message.startswith("rank")]
        assert len(own) == 2 or row in (UNCOVERED, OTHERS, SETTINGS)
        assert own, row
        for kind, message in own:
            check_documented(kind, message, row)
    of_group = [message for _, message in run_processes(mistake_of_a_group, 2)]
    assert any(
        re.search(r"replica (0 was given betas=.0.9, 0.5. in group 0|1 was given betas=.0.9, 0.75. in group 0), and", one)
        for one in of_group
    )
    for kind, message in run_processes(mistake_in_a_job_that_survives, 2):
        check_documented(kind, message, SURVIVES)


def test_one_replica_has_a_plain_optimizer(one_thread: None) -> None:
    foreign = UNEVEN.make()
    wrong: Any = torch.optim.SGD(foreign.parameters(), lr=0.1)
    with opened() as pipe:
        check_documented(*error_of(lambda: pipe.shard(torch.optim.SGD, foreign.parameters(), lr=0.1)), FOREIGN)
        check_documented(*error_of(lambda: pipe.shard(wrong, lr=0.1)), NO_CLASS)
        check_documented(*error_of(lambda: pipe.shard(torch.optim.LBFGS)), LBFGS)
        optimizer = pipe.shard(torch.optim.AdamW, pipe.named_parameters(), lr=0.01)
        assert type(optimizer) is torch.optim.AdamW
        assert [id(one) for group in optimizer.param_groups for one in group["params"]] == [*map(id, pipe.parameters())]
        sharded = train(pipe, UNEVEN, [optimizer])
    with opened() as pipe:
        assert not sharded.differences(train(pipe, UNEVEN, [torch.optim.AdamW(pipe.parameters(), lr=0.01)]))


def test_a_parameter_that_is_not_trained_any_more_keeps_its_owner() -> None:
    """As where it was frozen, another one not, and the cut has moved: the first optimizer still brings it."""
    later, owners = nn.Parameter(torch.ones(3)), dict[str, int]()
    worker = SimpleNamespace(
        owners={"frozen": 1}, trainable={"later": later}, replica=0, shard=lambda shared, *_: owners.update(shared)
    )
    world = SimpleNamespace(replicas=2, sites=1, has_guests=False)
    session: Any = SimpleNamespace(
        launched=SimpleNamespace(world=world, job=SimpleNamespace(keeper=None)),
        local=SimpleNamespace(on_every_rank=lambda run, _: [run(worker)], shards={}),
        workers=[worker],
    )
    optimizer = Sharding(session, {later: "later"}).optimizer(torch.optim.SGD, [{"params": [later]}], {"lr": 0.1})
    assert owners == {"frozen": 1, "later": 0}
    assert optimizer.param_groups[0]["params"] == [later]


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_owners_are_balanced(replicas: int) -> None:
    sizes = {f"{number}.{kind}": size for number in range(24) for kind, size in (("up", 4096), ("down", 4096), ("bias", 64))}
    owners = balanced_owners(sizes, replicas)
    owned = [sum(size for name, size in sizes.items() if owners[name] == one) for one in range(replicas)]
    assert max(owned) - min(owned) <= 4096
    assert balanced_owners(dict(reversed(sizes.items())), replicas) == owners, "whatever their order"
    assert balanced_owners(sizes | {"more": 10}, replicas, owners).items() >= owners.items(), "owners stay"
