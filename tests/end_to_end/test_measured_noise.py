"""Jobs that measure the noise of their gradients: norms of all stages as by force, told in telemetry, and no other bit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Batch, Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import call, compiled, loss_of, microbatches_of

import adaptra
from adaptra.cli import main
from adaptra.planning.routes.job_planner import plan_job
from adaptra.planning.synchrony.noise_scale import NoiseScaleEstimator, TermNorms
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.report.recorded_case import norms_of
from adaptra.report.run_records import load_run
from adaptra.runtime.telemetry.records import NormsTold
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

pytestmark = pytest.mark.processes

REPLICAS, STAGES, MICROBATCHES, ROWS, STEPS = 3, 2, 2, 8, 4
LONG = 30
SCALE = 64.0
RATES = {"mean": 0.1, "weighted": 0.1, "sum": 1e-4}


class Small(nn.Module):
    """Its first and last layer share their weight, of which each of two stages has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def weighted_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the positive targets, and their number."""
    counted = targets > 0
    return ((outputs - targets).square() * counted).sum(), counted.sum()


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


LOSSES: dict[str, Any] = {"mean": square_loss, "sum": summed_loss, "weighted": weighted_loss}
EXAMPLES = {reduction: Example(reduction, Small, vectors(8), loss) for reduction, loss in LOSSES.items()}


@dataclass(frozen=True)
class Trained:
    """How a job trains, and in how many steps."""

    reduction: str = "mean"
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    scales: bool = False
    shards: bool = False
    accumulates: bool = False


def shared() -> Program:
    """The first replica computes a microbatch of the second."""
    case = Case(CostModel.uniform(STAGES, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1)).of_replicas(REPLICAS)
    own = tuple((2 * replica, 2 * replica + 1) for replica in range(REPLICAS))
    return plan_job(case, routing=Routing.of_paths(own, [[own[0]] * 2, [own[1], own[0]], [own[2]] * 2]))


JOBS = {
    "mean": Trained(steps=LONG),
    "sum": Trained("sum", options={"reduce": adaptra.Reduce(algorithm="chain")}),
    "weighted": Trained("weighted"),
    "scaled": Trained(scales=True),
    "sharded": Trained(shards=True),
    "shared": Trained(options={"schedule": shared()}),
    "accumulated": Trained(accumulates=True),
}


def batches(job: Trained, step: int) -> list[Batch]:
    """The batch of each replica; a long job has ever the same, so that its loss falls."""
    seed = step if job.steps == STEPS else 0
    return microbatches_of(EXAMPLES[job.reduction].rows(REPLICAS * ROWS, seed), REPLICAS)


def train(rank: int, folder: str) -> dict[str, tuple[list[bytes], list[str], str]]:
    """By job: the parameters behind all steps without and with norms, the noise scales and what is explained."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, tuple[list[bytes], list[str], str]] = {}
    for name, job in JOBS.items():
        left: list[bytes] = []
        for measures in (False, True):
            options = adaptra.Options(
                adapt=False,
                share="schedule" in job.options,
                captured="accept",
                noise_scale=measures,
                telemetry=adaptra.Telemetry(folder=f"{folder}/{name}" if measures else None),
                **job.options,
            )
            example = EXAMPLES[job.reduction]
            how: dict[str, Any] = {"stages": STAGES, "microbatches": MICROBATCHES, "reduction": job.reduction}
            with compiled(example, example.rows(ROWS, 0), **how, model=example.make(), options=options) as pipe:
                left.append(run(pipe, job))
                noise, explained = [str(one.estimate) for one in pipe.noise_scales], pipe.explain()
        found[name] = left, noise, explained
    return found


def run(pipe: adaptra.Pipeline, job: Trained) -> bytes:
    """Train, and return the bits of the parameters."""
    rate = RATES[job.reduction]
    optimizer = pipe.shard(torch.optim.SGD, lr=rate) if job.shards else torch.optim.SGD(pipe.parameters(), lr=rate)
    scaler = pipe.grad_scaler(init_scale=SCALE) if job.scales else None
    for step in range(job.steps):
        args, kwargs = call(batches(job, step)[pipe.replica])
        pipe.step(*args, **kwargs)
        if job.accumulates and step % 2 == 0:
            continue
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return b"".join(one.detach().numpy().tobytes() for one in pipe.parameters())


