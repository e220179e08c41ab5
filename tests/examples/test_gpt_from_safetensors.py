"""A GPT that is built on the meta device trains from a checkpoint as in one process, bitwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES
from script_pairs import losses_of_pipeline, losses_of_plain

PAIR = "gpt_from_safetensors"


@pytest.mark.processes
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / PAIR / "task.py")], cwd=tmp_path, check=True)
    expected = losses_of_plain(PAIR, tmp_path, "--steps", "3")
    assert losses_of_pipeline(PAIR, tmp_path, 4, "--steps", "3") == expected
    assert expected[-1] < expected[0]
