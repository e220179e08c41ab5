"""Loops of accelerate and Lightning: what the recipes print and save is bitwise that of one process in plain torch."""

from __future__ import annotations

import csv
import re
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


@pytest.mark.processes
def test_lightning_trains_and_goes_on_as_one_process(one_thread: None, tmp_path: Path) -> None:
    """The second run begins where the first one's checkpoints are, one of each rank. Each process imports once."""
    pytest.importorskip("pytorch_lightning")
    write_recipe("lightning", tmp_path)
    (tmp_path / "twice.py").write_text("import runpy, sys\nfor sys.argv[1:] in ['1', '2']:\n    runpy.run_path('train.py')\n")
    run_recipe(["torchrun", "--standalone", "--nproc-per-node=2", "twice.py"], tmp_path)
    made = made_by(tmp_path, before="module = Piped(")
    model, rows = made["model"], made["rows"]
    optimizer, sampler = torch.optim.AdamW(model.parameters()), DistributedSampler(rows, 1, 0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    losses: list[float] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs in DataLoader(rows, 8, sampler=sampler):
            losses.append(backward(model, inputs).item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    logged = [
        float(row["loss"])
        for version in range(2)
        for row in csv.DictReader((tmp_path / f"lightning_logs/version_{version}/metrics.csv").open())
        if row["loss"]
    ]
    assert logged == losses and len(losses) == 8
    trained = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(one, trained[name]) for name, one in model.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["rank-0", "rank-1"]


MISTAKES = """
class Backward(Piped):
    def training_step(self, inputs, index):
        self.manual_backward(self.pipe.step(inputs, inputs))


class Automatic(Piped):
    def training_step(self, inputs, index):
        self.automatic_optimization = True
        return self.pipe.step(inputs, inputs)


mistakes = [(Backward, {}), (Automatic, {})]
mistakes += [(Piped, one) for one in ({"precision": "bf16-mixed"}, {"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2})]
mistakes += [(Piped, {"strategy": "ddp"})]  # the last one, as its process group stays
for kind, given in mistakes:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = kind(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), rows)
    try:
        lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet, **given).fit(module)
    except Exception as error:
        print(f"refused {kind.__name__} {given}: {error}".replace(chr(10), " "), flush=True)
    module.pipe.close()
"""


def test_what_lightning_can_not_do_is_an_error_that_the_page_names(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    recipe = write_recipe("lightning", tmp_path)
    text = (tmp_path / "train.py").read_text().split("module = Piped(")[0]
    (tmp_path / "train.py").write_text(text + MISTAKES)
    printed = re.findall(r"^refused .*$", run_recipe(["python", "train.py", "1"], tmp_path), re.MULTILINE)
    named = re.findall(r"^\| `([^`]+)` ", recipe.text, re.MULTILINE)
    assert len(printed) == 6 and len(named) == 4
    for line, text in zip(printed, [named[2], named[2], named[1], named[3], "accumulate_grad_batches", named[0]], strict=True):
        assert text in line.partition(": ")[2], f"{line}: expected {text!r}"
