"""The recipes of docs/recipes: tests run what a page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commands import run_command
from documented import Page
from paths import DOCS
from patience import HUNG
from torch import Tensor, nn
from warm_python import warm_commands

RECIPES = DOCS / "recipes"
MICROBATCHES = 4
"""Those of the recipes that train something."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A page of docs/recipes: its text and its blocks."""

    text: str
    page: Page


def write_recipe(name: str, folder: Path) -> Recipe:
    """Read a recipe, and write the files that it shows into a folder."""
    path = RECIPES / f"{name}.md"
    recipe = Recipe(path.read_text(), Page.read(path))
    for title, text in recipe.page.files.items():
        (folder / title).write_text(text)
    return recipe


def environment(**more: str) -> dict[str, str]:
    """The environment of somebody who has adaptra installed, on a machine that others use too."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | more


def warm_environment(folder: Path, **more: str) -> dict[str, str]:
    """The same environment, in which the scripts of a folder begin at once."""
    there = environment(**more)
    return there | {"PATH": f"{warm_commands(folder)}:{there['PATH']}"}


def run_recipe(command: Sequence[str], folder: Path, **more: str) -> str:
    """What a command prints; nothing of it is left, however it ends."""
    done = run_command(command, folder, warm_environment(folder, **more))
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def outputs_of(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each of several processes prints that run together; nothing of them is left, however they end."""
    try:
        printed = [process.communicate(timeout=HUNG) for process in started]
    finally:
        for process in started:
            process.terminate()  # torchrun ends its ranks when it is asked to, not when it is killed
    assert not any(process.returncode for process in started), "\n".join(errors for _, errors in printed)
    return [output for output, _ in printed]


def made_by(folder: Path, before: str = "pipe = adaptra.compile(") -> dict[str, Any]:
    """What the script of a recipe has made before it compiles the model."""
    found: dict[str, Any] = {}
    exec((folder / "train.py").read_text().split(before)[0], found)
    return found


def backward(model: nn.Module, inputs: Tensor) -> Tensor:
    """The mean loss of a batch, its gradients added to those that are there."""
    losses: list[Tensor] = []
    for part in inputs.chunk(MICROBATCHES):
        loss = nn.functional.mse_loss(model(part), part)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()
