"""The Triton kernel of packing. It imports triton, so it is imported only where a kernel runs.

The kernel sees bits and no numbers: it copies integers as wide as the tensor's elements, and rounds to bfloat16 by arithmetic
on the bits. So its output is the same on every device, and under Triton's interpreter.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports] - an extra
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def rounded_to_bfloat16(value):  # pyright: ignore[reportMissingParameterType]
    """Return the bits of bfloat16, as int16, that are nearest to the float32 whose bits are these int32."""
    # To nearest, ties to even: half of the last kept bit less one, and one more if that bit is set, before the cut.
    rounded = (value + 0x7FFF + ((value >> 16) & 1)) >> 16
    is_nan = (value & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded).to(tl.int16)


@triton.jit  # pyright: ignore[reportUntypedFunctionDecorator]
def copy_flat(
    source,  # pyright: ignore[reportMissingParameterType] - a kernel's arguments are Triton's to type
    target,  # pyright: ignore[reportMissingParameterType]
    count,  # pyright: ignore[reportMissingParameterType]
    padded,  # pyright: ignore[reportMissingParameterType]
    size_1,  # pyright: ignore[reportMissingParameterType]
    size_2,  # pyright: ignore[reportMissingParameterType]
    size_3,  # pyright: ignore[reportMissingParameterType]
    stride_0,  # pyright: ignore[reportMissingParameterType]
    stride_1,  # pyright: ignore[reportMissingParameterType]
    stride_2,  # pyright: ignore[reportMissingParameterType]
    stride_3,  # pyright: ignore[reportMissingParameterType]
    WIDE: tl.constexpr,  # noqa: N803 - constants of a kernel are written so
    NARROW: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Copy ``count`` elements of a tensor of four dimensions to ``target`` in order, and zeros from there to ``padded``.

    Args:
        source: The tensor's first element, as an integer of the same width.
        target: The beginning of the flat copy; int16 if ``NARROW``.
        count: Elements of the tensor.
        padded: Elements to write, at least ``count``.
        size_1: The size of dimension 1; ``count`` implies that of dimension 0.
        size_2: The size of dimension 2.
        size_3: The size of dimension 3.
        stride_0: The stride of dimension 0, in elements.
        stride_1: The stride of dimension 1, in elements.
        stride_2: The stride of dimension 2, in elements.
        stride_3: The stride of dimension 3, in elements.
        WIDE: Whether offsets need 64 bits.
        NARROW: Whether the source's int32 are float32 to be rounded to bfloat16.
        BLOCK: Elements per program.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    index = program * BLOCK + tl.arange(0, BLOCK)
    rest = index
    place = (rest % size_3) * stride_3
    rest = rest // size_3
    place += (rest % size_2) * stride_2
    rest = rest // size_2
    place += (rest % size_1) * stride_1
    place += (rest // size_1) * stride_0
    value = tl.load(source + place, mask=index < count, other=0)
    if NARROW:
        value = rounded_to_bfloat16(value)
    tl.store(target + index, value, mask=index < padded)
