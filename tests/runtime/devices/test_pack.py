"""Packing by the Triton kernel: under Triton's interpreter on the CPU, and on a GPU where there is one."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pack_bodies
import pytest
import torch

from adaptra.errors import MissingExtraError
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.devices import pack

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed here: pip install 'adaptra[gpu]'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """What the checks found in a process of their own under the interpreter."""
    done = subprocess.run(
        [sys.executable, str(Path(pack_bodies.__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("name", pack_bodies.CHECKS)
def test_interpreted(interpreted: dict[str, str | None], name: str) -> None:
    assert interpreted[name] is None, interpreted[name]


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", pack_bodies.CHECKS)
def test_on_a_gpu(name: str) -> None:
    check, *arguments = pack_bodies.CHECKS[name]
    check(*arguments, "cuda")


@needs_triton
@needs_gpu
@pytest.mark.gpu
def test_staging_packs_on_a_gpu() -> None:
    assert pack.why_not(torch.device("cuda")) is None


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "adaptra.runtime.devices.pack_kernel", raising=False)
    with pytest.raises(MissingExtraError, match=r"packing on a GPU needs triton: pip install 'adaptra\[gpu\]'"):
        pack.pack(torch.empty(64, dtype=torch.uint8), [torch.ones(3)], (TensorSpec((3,), torch.float32),))


def test_why_not_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert pack.why_not(torch.device("cpu")) == "triton is not installed: pip install 'adaptra[gpu]'"


@needs_triton
def test_why_not_says_what_fails() -> None:
    # Without the interpreter the kernel can't run on the CPU.
    reason = pack.why_not(torch.device("cpu"))
    assert reason is not None
    assert reason.startswith("triton can't compile or run a kernel here: ")


def test_only_what_is_not_flat_yet_is_packed() -> None:
    matrix, spec = torch.ones(3, 4), TensorSpec((3, 4), torch.float32)
    assert not pack.is_worthwhile([matrix], (spec,), matrix.device)
    assert pack.is_worthwhile([matrix.view(4, 3).t()], (spec,), matrix.device)
    assert pack.is_worthwhile([matrix, matrix], (spec, spec), matrix.device)
    assert pack.is_worthwhile([matrix], (replace(spec, lossy_bf16=True),), matrix.device)


@needs_triton
@pytest.mark.parametrize(("width", "is_narrowed", "is_wide"), [(8, False, False), (32, True, False), (64, False, True)])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_gpus_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, width: int, is_narrowed: bool, is_wide: bool
) -> None:
    import triton  # pyright: ignore[reportMissingImports] - an extra
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports] - an extra
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports] - an extra

    from adaptra.runtime.devices import pack_kernel

    copy_flat: Any = pack_kernel.copy_flat

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"WIDE": is_wide, "NARROW": is_narrowed, "BLOCK": 1024}
    numbers = [name for name in copy_flat.arg_names if name not in {"source", "target", *constants}]
    types = {
        "source": f"*i{width}",
        "target": "*i16" if is_narrowed else f"*i{width}",
        **dict.fromkeys(numbers, "i64" if is_wide else "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    made = triton.compile(ASTSource(copy_flat, types, constants), target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in made.asm["ptx"]
    assert made.asm["cubin"]
