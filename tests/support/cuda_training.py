"""A training on the CPU, on GPUs or on the stand-in for CUDA, in one process or as ranks, and what it came to."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from models import GPT
from torch import nn
from torch._utils import CallbackRegistry
from torch.nn import functional

import adaptra
from adaptra.errors import PeerLostError

STEPS = 3


@dataclass(frozen=True)
class Size:
    """A GPT, and the rows of its batch; without blocks a small MLP that imitates no model."""

    blocks: int = 0
    width: int = 64
    length: int = 8
    rows: int = 16


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Attributes:
        size: Of the model and the batch.
        device: ``"cpu"`` or ``"cuda"``.
        stages: Of a replica.
        transport: None for what adaptra takes by itself.
        placement: See ``adaptra.compile``.
        schedule: The order of ops to begin with; None for the planner's.
        deterministic: Whether kernels give the same bits each time.
        own_rows: Whether each replica has a part of the rows for itself.
        gpus: How many GPUs the ranks take in turn; None for all.
    """

    size: Size = Size()
    device: str = "cuda"
    stages: int = 2
    transport: str | None = None
    placement: str = "straight"
    schedule: str | None = None
    deterministic: bool = False
    own_rows: bool = False
    gpus: int | None = None

    def model_and_batch(self) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """The model on its device, and the batch on the host; the same each time."""
        torch.manual_seed(0)
        size = self.size
        if not size.blocks:
            hidden = [nn.Linear(size.width, size.width), nn.GELU(), nn.LayerNorm(size.width)]
            ends = nn.Linear(8, size.width), nn.Linear(size.width, 5)
            model = nn.Sequential(ends[0], nn.GELU(), *hidden, nn.Linear(size.width, size.width), nn.GELU(), ends[1])
            return model.to(self.device), torch.randn(size.rows, 8), torch.randint(0, 5, (size.rows,))
        model = GPT(size.blocks, size.width, length=size.length)
        # Few tokens, each often: their gradients meet in the embedding's rows, where a GPU adds in any order.
        tokens = torch.randint(0, 16, (size.rows, size.length + 1))
        return model.to(self.device), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def compile(self, rank: int = 0) -> tuple[adaptra.Pipeline, torch.Tensor, torch.Tensor]:
        """The pipeline of a rank, and its rows."""
        if self.device == "cuda":
            torch.cuda.set_device(rank % (self.gpus or torch.cuda.device_count()))
        model, inputs, targets = self.model_and_batch()
        replicas = int(os.environ.get("WORLD_SIZE", "1")) // self.stages
        if self.own_rows:
            inputs, targets = (rows.chunk(replicas)[rank // self.stages] for rows in (inputs, targets))
        pipe = adaptra.compile(
            model,
            stages=self.stages,
            microbatches=4,
            example_inputs=(inputs, targets),
            loss=token_loss if self.size.blocks else functional.cross_entropy,
            transport=self.transport,
            placement=self.placement,
            options=adaptra.Options(
                schedule=self.schedule,
                deterministic=self.deterministic,
                reduce=adaptra.Reduce(bucket=2048),  # several, so that sums begin before the last W
            ),
        )
        return pipe, inputs, targets


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        losses: Of each step, and at last of the batch without training.
        norms: Of each step's gradients.
        weights: By name, on rank 0; empty on others.
        reports: Faults in the order of streams, events and memory, as the stand-in or torch's sanitizer reports them.
        communicators: How many of NCCL's the stand-in saw made, before the first step and after each.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray[Any, Any]]
    reports: list[str]
    communicators: list[int]

    def is_bitwise(self, other: Trained) -> bool:
        """Whether all numbers are those of another training."""
        same = (self.losses, self.norms, self.weights.keys()) == (other.losses, other.norms, other.weights.keys())
        return same and all(value.tobytes() == other.weights[name].tobytes() for name, value in self.weights.items())

    def distance(self, other: Trained) -> tuple[float, float]:
        """The greatest difference of a loss, in parts of it, and of a weight, in parts of its tensor's largest."""
        losses = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        weights = [
            np.abs(value - (wanted := other.weights[name])).max() / np.abs(wanted).max() for name, value in self.weights.items()
        ]
        return max(losses), float(max(weights))


def train(rank: int, *trainings: Training) -> list[Trained]:
    """Train one after the other, each for some steps."""
    results = [_run(rank, training, *training.compile(rank)) for training in trainings]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return results


def _run(rank: int, training: Training, pipe: adaptra.Pipeline, inputs: torch.Tensor, targets: torch.Tensor) -> Trained:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses: list[float] = []
    norms: list[float] = []
    communicators = [_communicators()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = pipe.step(inputs, targets)
        assert loss.device.type == training.device
        losses.append(float(loss))
        norms.append(float(pipe.clip_grad_norm_(1.0)))
        optimizer.step()
        communicators.append(_communicators())
    weights = pipe.full_state_dict()
    losses.append(float(pipe.eval_step(inputs, targets)))
    pipe.close()
    held = {name: value.cpu().numpy() for name, value in weights.items()} if rank == 0 else {}
    return Trained(losses, norms, held, reports(), communicators)


def train_under_the_sanitizer(rank: int, training: Training) -> Trained:
    """Train under torch's race sanitizer, in all threads; the environment has TORCH_CUDA_SANITIZER=1.

    By itself it sees kernels of the main thread alone, is not safe for several, and ends the thread at the first conflict. Nor
    does it know that a thread which has found an event done need not wait for it.
    """
    from torch.cuda import _gpu_trace, _sanitizer
    from torch.utils._python_dispatch import TorchDispatchMode

    sanitizer = _sanitizer.cuda_sanitizer
    assert sanitizer.enabled, "TORCH_CUDA_SANITIZER=1 is not in this rank's environment"
    handler: Any = sanitizer.dispatch.event_handler
    lock = _thread.RLock()  # the stand-in takes one of threading's for an order that the training has by itself
    conflicts: list[str] = []
    threads: set[str] = set()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with lock:
                return function(*args)

        return call

    launch = locked(handler._handle_kernel_launch)

    def launched(*args: Any) -> list[Any]:
        threads.add(threading.current_thread().name)
        conflicts.extend(map(str, launch(*args)))
        return []

    class OfThread(_sanitizer.CUDASanitizerDispatchMode):
        def __init__(self) -> None:
            TorchDispatchMode.__init__(self)
            self.event_handler = handler

    query, run = torch.cuda.Event.query, threading.Thread.run

    def query_watched(self: torch.cuda.Event) -> bool:
        if is_done := query(self):
            _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)
        return is_done

    def run_watched(self: threading.Thread) -> None:
        with OfThread():
            run(self)

    handler._handle_kernel_launch = launched
    for registry in vars(_gpu_trace).values():
        if isinstance(registry, CallbackRegistry):
            registry.callback_list[:] = map(locked, registry.callback_list)
    torch.cuda.Event.query, threading.Thread.run = query_watched, run_watched
    sanitizer.disable()  # torch.export does not work under it
    pipeline = training.compile(rank)
    sanitizer.enable()
    trained = _run(rank, training, *pipeline)
    assert len(threads) > 1, f"the sanitizer has seen kernels of {threads} alone"
    return replace(trained, reports=[*trained.reports, *conflicts])


def lose_rank_1(rank: int, training: Training) -> tuple[int | None, str, float]:
    """Train until rank 1 kills itself; return the lost rank of the error, its text, and the seconds until it came."""
    pipe, inputs, targets = training.compile(rank)
    for _ in range(2):
        pipe.step(inputs, targets)
    # What rank 1 has sent last has to be there, or the error comes in this step.
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"trained {rank}", "")
    store.wait([f"trained {other}" for other in range(torch.distributed.get_world_size())])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        pipe.step(inputs, targets)
    seconds = time.monotonic() - began
    pipe.close()
    return caught.value.rank, str(caught.value), seconds


def reports() -> list[str]:
    """What the stand-in has to report of this process."""
    return [] if (machine := _machine()) is None else [*map(str, machine.detector.reports)]


def _communicators() -> int:
    machine = _machine()
    return 0 if machine is None else sum(count for what, count in machine.syncs.items() if "communicator" in what)


@cache
def _machine() -> Any:
    module = sys.modules.get("fake_cuda.machine")
    return None if module is None else module.the_machine()
