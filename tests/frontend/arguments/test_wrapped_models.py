"""Models that something else has wrapped, sharded or compiled are refused at both doors, by name and place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_backend import MADE, caught, compiled, fresh_compiler
from errors_table import check_documented
from processes import run_processes
from torch import Tensor, nn

import adaptra

X, Y = torch.ones(8, 4), torch.zeros(8, 4)

DOCUMENTED = {
    "DistributedDataParallel": "model: a DistributedDataParallel…: expected a module that nothing wraps; give model.module, "
    "the plain one: the pipeline averages the gradients of its replicas itself",
    "DataParallel": "model: a DataParallel…: expected a module that nothing wraps; give model.module, the plain one: the "
    "pipeline splits the batch itself",
    "FullyShardedDataParallel": "model: a FullyShardedDataParallel…: expected a module that nothing wraps; build the model "
    "without it: each rank keeps the parameters of its own stage only",
    "FSDPModule": "model: an FSDPModule…: expected a module that nothing wraps; build the model without fully_shard: each "
    "rank keeps the parameters of its own stage only",
    "DTensor": "model: … is a DTensor: expected ordinary tensors; build the model without parallelize_module or "
    "distribute_tensor: each rank keeps the parameters of its own stage whole",
    "OptimizedModule": "model: an OptimizedModule…: expected a module that nothing wraps; give the module before "
    "torch.compile (its ._orig_mod); Options(inner=...) compiles the stages",
    "compiled": "model: a compiled module…: expected it without module.compile(); Options(inner=...) compiles the stages",
    "ScriptModule": "model: a ScriptModule…: expected a module that nothing wraps; give the Python module that it was made of",
}


class Layers(nn.Module):
    """Returns its loss; its own modules have code of their own, which torch.compile looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest: nn.Module = Rest()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.rest(self.first(x).relu()) - y).square().mean()


class Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def whole(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return wrap(Layers())


def within(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Layers()
    model.rest = wrap(model.rest)
    return model


def in_place(change: Callable[[nn.Module], object]) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        change(model)
        return model

    return wrap


def by_compile(model: nn.Module) -> object:
    return adaptra.compile(model, stages=2, microbatches=4, example_inputs=(X, Y), transport="local")


def by_backend(model: nn.Module) -> object:
    device = next(model.parameters()).device
    with fresh_compiler():
        return compiled(model, transport="local")(X.to(device), Y.to(device)).backward()


LOCAL: dict[str, Callable[[Any], Any]] = {
    "DataParallel": nn.DataParallel,
    "OptimizedModule": lambda model: torch.compile(model, backend="eager"),
    "compiled": in_place(lambda model: model.compile(backend="eager")),
    "ScriptModule": torch.jit.script,
}


@pytest.mark.parametrize("where", [whole, within])
@pytest.mark.parametrize("kind", LOCAL)
def test_a_wrapped_or_compiled_model_is_refused_by_compile(kind: str, where: Callable[..., nn.Module]) -> None:
    error = caught(lambda: by_compile(where(LOCAL[kind])))
    check_documented(type(error).__name__, str(error), DOCUMENTED[kind])
    assert (" at 'rest'" in str(error)) == (where is within)


@pytest.mark.parametrize("where", [whole, within])
def test_a_wrapped_model_is_refused_by_torch_compile(where: Callable[..., nn.Module]) -> None:
    error = caught(lambda: by_backend(where(nn.DataParallel)))
    check_documented(type(error).__name__, str(error), DOCUMENTED["DataParallel"])


@pytest.mark.parametrize("kind", ["OptimizedModule", "compiled"])
def test_torch_compile_itself_compiles_what_is_compiled_within(kind: str, one_thread: None) -> None:
    """The outer compilation takes all of it, and the numbers are those of a model without one."""
    gradients = []
    for wrap in (LOCAL[kind], lambda model: model):
        torch.manual_seed(0)
        model = within(wrap)
        by_backend(model)
        gradients.append([one.grad for one in model.parameters()])
    assert all(map(torch.equal, *gradients)) and not MADE


def test_stages_given_as_modules_may_be_compiled_but_not_wrapped() -> None:
    stages = [Rest(), torch.compile(Rest(), backend="eager")]
    with by_compile_stages(stages) as pipe:
        assert pipe.step(X, Y).isfinite()
    error = caught(lambda: by_compile_stages([Rest(), nn.DataParallel(Rest())]))
    check_documented(type(error).__name__, str(error), DOCUMENTED["DataParallel"])


def by_compile_stages(stages: list[Any]) -> adaptra.Pipeline:
    loss = nn.functional.mse_loss
    return adaptra.compile(stages, stages=2, microbatches=4, example_inputs=(X, Y), loss=loss, transport="local")


def refused_in_a_job(rank: int) -> list[tuple[str, str, str]]:
    """Kind of the wrapper, and class and text of the error, for each wrapper, place and door."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    cpu = torch.device("cpu")
    kinds: dict[str, Callable[[Any], Any]] = {
        "DistributedDataParallel": DistributedDataParallel,
        "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu),
        "FSDPModule": in_place(lambda model: fully_shard(model, mesh=mesh)),
        "DTensor": in_place(
            lambda model: [
                parallelize_module(one, mesh, ColwiseParallel()) for one in model.modules() if type(one) is nn.Linear
            ]
        ),
    }
    found = []
    for kind, wrap in kinds.items():
        for where in (whole, within):
            for door in (by_compile, by_backend):
                model = where(wrap)
                error = caught(lambda door=door, model=model: door(model))
                found.append((kind, type(error).__name__, str(error)))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.processes
def test_every_wrapper_of_torch_distributed_is_refused_at_both_doors() -> None:
    (found,) = run_processes(refused_in_a_job, 1)
    assert len(found) == 16
    for kind, error, message in found:
        check_documented(error, message, DOCUMENTED[kind])
