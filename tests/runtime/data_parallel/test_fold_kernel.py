"""The fold of a sum's terms by the Triton kernel: under the interpreter on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import fold_bodies
import pytest
import torch
from fold_bodies import left_fold, values
from kernel_checks import capabilities, compiled, interpreted, needs_gpu, needs_triton

from adaptra.runtime.data_parallel.collectives import kernel_fold
from adaptra.runtime.data_parallel.collectives.fold import _fold_by_torch, fold

ADDITIONS = 4


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What the checks found under the interpreter."""
    return interpreted(fold_bodies)


@needs_triton
@pytest.mark.parametrize("name", fold_bodies.CHECKS)
def test_interpreted(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]


@needs_triton
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", fold_bodies.CHECKS)
def test_on_a_gpu(name: str) -> None:
    check, *arguments = fold_bodies.CHECKS[name]
    assert kernel_fold.runs_on(torch.device("cuda", 0))
    check(*arguments, "cuda:0")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernel_fold.DTYPES)
def test_torch_adds_to_the_same_bits_on_a_gpu(dtype: torch.dtype) -> None:
    terms = [torch.randn(2500).to(dtype) for _ in range(3)]
    out = torch.empty_like(terms[0], device="cuda")
    _fold_by_torch([one.cuda() for one in terms], out, 3, dtype)
    assert torch.equal(out.cpu(), left_fold(terms, 3, dtype, dtype))


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
@capabilities
def test_it_compiles_for_gpus_that_are_not_here_and_rounds_after_each_addition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, capability: int
) -> None:
    import triton.language as tl  # pyright: ignore[reportMissingImports] - an extra

    from adaptra.runtime.data_parallel.collectives.fold_kernel import fold_flat

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointer = "*i16" if dtype == "bf16" else f"*{dtype}"
    types = {"terms": (pointer,) * (ADDITIONS + 1), "out": pointer, "count": "i32"}
    language = {"fp32": tl.float32, "fp64": tl.float64, "fp16": tl.float16, "bf16": tl.bfloat16}
    block = 128  # an element per thread
    ptx = compiled(fold_flat, types, {"DTYPE": language[dtype], "DIVISOR": 3, "BLOCK": block}, capability)
    # Halves are added as they are, to the bits of a float32 that is rounded: it has more than twice their digits.
    added_in, divided_in = {"fp64": ("f64", "f64"), "fp16": ("f16", "f32")}.get(dtype, ("f32", "f32"))
    assert len(re.findall(rf"\badd(\.rn)?\.{added_in}\b", ptx)) == ADDITIONS
    assert len(re.findall(rf"\bdiv\.rn\.{divided_in}\b", ptx)) == 1
    assert not re.findall(r"\.ftz|\bfma\b|\bmul\.f|\.approx|\.full", ptx)


def test_without_triton_torch_adds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kernel_fold.runs_on.cache_clear()
    with caplog.at_level("INFO"):
        assert not kernel_fold.runs_on(torch.device("cpu"))
    assert "sums over replicas on cpu are added by torch, term by term: triton is not installed" in caplog.text
    kernel_fold.runs_on.cache_clear()


@pytest.mark.parametrize("dtype", kernel_fold.DTYPES)
def test_the_fold_has_the_same_bits_without_the_kernel(dtype: torch.dtype) -> None:
    terms = [values(1025, dtype, seed).nan_to_num(1.0) for seed in range(3)]
    out = torch.empty_like(terms[0])
    fold(terms, out, 3)
    expected = left_fold(terms, 3, dtype, dtype)
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.nan_to_num(2.0), expected.nan_to_num(2.0))
