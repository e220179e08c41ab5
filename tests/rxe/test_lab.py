"""The lab itself: what it leaves behind, and what it says when it can't be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import RXE


def processes_of(exchange: Path) -> list[int]:
    """The processes that have this folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(str(exchange)) in text:
            found.append(int(path.parent.name))
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait for something; the limit is there only so that a hang ends."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.rdma
@pytest.mark.timeout(900)
def test_a_lab_ends_with_the_process_that_started_it(
    in_lab: Callable[..., Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Killed as by a terminal that is closed, or by the machine when memory is short."""
    kernel: Path = Path(str(request.config.getoption("--lab-kernel"))).resolve()
    script = f"import lab, pathlib; lab.run(pathlib.Path({str(kernel)!r}), ['sleep', '600'], pathlib.Path('/'), timeout=600.0)"
    starter = subprocess.Popen([sys.executable, "-c", script], cwd=RXE, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        until(lambda: any(path.stat().st_size for path in tmp_path.glob("lab.*/console")))
        assert processes_of(tmp_path)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        until(lambda: not processes_of(tmp_path) and not list(tmp_path.iterdir()))
    finally:
        starter.kill()
        for left in processes_of(tmp_path):
            os.kill(left, signal.SIGKILL)
