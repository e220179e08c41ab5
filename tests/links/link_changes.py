"""Changes of links as people write them: ``0-1 delay=30ms rate=100MB``, ``1>0 loss=0.01``, ``all down``, ``0-1/1 reset``.

First which links, then what becomes of them. ``0-1`` is both directions between two hosts, ``0>1`` one, ``all`` every pair.
``2`` is the port of a host, which all its links share, ``2>`` what leaves it, and ``>2`` what reaches it. Only its rate and its
queue change. ``/1`` behind any of them names one of several rails. What is one or several of

- ``delay=``: one way; ``us``, ``ms`` or ``s``
- ``rate=``: bytes per second; ``KB``, ``MB``, ``GB``; 0 is no limit
- ``queue=``: bytes that wait for the rate before packets are dropped
- ``loss=``: the share of packets
- ``down``, ``up``
- ``reset``: ends every TCP connection that there is
"""

from __future__ import annotations

import re

DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
SIZES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "": 1.0}


def parse(text: str, hosts: int, rails: int) -> list[str]:
    """The router's commands for a change.

    Raises:
        ValueError: The text says no change, or names a host or rail that there isn't.
    """
    where, *words = text.split()
    if not words:
        raise ValueError(f"{text!r}: expected links and what becomes of them, such as '0-1 delay=30ms'")
    changes = [_change(word) for word in words]
    links = _links(where, hosts, rails)
    if "*" in links[0] and any(change.split()[0] not in ("rate", "queue") for change in changes):
        raise ValueError(f"{text!r}: expected rate= or queue= of a port")
    return [f"{link} {change}" for link in links for change in changes]


def _links(text: str, hosts: int, rails: int) -> list[str]:
    where, slash, rail = text.partition("/")
    if where == "all":
        pairs = [(f"{source}", f"{target}") for source in range(hosts) for target in range(hosts) if source != target]
    elif found := re.fullmatch(r"(\d+)([->])(\d+)", where):
        first, direction, second = found.groups()
        pairs = [(first, second)] if direction == ">" else [(first, second), (second, first)]
    elif found := re.fullmatch(r"(>?)(\d+)(>?)", where):
        reaches, port, leaves = found.groups()
        pairs = [*([] if reaches else [(port, "*")]), *([] if leaves else [("*", port)])]
    else:
        pairs = []
    if not pairs or (slash and not rail.isdecimal()):
        raise ValueError(f"{text!r}: expected links, such as '0-1', '0>1', 'all' or '0-1/1', or a port: '2', '2>' or '>2'")
    on = [int(rail)] if slash else range(rails)
    if (
        any(int(host) >= hosts for pair in pairs for host in pair if host != "*")
        or max(on) >= rails
        or any(a == b for a, b in pairs)
    ):
        raise ValueError(f"{text!r}: expected two of the hosts 0..{hosts - 1} and one of the rails 0..{rails - 1}")
    return [f"{source} {target} {one}" for source, target in pairs for one in on]


def _change(word: str) -> str:
    name, _, value = word.partition("=")
    match name:
        case "delay":
            return f"delay {_number(word, value, DURATIONS)}"
        case "rate" | "queue":
            return f"{name} {_number(word, value, SIZES)}"
        case "loss":
            return f"loss {_number(word, value, {'': 1.0})}"
        case "up" | "down" | "reset" if not value:
            return {"up": "up 1", "down": "up 0", "reset": "reset 1"}[name]
        case _:
            raise ValueError(f"{word!r}: expected delay=, rate=, loss=, queue=, up, down or reset")


def _number(word: str, value: str, units: dict[str, float]) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", value)
    if found is None or found[2] not in units:
        raise ValueError(
            f"{word!r}: expected a number{' with ' + ', '.join(unit for unit in units if unit) if len(units) > 1 else ''}"
        )
    return f"{float(found[1]) * units[found[2]]:.12g}"
