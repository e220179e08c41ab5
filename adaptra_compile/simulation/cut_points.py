"""Where a model's stages begin, where else they could, and what moving a cut there would do to the costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from adaptra.simulation.cost import CostModel


@dataclass(frozen=True, slots=True)
class CutPoint:
    """Where a stage may begin.

    Attributes:
        module: The module whose first operation it is, as ``split=`` takes it; None if no module begins there.
        bytes: What a microbatch sends across a cut there, in bytes.
        work: The estimated cost of all that is before it, in FLOPs or bytes moved; only shares of it matter.
        position: The number of its first operation in the captured model; None where nothing was captured.
    """

    module: str | None
    bytes: int
    work: float
    position: int | None = None


@dataclass(frozen=True, slots=True)
class MovedCut:
    """The pipeline with one cut elsewhere.

    Attributes:
        stage: The stage that begins elsewhere.
        was: Where it began.
        to: Where it begins now.
        places: Where stages 1, 2, … then begin.
        cost: The costs then, estimated.
    """

    stage: int
    was: CutPoint
    to: CutPoint
    places: tuple[CutPoint, ...]
    cost: CostModel

    @property
    def split(self) -> tuple[str | None, ...]:
        """The modules at which stages 1, 2, … then begin, as ``split=`` takes them; None where a stage begins at none."""
        return tuple(place.module for place in self.places)


@dataclass(frozen=True, slots=True)
class CutPoints:
    """The cuts of a pipeline and their alternatives.

    Attributes:
        chosen: Where stages 1, 2, … begin, in the order of execution.
        possible: Where a stage could begin too, at a module, in the order of execution.
        work: The cost of the whole model, in the unit of :attr:`CutPoint.work`.
    """

    chosen: tuple[CutPoint, ...]
    possible: tuple[CutPoint, ...]
    work: float

    def moves(self, cost: CostModel, stage: int) -> Iterator[MovedCut]:
        """Begin ``stage`` anywhere between its neighbours' beginnings where less is sent than now.

        The work that changes sides takes as long per unit as it did on the stage that had it, a message occupies the edge in
        proportion to its bytes, and latency and memory stay as they are: estimates, which the first measured steps replace.
        """
        was = self.chosen[stage - 1]
        begin = self.chosen[stage - 2].work if stage > 1 else 0.0
        end = self.chosen[stage].work if stage < len(self.chosen) else self.work
        for to in self.possible:
            if begin < to.work < end and to.work != was.work and to.bytes < was.bytes:
                places = tuple(to if at == stage else place for at, place in enumerate(self.chosen, 1))
                yield MovedCut(stage, was, to, places, _moved(cost, stage, (begin, was.work, end), to, to.bytes / was.bytes))


def positions_of(places: Sequence[CutPoint]) -> tuple[int, ...]:
    """Where stages begin in a captured model."""
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
