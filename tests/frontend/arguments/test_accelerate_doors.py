"""What accelerate has prepared, placed or is set up to do is refused, and so is a pipeline that is given to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_backend import caught
from errors_table import check_documented
from processes import run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import adaptra

pytest.importorskip("accelerate", reason="these are doors for accelerate")
pytestmark = pytest.mark.usefixtures("no_accelerator_left")

PREPARED = (
    "model: a module… that accelerator.prepare has changed: expected the plain model: give it to adaptra.compile, and neither "
    "it nor the pipeline to prepare"
)
PLACED = (
    "model: a module… that accelerate has placed, as device_map= does: expected none: adaptra places the stages itself; "
    "weights= reads a checkpoint in parts"
)
ENGINE = (
    "Accelerator: distributed_type=…: expected none of FSDP, DEEPSPEED, MEGATRON_LM: they shard a model that is prepared, and "
    "each rank of a pipeline has the whole parameters of its stages; more stages hold less on each rank"
)
PARALLEL = (
    "Accelerator: parallelism_config: it was given: expected none: a pipeline has stages and replicas only; more stages hold "
    "less on each rank"
)
PRECISION = (
    "Accelerator: mixed_precision=…: expected 'no': it takes effect in prepare only, which a pipeline isn't given to; put "
    "torch.autocast into the model's forward"
)
WRAPPED = (
    "a module of a pipeline was given to DistributedDataParallel or to accelerator.prepare: expected pipe.step without them: "
    "they would send the first rank's stage to all others, and a step averages the gradients of replicas itself"
)
X = torch.ones(8, 4)


def accelerator(**settings: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **settings)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def compiled(model: nn.Module) -> adaptra.Pipeline:
    how: Any = {"loss": nn.functional.mse_loss, "transport": "local"}
    return adaptra.compile(model, stages=2, microbatches=4, example_inputs=(X, X), **how)


def refused(call: Callable[[], object], kind: str, row: str) -> str:
    error = caught(call)
    check_documented(type(error).__name__, str(error), row)
    return str(error)


@pytest.mark.parametrize("part", [False, True], ids=["whole", "within"])
def test_a_prepared_model_is_refused(part: bool) -> None:
    model = layers()
    accelerator().prepare(model[1] if part else model)  # pyright: ignore[reportIndexIssue]
    message = refused(lambda: compiled(model), "OptionError", PREPARED)
    assert ("at '1'" in message) == part


def test_a_placed_model_is_refused() -> None:
    from accelerate import cpu_offload

    refused(lambda: compiled(cpu_offload(layers(), torch.device("cpu"))), "OptionError", PLACED)


def test_mixed_precision_is_refused() -> None:
    accelerator(mixed_precision="bf16")
    assert "'bf16'" in refused(lambda: compiled(layers()), "OptionError", PRECISION)


def test_an_accelerator_that_is_younger_than_the_pipeline_is_refused_at_the_first_step() -> None:
    with compiled(layers()) as pipe:
        accelerator(mixed_precision="bf16")
        refused(lambda: pipe.step(X, X), "OptionError", PRECISION)
        assert all(one.grad is None for one in pipe.parameters())


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_other_engines_are_refused(engine: str) -> None:
    """They need packages or devices that are not here, so the Accelerator is told that it has them."""
    from accelerate import DistributedType, PartialState

    accelerator()
    PartialState._shared_state["distributed_type"] = DistributedType(engine)
    assert engine in refused(lambda: compiled(layers()), "OptionError", ENGINE).split(":")[1]


def test_other_parallelism_is_refused() -> None:
    from accelerate import ParallelismConfig

    accelerator(parallelism_config=ParallelismConfig())
    refused(lambda: compiled(layers()), "OptionError", PARALLEL)


def test_accelerate_wraps_no_module_of_a_pipeline() -> None:
    given = accelerator()
    with compiled(layers()) as pipe:
        before = {name: one.clone() for name, one in pipe.named_parameters()}
        for call in (
            lambda: given.prepare(pipe.local_module),
            lambda: given.prepare(next(iter(pipe.local_module.children()))),
            lambda: given.prepare_model(pipe),
        ):
            refused(call, "PipelineError", WRAPPED)
        assert given.prepare(pipe) is pipe
        assert all(torch.equal(one, before[name]) for name, one in pipe.named_parameters())
        assert pipe.step(X, X).isfinite()
        averaged = AveragedModel(pipe.local_module)
        averaged.update_parameters(pipe.local_module)


def wrapped_and_loaded(rank: int) -> tuple[str, str, str]:
    """The error where a module is wrapped, and the text of the one where a prepared loader gives each rank other rows."""
    given = accelerator()
    model = layers()
    with adaptra.compile(model, stages=2, microbatches=4, example_inputs=(X, X), loss=nn.functional.mse_loss) as pipe:
        wrapped = caught(lambda: DistributedDataParallel(pipe.local_module))
        loader = given.prepare(DataLoader(torch.randn(80, 4), 8))  # pyright: ignore[reportArgumentType]
        rows = caught(lambda: [pipe.step(batch, batch) for batch in loader])
    return type(wrapped).__name__, str(wrapped), f"{type(rows).__name__}: {rows}"


@pytest.mark.processes
def test_ranks_neither_wrap_a_stage_nor_share_out_rows() -> None:
    for kind, wrapped, rows in run_processes(wrapped_and_loaded, 2):
        check_documented(kind, wrapped, WRAPPED)
        assert re.match(r"(BatchError|PeerLostError: .*BatchError): step \d+: rank 1 was given other inputs and targets", rows)
