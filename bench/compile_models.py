"""How long each supported architecture takes to compile into four stages; prints the table of docs/models.md.

The models are small: what takes time is their number of ops. Models and what is said of them come from ``tests/``, which trains
them; ``--write`` puts the table into the page. There is no baseline: nothing else compiles these into F, I and W.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from _table import parser

from adaptra.graph import compile_stages
from adaptra.runtime.worker.batch import example_microbatch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from architecture_table import DOCUMENT, STAGES, row_of, rows_of, with_rows
from architectures import ARCHITECTURES


def measure(name: str, runs: int) -> tuple[tuple[str, ...], float]:
    """A model's row and the median of its processor seconds to compile."""
    example = ARCHITECTURES[name]
    args, kwargs, targets = example_microbatch(example.rows(6, 0), 3, "example")
    seconds: list[float] = []
    row: tuple[str, ...] = ()
    for _ in range(runs):
        model = example.make()
        begun = time.process_time()
        compiled = compile_stages(model, args, kwargs, stages=STAGES, loss=example.loss, targets=targets)
        seconds.append(time.process_time() - begun)
        row = row_of(name, model, compiled)
    return row, median(seconds)


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all without a name")
    arguments.add_argument("--runs", type=int, default=1)
    arguments.add_argument("--write", action="store_true", help=f"put the rows into {DOCUMENT.name}")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(name, given.runs) for name in given.models or ARCHITECTURES}
    if given.json:
        rows = [
            {"name": f"compile {name}", "ours": seconds, "baseline": None, "ratio": None, "unit": "s", "runs": given.runs}
            for name, (_, seconds) in found.items()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    rows = {name: (*row, f"{seconds:.1f}") for name, (row, seconds) in found.items()}
    page = DOCUMENT.read_text()
    known = rows_of(page)
    new = with_rows(page, {name: rows.get(name, known.get(name, (name,))) for name in ARCHITECTURES if name in known | rows})
    if given.write:
        DOCUMENT.write_text(new)
    for row in rows.values():
        print(" | ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
