"""Rows of ``gpu_slow_link.py`` on one rank: torch's schedule or adaptra trains a GPT while a link turns slower and slower."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _gpu_gaps import Arrival, OpTimes, of_timeline
from _gpu_hosts import HELD, set_delay
from _ranks import timed_in_a_row
from torch import Tensor

import adaptra
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, next_byte_loss

if TYPE_CHECKING:
    from _gpu_torch import Theirs


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in float32, so that its bits tell more than those of bfloat16."""
    return next_byte_loss(logits.float(), targets)


def batch_of(step: int, size: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Random tokens of a step, inputs and targets, (rows of all microbatches, length) each."""
    generator = torch.Generator().manual_seed(step)
    shape = (size["microbatches"] * size["rows"], size["length"] + 1)
    tokens = torch.randint(size["vocabulary"], shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(size: dict[str, Any], device: torch.device) -> GPT:
    """The whole model on a device, the same on every rank."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(size["blocks"], size["width"], size["heads"], size["length"], size["vocabulary"])
    finally:
        torch.set_default_dtype(torch.float32)


class Ours:
    """adaptra on this rank."""

    def __init__(self, row: dict[str, Any], size: dict[str, Any], model: GPT, way: str) -> None:
        ranks, steps, slow = size["ranks"], size["steps"] + 1, size["slow"]
        faults = [
            f"delay {low}-{high} {1e3 * delay:g}ms @{index * steps}..{(index + 1) * steps}"
            for index, delay in enumerate(row["delays"])
            for low, high in slow
            if delay and way == HELD
        ]
        options = adaptra.Options(
            adapt=row["adapts"], schedule=row["schedule"], delegate=row["delegate"], faults=faults, deterministic=True
        )
        self.pipe = adaptra.compile(
            model,
            stages=ranks,
            microbatches=size["microbatches"],
            example_inputs=batch_of(0, size),
            loss=loss_of,
            split=[f"blocks.{rank * size['blocks'] // ranks}" for rank in range(1, ranks)],
            memory=size["memory"],
            transport=row["transport"],
            options=options,
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-4)
        self._losses: list[list[str]] = []
        self._versions: list[int] = []

    def face(self, delay: float) -> None:
        """Begin to tell of the steps to come; faults have their steps already."""
        self._losses, self._versions = [], [self.pipe.plan.version]

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step."""
        self.pipe.step(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._losses.append([float(loss).hex() for loss in self.pipe.microbatch_losses])
        self._versions.append(self.pipe.plan.version)

    def times(self, inputs: Tensor, targets: Tensor) -> tuple[list[OpTimes], list[Arrival]]:
        """The times of ops and arrivals in one more step, of all ranks on the first."""
        self.step(inputs, targets)
        timeline = self.pipe.timeline()
        return ([], []) if timeline is None else of_timeline(timeline)

    def told(self) -> dict[str, Any]:
        """The version of the plan before the first step and of each step, and the losses of each."""
        return {"versions": self._versions, "losses": self._losses}

    def close(self) -> None:
        """End it."""
        self.pipe.close()


def train(rank: int, rows: list[dict[str, Any]], size: dict[str, Any], way: str) -> dict[str, Any]:
    """Train by each row through all delays; return what this rank measured under each, and what it ran on."""
    device = torch.device("cuda", rank % size["gpus"])
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("gloo")
    measured = [_train(rank, row, size, way, device) for row in rows]
    parameters = sum(each.numel() for each in build(size, torch.device("meta")).parameters())
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl()}"
    facts = [f"{parameters:,} parameters, bfloat16", versions]
    return {"rows": measured, "gpu": torch.cuda.get_device_name(device), "facts": facts}


def _train(rank: int, row: dict[str, Any], size: dict[str, Any], way: str, device: torch.device) -> dict[str, Any]:
    model = build(size, device)
    contender = _contender(row, size, model, way)
    del model
    torch.cuda.empty_cache()
    begun = 0

    def step() -> None:
        nonlocal begun
        contender.step(*batch_of(begun, size))
        torch.cuda.synchronize()
        begun += 1

    measured: list[dict[str, Any]] = []
    for delay in row["delays"]:
        if rank == 0:
            print(f"  {row['name']}: {1e3 * delay:g} ms", file=sys.stderr, flush=True)
        for link in size["slow"]:
            set_delay(link, delay)
        contender.face(delay)
        torch.cuda.reset_peak_memory_stats()
        seconds = timed_in_a_row(step, size["steps"], before=0)
        ops, arrivals = contender.times(*batch_of(begun, size))
        begun += 1
        measured.append({
            "seconds": seconds, "ops": ops, "arrivals": arrivals,
            "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            **contender.told(),
        })  # fmt: skip
    contender.close()
    healthy = measured[0]["ops"] if row["transport"] else []
    bounds = [_bound(healthy, size, delay) for delay in row["delays"]] if healthy else []
    return {"measured": measured, "bounds": bounds}


def _contender(row: dict[str, Any], size: dict[str, Any], model: GPT, way: str) -> Theirs | Ours:
    if row["transport"]:
        return Ours(row, size, model, way)
    from _gpu_torch import Theirs  # what other versions of torch may lack ends its own rows alone

    example = batch_of(0, size)[0]
    return Theirs(row["schedule"], model, loss_of, example, size["microbatches"], size["slow"], way == HELD)


def _bound(ops: list[OpTimes], size: dict[str, Any], delay: float) -> float:
    """Seconds that no order of a step is below if its ops take as long as these, and each slow link ``delay`` one way."""
    cost = CostModel.uniform(size["ranks"], 0.0, 0.0, 0.0)
    for stage in range(cost.stages):
        medians = [median(end - start for _, of, kind, _, start, end in ops if (of, kind) == (stage, each)) for each in "FIW"]
        cost = cost.with_stage(stage, *medians)
    for low, high in size["slow"]:
        cost = cost.with_latency(low, high, delay).with_latency(high, low, delay)
    return PERIOD.bound(Case(cost, size["microbatches"], tuple(range(cost.stages))))


def _nccl() -> str:
    from torch.cuda import nccl

    try:
        return ".".join(map(str, nccl.version()))
    except AttributeError:  # a torch for CPUs, under the stand-in
        return "none"
