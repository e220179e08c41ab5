"""Pressure and ports: this kernel's own figures, those of a made folder, and reasons where there are none."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from adaptra.runtime.detection.pressure import MachineReading, PressureWaits, read_machine

CPU = "some avg10=8.34 avg60=7.83 avg300=22.73 total=2500000\n"
IO = "some avg10=1.00 avg60=0.01 avg300=0.09 total=1000000\nfull avg10=0.50 avg60=0.00 avg300=0.05 total=600000\n"


def machine(folder: Path) -> tuple[Path, Path]:
    pressure, ports = folder / "pressure", folder / "net"
    for path, text in (("cpu", CPU), ("io", IO)):
        (pressure / path).parent.mkdir(parents=True, exist_ok=True)
        (pressure / path).write_text(text)
    for port in ("eth0", "lo"):
        (ports / port / "statistics").mkdir(parents=True)
        for number, name in enumerate(("rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped", "rx_errors")):
            (ports / port / "statistics" / name).write_text(f"{1000 * number}\n")
    (ports / "bonding_masters").write_text("")  # a file among the ports, as some kernels have
    return pressure, ports


def test_this_kernels_figures_are_read_or_their_absence_has_a_reason() -> None:
    before = read_machine()
    time.sleep(0.05)
    after = read_machine()
    for resource in ("cpu", "io", "memory"):
        has_file = Path(f"/proc/pressure/{resource}").exists()
        assert (resource in after.some) != (f"/proc/pressure/{resource}" in after.missing) and (has_file or after.missing)
        if resource in after.some:
            assert 0 <= after.some[resource].average <= 1
            assert after.some[resource].total >= before.some[resource].total
    found = after.since(before)
    assert all(value >= 0 for value in found.values()) and "lo" not in after.ports
    assert all(value < 1.5 for name, value in found.items() if name.split()[0] in ("cpu", "io", "memory"))


def test_a_folders_figures_and_what_it_lacks(tmp_path: Path) -> None:
    pressure, ports = machine(tmp_path)
    found = read_machine(pressure, ports)
    assert found.some == {"cpu": PressureWaits(0.0834, 2.5), "io": PressureWaits(0.01, 1.0)}
    assert found.full == {"io": PressureWaits(0.005, 0.6)}
    assert found.ports == {
        "eth0": dict(zip(("rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped", "rx_errors"), range(0, 5000, 1000), strict=True))
    }
    assert found.missing == {
        str(pressure / "memory"): "No such file or directory",
        str(ports / "eth0" / "statistics" / "tx_errors"): "No such file or directory",
    }


def test_what_is_not_a_figure_has_a_reason_and_no_value(tmp_path: Path) -> None:
    pressure, ports = machine(tmp_path)
    (pressure / "cpu").write_text("some avg10=0.00\n")
    (ports / "eth0" / "statistics" / "rx_bytes").write_text("many\n")
    found = read_machine(pressure, ports)
    assert "cpu" not in found.some and "rx_bytes" not in found.ports["eth0"]
    assert found.missing[str(pressure / "cpu")] == "'some avg10=0.00': expected avg10=… and total=…"
    assert "many" in found.missing[str(ports / "eth0" / "statistics" / "rx_bytes")]


def test_a_machine_without_any_has_reasons_only(tmp_path: Path) -> None:
    found = read_machine(tmp_path / "none", tmp_path / "neither")
    assert not found.some and not found.full and not found.ports and len(found.missing) == 4
    assert found.since(found) == {}


def reading(seconds: float, total: float, port: dict[str, int]) -> MachineReading:
    return MachineReading(seconds, {"cpu": PressureWaits(0.0, total)}, {}, {"eth0": port}, {})


def test_rates_are_of_the_time_between_and_leave_out_what_began_anew() -> None:
    before = reading(10.0, 1.0, {"rx_bytes": 100, "tx_bytes": 50, "rx_dropped": 7})
    after = reading(12.0, 1.5, {"rx_bytes": 300, "tx_bytes": 150, "rx_dropped": 9})
    assert after.since(before) == {"cpu some": 0.25, "bytes/s": 150.0, "lost/s": 1.0}
    assert replace(after, ports={}).since(before) == {"cpu some": 0.25}
    assert reading(12.0, 0.5, {"rx_bytes": 10, "tx_bytes": 0, "rx_dropped": 9}).since(before) == {"lost/s": 1.0}
