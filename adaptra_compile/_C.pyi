# ruff: noqa: N999 - the underscore and capital say that this is the extension module, as in torch._C
"""The C++ part: event simulation and list scheduling. Its callers are adaptra.simulate and the passes, nobody else."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

from adaptra.cost import Case, CostModel
from adaptra.dependencies import Row
from adaptra.program import Kind, Op, Program

@final
class Orders:
    """Op sequences outside Python, without communication ops. ``len()`` is the number of ops."""

    def __len__(self) -> int: ...

@final
class Simulated:
    """What a simulation found. Tuples have one entry per rank, ``peak_in_flight`` one per stage."""

    @property
    def complete(self) -> bool:
        """False when the ranks deadlock or an op is misplaced or occurs twice; nothing else has a meaning then."""

    @property
    def makespan(self) -> float: ...
    @property
    def busy(self) -> tuple[float, ...]: ...
    @property
    def first_start(self) -> tuple[float, ...]: ...
    @property
    def last_end(self) -> tuple[float, ...]: ...
    @property
    def peak_in_flight(self) -> tuple[int, ...]: ...
    @property
    def peak_memory(self) -> tuple[float, ...]: ...
    def intervals(self, rank: int) -> bytes:
        """One record ``=2d`` per compute op of the rank, in its order: start, end."""

    def messages(self) -> bytes:
        """One record ``=3i4x3d`` per message: source stage, destination stage, microbatch; posted, departed, arrived."""

def to_orders(orders: tuple[tuple[Op, ...], ...]) -> Orders:
    """Take the compute ops of a program out of Python."""

def simulate(program: Program, cost: CostModel, orders: Orders, rule: Mapping[Kind, Sequence[Row]]) -> Simulated:
    """Run ``orders`` (of ``program``, whose placement and microbatches count) under the rule; releases the interpreter lock.

    Raises:
        ValueError: The program and the cost model have different numbers of stages.
    """

def lower_bound(planning_case: Case) -> tuple[float, str, int]:
    """The greatest lower bound: its value, its name, and the stage, edge or rank that binds."""

def search_orders(
    planning_case: Case,
    in_flight: Sequence[int],
    warm_ups: Sequence[Sequence[int]],
    alternations: Sequence[tuple[Sequence[int], Sequence[int]]],
    effort: int,
    seed: int,
    seconds: float | None,
    should_stop: Callable[[], bool] | None,
    rule: Mapping[Kind, Sequence[Row]],
) -> tuple[float, tuple[tuple[Op, ...], ...]] | None:
    """The shortest makespan found for a case and its orders, rank by rank, or None when nothing was found within the limits.

    Releases the interpreter lock while it searches. However soon it is stopped, it looks until it has orders or has tried
    everything it starts from.

    Args:
        planning_case: Times, memory, placement and microbatches; ``memory_limit`` is kept.
        in_flight: Per stage, the most microbatches in flight.
        warm_ups: Where to start; every one has a number per stage, at least 1.
        alternations: (warm-up, W deferred by) per stage; the result is never worse than any of these that fits.
        effort: About how many ops to dispatch and simulate before the search ends.
        seed: Of all random choices.
        seconds: How long to search, if that is limited.
        should_stop: Asked every few milliseconds; True ends the search.
        rule: The dependency rule.

    Raises:
        ValueError: The numbers per stage are not as many as the case has stages.
        Exception: What ``should_stop`` raised.
    """
