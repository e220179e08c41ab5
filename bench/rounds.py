"""Rounds of sums with one late rank, counted from its first message, and processor time to make their schedules.

Every schedule is verified: each term counted once in the order of ranks, one message in and one out of a rank in a round.
From 3 to 64 ranks N the number of parts C is each up to 2N, and 8(N-1); beyond 64, six of these. The bound is C + ⌈log2 N⌉, or
one less where the late rank's term is the last of the fold. StragglAR's figures are published ones, for even N only.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

from _table import Row, parser, print_rows

from adaptra.collectives.algorithms import sum_schedule
from adaptra.collectives.verify import verify_sum

SMALL = 64
"""Up to here each number of parts is tried."""
FIRST_BAR, CLOSED_BAR = 0.2, 0.005
"""Seconds to make the first schedule of a number of ranks, and where its form is closed."""


def parts_of(ranks: int) -> list[int]:
    """The numbers of parts to try."""
    if ranks <= SMALL:
        return [*range(1, 2 * ranks + 1), 8 * (ranks - 1)]
    return [1, 2, 7, ranks - 1, ranks, 2 * (ranks - 1)]


def is_closed(ranks: int) -> bool:
    """Whether the schedule of ``merge`` needs no flows: N = 2^k - 2^(k-s) + 1."""
    depth = (ranks - 1).bit_length()
    return any(ranks == 2**depth - 2 ** (depth - late) + 1 for late in range(1, depth + 1))


def first_seconds(most: int) -> Iterator[tuple[str, int, float]]:
    """What the first schedule of each algorithm and number of ranks takes."""
    for ranks in range(3, most + 1):
        for name in ("merge", "swap"):
            start = process_time()
            sum_schedule(name, ranks, 1, (ranks - 1,))
            yield name, ranks, process_time() - start


def above_bound(name: str, ranks: int) -> list[int]:
    """By how many rounds each verified schedule is above the bound."""
    bound, excess = (ranks - 1).bit_length() - (name == "swap"), []
    for parts in parts_of(ranks):
        schedule = sum_schedule(name, ranks, parts, (ranks - 1,))
        verify_sum(schedule)
        excess.append(schedule.rounds_of_late - parts - bound)
    return excess


def main() -> int:
    """Make all schedules, verify them and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--most", type=int, default=256, help="the largest number of ranks")
    given = arguments.parse_args()
    seconds = [*first_seconds(given.most)]
    closed = [(ranks, took) for name, ranks, took in seconds if name == "merge" and is_closed(ranks)]
    rows: list[Row] = []
    for name, least in (("merge", 3), ("swap", 4)):
        for begin, end in ((least, min(SMALL, given.most)), (SMALL + 1, given.most)):
            counts = [more for ranks in range(begin, end + 1) for more in above_bound(name, ranks)]
            if counts:
                rows.append(
                    Row(f"{name}, N={begin}..{end}: most rounds above the bound", max(counts), 0, "rounds", len(counts))
                )
    failed = any(row.ours > 0 for row in rows)
    for name in ("merge", "swap"):
        schedule = sum_schedule(name, 48, 47, (47,))
        verify_sum(schedule)
        rows.append(Row(f"{name}, N=48, C=47, beside StragglAR's", schedule.rounds_of_late, 55, "rounds", 1))
    for name in ("merge", "swap"):
        took, ranks = max((took, ranks) for other, ranks, took in seconds if other == name)
        rows.append(Row(f"{name}: longest synthesis, N={ranks}", took, FIRST_BAR, "s", given.most - 2))
    took, ranks = max((took, ranks) for ranks, took in closed)
    rows.append(Row(f"merge: longest in closed form, N={ranks}", took, CLOSED_BAR, "s", len(closed)))
    failed |= any(row.baseline is not None and row.ours > row.baseline for row in rows[-3:])
    start = process_time()
    sum_schedule("merge", 256, 255, (255,))
    rows.append(Row("merge, N=256, C=255: all messages, beside StragglAR's", process_time() - start, 145, "s", 1))
    print_rows("Rounds of a sum with one late rank", rows, baseline="bar", as_json=given.json)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
