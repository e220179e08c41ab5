"""Cut points: the modules at which stages begin, their alternatives, and the cost model after a move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from adaptra.simulation.cost import CostModel


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A position at which a stage may begin.

    Attributes:
        module: The module that begins there, by its name for ``split=``; None if no module begins there.
        bytes: Bytes that a microbatch sends across a cut there.
        work: The estimated cost of everything before it, in FLOPs or bytes moved. Only ratios matter.
        position: The number of its first operation in the captured model; None if nothing was captured.
    """

    module: str | None
    bytes: int
    work: float
    position: int | None = None


@dataclass(frozen=True, slots=True)
class MovedCut:
    """A pipeline with one cut point moved.

    Attributes:
        stage: The stage whose cut point moves.
        was: Its cut point before.
        to: Its cut point after.
        places: The cut points of stages 1, 2, … after the move.
        cost: The estimated cost model after the move.
    """

    stage: int
    was: CutPoint
    to: CutPoint
    places: tuple[CutPoint, ...]
    cost: CostModel

    @property
    def split(self) -> tuple[str | None, ...]:
        """The modules at which stages 1, 2, … then begin, by their names for ``split=``, or None."""
        return tuple(place.module for place in self.places)


@dataclass(frozen=True, slots=True)
class CutPoints:
    """The cut points of a pipeline and their alternatives.

    Attributes:
        chosen: The cut points of stages 1, 2, …, in the order of execution.
        possible: Other cut points at which a module begins, in the order of execution.
        work: The cost of the whole model, in the unit of :attr:`CutPoint.work`.
    """

    chosen: tuple[CutPoint, ...]
    possible: tuple[CutPoint, ...]
    work: float

    def moves(self, cost: CostModel, stage: int) -> Iterator[MovedCut]:
        """Yield all moves of ``stage``'s cut point, between those of its neighbours, that send fewer bytes than now.

        The cost models are estimates, which the first measured steps replace. Work that moves takes as long per unit as on its
        former stage. A message's occupancy is proportional to its bytes. Latency and memory do not change.
        """
        was = self.chosen[stage - 1]
        begin = self.chosen[stage - 2].work if stage > 1 else 0.0
        end = self.chosen[stage].work if stage < len(self.chosen) else self.work
        for to in self.possible:
            if begin < to.work < end and to.work != was.work and to.bytes < was.bytes:
                places = tuple(to if at == stage else place for at, place in enumerate(self.chosen, 1))
                yield MovedCut(stage, was, to, places, _moved(cost, stage, (begin, was.work, end), to, to.bytes / was.bytes))


def positions_of(places: Sequence[CutPoint]) -> tuple[int, ...]:
    """Return the positions of cut points in a captured model."""
    return tuple(place.position for place in places if place.position is not None)


def _moved(cost: CostModel, stage: int, bounds: tuple[float, float, float], to: CutPoint, bytes_ratio: float) -> CostModel:
    begin, was, end = bounds
    shrinks, share = (stage - 1, (was - to.work) / (was - begin)) if to.work < was else (stage, (to.work - was) / (end - was))
    grows = stage - 1 if shrinks == stage else stage

    def shifted(times: tuple[float, ...]) -> tuple[float, ...]:
        moving = share * times[shrinks]
        return tuple(
            time - moving if at == shrinks else time + moving if at == grows else time for at, time in enumerate(times)
        )

    moved = replace(
        cost,
        forward=shifted(cost.forward),
        input_grad=shifted(cost.input_grad),
        weight_grad=shifted(cost.weight_grad),
    )
    for source, destination, occupancy in (
        (stage - 1, stage, cost.occupancy_forward[stage - 1]),
        (stage, stage - 1, cost.occupancy_backward[stage - 1]),
    ):
        moved = moved.with_occupancy(source, destination, occupancy * bytes_ratio)
    return moved
