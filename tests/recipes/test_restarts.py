"""A rank is killed, torchrun starts all again, and the run ends with the losses and weights of one that nothing interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paths import TESTS
from recipes import run_recipe, write_recipe

DYING = TESTS / "support" / "dying.py"


@pytest.mark.processes
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_changes_no_number(tmp_path: Path) -> None:
    page = write_recipe("restarts", tmp_path)
    undisturbed = run_recipe(["python", "train.py", "alone"], tmp_path).splitlines()
    assert len(undisturbed) == 12
    shown = [line for line in page.text.splitlines() if line.startswith("step ")]
    assert shown == [undisturbed[step] for step in (5, 4, 5)]

    launch = (tmp_path / "launch.sh").read_text()
    (tmp_path / "launch.sh").write_text(launch.replace(" train.py ", f" {DYING} 6 train.py "))
    (tmp_path / "checkpoints" / "step-000005").mkdir(parents=True)  # one that was interrupted is not taken
    printed = run_recipe(["sh", "launch.sh", "checkpoints"], tmp_path).splitlines()
    assert printed == [*undisturbed[:6], *undisturbed[4:]]
    alone, restarted = (torch.load(tmp_path / run / "model.pt") for run in ("alone", "checkpoints"))
    assert alone.keys() == restarted.keys() and all(torch.equal(alone[name], restarted[name]) for name in alone)
