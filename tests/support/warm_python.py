"""A ``python`` and a ``torchrun`` that begin at once, for scripts that tests run as a user would.

An interpreter needs seconds of a core to import torch and to compile its first model, in each rank of each script. These two
commands ask a server instead, which has done both. It forks a process for the script, with the caller's arguments, environment,
folder and files, in a session of its own. A command ends as its process does, by the same code or signal, and its process ends
with it. Tests that look at a start itself take ``sys.executable``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ending import end_after

COMMAND = """#!/bin/sh
exec "{python}" -S -E "{client}" "{door}" {more}"$@"
"""
CLIENT = Path(__file__).with_name("warm_client.py")


LIBRARIES = ("transformers.trainer", "accelerate", "peft", "pytorch_lightning")
_IMPORTS_THEM = re.compile(r"^ *(?:import|from) (?:transformers|accelerate|peft|lightning|pytorch_lightning)\b", re.MULTILINE)


def warm_commands(scripts: Path) -> Path:
    """The folder of the two commands for a script, or for those of a folder, with a server that has what they import."""
    paths = [scripts] if scripts.is_file() else scripts.glob("*.py")
    return _started(LIBRARIES if any(_IMPORTS_THEM.search(path.read_text()) for path in paths) else ())


@cache
def _started(libraries: tuple[str, ...]) -> Path:
    """Start a server, and return the folder of its commands. Both are there until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    door = folder / "door"
    for name, more in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        command = folder / name
        command.write_text(COMMAND.format(python=sys.executable, client=CLIENT, door=door, more=more))
        command.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = subprocess.Popen([sys.executable, __file__, str(door), *libraries], stdin=subprocess.PIPE, env=environment)
    atexit.register(_end, server, folder)
    while not door.exists():
        assert server.poll() is None, "the server of warm processes has ended"
        time.sleep(0.05)
    return folder


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.kill()
    server.wait()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


class Server:
    """Forks a process for each command, tells the command how it ended, and ends it if the command is gone.

    Args:
        door: The path of the socket to which commands connect.
    """

    def __init__(self, door: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{door}.new")
        self._listener.listen(64)
        Path(f"{door}.new").rename(door)
        self._commands: dict[int, socket.socket] = {}
        self._waking, self._wakes = socket.socketpair()
        for end in (self._waking, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno())
        self._ready = selectors.DefaultSelector()
        for file, handle in ((self._listener, self._begin), (self._wakes, self._reap), (sys.stdin.fileno(), self._stop)):
            self._ready.register(file, selectors.EVENT_READ, handle)

    def run(self) -> None:
        """Serve until the process that has started this one is gone."""
        while True:
            for key, _ in self._ready.select():
                key.data()

    def _begin(self) -> None:
        command, _ = self._listener.accept()
        message, files, *_ = socket.recv_fds(command, 1 << 20, 3)
        process = os.fork()
        if not process:
            signal.set_wakeup_fd(-1)
            for file in (self._listener, self._waking, self._wakes, command, *self._commands.values()):
                file.close()
            self._ready.close()
            _become(json.loads(message), files)
        for file in files:
            os.close(file)
        command.sendall(process.to_bytes(4, "little"))
        self._commands[process] = command
        self._ready.register(command, selectors.EVENT_READ, lambda: self._end(process))

    def _reap(self) -> None:
        self._wakes.recv(4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                command = self._commands.pop(ended[0])
                with suppress(KeyError):
                    self._ready.unregister(command)
                with suppress(OSError):
                    command.sendall(ended[1].to_bytes(4, "little"))
                command.close()

    def _end(self, process: int) -> None:
        """End a process whose command has ended before it."""
        if process in self._commands:
            self._ready.unregister(self._commands[process])
            os.kill(process, signal.SIGKILL)

    def _stop(self) -> None:
        for process in self._commands:
            os.kill(process, signal.SIGKILL)
        os._exit(0)


def _become(told: dict[str, Any], files: list[int]) -> None:
    """Run a command as a new interpreter would, and end."""
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ |= told["environment"]
    os.environ.setdefault("PYTHON_EXEC", told["python"])  # torchrun starts its ranks by it
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") or "-u" in told["options"] else -1
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering), open(2, "w", 1)  # noqa: SIM115 - for life
    _begin_anew()
    end_after(partial(_run, told["arguments"]))


def _begin_anew() -> None:
    """Set what a new interpreter would have found in its environment, and the generators of random numbers."""
    import random

    import numpy
    import torch

    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    torch.seed()
    random.seed()
    numpy.random.seed()


def _run(arguments: list[str]) -> None:
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(arguments[1])  # pyright: ignore[reportAttributeAccessIssue] - what python -m does
        return
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        code, sys.argv = compile(arguments[1], "<string>", "exec"), ["-c", *arguments[2:]]
        sys.path.insert(0, "")
    else:
        code, sys.argv = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), arguments
        main.__file__ = arguments[0]
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    main.__dict__["__builtins__"] = __builtins__
    exec(code, main.__dict__)


if __name__ == "__main__":
    for name in ("warm", "torch.distributed.run", *sys.argv[2:]):
        with suppress(ImportError):
            import_module(name)
    del sys.modules["torch.distributed.run"]  # runpy warns of a module that is there before it runs
    gc.collect()
    gc.freeze()  # as in warm
    Server(Path(sys.argv[1])).run()
