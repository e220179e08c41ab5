"""The command ``doctor``: the installed parts, and instructions for missing ones."""

from __future__ import annotations

import ctypes.util
import importlib.util
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from adaptra import __version__
from adaptra.cli.tested_versions import TESTED, outside
from adaptra.errors import MissingExtraError

EXTRAS: Final = {
    "transformers": (("transformers", "accelerate"), "PipelineTrainer"),
    "viz": (("matplotlib",), "pictures"),
    "exact": (("ortools",), "exact plans"),
    "gpu": (("triton",), "packing messages and adding gradients on a GPU"),
    "metrics": (("prometheus_client",), "metrics for Prometheus"),
    "tensorboard": (("tensorboard",), "scalars for TensorBoard"),
    "otel": (("opentelemetry_sdk",), "traces for OpenTelemetry"),
}
_BACKENDS: Final = ("gloo", "nccl", "mpi", "xccl")


def examine() -> dict[str, Any]:
    """Return versions and availability as JSON values. Loads torch, and opens RDMA devices but no connections."""
    return {
        "adaptra": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "extension": importlib.util.find_spec("adaptra._C") is not None,
        "torch": _torch(),
        "sympy": _version("sympy"),
        "rich": _version("rich"),
        "extras": {
            extra: {"package": ", ".join(packages), "version": _versions(packages)} for extra, (packages, _) in EXTRAS.items()
        },
        "untested": _untested(),
        "libibverbs": ctypes.util.find_library("ibverbs"),
        "rdma": _rdma(),
    }


def report(findings: dict[str, Any]) -> str:
    """Return the findings of :func:`examine` as text for people."""
    torch = findings["torch"]
    lines = [
        ("adaptra", findings["adaptra"]),
        ("python", f"{findings['python']}, {findings['system']}"),
        ("extension", "built" if findings["extension"] else "missing: pip install . builds it"),
        ("torch", "missing: pip install torch" if torch is None else torch["version"]),
    ]
    if torch is not None:
        backends = [name for name, available in torch["distributed"].items() if available]
        lines.append(("distributed", ", ".join(backends) or "no backend"))
        lines.append(("accelerator", torch["accelerator"] or "none"))
        if torch["deterministic"] is not None:
            lines.append(("deterministic", torch["deterministic"]))
        if torch["hardware_queues"] is not None:
            lines.append(("hardware queues", torch["hardware_queues"]))
    lines += [(name, findings[name] or f"missing: pip install {name}") for name in ("sympy", "rich")]
    for extra, (packages, use) in EXTRAS.items():
        installed = findings["extras"][extra]["version"]
        shown = zip(packages, installed.split(", "), strict=True) if installed else ()
        state = ", ".join(map(" ".join, shown)) if installed else f"missing, needed for {use}: pip install 'adaptra[{extra}]'"
        lines.append((f"extra {extra}", state))
    lines += [("untested", f"{package} {reason}") for package, reason in findings["untested"].items()]
    missing = "not found: RDMA devices can't be used; install libibverbs (Debian: libibverbs1 ibverbs-providers)"
    lines.append(("libibverbs", findings["libibverbs"] or missing))
    lines += _report_rdma(findings["rdma"])
    width = max(len(name) for name, _ in lines) + 2
    return "".join(f"{name:<{width}}{state}\n" for name, state in lines)


def _rdma() -> dict[str, Any]:
    """Return the path of pyverbs and the RDMA ports that it finds, or the reason why there are none."""
    from adaptra.runtime.rdma import devices as rdma

    findings: dict[str, Any] = {"pyverbs": None, "reason": None, "ports": []}
    try:
        findings["pyverbs"] = rdma.load_pyverbs().__file__
        findings["ports"] = [port.to_json() for port in rdma.find_ports()]
    except (MissingExtraError, OSError) as error:
        findings["reason"] = str(error)
    else:
        if not findings["ports"]:
            findings["reason"] = "this machine has no RDMA device"
    return findings


def _report_rdma(findings: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("extra rdma", findings["pyverbs"] or f"missing, needed to look at RDMA devices: {findings['reason']}")]
    if findings["pyverbs"] is not None and findings["reason"] is not None:
        lines.append(("RDMA", f"none: {findings['reason']}"))
    for port in findings["ports"]:
        name = f"{port['device']}/{port['number']}"
        if port["unusable"] is not None:
            lines.append(("RDMA", f"{name} unusable: {port['unusable']}"))
            continue
        where = f", {port['address']} on {port['interface']}" if port["interface"] else ""
        lines.append(("RDMA", f"{name} usable: {port['link_layer']}{where}, packets of {port['mtu']} bytes"))
    return lines


def _untested() -> dict[str, str]:
    """Return the installed packages whose version lies outside of what was tested, each with the version and how."""
    installed = {package: platform.python_version() if package == "python" else _version(package) for package in TESTED}
    reasons = {package: outside(package, found) for package, found in installed.items() if found is not None}
    return {package: f"{installed[package]}: {reason}" for package, reason in reasons.items() if reason is not None}


def _torch() -> dict[str, Any] | None:
    try:
        import torch
        from torch import distributed
    except ImportError:
        return None
    from adaptra.runtime.devices.determinism import why_not_on_a_gpu
    from adaptra.runtime.devices.hardware_queues import why_too_few

    available = distributed.is_available()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    is_gpu = accelerator is not None and accelerator.type == "cuda"
    return {
        "version": torch.__version__,
        "accelerator": None if accelerator is None else f"{torch.accelerator.device_count()} × {accelerator.type}",
        "deterministic": (why_not_on_a_gpu() or "possible") if is_gpu else None,
        "hardware_queues": (why_too_few() or "enough") if is_gpu else None,
        "distributed": {name: available and distributed.is_backend_available(name) for name in _BACKENDS},
    }


def _versions(packages: Sequence[str]) -> str | None:
    """Return the installed versions in this order; None if a package is missing."""
    found = [one for package in packages if (one := _version(package)) is not None]
    return ", ".join(found) if len(found) == len(packages) else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
