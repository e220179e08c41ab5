"""What a job has more of after a hundred moved cuts, changed roles, compilations and timelines than after ten.

Two replicas of two stages, a process each, over gloo on this machine. Counted are descriptors, threads and process groups of
the rank that gains most of them, and keys in the job's store. The baseline is the count after ten rounds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _table import Row, parser, print_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests" / "support")]
from leaking import ACTIONS, RANKS, repeat
from processes import run_processes

EARLY = 10


def main() -> int:
    """Run every action over and over and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--only", choices=ACTIONS, action="append", help="one of the actions; may be repeated")
    given = arguments.parse_args()
    rows: list[Row] = []
    for what in given.only or ACTIONS:
        by_rank = run_processes(repeat, RANKS, what, (EARLY, given.rounds), timeout=3600.0)
        for kind in by_rank[0][0]:
            early, late = max(((early[kind], late[kind]) for early, late in by_rank), key=lambda pair: pair[1] - pair[0])
            rows.append(Row(f"{given.rounds} × {what}: {kind}", late, early, kind, given.rounds))
    print_rows("what a job holds", rows, baseline=f"after {EARLY}", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
