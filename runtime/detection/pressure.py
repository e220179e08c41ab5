"""What the kernel says of a machine: how long tasks wait for processors, storage and memory, and what its ports carry.

Two readings are compared: their totals differ by what happened between them. The kernel's own averages are over ten seconds and
more, and so lag behind steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

_PRESSURE: Final = Path("/proc/pressure")
_PORTS: Final = Path("/sys/class/net")
_RESOURCES: Final = ("cpu", "io", "memory")
_COUNTERS: Final = ("rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped", "rx_errors", "tx_errors")
_LOOPBACK: Final = "lo"
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class PressureWaits:
    """The waits for a resource.

    Attributes:
        average: The share of the last ten seconds in which a task waited.
        total: Seconds in which a task waited, since the machine started.
    """

    average: float
    total: float


@dataclass(frozen=True, slots=True)
class MachineReading:
    """What the kernel said at one moment.

    Attributes:
        seconds: When, by a steady clock.
        some: By resource, the waits of at least one task. Empty where the kernel has no such figures.
        full: By resource, the waits of all tasks at once.
        ports: By port, its counters by name; the machine's own loopback is left out.
        missing: By file or folder, why it could not be read.
    """

    seconds: float
    some: Mapping[str, PressureWaits]
    full: Mapping[str, PressureWaits]
    ports: Mapping[str, Mapping[str, int]]
    missing: Mapping[str, str]

    def since(self, earlier: MachineReading) -> dict[str, float]:
        """Return what happened since an earlier reading: ``cpu some`` and alike as shares of time, ``bytes/s`` and ``lost/s``.

        What one of both lacks is left out, as are counters that have begun anew. Bytes and losses are those of all ports that
        both have.
        """
        passed = self.seconds - earlier.seconds
        figures = {
            f"{resource} {who}": after[resource].total - before[resource].total
            for who, before, after in (("some", earlier.some, self.some), ("full", earlier.full, self.full))
            for resource in _RESOURCES
            if resource in before and resource in after
        }
        for port in self.ports.keys() & earlier.ports.keys():
            for counter in self.ports[port].keys() & earlier.ports[port].keys():
                kind = "bytes/s" if counter.endswith("bytes") else "lost/s"
                figures[kind] = figures.get(kind, 0.0) + self.ports[port][counter] - earlier.ports[port][counter]
        return {name: change / passed for name, change in figures.items() if passed > 0 and change >= 0}


def read_machine(pressure: Path = _PRESSURE, ports: Path = _PORTS) -> MachineReading:
    """Read what the kernel says now. What it does not have is named in :attr:`MachineReading.missing`.

    Args:
        pressure: The folder with a file for each resource.
        ports: The folder with a folder for each port.
    """
    missing = dict[str, str]()
    seconds = time.monotonic()
    waits = {resource: _read(pressure / resource, _parse, missing) or {} for resource in _RESOURCES}
    some, full = ({resource: lines[who] for resource, lines in waits.items() if who in lines} for who in ("some", "full"))
    counters = dict[str, dict[str, int]]()
    for port in _ports(ports, missing):
        read = {name: _read(ports / port / "statistics" / name, int, missing) for name in _COUNTERS}
        counters[port] = {name: count for name, count in read.items() if count is not None}
    return MachineReading(seconds, some, full, counters, missing)


def _ports(folder: Path, missing: dict[str, str]) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.name != _LOOPBACK and (path / "statistics").is_dir())
    except OSError as error:
        missing[str(folder)] = error.strerror or str(error)
        return []


def _read(path: Path, parse: Callable[[str], _Parsed], missing: dict[str, str]) -> _Parsed | None:
    """Return what a file says; None, with the reason in ``missing``, if it is not there or says something else."""
    try:
        return parse(path.read_text())
    except OSError as error:
        missing[str(path)] = error.strerror or str(error)
    except ValueError as error:
        missing[str(path)] = str(error)
    return None


def _parse(text: str) -> dict[str, PressureWaits]:
    """Return the waits by the first word of each line, such as ``some avg10=0.00 avg60=0.00 avg300=0.00 total=0``.

    Raises:
        ValueError: A line is of another form.
    """
    waits: dict[str, PressureWaits] = {}
    for line in text.splitlines():
        who, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        if not {"avg10", "total"} <= values.keys():
            raise ValueError(f"{line!r}: expected avg10=… and total=…")
        waits[who] = PressureWaits(float(values["avg10"]) / 100, int(values["total"]) / 1e6)
    return waits
