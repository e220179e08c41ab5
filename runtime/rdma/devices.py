"""RDMA devices of this host, by pyverbs: devices, ports, addresses, link states and hardware counters.

pyverbs is optional (the extra ``rdma``). It has to fit the installed rdma-core exactly, so it is best installed as the
distribution's own package. That package is found here even from within a virtual environment. pyverbs holds the interpreter
lock in every call, so no data pass through it. It only describes devices, and the engine in C++ uses them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from adaptra.errors import MissingExtraError

DISTRIBUTION_PACKAGES: Final = "/usr/lib/python3/dist-packages"
INSTALL: Final = "apt-get install python3-pyverbs rdma-core (or your distribution's packages)"
_SYSFS: Final = Path("/sys/class/infiniband")
_MOST_GIDS: Final = 1024
_ROCE_V2: Final = 2
_ETHERNET: Final = 2
_STATES: Final = {1: "down", 2: "init", 3: "armed", 4: "active", 5: "active, deferred"}


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device.

    Attributes:
        device: The device's name, such as ``mlx5_0``.
        number: The port's number on the device, from 1.
        state: ``active``, ``down``, ``init``, ``armed``, or ``unknown``.
        link_layer: ``ethernet`` for RoCE, else ``infiniband``.
        mtu: Largest payload of a packet, bytes.
        gid_index: Index of the address in the port's table, None if it has none to connect from.
        address: The address to connect from, None if there is none.
        interface: The network interface that carries a RoCE port.
        counters: The hardware counters by name, as far as the system shows them.
        unusable: The reason why nothing can be sent through the port now; None if it is usable.
    """

    device: str
    number: int
    state: str
    link_layer: str
    mtu: int
    gid_index: int | None = None
    address: str | None = None
    interface: str | None = None
    counters: dict[str, int] = field(default_factory=dict[str, int])
    unusable: str | None = None

    @property
    def name(self) -> str:
        """The name, such as ``mlx5_0/1``."""
        return f"{self.device}/{self.number}"

    def to_json(self) -> dict[str, Any]:
        """Return the port as a JSON object, one value per attribute."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def load_pyverbs() -> ModuleType:
    """Return the package pyverbs, from this environment or else from the distribution.

    Raises:
        MissingExtraError: There is none, or it does not fit the installed rdma-core; says which and what to install.
    """
    if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
        spec = importlib.machinery.PathFinder.find_spec("pyverbs", [DISTRIBUTION_PACKAGES])
        if spec is None or spec.loader is None:
            raise MissingExtraError(f"pyverbs is not installed: {INSTALL}")
        package = importlib.util.module_from_spec(spec)
        # Only this package of the distribution, not the other packages in that folder.
        sys.modules["pyverbs"] = package
        spec.loader.exec_module(package)
    try:
        importlib.import_module("pyverbs.device")
    except ImportError as error:
        raise MissingExtraError(f"pyverbs does not fit this Python or rdma-core: {error}: {INSTALL}") from error
    return sys.modules["pyverbs"]


def open_device(name: str) -> Any:
    """Return a ``pyverbs.device.Context``, to be closed by the caller.

    Raises:
        MissingExtraError: See :func:`load_pyverbs`.
        OSError: The device can't be opened; names it and includes the system's text.
    """
    load_pyverbs()
    from pyverbs.device import Context, PyverbsError  # pyright: ignore[reportMissingImports]

    try:
        return Context(name=name)
    except PyverbsError as error:
        raise OSError(f"RDMA device {name}: {error}") from error


def device_names() -> tuple[str, ...]:
    """Return the names of all RDMA devices, sorted.

    Raises:
        MissingExtraError: See :func:`load_pyverbs`.
        OSError: The kernel has no RDMA, or doesn't list its devices.
    """
    load_pyverbs()
    from pyverbs.device import PyverbsError, get_device_list  # pyright: ignore[reportMissingImports]

    try:
        return tuple(sorted(device.name.decode() for device in get_device_list()))
    except PyverbsError as error:
        raise OSError(f"the list of RDMA devices: {error}") from error


def find_ports() -> tuple[Port, ...]:
    """Return every port of every device, by name.

    Raises:
        MissingExtraError: See :func:`load_pyverbs`.
        OSError: A device can't be opened.
    """
    ports: list[Port] = []
    for name in device_names():
        with open_device(name) as context:
            count = context.query_device().phys_port_cnt
            ports.extend(describe_port(context, number) for number in range(1, count + 1))
    return tuple(ports)


def describe_port(context: Any, number: int) -> Port:
    """Return the present state of one port of an open ``pyverbs.device.Context``."""
    name = context.name.decode() if isinstance(context.name, bytes) else str(context.name)
    attributes = context.query_port(number)
    state = _STATES.get(attributes.state, "unknown")
    is_ethernet = attributes.link_layer == _ETHERNET
    port = Port(
        device=name,
        number=number,
        state=state,
        link_layer="ethernet" if is_ethernet else "infiniband",
        mtu=128 << attributes.active_mtu,
        counters=read_counters(name, number),
        unusable=None if state == "active" else f"is {state}",
    )
    entries = [entry for entry in context.query_gid_table(_MOST_GIDS) if entry.port_num == number]
    for entry in sorted(entries, key=lambda entry: (_address_rank(entry.gid_str()), entry.gid_index)):
        address = _address_text(entry.gid_str())
        if not is_ethernet:
            return _with(port, gid_index=entry.gid_index, address=address)
        if entry.gid_type == _ROCE_V2 and _is_ours(address, entry.ndev_ifindex):
            return _with(port, gid_index=entry.gid_index, address=address, interface=socket.if_indextoname(entry.ndev_ifindex))
    return _with(port, unusable="has no RoCE v2 GID that is an address of this host" if is_ethernet else "has no GID")


def read_counters(device: str, number: int) -> dict[str, int]:
    """Return a port's hardware counters from sysfs, or from the program ``rdma`` in a network namespace where sysfs has
    none.
    """
    counters: dict[str, int] = {}
    for folder in ("counters", "hw_counters"):
        for file in sorted((_SYSFS / device / "ports" / str(number) / folder).glob("*")):
            try:
                counters[file.name] = int(file.read_text())
            except (OSError, ValueError):
                continue  # Each driver omits some counters, and one of the files is a setting.
    if counters or (program := shutil.which("rdma")) is None:
        return counters
    shown = subprocess.run(
        [program, "-j", "statistic", "show", "link", f"{device}/{number}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    rows = json.loads(shown.stdout or "[]") if shown.returncode == 0 else []
    return {name: value for row in rows for name, value in row.items() if isinstance(value, int) and name != "port"}


def _with(port: Port, **values: Any) -> Port:
    from dataclasses import replace

    return replace(port, **values)


def _address_text(gid: str) -> str:
    packed = socket.inet_pton(socket.AF_INET6, gid)
    if packed[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)


def _address_rank(gid: str) -> int:
    """Return the preference: IPv4 first, link-local last, because a peer on another link does not share its scope."""
    address = _address_text(gid)
    return 0 if ":" not in address else 2 if address.startswith("fe80:") else 1


def _is_ours(address: str, interface: int) -> bool:
    """Return True if this host (this network namespace) has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    where = (address, 0, 0, interface) if family == socket.AF_INET6 else (address, 0)
    try:
        socket.if_indextoname(interface)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True
