"""The hosts of a job, as ``adaptra run`` reads them from a file: a name and a number of processes on each line."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptra.errors import LaunchError

_FORM = "expected lines such as 'node1 8', a host's name or address and the number of its processes"


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host.

    Attributes:
        name: The name or address by which the others reach it.
        count: The number of its processes.
    """

    name: str
    count: int


def read_hosts(path: Path) -> list[HostLine]:
    """Read a file of hosts. Empty lines and what follows a ``#`` are for people.

    Raises:
        LaunchError: It can't be read, or a line is of another form; names it.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hosts {path}: {error}: {_FORM}") from error
    hosts: list[HostLine] = []
    for number, line in enumerate(lines, 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [name, count] if count.isdecimal() and int(count) > 0:
                hosts.append(HostLine(name, int(count)))
            case _:
                raise LaunchError(f"hosts {path}, line {number}: {line!r}: {_FORM}")
    if not hosts:
        raise LaunchError(f"hosts {path}: no host: {_FORM}")
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LaunchError(f"hosts {path}: {twice} stands there twice: expected each host once")
    return hosts


def own_index(hosts: Sequence[HostLine], chosen: str | None) -> int:
    """Return which of the hosts this one is: that of the name chosen, or else the one with this host's own name.

    Raises:
        LaunchError: It is none of them.
    """
    own = socket.gethostname()
    names = [host.name for host in hosts]
    for name in (chosen,) if chosen is not None else (own, own.partition(".")[0]):
        if name in names:
            return names.index(name)
    raise LaunchError(f"hosts: this one is {chosen or own}: expected one of {', '.join(names)}, or --host with its name there")
