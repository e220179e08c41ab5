"""How Triton's kernels are tested without a GPU: by the interpreter in a process of its own, and by compilation."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed here: pip install 'adaptra[gpu]'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
capabilities = pytest.mark.parametrize("capability", [80, 90])
"""What GPUs that are not here can do, as CUDA numbers it."""

Checks = Mapping[str, tuple[Any, ...]]
"""By name a function and its arguments; the device follows them."""


def interpreted(bodies: ModuleType) -> dict[str, str | None]:
    """Run a module of checks under the interpreter, and return what :func:`run_as_a_script` prints."""
    done = subprocess.run(
        [sys.executable, str(Path(str(bodies.__file__)))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_as_a_script(checks: Checks) -> None:
    """Print every check's name with its error, or None if it holds on the CPU."""
    torch.set_num_threads(1)
    errors: dict[str, str | None] = {}
    for name, (check, *arguments) in checks.items():
        try:
            check(*arguments, "cpu")
        except Exception:
            errors[name] = traceback.format_exc()
        else:
            errors[name] = None
    json.dump(errors, sys.stdout)


def compiled(kernel: Any, types: Mapping[str, Any], constants: Mapping[str, Any], capability: int) -> str:
    """Compile a kernel for a GPU, and return its PTX."""
    import triton  # pyright: ignore[reportMissingImports] - an extra
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports] - an extra
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports] - an extra

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in made.asm["ptx"]
    assert made.asm["cubin"]
    return made.asm["ptx"]