def by_force(job: Trained) -> dict[int, tuple[TermNorms, tuple[float, ...], float]]:
    """The norms of each step, the samples of each replica and the loss, in one process from all gradients."""
    example = EXAMPLES[job.reduction]
    model = example.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[job.reduction])
    found: dict[int, tuple[TermNorms, tuple[float, ...], float]] = {}
    for step in range(job.steps):
        gradients: list[list[Tensor]] = []
        counts: list[float] = []
        losses: list[float] = []
        for part in batches(job, step):
            own: list[Any] = [loss_of(example, model, one) for one in microbatches_of(part, MICROBATCHES)]
            counts.append(sum(one[1].item() for one in own) if job.reduction == "weighted" else ROWS)
            whole: Any = sum(one[0] for one in own) if job.reduction == "weighted" else sum(own)
            mean: Tensor = whole / (MICROBATCHES if job.reduction == "mean" else counts[-1])
            gradients.append([*torch.autograd.grad(mean, [*model.parameters()])])
            losses.append(mean.item())
        of_all: list[Any] = [
            sum(count * one for count, one in zip(counts, ones, strict=True)) / sum(counts)
            for ones in zip(*gradients, strict=True)
        ]
        norms = TermNorms(tuple(map(_square, gradients)), _square(of_all))
        loss = sum(count * one for count, one in zip(counts, losses, strict=True))
        if not (job.accumulates and step % 2):
            found[step] = norms, tuple(counts), loss / (1 if job.reduction == "sum" else sum(counts))
        scale = sum(counts) if job.reduction == "sum" else 1
        for parameter, one in zip(model.parameters(), of_all, strict=True):
            grown = scale * one if parameter.grad is None else parameter.grad + scale * one
            parameter.grad = grown
        if not (job.accumulates and step % 2 == 0):
            optimizer.step()
            optimizer.zero_grad()
    return found


def _square(tensors: list[Any]) -> float:
    return sum(one.double().square().sum().item() for one in tensors)


Measured = tuple[Path, list[dict[str, tuple[list[bytes], list[str], str]]]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("noise")
    return folder, run_processes(train, REPLICAS * STAGES, str(folder))


@pytest.mark.parametrize("name", JOBS)
def test_norms_of_all_stages_are_those_by_force_and_no_bit_is_another(measured: Measured, name: str) -> None:
    folder, ranks = measured
    for (without, with_norms), noise, _ in (one[name] for one in ranks):
        assert len(noise) == 1 and without == with_norms
    found, expected = norms_of(load_run(folder / name)), by_force(JOBS[name])
    assert found.keys() == expected.keys()
    for step, (norms, samples, loss) in expected.items():
        one = found[step]
        assert [*one.norms.terms, one.norms.mean] == pytest.approx([*norms.terms, norms.mean], rel=2e-6), step
        assert one.samples == samples and one.loss == pytest.approx(loss, rel=1e-5) and one.stages == (0, 1)
        assert one.unit == ("weights" if JOBS[name].reduction == "weighted" else "rows")


def test_the_noise_scale_of_a_rank_is_that_of_its_stages_by_force(measured: Measured) -> None:
    folder, ranks = measured
    for number in range(STAGES):
        records = load_run(folder / "weighted").records[number]
        found = [one.record.norms for one in records if isinstance(one.record, NormsTold)]
        estimator = NoiseScaleEstimator(found[0].samples, REPLICAS)
        for one in found:
            estimator.add(one.norms, one.samples)
        of_replicas = [rank["weighted"][1] for rank in ranks[number::STAGES]]
        assert of_replicas == [[str(estimator.estimate)]] * REPLICAS
    assert "noise scale of this rank's gradients: " in ranks[0]["weighted"][2]
    assert "from 2 steps; 2 steps had no norms" in ranks[0]["accumulated"][2]


def test_modes_of_a_run_say_when_a_loss_comes(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = measured
    expected = NoiseScaleEstimator(ROWS, REPLICAS)
    losses: list[float] = []
    for norms, _, loss in by_force(JOBS["mean"]).values():
        expected.add(norms)
        losses.append(loss)
    target = f"{0.95 * losses[-1]:.3f}"
    assert main(["modes", str(folder / "mean"), "--loss", target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["case"]["replicas"] == REPLICAS and found["case"]["batch"] == ROWS and found["run"]["steps"] == LONG
    assert expected.estimate is not None and found["case"]["phi"] == pytest.approx(expected.estimate.value, rel=1e-4)
    assert found["run"]["noise"]["low"] <= found["case"]["phi"]
    assert found["modes"][0]["seconds"] == pytest.approx(found["run"]["step_seconds"], rel=0.35)
    assert found["loss"]["updates"] > LONG / 2 and found["loss"]["low"] <= found["loss"]["updates"]
    assert main(["modes", str(folder / "mean"), "--loss", target]) == 0
    shown = capsys.readouterr().out
    assert f"loss      {target} after " in shown and "stealing: " in shown and "noise     " in shown
