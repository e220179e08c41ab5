"""The command behind ``python`` of :mod:`warm_python`. It imports little, so it begins in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def ask(door: str, arguments: list[str]) -> int:
    """Have the server run the arguments, and return how its process ended, as ``waitpid`` says it."""
    options = []
    while arguments[0] in ("-u", "-E", "-s"):
        options.append(arguments.pop(0))
    told = {
        "arguments": arguments,
        "options": options,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "python": str(Path(door).with_name("python")),
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(door)
    socket.send_fds(server, [json.dumps(told).encode()], [0, 1, 2])
    process = int.from_bytes(server.recv(4), "little")

    def pass_on(number: int, _: Any) -> None:
        os.kill(process, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    return int.from_bytes(server.recv(4), "little")


if __name__ == "__main__":
    status = ask(sys.argv[1], sys.argv[2:])
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
