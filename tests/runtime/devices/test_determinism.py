"""Deterministic kernels: asked for once, and looked at before each step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from errors_table import check_documented
from torch import nn

import adaptra
from adaptra.errors import OptionError
from adaptra.runtime.devices.determinism import FIXED, WORKSPACE, require_deterministic, set_deterministic

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UNDONE = "deterministic=True: something has undone …, which compile ran: expected it to stay"


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Leave torch's switches as they were."""
    was = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(was[0])
    torch.backends.cudnn.benchmark = was[1]


def test_on_a_cpu_it_is_torchs_switch_and_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    torch.backends.cudnn.benchmark = True
    set_deterministic(CPU)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    require_deterministic()


@pytest.mark.parametrize("given", [None, ":0:0"])
def test_a_gpu_needs_a_workspace_of_a_fixed_size(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    if given is not None:
        monkeypatch.setenv(WORKSPACE, given)
    with pytest.raises(OptionError) as error:
        set_deterministic(CUDA)
    row = "deterministic=True: CUBLAS_WORKSPACE_CONFIG …: expected … in the environment of every process, before it uses a GPU"
    check_documented(type(error.value).__name__, str(error.value), row)
    assert not torch.are_deterministic_algorithms_enabled(), "nothing is set by halves"


@pytest.mark.parametrize("given", FIXED)
def test_with_such_a_workspace_a_gpu_is_deterministic(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, given)
    set_deterministic(CUDA)
    require_deterministic()


def undo(how: str) -> None:
    if how == "cudnn":
        torch.backends.cudnn.benchmark = True
    else:
        torch.use_deterministic_algorithms(how == "warn", warn_only=how == "warn")


@pytest.mark.parametrize("how", ["off", "warn", "cudnn"])
def test_a_step_and_an_evaluation_refuse_what_was_undone_and_go_on_once_it_is_back(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = torch.randn(4, 4), torch.randn(4, 1)
    options = adaptra.Options(deterministic=True)
    with adaptra.compile(
        model, stages=2, microbatches=2, example_inputs=batch, loss=nn.functional.mse_loss, options=options
    ) as pipe:
        expected = nn.functional.mse_loss(model(batch[0]), batch[1])
        assert torch.equal(pipe.eval_step(*batch), pipe.step(*batch))
        undo(how)
        for call in (pipe.step, pipe.eval_step):
            with pytest.raises(OptionError) as error:
                call(*batch)
            check_documented(type(error.value).__name__, str(error.value), UNDONE)
        set_deterministic(CPU)
        assert torch.allclose(pipe.step(*batch), expected)


class Put(nn.Module):
    """Overwrites the first column: torch has no deterministic kernel for that, on any device."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.put(rows, torch.arange(rows.shape[0]) * rows.shape[1], rows[:, 1])


def test_an_op_without_a_deterministic_kernel_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Put(), nn.Linear(4, 1))
    batch = torch.randn(4, 4), torch.randn(4, 1)
    options = adaptra.Options(deterministic=True)
    loss = nn.functional.mse_loss
    with (
        pytest.raises(Exception, match="put_ does not have a deterministic implementation"),
        adaptra.compile(model, stages=2, microbatches=2, example_inputs=batch, loss=loss, options=options) as pipe,
    ):
        pipe.step(*batch)
