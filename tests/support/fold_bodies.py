"""What the kernel of sums must do, on any device that it runs on: its bits beside those of torch's additions on the CPU.

Run as a script it is one process under Triton's interpreter, which has to be chosen before triton is imported.
"""

from __future__ import annotations

import itertools

import torch
from kernel_checks import Checks, run_as_a_script
from torch import Tensor

from adaptra.runtime.data_parallel.collectives.kernel_fold import DTYPES, fold_by_kernel

SIZES = (0, 1, 2, 31, 33, 1023, 1024, 1025, 2500)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def left_fold(terms: list[Tensor], divisor: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The expression in plain torch."""
    total = terms[0].to(dtype, copy=True)
    for term in terms[1:]:
        total.add_(term)
    return (total if divisor == 1 else total / divisor).to(out)


def values(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of any exponent whose sums are rounded, zeros of both signs, infinities, NaNs and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 8 * dtype.itemsize - 1), (1 << 8 * dtype.itemsize - 1) - 1, (size,), generator=generator)
    anything = bits.to(INTEGERS[dtype.itemsize]).view(dtype)
    near = torch.randn(size, generator=generator).to(dtype)
    least = torch.finfo(dtype).smallest_normal
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), least / 2, -least / 4, torch.finfo(dtype).max]
    )
    picked = special.to(torch.float64)[torch.randint(0, len(special), (size,), generator=generator)].to(dtype)
    choice = torch.randint(0, 8, (size,), generator=generator)
    return torch.where(choice < 5, near, torch.where(choice < 7, anything, picked))


def check(dtype: torch.dtype, added_in: torch.dtype, out: torch.dtype, device: str) -> None:
    """Sums and means of 1 to 9 terms of odd sizes that begin anywhere, the first one a sum already, the result one of them."""
    for count, (number, size) in itertools.product(range(1, 10), enumerate(SIZES)):
        if (count + number) % 3 and size != 1025:
            continue
        divisor = (1, count, 300)[number % 3]
        terms = [values(size + shift, dtype, 100 * number + shift)[shift:] for shift in range(count)]
        if number % 2:
            terms[0] = terms[0].to(added_in)
        expected = left_fold(terms, divisor, added_in, out)
        # Each begins at another address. What lies before and after the result stays.
        there = [torch.cat([one.new_zeros(shift), one]).to(device)[shift:] for shift, one in enumerate(terms)]
        around = torch.full((size + 9,), 7.0, dtype=out, device=device)
        result = around[4 : 4 + size]
        if number % 2 == 0 and out == dtype:
            result.copy_(there[-1])
            there[-1] = result
        fold_by_kernel(there, result, divisor, added_in)
        # The bits of a NaN are not specified.
        found, integers = result.cpu(), INTEGERS[out.itemsize]
        where = f"{count} terms of {size}, divided by {divisor}"
        assert torch.equal(found.isnan(), expected.isnan()), where
        is_number = ~expected.isnan()
        assert torch.equal(found.view(integers)[is_number], expected.view(integers)[is_number]), where
        assert bool((around[:4] == 7).all() and (around[4 + size :] == 7).all()), f"{where}: wrote beside the result"


ADDED_IN = [
    *((one, one, one) for one in DTYPES),
    *((half, wide, out) for half in DTYPES[2:] for wide in DTYPES[:2] for out in (half, wide)),
    (torch.float32, torch.float64, torch.float32),
]
CHECKS: Checks = {" ".join(str(one).removeprefix("torch.") for one in dtypes): (check, *dtypes) for dtypes in ADDED_IN}


if __name__ == "__main__":
    run_as_a_script(CHECKS)
