"""The Triton kernel of the fold of a sum's terms. It imports triton, so it is imported only where a kernel runs.

Every addition is rounded to the dtype of the sum, as torch's ``add`` does. So the bits are those of torch's additions one after
the other, while memory is read once. The kernel is compiled once for a number of terms, whatever their addresses and size.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports] - an extra
import triton.language as tl  # pyright: ignore[reportMissingImports]

from adaptra.runtime.devices.pack_kernel import rounded_to_bfloat16


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def _from_bfloat16(bits):  # pyright: ignore[reportMissingParameterType]
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def _to_bfloat16(value):  # pyright: ignore[reportMissingParameterType]
    # torch rounds a float64 to float32 first.
    return rounded_to_bfloat16(value.to(tl.float32).to(tl.int32, bitcast=True))


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def _read(
    term,  # pyright: ignore[reportMissingParameterType]
    index,  # pyright: ignore[reportMissingParameterType]
    count,  # pyright: ignore[reportMissingParameterType]
    WIDE: tl.constexpr,  # noqa: N803 - constants of a kernel are written so
):
    value = tl.load(term + index, mask=index < count, other=0)
    if value.dtype == tl.int16:
        value = _from_bfloat16(value)
    return value.to(WIDE)


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def _rounded(
    value,  # pyright: ignore[reportMissingParameterType]
    DTYPE: tl.constexpr,  # noqa: N803
):
    if DTYPE == tl.bfloat16:
        value = _from_bfloat16(_to_bfloat16(value))
    elif DTYPE == tl.float16:
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit(  # pyright: ignore[reportUntypedFunctionDecorator]
    do_not_specialize=["terms", "out", "count"], do_not_specialize_on_alignment=["terms", "out", "count"]
)
def fold_flat(
    terms,  # pyright: ignore[reportMissingParameterType] - a kernel's arguments are Triton's to type
    out,  # pyright: ignore[reportMissingParameterType]
    count,  # pyright: ignore[reportMissingParameterType]
    DTYPE: tl.constexpr,  # noqa: N803
    DIVISOR: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write ((t0 + t1) + …) / ``DIVISOR`` of ``count`` elements to ``out``, rounded after each operation.

    Args:
        terms: The terms' first elements, in the order of the sum. Those of bfloat16 are int16, the bits.
        out: The first element of the result, as one of the terms.
        count: Elements of each.
        DTYPE: Of the additions and of the division.
        DIVISOR: What the sum is divided by, at most 2**24.
        BLOCK: Elements per program.
    """
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32  # noqa: N806  # pyright: ignore[reportAssignmentType]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # The first one may be less precise, and is exact in DTYPE, or is a sum already.
    total = _read(terms[0], index, count, WIDE)
    for number in tl.static_range(1, len(terms)):  # pyright: ignore[reportGeneralTypeIssues]
        total = _rounded(total + _read(terms[number], index, count, WIDE), DTYPE)
    if DIVISOR != 1:
        divisor = tl.full((BLOCK,), DIVISOR, WIDE)
        # Else the division of float32 is not rounded to nearest; that of float64 always is.
        total = _rounded(total / divisor if WIDE == tl.float64 else tl.div_rn(total, divisor), DTYPE)
    if out.dtype.element_ty == tl.int16:
        total = _to_bfloat16(total)
    elif out.dtype.element_ty == tl.float16:
        total = total.to(tl.float32).to(tl.float16)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=index < count)
