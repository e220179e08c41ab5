"""Builds the stand-in's extension against the headers of the installed torch, once per source, torch and Python."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
SOURCE: Final = _HERE / "fake_cuda.cc"
_FOLDER: Final = _HERE.parents[2] / "build" / "fake_cuda"
EXTENSION: Final = "fake_cuda_extension"
_FLAGS: Final = "-O1 -g0 -shared -fPIC -std=c++20 -DNDEBUG -DTORCH_API_INCLUDE_EXTENSION_H".split()


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def has_cuda() -> bool:
    """Whether the installed torch has CUDA itself."""
    return (torch_folder() / "lib" / "libtorch_cuda.so").exists()


def missing() -> str | None:
    """Why there can be no stand-in here, or None if there can."""
    if has_cuda():
        return f"torch {version('torch')} has CUDA itself, which nothing can stand in for: install a build for CPUs"
    if _compiler() is None:
        return "the stand-in for CUDA is built by a C++ compiler, and there is none"
    return None


def build() -> Path:
    """Build the extension if it isn't there, and return its path. Processes that call it together wait for one of them.

    Raises:
        RuntimeError: The compiler failed; the text has what it printed.
    """
    torch, suffix = torch_folder(), sysconfig.get_config_var("EXT_SUFFIX")
    include = sysconfig.get_paths()["include"]
    facts = [version("torch"), suffix, *_FLAGS, SOURCE.read_text()]
    folder = _FOLDER / hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    built = folder / f"{EXTENSION}{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():
            return built
        partial = built.with_suffix(".partial")
        includes = (torch / "include", torch / "include/torch/csrc/api/include", include)
        libraries = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")
        command = [_compiler(), *_FLAGS, f"-DTORCH_EXTENSION_NAME={EXTENSION}", *(f"-isystem{path}" for path in includes)]
        command += [SOURCE, "-o", partial, f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", *libraries]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the stand-in for CUDA can't be built:\n{done.stderr}")
        partial.rename(built)
    return built


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))
