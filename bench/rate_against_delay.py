"""Messages per second of the delegate over TCP while the link's delay grows: they should not fall until its window is full.

    bench/rate_against_delay.py --rate 100 --size 1 --window 32          (root)

Two hosts joined by a link of a stated rate. One message occupies it for ``size / rate``. The one-way delay is a multiple of
that, and changes while the connections live. Messages go from rank 0 to rank 1, as many outstanding as the window, for a
while. The time per message is that of the second half, when connections and windows have grown as far as they need. Each row
stands beside the same without delay, of the same round. The medians of ``--rounds`` are printed.
"""

from __future__ import annotations

from statistics import median

import torch.distributed as dist
from _exchanges import Delegate, make_engine
from _ranks import change_links, run_on_hosts
from _table import Row, parser, print_rows

MIB = 1 << 20


def measure(
    rank: int, rate: float, size: int, window: int, multiples: list[float], seconds: float, rounds: int
) -> list[list[float]]:
    """One rank: seconds per message, for every round and every multiple."""
    engine = make_engine(rank, 1)
    messages = Delegate(engine, rank, size, window)
    alone = size / rate
    count = max(4 * window, int(seconds / alone))
    found: list[list[float]] = []
    for _ in range(rounds):
        found.append([])
        for multiple in multiples:
            change_links(f"all delay={multiple * alone * 1e3:.6f}ms")
            ends = messages.exchange(count)
            half = count // 2
            found[-1].append((ends[-1] - ends[half]) / (count - 1 - half))
            dist.barrier()
    engine.close("measured", 1.0)
    return found


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rate", type=float, default=100.0, help="of the link, in MB/s")
    arguments.add_argument("--size", type=float, default=1.0, help="of the messages, in MiB")
    arguments.add_argument("--window", type=int, default=32, help="messages that the receiver holds at most")
    arguments.add_argument(
        "--multiples", type=float, nargs="+", default=[0, 1, 2, 4, 8], help="of a message's time: the delays"
    )
    arguments.add_argument("--seconds", type=float, default=20.0, help="of messages per delay, the first half not counted")
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    multiples = [0.0] + [each for each in given.multiples if each > 0]
    rate, size = given.rate * 1e6, int(given.size * MIB)
    links = [f"all rate={rate:.0f}"]
    found = run_on_hosts(measure, 2, links, rate, size, given.window, multiples, given.seconds, given.rounds)
    rows = [
        Row(
            f"delay {multiple:g} × a message's time, {1e3 * multiple * size / rate:.3g} ms",
            1e3 * median(one[k] for one in found),
            1e3 * median(one[0] for one in found),
            "ms/message",
            given.rounds,
        )
        for k, multiple in enumerate(multiples)
    ]
    title = f"{given.size:g} MiB over {given.rate:g} MB/s, window of {given.window}"
    print_rows(title, rows, baseline="without delay", as_json=given.json)


if __name__ == "__main__":
    main()
