"""The lab itself: what it leaves behind, and what it says when it can't be."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import RXE


def processes_of(exchange: Path, program: str = "") -> list[int]:
    """The processes that have this folder in their command line, which begins with a program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(str(exchange)) in text and text.startswith(program.encode()):
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
        until(lambda: bool(processes_of(tmp_path, "/bin/sh")))  # the guard, which is started after the kernel
        assert len(processes_of(tmp_path)) > 1
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        until(lambda: not processes_of(tmp_path) and not list(tmp_path.iterdir()))
    finally:
        starter.kill()
        for left in processes_of(tmp_path):
            os.kill(left, signal.SIGKILL)


def fails_on_purpose() -> None:
    print("before the end")
    raise RuntimeError("on purpose")


@pytest.mark.rdma
def test_what_goes_wrong_in_the_lab_is_shown(in_lab: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"(?s)before the end.*RuntimeError: on purpose"):
        in_lab(fails_on_purpose, hosts=1, rails=1)


def never_ends() -> None:
    print("begun", flush=True)
    queue.Queue[None]().get()


@pytest.mark.rdma
def test_a_lab_that_takes_too_long_is_ended(in_lab: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"(?s)did not end by itself within 30.0 s\nbegun"):
        in_lab(never_ends, hosts=1, rails=1, timeout=30.0)
