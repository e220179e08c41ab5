"""Has ``import torch`` take the stand-in, in this process and in those that it starts."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fake_cuda import threads
from fake_cuda.building import EXTENSION, build, torch_folder

DEVICES: Final = "FAKE_CUDA_DEVICES"
"""The environment variable with the number of devices, for processes that a test starts."""
_CHOSEN_BY_DEVICE: Final = {"aten::convolution", "aten::convolution_backward"}
"""Ops that take other kernels on CUDA than on CPUs, though they are written once for all devices."""
_SITE: Final = str(Path(__file__).resolve().parent / "site")


def enable(devices: int = 2) -> None:
    """Have the next ``import torch`` take the stand-in, here and in processes that inherit this one's environment.

    Raises:
        RuntimeError: torch is there already, which looks for CUDA only once; or the extension can't be built.
    """
    if is_enabled():
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: enable the stand-in for CUDA before")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, *(folder for folder in path if folder not in {"", _SITE})])
    os.environ[DEVICES] = str(devices)
    # Backward runs on threads of torch's own here, which torch.set_num_threads doesn't reach. More would change bits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threads.watch()
    sys.meta_path.insert(0, _TorchFinder(build(), devices))


def is_enabled() -> bool:
    """Whether this process has the stand-in, or gets it as soon as it imports torch."""
    return EXTENSION in sys.modules or any(isinstance(finder, _TorchFinder) for finder in sys.meta_path)


class _TorchFinder:
    """Finds torch as ever, and puts the stand-in around its import."""

    def __init__(self, extension: Path, devices: int) -> None:
        self._extension = extension
        self._devices = devices

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return torch's own spec, with a loader that loads the extension first; None for other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.loader is not None
        spec.loader = _Loader(spec.loader, self._extension, self._devices)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, real: Any, extension: Path, devices: int) -> None:
        self._real = real
        self._extension = extension
        self._devices = devices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the extension, so that torch finds a CUDA when it first asks; then torch, then the stand-in's Python."""
        for library in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
            ctypes.CDLL(str(torch_folder() / "lib" / library), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(self._extension), mode=ctypes.RTLD_GLOBAL)
        self._real.exec_module(module)
        spec = importlib.util.spec_from_file_location(EXTENSION, self._extension)
        assert spec is not None and spec.loader is not None
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        sys.modules[EXTENSION] = extension
        registered: Any = importlib.import_module("torch")._C._dispatch_get_registrations_for_dispatch_key
        of_the_cpu = {name for name in registered("CPU") if name.startswith("aten::")} | _CHOSEN_BY_DEVICE
        extension.cover(sorted(of_the_cpu - {*registered("CUDA")}))
        from fake_cuda import machine, torch_cuda

        machine.MACHINE = machine.Machine(extension, self._devices)
        extension.start(machine.MACHINE, self._devices)
        atexit.register(extension.stop)
        torch_cuda.install(machine.MACHINE)
        from fake_cuda import nccl

        nccl.install()
