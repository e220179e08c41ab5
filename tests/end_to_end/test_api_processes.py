"""adaptra.compile over processes: what is wrong on one rank reaches all of them, and replicas stay equal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from errors_table import check_documented
from processes import run_processes

if TYPE_CHECKING:
    from models import Example
    from torch import Tensor

    import adaptra

Caught = tuple[str, str, int | None, tuple[int, int] | None, float]
"""An error's class and text, its rank and edge if it has some, and the seconds until it came."""

Trained = tuple[list[float], dict[str, Any], dict[str, Any], int]

pytestmark = pytest.mark.processes

ROWS, MICROBATCHES = 16, 8

DOCUMENTED = {
    "told": "rank … failed: BatchError: … has … rows, … has …: expected …",
    "killed": "rank … is lost…",
    "raised": "rank … failed: IndexError: …",
    "arguments": "adaptra.compile: rank … was given …, rank 0 …: expected the same arguments on every rank",
    "models": (
        "pipeline: rank … compiled something else than rank 0: …: expected every rank to build the same model and to call "
        "adaptra.compile with the same arguments"
    ),
    "compile": "pipeline: rank … failed: …",
    "ranks": (
        "… ranks for a pipeline of …: expected a multiple of … ranks (more make data-parallel replicas); start … processes, "
        "ask for another number of stages, or give replicas= to have some ranks host several workers"
    ),
    "half": "mesh=…: … ranks in a job of …: expected a mesh of all ranks",
    "pp": "mesh=…: … ranks along pp: expected …, as many as the pipeline has",
    "replicas": "mesh=…: … replicas: expected replicas=…, as is given",
    "local": "mesh= with transport 'local': expected another transport, as 'local' runs all in one process",
}


def set_up(name: str = "skip_mlp", stages: int = 4, seed: int = 0, **arguments: Any) -> tuple[Example, adaptra.Pipeline]:
    """A process group, a model and its pipeline."""
    import torch.distributed as dist
    from models import EXAMPLES

    import adaptra

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    example = EXAMPLES[name]
    args, _, targets = example.rows(ROWS, seed=0)
    arguments = {"example_inputs": (args, targets), "loss": example.loss, "microbatches": MICROBATCHES} | arguments
    return example, adaptra.compile(example.make(seed=seed), stages=stages, **arguments)


def caught(run: Callable[[], object]) -> Caught | None:
    """What ``run`` raises, as a tuple that can be pickled, with the seconds it took."""
    begun = time.monotonic()
    try:
        run()
    except Exception as error:
        seconds = time.monotonic() - begun
        return type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "edge", None), seconds
    return None


