"""What comparing the ranks' rows costs a step, and comparing their values costs a compile.

A step whose rows are compared takes one number of each tensor of the batch. The first ten steps do that, and then each
hundredth. The numbers travel with the control thread's mail, so that no step waits for them. Values that several ranks have
are compared once, at compile and after `load_state_dict`. Seconds are processor time of one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from _table import Row, parser, print_rows
from step_against_torch import VOCABULARY, llama, token_loss

import adaptra
from adaptra.runtime.control.agreement.same_rows import EVERY, numbers_of
from adaptra.runtime.data_parallel.checksum import checksums


def seconds_of(work: Callable[[], object], runs: int) -> float:
    """Processor seconds of the median run, after one that doesn't count."""
    times: list[float] = []
    for _ in range(runs + 1):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return median(times[1:])


def main() -> int:
    """Measure both and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=15, help="steps, and times that numbers are taken")
    arguments.add_argument("--rows", type=int, default=8, help="rows of a batch, of 512 tokens each; two make a microbatch")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    tokens, targets = torch.randint(VOCABULARY, (2, given.rows, 512))
    batch = {"inputs": (tokens,), "targets": targets}
    with adaptra.compile(
        llama(4), stages=1, microbatches=given.rows // 2, example_inputs=(tokens, targets), loss=token_loss
    ) as pipe:
        step = seconds_of(lambda: pipe.step(tokens, targets), given.runs) * 1e3
    numbers = seconds_of(lambda: [numbers_of(batch) for _ in range(100)], given.runs) / 100 * 1e3
    values = [torch.randn(1 << 24) for _ in range(4)]
    hashed = seconds_of(lambda: checksums(values), given.runs) * 1e3
    gigabytes = sum(one.nbytes for one in values) / 1e9
    unit = "ms of processor time"
    rows = [
        Row("a step whose rows are compared", step + numbers, step, unit, given.runs),
        Row(f"a step on average, of which one in {EVERY} is", step + numbers / EVERY, step, unit, given.runs),
        Row("values compared at compile, per gigabyte", hashed / gigabytes, None, unit, given.runs),
    ]
    print_rows("Checks that ranks agree", rows, baseline="without", as_json=given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
