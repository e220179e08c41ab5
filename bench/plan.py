"""How good plans are and how long planning takes, over the cases in tests/cases.

Rows "makespan" are simulated; beside them stand the shortest schedule known of the case, the bound that no schedule beats, and
the better of the paper's rules that fits the memory. Rows "planning" are the time of one plan() call, the first of a process
(which compiles the equations) not counted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

from _table import Row, median_seconds, parser, print_rows

from adaptra.cost import Case
from adaptra.planner import plan
from adaptra.simulate import lower_bound, simulate

CASES = Path(__file__).parent.parent / "tests" / "cases"


def rows(paths: list[Path], runs: int) -> Iterator[Row]:
    """Four rows per case, and at the end the geometric means of the ratios to each baseline."""
    logarithms: dict[str, list[float]] = {}
    for path in paths:
        case, known = Case.load(path), json.loads(path.read_text())
        makespan = simulate(plan(case), case.cost).makespan
        baselines = {
            "best known": known["best_known"],
            "bound": lower_bound(case).value,
            "paper's rule": known["reference_rule"],
        }
        for name, baseline in baselines.items():
            logarithms.setdefault(name, []).append(math.log(makespan / baseline))
            yield Row(f"{case.name} makespan / {name}", makespan, baseline, "case's unit", 1)
        yield Row(f"{case.name} planning", 1e3 * median_seconds(runs, lambda case=case: plan(case)), None, "ms", runs)
    for name, found in logarithms.items():
        yield Row(f"all makespans / {name}", math.exp(sum(found) / len(found)), 1.0, "geometric mean", len(found))


def main() -> None:
    """Measure and print."""
    options = _parser().parse_args()
    paths = sorted(CASES.glob("*.json"))
    if options.case:
        paths = [path for path in paths if path.stem in options.case]
    print_rows("plans", rows(paths, options.runs), baseline="beside", as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__ or "")
    made.add_argument("--runs", type=int, default=3, help="how often planning is timed (default: 3)")
    made.add_argument("case", nargs="*", help="names of cases, such as A02 (default: all)")
    return made


if __name__ == "__main__":
    main()
