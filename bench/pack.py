"""Packing of a message on a GPU by the Triton kernel, then one copy to the host, beside torch's copies. Needs a GPU and triton.

The baseline copies each tensor into its view of the pinned buffer, as the delegate does without Triton. Both end when the
buffer on the host is complete, and both buffers are compared bit by bit before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _table import Row, median_seconds, parser, print_rows
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.devices import pack
from adaptra.runtime.transports.message_format import flat_bytes, views_of


def messages(mib: int) -> dict[str, tuple[list[Tensor], MessageSpec]]:
    """Messages of about ``mib`` MiB by name: tensors on the GPU and their specs."""
    rows = mib * (1 << 20) // (4 * 1024)
    matrix = torch.randn(rows, 1024, device="cuda")
    turned = matrix.view(1024, rows).t()
    many = list(matrix.chunk(16))

    def specs(tensors: list[Tensor], *, lossy: bool = False) -> MessageSpec:
        return tuple(TensorSpec(tuple(one.shape), one.dtype, lossy_bf16=lossy) for one in tensors)

    return {
        "one transposed": ([turned], specs([turned])),
        "16 contiguous": (many, specs(many)),
        "one, rounded to bfloat16": ([matrix], specs([matrix], lossy=True)),
    }


def by_kernel(tensors: list[Tensor], specs: MessageSpec) -> tuple[Tensor, Callable[[], None]]:
    """A pinned buffer, and what fills it by the kernel and one copy."""
    flat = torch.empty(flat_bytes(specs), dtype=torch.uint8, device="cuda")
    host = torch.zeros(flat.numel(), dtype=torch.uint8, pin_memory=True)

    def work() -> None:
        pack.pack(flat, tensors, specs)
        host.copy_(flat, non_blocking=True)
        torch.cuda.synchronize()

    return host, work


def by_copies(tensors: list[Tensor], specs: MessageSpec) -> tuple[Tensor, Callable[[], None]]:
    """A pinned buffer, and what fills it by torch's copies, tensor by tensor."""
    host = torch.zeros(flat_bytes(specs), dtype=torch.uint8, pin_memory=True)
    views = views_of(host, specs)

    def work() -> None:
        for tensor, view in zip(tensors, views, strict=True):
            view.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    return host, work


def main() -> int:
    """Compare, time and print the table; exit status 1 where nothing can be measured or the bits differ."""
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, nargs="+", default=[1, 8, 64], help="of a message's float32, MiB")
    arguments.add_argument("--runs", type=int, default=50)
    given = arguments.parse_args()
    reason = pack.why_not(torch.device("cuda")) if torch.cuda.is_available() else "no CUDA device here"
    if reason is not None:
        print(f"pack: {reason}: nothing was measured", file=sys.stderr)
        return 1
    rows: list[Row] = []
    for mib in given.mib:
        for name, (tensors, specs) in messages(mib).items():
            (ours, pack_all), (theirs, copy_all) = by_kernel(tensors, specs), by_copies(tensors, specs)
            pack_all()
            copy_all()
            if not torch.equal(ours, theirs):
                print(f"pack: {name} of {mib} MiB: the kernel's bytes are not those of torch's copies", file=sys.stderr)
                return 1
            seconds = [1e6 * median_seconds(given.runs, work) for work in (pack_all, copy_all)]
            rows.append(Row(f"{mib} MiB, {name}", seconds[0], seconds[1], "µs", given.runs))
    title = f"a message packed on {torch.cuda.get_device_name()} and copied to the host"
    print_rows(title, rows, baseline="torch's copies", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
