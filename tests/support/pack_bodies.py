"""What the packing kernel must do, on any device that it runs on: its bytes beside those that torch's copies make.

Run as a script it is one process under Triton's interpreter, which has to be chosen before triton is imported.
"""

from collections.abc import Sequence
from typing import Any

import torch
from kernel_checks import run_as_a_script
from torch import Tensor

from adaptra.graph.ops.specs import TensorSpec
from adaptra.runtime.devices.pack import pack
from adaptra.runtime.transports.message_format import flat_bytes, views_of

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def bits(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of random bits, NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(7)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(device, torch.bool)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape).to(device)


def layouts(dtype: torch.dtype, device: str) -> dict[str, list[Tensor]]:
    """Tensors of every kind of layout, and one of each odd size around a block's."""
    base = bits((4, 6, 5, 3), dtype, device)
    line = bits((2500,), dtype, device)
    return {
        "contiguous": [base],
        "transposed": [base.transpose(0, 3), base[0, 0].t()],
        "permuted": [base.permute(2, 0, 3, 1), base.permute(3, 2, 1, 0)],
        "sliced": [base[1:3, ::2, 1:, 1], line[3::7], base[..., 1:2]],
        "expanded": [line[:5].view(5, 1, 1).expand(5, 2, 3), line[0].expand(77)],
        "scalar": [line[9]],
        "empty": [line[:0], base[:, :0], line[:3], line[:0]],
        "odd sizes": [
            line[offset : offset + size] for offset, size in enumerate((1, 2, 3, 31, 63, 65, 1023, 1024, 1025, 2047))
        ],
        "six dimensions": [bits((2, 3, 2, 3, 2, 3), dtype, device).permute(5, 3, 1, 0, 2, 4)],
        "one storage": [line[:40].view(8, 5).t(), line[20:60].view(5, 8)],
    }


def copied(tensors: Sequence[Tensor], specs: tuple[TensorSpec, ...]) -> Tensor:
    """A message as torch's copies make it, with zeros between the tensors."""
    flat = torch.zeros(flat_bytes(specs), dtype=torch.uint8, device=tensors[0].device)
    for view, tensor in zip(views_of(flat, specs), tensors, strict=True):
        view.copy_(tensor)
    return flat


def check_copies(name: str, device: str) -> None:
    """Bytes as torch's, for one dtype and all layouts; whatever the buffer held is overwritten, and nothing behind it."""
    for layout, tensors in layouts(getattr(torch, name), device).items():
        specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        size = flat_bytes(specs)
        flat = torch.full((size + 64,), 0xA5, dtype=torch.uint8, device=device)
        pack(flat, tensors, specs)
        assert torch.equal(flat[:size], copied(tensors, specs)), layout
        assert bool((flat[size:] == 0xA5).all()), f"{layout}: wrote past the end"


def check_narrowing(device: str) -> None:
    """float32 to bfloat16 as torch rounds; other dtypes in the same message stay as they are."""
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    ties = torch.cat([halves | low for low in (0x7FFF, 0x8000, 0x8001, 0, 1, 0xFFFF)])
    values = torch.cat(
        [ties.view(torch.float32), torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45])]
    )
    values = values.to(device)
    others = [bits((3, 7), torch.float64, device).t(), bits((5,), torch.bfloat16, device)]
    tensors = [values, values[: 1 << 16].view(256, 256).t(), *others]
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype, lossy_bf16=t.dtype == torch.float32) for t in tensors)
    flat = torch.full((flat_bytes(specs),), 0xA5, dtype=torch.uint8, device=device)
    pack(flat, tensors, specs)
    for got, tensor in zip(views_of(flat, specs)[:2], tensors, strict=False):
        is_nan = tensor.isnan()
        # Which NaN comes of a NaN is not defined, and differs between torch's own kernels.
        assert bool(got[is_nan].isnan().all())
        expected = tensor.to(torch.bfloat16)
        assert torch.equal(got.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])
    assert torch.equal(flat[flat_bytes(specs[:2]) :], copied(others, specs[2:]))


def check_conjugated(device: str) -> None:
    """A pending conjugation or negation is carried out."""
    values = bits((6, 5), torch.complex64, device).nan_to_num(0.5)
    tensors = [values.t().conj(), values.conj().imag]
    specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    flat = torch.empty(flat_bytes(specs), dtype=torch.uint8, device=device)
    pack(flat, tensors, specs)
    assert torch.equal(flat, copied(tensors, specs))


CHECKS: dict[str, tuple[Any, ...]] = {
    **{f"copies {dtype}".replace("torch.", ""): (check_copies, str(dtype).removeprefix("torch.")) for dtype in DTYPES},
    "narrowing": (check_narrowing,),
    "conjugated": (check_conjugated,),
}


if __name__ == "__main__":
    run_as_a_script(CHECKS)