def refuse_one_batch(rank: int) -> tuple[Caught | None, Caught | None]:
    example, pipe = set_up()
    args, _, targets = example.rows(ROWS, seed=1)
    with pipe:
        pipe.step(args, targets)
        if rank == 0:
            args = (args[0][: ROWS // 2],)
        first = caught(lambda: pipe.step(args, targets))
        second = caught(lambda: pipe.step(*example.rows(ROWS, seed=2)[::2]))
    return first, second


def test_a_batch_refused_on_one_rank_ends_the_step_on_all() -> None:
    """Nobody waits for a rank that has refused its batch, and all are told why, though no process has ended."""
    results = run_processes(refuse_one_batch, 4)
    (kind, message, *_), (kind_again, *_) = results[0]
    assert (kind, kind_again) == ("BatchError", "PipelineError") and "has 8 rows, targets has 16" in message
    for (kind, message, lost, _, seconds), (kind_again, *_) in results[1:]:
        check_documented(kind, message, DOCUMENTED["told"])
        assert (kind, lost, kind_again) == ("PeerLostError", 0, "PipelineError")
        assert seconds < 100, "it waited for an op's own limit"


def be_killed(rank: int, victim: int, stages: int) -> Caught | None:
    import adaptra

    slow = adaptra.Options(emulate=adaptra.EmulatedDevice(0.05, 0.05, 0.05))
    example, pipe = set_up(stages=stages, options=slow)
    args, _, targets = example.rows(ROWS, seed=1)
    pipe.step(args, targets)
    if rank == victim:
        # A step takes more than 8 × 3 × 50 ms.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    result = caught(lambda: pipe.step(args, targets))
    pipe.close()
    return result


@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_killed_in_a_step_ends_the_others(victim: int) -> None:
    """Long before an op gives up by itself, with an error that names the killed rank and an edge at which it was missed."""
    results = run_processes(be_killed, 4, victim, 4, may_die=(victim,))
    for rank in set(range(4)) - {victim}:
        assert results[rank] is not None, f"rank {rank} ended the step without an error"
        kind, message, lost, edge, seconds = results[rank]
        check_documented(kind, message, DOCUMENTED["killed"])
        assert (kind, lost) == ("PeerLostError", victim), message
        assert seconds < 100, "it waited for an op's own limit"
        assert edge is not None and victim in edge, message


def raise_in_the_model(rank: int) -> Caught | None:
    example, pipe = set_up("gpt_tied")
    args, _, targets = example.rows(ROWS, seed=1)
    with pipe:
        pipe.step(args, targets)
        args[0][ROWS // 2, 3] = 999  # there are 256 tokens
        return caught(lambda: pipe.step(args, targets))


def test_an_exception_in_the_model_reaches_all_ranks() -> None:
    results = run_processes(raise_in_the_model, 4)
    assert results[0][0] == "IndexError"
    for kind, message, lost, _, seconds in results[1:]:
        check_documented(kind, message, DOCUMENTED["raised"])
        assert (kind, lost) == ("PeerLostError", 0) and "out of range" in message
        assert seconds < 100, "it waited for an op's own limit"


def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * (outputs - targets).square().mean()


def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * (outputs - targets).square().mean()

    return loss


def compile_scaled(factor: float) -> None:
    """Compile a model whose code has another number on each rank, though its modules and shapes are the same."""
    import torch
    from torch import nn

    import adaptra

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return factor * x

    def part() -> nn.Sequential:
        found = nn.Sequential(nn.Linear(4, 4))
        found.add_module("scale", Scale())
        return found

    example = torch.ones(8, 4), torch.ones(8, 4)
    adaptra.compile(
        nn.Sequential(part(), part()), stages=2, microbatches=2, example_inputs=example, loss=nn.functional.mse_loss
    ).close()


def compile_differently(rank: int) -> tuple[dict[str, Caught | None], list[Any], list[str]]:
    import torch
    from models import EXAMPLES, square_loss

    import adaptra

    is_odd = rank == 1
    args, _, targets = EXAMPLES["skip_mlp"].rows(ROWS, seed=0)
    schedules = [adaptra.generate(name, 2, MICROBATCHES) for name in ("gpipe", "1f1b")]
    found = {
        "stages": caught(lambda: set_up(stages=1 if is_odd else 2)),
        "loss": caught(lambda: set_up(stages=2, loss=doubled if is_odd else square_loss)),
        "constant": caught(lambda: set_up(stages=2, loss=scaled(rank + 1.0))),
        "seed": caught(lambda: set_up(stages=2, options=adaptra.Options(seed=rank))),
        "schedule": caught(lambda: set_up(stages=2, options=adaptra.Options(schedule=schedules[rank]))),
        "model": caught(lambda: set_up("tied_twice" if is_odd else "frozen_upstream", stages=2)),
        "forward": caught(lambda: compile_scaled(rank + 1.0)),
        "rows": caught(lambda: set_up(stages=2, example_inputs=EXAMPLES["skip_mlp"].rows(ROWS << rank, seed=0)[::2])),
        "targets": caught(lambda: set_up(stages=2, example_inputs=args if is_odd else (args, targets))),
        "ranks": caught(lambda: set_up(stages=3)),
    }
    # None of these stands in the way of the next pipelines in the same process group.
    losses, state = [], {}
    for _ in range(2):
        example, pipe = set_up(stages=2)
        with pipe:
            losses.append(pipe.step(*example.rows(ROWS, seed=1)[::2]))
            state = pipe.state_dict()
    return found, torch.stack(losses).tolist(), sorted(state)


def test_ranks_that_compile_something_else_are_named() -> None:
    (first, losses, state), (second, same_losses, other_state) = run_processes(compile_differently, 2)
    for found in (first, second):
        assert all(error is not None and error[0] in {"LaunchError", "BatchError"} for error in found.values()), found
        assert all(error[-1] < 100 for error in found.values())
        check_documented(found["stages"][0], found["stages"][1], DOCUMENTED["arguments"])
        assert "rank 1 was given stages=1, rank 0 stages=2" in found["stages"][1]
        assert "rank 1 was given loss=test_api_processes.doubled (code " in found["loss"][1]
        assert "rank 0 loss=models.square_loss (code " in found["loss"][1]
        assert "rank 1 was given loss=test_api_processes.scaled.<locals>.loss (code" in found["constant"][1]
        assert "rank 1 was given options.seed=1, rank 0 options.seed=0" in found["seed"][1]
        assert "rank 1 was given options.schedule=schedule 1f1b placement=0,1 " in found["schedule"][1]
        assert len(found["schedule"][1]) < 400
        assert "rank 1 was given model=TiedTwice (352 parameters), rank 0 model=FrozenUpstream (288 " in found["model"][1]
        check_documented(found["rows"][0], found["rows"][1], DOCUMENTED["models"])
        assert "rank 1 compiled" in found["rows"][1]
        check_documented(found["forward"][0], found["forward"][1], DOCUMENTED["models"])
        assert "rank 1 compiled something else than rank 0: the ops in training of module 0.scale:" in found["forward"][1]
        check_documented(found["ranks"][0], found["ranks"][1], DOCUMENTED["ranks"])
    assert second["targets"][0] == "BatchError"
    check_documented(first["targets"][0], first["targets"][1], DOCUMENTED["compile"])
    assert "rank 1 failed: BatchError: loss= compares outputs with targets" in first["targets"][1]
    assert losses == same_losses and losses[0] == losses[1]
    assert len(state) + len(other_state) == 16 and not set(state) & set(other_state)


def train_replicas(rank: int, delay: float, dimensions: Sequence[str] | None = None, placement: str = "straight") -> Trained:
    """Two replicas on two ranks each, of a mesh with these dimensions if any: every replica gets its own half of the rows."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import adaptra

    options = adaptra.Options(
        faults=[f"delay 0-1 {delay}ms @2"] if delay else [], emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004)
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(dimensions)) if dimensions else None
    stages = 2 if placement == "straight" else 4
    example, pipe = set_up(stages=stages, options=options, mesh=mesh, placement=placement)
    replica = mesh.get_local_rank("dp") if mesh else rank // 2
    assert pipe.replica == replica
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, gradients = [], {}
    with pipe:
        for step in range(24 if delay else 3):
            (inputs,), _, targets = example.rows(2 * ROWS, seed=step)
            half = slice(replica * ROWS, (replica + 1) * ROWS)
            losses.append(pipe.step(inputs[half], targets[half]).item())
            gradients = {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        # Arrays, since a tensor's memory would end with its process.
        weights = {name: value.cpu().numpy() for name, value in pipe.state_dict().items()}
        return losses, {name: value.cpu().numpy() for name, value in gradients.items()}, weights, pipe.plan.version


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two dictionaries of arrays are bitwise the same, and not empty."""
    return bool(one) and one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize("placement", ["straight", "v"])
def test_replicas_take_the_mean_and_stay_equal(placement: str) -> None:
    """4 ranks, 2 per replica: gradients are the mean over replicas, the loss is the global mean, weights stay bitwise equal."""
    import torch
    from models import EXAMPLES

    results = run_processes(train_replicas, 4, 0, None, placement)
    example = EXAMPLES["skip_mlp"]
    model = example.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {}
    for step in range(3):
        (inputs,), _, targets = example.rows(2 * ROWS, seed=step)
        assert example.loss is not None
        loss = example.loss(model(inputs), targets)
        loss.backward()
        for losses, *_ in results:
            assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    for stage in range(2):
        (losses, mine, state, _), (other_losses, theirs, other_state, _) = results[stage], results[2 + stage]
        assert losses == other_losses
        assert same(state, other_state) and same(mine, theirs)
        for name, gradient in mine.items():
            torch.testing.assert_close(torch.from_numpy(gradient), gradients[name], rtol=1e-4, atol=1e-7)


def train_on_meshes(rank: int) -> tuple[Trained, Trained]:
    return train_replicas(rank, 0, ["dp", "pp"]), train_replicas(rank, 0, ["pp", "dp"])


def test_a_mesh_says_which_stage_of_which_replica_a_rank_holds() -> None:
    """What ranks 0, 2 and 1, 3 train, the stages of its two columns, is bitwise what consecutive ranks do."""
    results = run_processes(train_on_meshes, 4)
    for rank, same_role in enumerate([0, 2, 1, 3]):
        (losses, gradients, state, _), (others, theirs, other_state, _) = results[rank][0], results[same_role][1]
        assert losses == others and same(gradients, theirs) and same(state, other_state)


def lie_in_another_order(rank: int) -> tuple[Any, ...]:
    """Meshes that don't fit; what a step of four stages in the usual order gives, and of one replica in another order."""
    import torch.distributed as dist
    from torch.distributed import DeviceMesh

    dist.init_process_group("gloo")
    halves = [DeviceMesh("cpu", ranks, mesh_dim_names=("pp",)) for ranks in ([0, 1], [2, 3])]
    every = DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("pp",))
    refused = {
        "half": caught(lambda: set_up(stages=2, mesh=halves[rank // 2])),
        "pp": caught(lambda: set_up(stages=2, mesh=every)),
        "replicas": caught(lambda: set_up(stages=4, mesh=every, replicas=2)),
        "local": caught(lambda: set_up(stages=4, mesh=every, transport="local")),
    }
    found = []
    for mesh in (None, every):
        example, pipe = set_up(stages=4, mesh=mesh)
        args, _, targets = example.rows(ROWS, seed=0)
        with pipe:
            found.append((pipe.step(args, targets).item(), sorted(pipe.state_dict())))
        dist.barrier()
    return refused, *found


def test_a_mesh_is_of_all_ranks_and_gives_stages_their_order() -> None:
    results = run_processes(lie_in_another_order, 4)
    for refused, *_ in results:
        for row, error in refused.items():
            check_documented(error[0], error[1], DOCUMENTED[row])
    usual, other = ([result[which] for result in results] for which in (1, 2))
    assert [other[rank] for rank in (3, 1, 0, 2)] == usual


def average_before_others_end(rank: int) -> float:
    """Stages other than the last end no step before the last one's gradients are averaged over the replicas."""
    import datetime

    import torch.distributed as dist

    from adaptra.runtime.data_parallel.gradient_averaging import Replicas
    from adaptra.runtime.step_messages.shared_gradients import Gradients

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    replica, stage = divmod(rank, 2)
    end_step, average = Gradients.end_step, Replicas.combine_gradients

    def waiting(self: Gradients) -> None:
        if stage == 0:
            store.wait([f"averaged {replica}"], datetime.timedelta(seconds=30))
        end_step(self)

    def telling(self: Replicas, *given: Any, **how: Any) -> int:
        nbytes = average(self, *given, **how)
        if stage == 1:
            store.set(f"averaged {replica}", "")
        return nbytes

    Gradients.end_step, Replicas.combine_gradients = waiting, telling
    example, pipe = set_up(stages=2)
    args, _, targets = example.rows(ROWS, seed=rank // 2)
    with pipe:
        return pipe.step(args, targets).item()


def test_a_stage_averages_its_gradients_while_others_still_compute() -> None:
    losses = run_processes(average_before_others_end, 4)
    assert losses == losses[:1] * 4


@pytest.mark.timed
@pytest.mark.parametrize("placement", ["straight", "v"])
def test_replicas_adapt(placement: str) -> None:
    """Each pipeline adapts for itself when its link turns slow, and the weights stay bitwise equal."""
    results = run_processes(train_replicas, 4, 20, None, placement)
    assert [version >= 1 for *_, version in results] == [True] * 4
    for stage in range(2):
        assert same(results[stage][2], results[2 + stage][2])


def fail_in_a_replica(rank: int) -> Caught | None:
    example, pipe = set_up("gpt_tied", stages=2)
    args, _, targets = example.rows(ROWS, seed=1)
    with pipe:
        pipe.step(args, targets)
        if rank >= 2:  # both ranks of the second replica are given the same rows
            args[0][3, 3] = 999
        return caught(lambda: pipe.step(args, targets))


def test_a_rank_killed_in_one_replica_ends_all() -> None:
    """All ranks name it by its number in the job, with its edge, those of the other replica too."""
    results = run_processes(be_killed, 4, 3, 2, may_die=(3,))
    for kind, message, lost, edge, seconds in results[:3]:
        assert (kind, lost) == ("PeerLostError", 3) and "rank 3 is lost" in message
        assert edge is not None and 1 in edge
        assert seconds < 100


def test_a_failure_in_one_replica_reaches_the_others() -> None:
    """The ranks of the other pipeline wait for the failed one's gradients; none of them waits for long, all are told why."""
    results = run_processes(fail_in_a_replica, 4)
    assert results[2][0] == "IndexError"
    for rank in (0, 1, 3):
        kind, message, lost, _, seconds = results[rank]
        assert (kind, lost) == ("PeerLostError", 2) and "out of range" in message
        assert seconds < 100, "it waited for an op's own limit"


def look_at_it(rank: int, folder: str) -> tuple[Any, ...]:
    example, pipe = set_up(name="skip_mlp")
    with pipe:
        pipe.step(*example.rows(ROWS, seed=1)[::2])
        timeline = pipe.timeline()
        for suffix in ("json", "svg", "png"):
            pipe.save_trace(f"{folder}/step.{suffix}")
        evaluated = pipe.eval_step(*example.rows(ROWS, seed=1)[::2])
        outputs = pipe.eval_step(example.rows(ROWS, seed=1)[0])
        last = pipe.step(*example.rows(ROWS, seed=2)[::2])
        return (
            None if timeline is None else [len(ops) for ops in timeline.ops],
            pipe.report().partition("\nstep ")[0],  # each rank has its own clock
            pipe.explain(),
            evaluated.item(),
            None if outputs is None else list(outputs.shape),
            last.item(),
            pipe.plan.version,
            pipe.slow_edges,
        )


def test_all_ranks_see_what_runs_and_the_first_one_draws_it(tmp_path: Path) -> None:
    """Timelines and evaluation between steps: rank 0 gets the timeline and writes, the last rank gets the outputs."""
    results = run_processes(look_at_it, 4, str(tmp_path))
    assert [timeline for timeline, *_ in results] == [[3 * MICROBATCHES] * 4, None, None, None]
    assert len({(report, explained) for _, report, explained, *_ in results}) == 1
    assert len({(evaluated, last) for _, _, _, evaluated, _, last, *_ in results}) == 1
    assert [outputs for _, _, _, _, outputs, *_ in results] == [None, None, None, [ROWS, 16]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json", "step.png", "step.svg"]
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
