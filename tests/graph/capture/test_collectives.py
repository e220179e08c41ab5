"""Models that send tensors between ranks themselves are refused by module and line, however they do it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as differentiable
from errors_table import check_documented
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

import adaptra
from adaptra.errors import CaptureError, OptionError

ROW = (
    "…: the model calls … while it runs: expected a model that computes with the tensors of its own rank only, as the ranks of "
    "a pipeline run other layers at other times; use more stages or replicas in place of expert, context or tensor parallelism"
)
CONTEXT = (
    "… within context_parallel: expected whole sequences on every rank, as each stage computes attention on its own rank; for "
    "longer sequences use more stages and microbatches, or checkpointing"
)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Exchanges(torch.autograd.Function):
    """An exchange of experts' tokens as libraries write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def functional(x: Tensor) -> Tensor:
    return functional_collectives.all_reduce(x, "sum", [0])


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x)
    return parts[0] + x


def logged(x: Tensor) -> Tensor:
    dist.all_reduce(x.detach().mean())
    return x


def waits(x: Tensor) -> Tensor:
    dist.barrier()
    return x


def receives(x: Tensor) -> Tensor:
    received = torch.empty_like(x)
    dist.recv(received)
    return x + received


def exchanged(x: Tensor) -> Tensor:
    return Exchanges.apply(x)  # pyright: ignore[reportReturnType, reportUnknownVariableType, reportUnknownMemberType]


class Layer(nn.Module):
    def __init__(self, send: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.send = send

    def forward(self, x: Tensor) -> Tensor:
        return self.send(self.layer(x))


def compiled(model: nn.Module | list[nn.Module], **given: Any) -> adaptra.Pipeline:
    example = torch.randn(4, 4), torch.randn(4, 4)
    given = {"loss": nn.functional.mse_loss, "transport": "local"} | given
    return adaptra.compile(model, stages=2, microbatches=2, example_inputs=example, **given)


@pytest.mark.parametrize(
    "send",
    [in_place, functional, gathered, logged, waits, receives, exchanged, differentiable.all_reduce],
    ids=lambda one: one.__name__,
)
def test_a_collective_in_a_forward_is_refused_where_it_is(send: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError) as caught:
        compiled(nn.Sequential(nn.Linear(4, 4), Layer(send)))
    check_documented("CaptureError", str(caught.value), ROW)
    assert str(caught.value).startswith(f"module 1 (Layer) at {__file__}:")


def test_a_collective_in_a_checkpointed_region_is_refused() -> None:
    class Checkpointed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    with pytest.raises(CaptureError, match="all_reduce"):
        compiled(nn.Sequential(nn.Linear(4, 4), Checkpointed(in_place)))


def test_a_collective_in_the_loss_is_refused() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return in_place(nn.functional.mse_loss(outputs, targets))

    with pytest.raises(CaptureError) as caught:
        compiled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss=loss)
    check_documented("CaptureError", str(caught.value), ROW)


@pytest.mark.parametrize("send", [in_place, functional, waits, exchanged], ids=lambda one: one.__name__)
def test_a_collective_in_a_stage_that_is_not_captured_is_refused(send: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError) as caught:
        compiled([nn.Linear(4, 4), Layer(send)])
    check_documented("CaptureError", str(caught.value), ROW)
    assert str(caught.value).startswith("stage 1: its module: the model calls ")


def test_another_thread_may_use_its_group_during_a_capture() -> None:
    def elsewhere(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: done.put(dist.all_reduce(torch.ones(1))))
        thread.start()
        thread.join()
        return x

    done = queue.SimpleQueue[object]()  # a list that grows from call to call would be refused
    with compiled(nn.Sequential(nn.Linear(4, 4), Layer(elsewhere))):
        assert not done.empty()
    value = torch.ones(1)
    dist.all_reduce(value)  # and this one afterwards
    assert value.item() == 1


def test_context_parallel_around_compile_or_a_step_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = torch.randn(4, 4)
    pipe = compiled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pipe:
        for call in (lambda: compiled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), lambda: pipe.step(x, x)):
            with context_parallel(mesh, buffers=[torch.ones(2, 2)], buffer_seq_dims=[0]), pytest.raises(OptionError) as caught:
                call()
            check_documented("OptionError", str(caught.value), CONTEXT)
        pipe.step(x, x)
