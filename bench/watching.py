"""The look for changes of a model before each step: its time beside that of a step, for a GPT of several depths.

A look at a model that has not changed is all that a step pays; the baseline is the share that it may take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from _table import Row, parser, print_rows
from torch import Tensor, nn

import adaptra


def gpt(layers: int, width: int) -> nn.Module:
    """Return a stack of transformer layers with a head."""
    torch.manual_seed(0)
    parts = [nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0) for _ in range(layers)]
    return nn.Sequential(*parts, nn.Linear(width, width))


def seconds(call: Callable[[], object], runs: int) -> float:
    """Return the median time of a call."""
    found: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(layers: int, width: int, rows: int, length: int, runs: int) -> list[Row]:
    """Return the time of a look, and its share of a step beside the share that it may take."""
    batch = tuple(torch.randn(rows, length, width) for _ in range(2))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    model = gpt(layers, width)
    with adaptra.compile(model, stages=2, microbatches=4, example_inputs=batch, loss=loss) as pipe:
        session = pipe.session
        step = seconds(lambda: pipe.step(*batch), runs)
        look = seconds(session.changes.follow, 20 * runs)
    modules = sum(1 for _ in model.modules())
    name = f"{layers} layers of width {width}, {modules} modules"
    return [
        Row(f"{name}: a look", look * 1e6, None, "µs", 20 * runs),
        Row(f"{name}: a look's share of a step of {step * 1e3:.0f} ms", 100 * look / step, 0.2, "%", runs),
    ]


def main() -> None:
    """Measure each depth."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--rows", type=int, default=16)
    arguments.add_argument("--length", type=int, default=128)
    arguments.add_argument("--runs", type=int, default=7)
    given = arguments.parse_args()
    rows = [row for layers in given.layers for row in measure(layers, given.width, given.rows, given.length, given.runs)]
    print_rows("Looks for changes of the model", rows, baseline="may take", as_json=given.json)


if __name__ == "__main__":
    main()
