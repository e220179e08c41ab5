"""Packing by the Triton kernel: under Triton's interpreter on the CPU, and on a GPU where there is one."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pack_bodies
import pytest
import torch
from kernel_checks import capabilities, compiled, interpreted, needs_gpu, needs_triton

from adaptra.errors import MissingExtraError
from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.devices import pack


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What the checks found under the interpreter."""
    return interpreted(pack_bodies)


@needs_triton
@pytest.mark.parametrize("name", pack_bodies.CHECKS)
def test_interpreted(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]


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
@capabilities
def test_it_compiles_for_gpus_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, width: int, is_narrowed: bool, is_wide: bool
) -> None:
    from adaptra.runtime.devices import pack_kernel

    copy_flat: Any = pack_kernel.copy_flat

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"WIDE": is_wide, "NARROW": is_narrowed, "BLOCK": 1024}
    numbers = [name for name in copy_flat.arg_names if name not in {"source", "target", *constants}]
    types = {
        "source": f"*i{width}",
        "target": "*i16" if is_narrowed else f"*i{width}",
        **dict.fromkeys(numbers, "i64" if is_wide else "i32"),
    }
    compiled(copy_flat, types, constants, capability)
