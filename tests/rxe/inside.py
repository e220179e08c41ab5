"""What runs in the lab: a test's body, outside of all hosts, and the processes that it starts on them.

``python inside.py FILE FUNCTION ARGUMENTS`` calls a function of a module with arguments given as JSON; the last line on
standard output is what it returned, as JSON. The module finds what tests find, in
``tests/support``, ``tests/links`` and ``tests/rxe``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

RESULT = "result: "


def command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command line that calls a function of a module's top level."""
    return [sys.executable, __file__, inspect.getfile(function), function.__name__, json.dumps(arguments)]


def result_of(output: str) -> Any:
    """What a function returned that was called by :func:`command`, out of all that was written."""
    (line,) = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(line.removeprefix(RESULT))


class Process:
    """A function running on a host; what it writes goes to standard output line by line, behind the host's name."""

    def __init__(self, host: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._name = f"n{host}"
        self._result: Any = None
        self._lines: list[str] = []
        self._told = threading.Condition()
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self._name, *command(function, *arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._told:
                self._lines.append(line.rstrip("\n"))
                self._told.notify_all()
            if not line.startswith(RESULT):
                print(f"{self._name}: {line.rstrip()}", flush=True)
        with self._told:
            self._lines.append("")
            self._told.notify_all()

    def wait_for(self, line: str, timeout: float) -> None:
        """Wait until the process has written this line, or has ended."""
        with self._told:
            assert self._told.wait_for(lambda: line in self._lines or "" in self._lines, timeout), f"{self._name}: no {line!r}"
            assert line in self._lines, f"{self._name} ended without {line!r}"

    def wait_until(self, holds: Callable[[str], bool], timeout: float) -> str | None:
        """The first line to be written from now on of which this holds; None if none was in time, or the process has ended."""
        with self._told:
            begun = len(self._lines)

            def fitting() -> str | None:
                return next((line for line in self._lines[begun:] if not line or holds(line)), None)

            self._told.wait_for(lambda: fitting() is not None, timeout)
            return fitting() or None

    def stop(self) -> None:
        """Take the processor from it until :meth:`go_on`; its devices go on by themselves."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Give it back."""
        self._process.send_signal(signal.SIGCONT)

    def result(self, timeout: float) -> Any:
        """What the function returned."""
        status = self._process.wait(timeout)
        self._reader.join(timeout)
        assert status == 0, f"{self._name}: exit status {status}"
        return result_of("\n".join(self._lines))

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def on_hosts(count: int, function: Callable[..., Any], *arguments: Any) -> Generator[list[Process], None, None]:
    """Processes that call ``function(host, *arguments)`` on the hosts 0 … count-1; what still runs in the end is killed."""
    processes: list[Process] = []
    try:
        for host in range(count):
            processes.append(Process(host, function, (host, *arguments)))
        yield processes
    finally:
        for process in processes:
            process.close()


def shell(line: str) -> str:
    """Run a command outside of all hosts, such as ``ip link set p0_0 down``; what it wrote.

    Raises:
        AssertionError: It failed.
    """
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout


def _main(file: str, function: str, arguments: str) -> None:
    path = Path(file).resolve()
    tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(path.parent), *(str(tests / folder) for folder in ("support", "links"))]
    result = getattr(importlib.import_module(path.stem), function)(*json.loads(arguments))
    print(f"{RESULT}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
