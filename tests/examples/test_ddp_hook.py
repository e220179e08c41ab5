"""The example of DDP with adaptra's hook trains to the same weights on both ranks, and names one that is lost."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from paths import EXAMPLES

pytestmark = pytest.mark.processes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # torchrun's agent would end the other rank at once.
    command = [sys.executable, "-m", "adaptra.cli", "run", "-n", "2", str(EXAMPLES / "ddp_hook.py"), "--steps", "4", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_both_ranks_have_the_same_weights() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"^rank \d: (\w{16})$", done.stdout, re.MULTILINE)
    assert len(digests) == 2 and len({*digests}) == 1


def test_a_lost_rank_is_named() -> None:
    done = run("--lose-at", "3")
    assert done.returncode != 0
    assert "PeerLostError: rank 1 is lost: it " in done.stderr
