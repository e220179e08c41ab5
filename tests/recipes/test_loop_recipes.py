"""Loops of accelerate and Lightning: what the recipes print and save is bitwise that of one process in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipes import backward, made_by, run_recipe, write_recipe
from torch.utils.data import DataLoader, DistributedSampler


@pytest.mark.processes
def test_a_loop_of_accelerate_trains_as_one_process(one_thread: None, no_accelerator_left: None, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    write_recipe("accelerate", tmp_path)
    printed = run_recipe(["sh", "launch.sh"], tmp_path).splitlines()
    made = made_by(tmp_path)
    model, rows = made["model"], made["rows"]
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    lines: list[str] = []
    for number, inputs in enumerate(DataLoader(rows, 8, sampler=DistributedSampler(rows, 1, 0))):
        lines.append(f"loss {backward(model, inputs).item()}")
        if number % made["BATCHES"] == made["BATCHES"] - 1:
            for parameter in model.parameters():
                parameter.grad /= made["BATCHES"]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert printed == lines and len(lines) == 8
    trained = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(one, trained[name]) for name, one in model.state_dict().items())
    assert (tmp_path / "checkpoint" / ".metadata").exists()
