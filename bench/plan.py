"""How good plans behind a barrier are and how long planning takes: the cases in tests/cases, budgets of 10 ms and 100 ms.

There is one row per case and budget. It has makespan ÷ the shortest known, ÷ the bound, and ÷ the better published rule that
fits the memory (Wu et al. 2025, arXiv 2504.19232). It also has how long plan() took as a whole. The first call of a process,
which compiles the equations, does not count. Below them stand mean and worst.

``--growth FILE`` measures instead how planning time grows from 4 stages × 8 microbatches to 256 × 2048, and draws it.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _table import Row, parser, print_rows

from adaptra.planning.planner import plan
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import lower_bound, simulate

CASES = Path(__file__).parent.parent / "tests" / "cases"
SIZES = ((4, 8), (8, 16), (16, 64), (32, 128), (64, 512), (128, 1024), (256, 2048))
FIRST, SOON, LONG = 1e-9, 0.5, 5.0
"""Seconds: no time at all, which still gives a plan; what re-planning beside training can wait; and what nobody waits."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One case planned once. ``over_memory`` counts ranks above their limit, ``seconds`` is the whole plan() call."""

    case: str
    stages: int
    microbatches: int
    budget: float
    makespan: float
    to_best_known: float
    to_bound: float
    to_papers_rule: float
    binds: str
    over_memory: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Grown:
    """One size planned with three budgets. ``megabytes`` is the process's peak memory above what it had before the first."""

    stages: int
    microbatches: int
    first_seconds: float
    first_to_long: float
    soon_seconds: float
    soon_to_long: float
    megabytes: float


def plan_cases(paths: list[Path], budgets: list[float], seed: int) -> Iterator[Planned]:
    """Plan every case with every budget, in seconds."""
    for path in paths:
        case, known = load_case(path), json.loads(path.read_text())
        bound = lower_bound(case)
        for budget in budgets:
            began = time.perf_counter()
            program = plan(case, budget=budget, seed=seed)
            seconds = time.perf_counter() - began
            found = simulate(program, case.cost)
            yield Planned(
                case.name,
                case.cost.stages,
                case.microbatches,
                budget,
                found.makespan,
                found.makespan / known["best_known"],
                found.makespan / bound.value,
                found.makespan / known["reference_rule"],
                f"{bound.kind.value}, {bound.where}",
                len(found.over_memory),
                seconds,
            )


def plan_sizes() -> Iterator[Grown]:
    """Plan ever larger cases with one slow edge and a memory limit of as many microbatches as stages."""
    before = _megabytes()
    for stages, microbatches in SIZES:
        cost = CostModel.uniform(stages, 20, 23, 17, latency=2).with_latency(1, 2, 60).with_latency(2, 1, 60)
        cost = cost.limited((float(stages),) * stages)
        case = Case(cost, microbatches, tuple(range(stages)))
        makespans: list[float] = []
        seconds: list[float] = []
        megabytes = 0.0
        for budget in (FIRST, SOON, LONG):
            began = time.perf_counter()
            program = plan(case, budget=budget)
            seconds.append(time.perf_counter() - began)
            if budget == SOON:
                megabytes = _megabytes() - before
            makespans.append(simulate(program, cost).makespan)
            del program
        yield Grown(
            stages,
            microbatches,
            seconds[0],
            makespans[0] / makespans[2],
            seconds[1],
            makespans[1] / makespans[2],
            megabytes,
        )


def case_rows(planned: list[Planned]) -> list[Row]:
    """The cases as rows of every benchmark's JSON: the makespan beside each thing it is compared with, and the time taken."""
    rows: list[Row] = []
    for one in planned:
        label = f"{one.case}, {1e3 * one.budget:g} ms"
        for name, ratio in (("best known", one.to_best_known), ("bound", one.to_bound), ("paper's rule", one.to_papers_rule)):
            rows.append(Row(f"{label}: makespan / {name}", one.makespan, one.makespan / ratio, "case's unit", 1))
        rows.append(Row(f"{label}: planning", 1e3 * one.seconds, 1e3 * one.budget, "ms", 1))
    return rows


def growth_rows(grown: list[Grown]) -> list[Row]:
    """The sizes as rows of every benchmark's JSON: times and memory, and makespans beside that of a long budget."""
    rows: list[Row] = []
    for one in grown:
        label = f"{one.stages}×{one.microbatches}"
        rows.append(Row(f"{label}: first plan", 1e3 * one.first_seconds, None, "ms", 1))
        rows.append(Row(f"{label}: first makespan", one.first_to_long, 1.0, "of the long plan's", 1))
        rows.append(Row(f"{label}: plan with {SOON:g} s", 1e3 * one.soon_seconds, 1e3 * SOON, "ms", 1))
        rows.append(Row(f"{label}: makespan with {SOON:g} s", one.soon_to_long, 1.0, "of the long plan's", 1))
        rows.append(Row(f"{label}: memory", one.megabytes, None, "MB", 1))
    return rows


