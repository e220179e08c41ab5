"""RDMA devices as ``adaptra doctor`` and the watcher see them: on this machine, whatever it has, and in the lab, for real."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import rdma_ports
from delegate_lab import CALM
from errors_table import check_documented

from adaptra import _C
from adaptra.cli import doctor
from adaptra.errors import LaunchError, MissingExtraError
from adaptra.runtime.rdma import devices as rdma
from adaptra.runtime.transports.delegate import rdma_paths

DOCUMENTED = {
    "rdma:mlx5_0/first": "path …: expected a device and a port's number, such as rdma:mlx5_0/1",
    "rdma:no_such_device/1": "path …: RDMA port …",
}
"""Paths that no host has, and what docs/errors.md says of them."""


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_port_that_is_not_there_is_refused_as_documented(path: str) -> None:
    engine = _C.Engine(0, 2, bytes(32), **CALM)
    with pytest.raises(LaunchError) as caught:
        rdma_paths.listen(engine, path)
    check_documented("LaunchError", str(caught.value), DOCUMENTED[path])


def test_doctor_always_says_what_it_found_or_why_not() -> None:
    found = doctor.examine()["rdma"]
    assert (found["reason"] is None) == bool(found["ports"])
    shown = doctor.report(doctor.examine())
    assert "extra rdma   " in shown
    assert found["reason"] is None or found["reason"] in shown


def test_pyverbs_that_is_not_there_is_named_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(rdma, "DISTRIBUTION_PACKAGES", str(tmp_path))
    for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
        monkeypatch.delitem(sys.modules, name)
    if rdma.importlib.util.find_spec("pyverbs") is not None:
        pytest.skip("pyverbs is installed in this environment itself")
    with pytest.raises(MissingExtraError, match=r"pyverbs is not installed: apt-get install python3-pyverbs"):
        rdma.load_pyverbs()


def test_pyverbs_that_does_not_load_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "device.py").write_text("raise ImportError('libibverbs.so.1: version IBVERBS_PRIVATE_59 not found')")
    for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"does not fit this Python or rdma-core: .*IBVERBS_PRIVATE_59 not found"):
        rdma.load_pyverbs()


def test_looking_at_devices_loads_no_torch() -> None:
    code = "import sys, adaptra.runtime.rdma.devices, adaptra.runtime.rdma.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


@pytest.mark.rdma
def test_finds_the_ports_of_this_host_and_says_why_others_are_unusable(in_lab: Callable[..., Any]) -> None:
    ports = {port["device"]: port for port in in_lab(rdma_ports.find_on_a_host_with_a_pulled_plug)}
    assert list(ports) == ["rxe0_0", "rxe0_1", "rxe1_0", "rxe1_1"]
    first = ports["rxe0_0"]
    assert first["unusable"] is None
    assert (first["address"], first["interface"], first["state"]) == ("10.9.0.1", "rail0", "active")
    assert (first["link_layer"], first["mtu"], first["number"]) == ("ethernet", 4096, 1)
    assert first["counters"]["sent_pkts"] == 0
    assert ports["rxe0_1"]["unusable"] == "is down"
    assert ports["rxe1_0"]["unusable"] == "has no RoCE v2 GID that is an address of this host"
    shown = doctor.report({**doctor.examine(), "rdma": {"pyverbs": "here", "reason": None, "ports": list(ports.values())}})
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "RDMA rxe0_0/1 usable: ethernet, 10.9.0.1 on rail0, packets of 4096 bytes" in lines
    assert "RDMA rxe0_1/1 unusable: is down" in lines


@pytest.mark.rdma
def test_the_watcher_tells_of_ports_that_go_down(in_lab: Callable[..., Any]) -> None:
    told = sorted(in_lab(rdma_ports.pull_a_plug_and_put_it_back))
    assert [event[:3] for event in told] == [
        ["rxe0_0", "IBV_EVENT_PORT_ERR", "down"],
        ["rxe0_1", "IBV_EVENT_PORT_ERR", "down"],
    ]
    assert told[0][3] == "RDMA device rxe0_0: IBV_EVENT_PORT_ERR; now port 1 is down"
