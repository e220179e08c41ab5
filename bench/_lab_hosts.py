"""What processes on hosts of the lab need to meet without a store: the hosts share their files."""

from __future__ import annotations

import re
import time
from pathlib import Path


def swap(host: int, mine: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Hand this host's ports over, and return the other host's."""
    part = Path(f"/tmp/ports.{host}.part")
    part.write_text(repr(mine))
    part.rename(f"/tmp/ports.{host}")
    theirs = Path(f"/tmp/ports.{1 - host}")
    while not theirs.exists():
        time.sleep(0.01)
    found = [(address, int(port)) for address, port in re.findall(r"\('([^']+)', (\d+)\)", theirs.read_text())]
    theirs.unlink()
    return found