def print_cases(rows: list[Planned]) -> None:
    """The rows as one table, cases down and budgets across."""
    budgets = sorted({row.budget for row in rows})
    names = [f"{1e3 * budget:g} ms" for budget in budgets]
    columns = ["case", "S×M", *(f"÷ best, {n}" for n in names), *(f"÷ bound, {n}" for n in names)]
    columns += [*(f"÷ paper, {n}" for n in names), *(f"took, {n}" for n in names), "binds"]
    cells: list[list[str]] = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        figures = [f"{value:.4f}" for name in _RATIOS for row in mine for value in [getattr(row, name)]]
        times = [f"{1e3 * row.seconds:.1f} ms" for row in mine]
        cells.append([case, f"{mine[0].stages}×{mine[0].microbatches}", *figures, *times, mine[0].binds])
    for label, summarise in (("mean", statistics.fmean), ("worst", max)):
        figures = [f"{summarise(getattr(r, name) for r in rows if r.budget == b):.4f}" for name in _RATIOS for b in budgets]
        times = [f"{1e3 * summarise(r.seconds for r in rows if r.budget == b):.1f} ms" for b in budgets]
        cells.append([label, "", *figures, *times, ""])
    over = sum(row.over_memory for row in rows)
    _print_table("plans", columns, cells, caption=f"plans over memory: {over} of {len(rows)}")


_RATIOS = ("to_best_known", "to_bound", "to_papers_rule")


def print_growth(rows: list[Grown]) -> None:
    """The rows as a table."""
    columns = ["S×M", "ops", "first plan", "÷ long", f"{SOON:g} s budget", "÷ long", "memory"]
    cells = [
        [
            f"{row.stages}×{row.microbatches}",
            f"{3 * row.stages * row.microbatches:,}",
            f"{1e3 * row.first_seconds:.1f} ms",
            f"{row.first_to_long:.4f}",
            f"{1e3 * row.soon_seconds:.0f} ms",
            f"{row.soon_to_long:.4f}",
            f"{row.megabytes:.0f} MB",
        ]
        for row in rows
    ]
    _print_table(
        "growth",
        columns,
        cells,
        caption=f"long: a budget of {LONG:g} s; memory: peak above the start, Python's program included",
    )


def draw_growth(rows: list[Grown], path: str) -> None:
    """Planning time and distance from the long plan against the number of ops."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    ops = [3 * row.stages * row.microbatches for row in rows]
    above.loglog(ops, [row.first_seconds for row in rows], "o-", label="first valid plan")
    above.loglog(ops, [row.soon_seconds for row in rows], "s--", label=f"budget of {SOON:g} s")
    above.set_ylabel("seconds")
    below.semilogx(ops, [100 * (row.first_to_long - 1) for row in rows], "o-", label="first valid plan")
    below.semilogx(ops, [100 * (row.soon_to_long - 1) for row in rows], "s--", label=f"budget of {SOON:g} s")
    below.set_ylabel(f"% above a budget of {LONG:g} s")
    below.set_xlabel("compute ops")
    for axes in (above, below):
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
    above.set_xticks(ops, [f"{row.stages}×{row.microbatches}" for row in rows])
    figure.savefig(path)


def _print_table(title: str, columns: list[str], cells: list[list[str]], *, caption: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=caption)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "binds" else "right")
    for row in cells:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    made = parser(__doc__ or "")
    made.add_argument("--budget", type=float, action="append", help="milliseconds; may be given again (default: 10 and 100)")
    made.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    made.add_argument("--growth", metavar="FILE", help="measure growth instead, and draw it into FILE (svg, png or pdf)")
    made.add_argument("case", nargs="*", help="names of cases, such as A02 (default: all)")
    options = made.parse_args()
    plan(Case(CostModel.uniform(2, 1, 1, 1), 2, (0, 1)))
    if options.growth:
        grown = list(plan_sizes())
        if options.json:
            print_rows("growth", growth_rows(grown), as_json=True)
        else:
            print_growth(grown)
        draw_growth(grown, options.growth)
        return
    paths = [path for path in sorted(CASES.glob("*.json")) if not options.case or path.stem in options.case]
    budgets = [1e-3 * budget for budget in options.budget or [10, 100]]
    planned = list(plan_cases(paths, budgets, options.seed))
    if options.json:
        print_rows("plans", case_rows(planned), as_json=True)
    else:
        print_cases(planned)


if __name__ == "__main__":
    main()
