"""Accumulation, mixed precision and LoRA: what the recipes print and save is bitwise that of one process in plain torch."""

from __future__ import annotations

import contextlib
import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from processes import run_processes
from recipes import MICROBATCHES, backward, made_by, run_recipe, write_recipe
from torch import Tensor, nn

import adaptra


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> list[str]:
    """The losses of one optimizer step per batch, as the scripts print them."""
    lines: list[str] = []
    for inputs in rows:
        lines.append(f"loss {backward(model, inputs).item()}")
        optimizer.step()
        optimizer.zero_grad()
    return lines


def run_script(rank: int, folder: str) -> None:
    """Run the script as a rank of two; what it prints goes into a file."""
    torch.distributed.init_process_group("gloo")
    os.chdir(folder)
    with Path(f"printed.{rank}").open("w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path("train.py")


def run_on_two_ranks(folder: Path) -> list[str]:
    run_processes(run_script, 2, str(folder))
    return (folder / "printed.0").read_text().splitlines()


@pytest.mark.processes
def test_accumulated_gradients_are_those_of_one_process(one_thread: None, tmp_path: Path) -> None:
    write_recipe("accumulation", tmp_path)
    printed = run_recipe(["sh", "launch.sh"], tmp_path).splitlines()
    made = made_by(tmp_path)
    model, count = made["model"], made["BATCHES"]
    optimizer = torch.optim.AdamW(model.parameters())
    lines: list[str] = []
    for batches in made["rows"]:
        lines.append(f"loss {torch.stack([backward(model, inputs) for inputs in batches]).mean().item()}")
        for parameter in model.parameters():
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert len(lines) == 3 and printed == lines
    trained = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(one, trained[name]) for name, one in model.state_dict().items())


@pytest.mark.processes
def test_autocast_computes_what_it_computes_in_one_process(one_thread: None, tmp_path: Path) -> None:
    write_recipe("mixed-precision", tmp_path)
    printed = run_on_two_ranks(tmp_path)
    made = made_by(tmp_path)
    model = made["model"]
    assert printed == train_alone(model, torch.optim.AdamW(model.parameters()), made["rows"]) and len(printed) == 4
    trained = torch.load(tmp_path / "model.pt")
    assert all(one.dtype == torch.float32 and torch.equal(one, trained[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("replaced", [False, True], ids=["sums in bfloat16", "the loss in float32"])
def test_a_model_in_bfloat16_has_gradients_and_optimizer_state_in_bfloat16(one_thread: None, replaced: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))).to(torch.bfloat16)
    rows = torch.randn(3, 8, 16).to(torch.bfloat16)
    loss = (lambda x, y: nn.functional.mse_loss(x.float(), y.float())) if replaced else nn.functional.mse_loss
    with adaptra.compile(model, stages=2, microbatches=MICROBATCHES, example_inputs=(rows[0], rows[0]), loss=loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for inputs in rows:
            assert pipe.step(inputs, inputs).dtype == (torch.float32 if replaced else torch.bfloat16)
            assert {one.grad.dtype for one in pipe.parameters() if one.grad is not None} == {torch.bfloat16}
            optimizer.step()
            optimizer.zero_grad()
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.processes
def test_adapters_are_those_of_one_process_and_other_stages_go_on_with_them(one_thread: None, tmp_path: Path) -> None:
    """The checkpoint of two ranks is read by four stages, of which three train nothing and have no state of the optimizer."""
    write_recipe("lora", tmp_path)
    printed = run_on_two_ranks(tmp_path)
    made = made_by(tmp_path)
    model, rows, trained = made["model"], made["rows"], made["trained"]
    alone = torch.optim.AdamW(model.parameters())
    assert printed == train_alone(model, alone, rows) and len(printed) == 4
    adapters = torch.load(tmp_path / "adapters.pt")
    assert adapters.keys() == trained == {"1.0.down.weight", "1.0.up.weight"}
    assert all(torch.equal(one, adapters[name]) for name, one in model.named_parameters() if name in trained)

    fresh, batch = made_by(tmp_path)["model"], (rows[0], rows[0])
    loss = nn.functional.mse_loss
    with adaptra.compile(fresh, stages=4, microbatches=MICROBATCHES, example_inputs=batch, loss=loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        checkpoints.load({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
        assert {name for name, one in pipe.named_parameters() if one in optimizer.state} == trained
        further = pipe.step(rows[0], rows[0])
        optimizer.step()
        assert [f"loss {further.item()}"] == train_alone(model, alone, rows[:1])
        ours = dict(pipe.named_parameters())
        assert all(torch.equal(one, ours[name]) for name, one in model.named_parameters())
