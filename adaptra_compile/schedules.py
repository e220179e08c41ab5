"""The schedules of the literature as functions of the number of stages and microbatches.

None of them knows a time: they are the programs that adapting starts from and is compared with. All place one stage on each
rank, hold compute ops only and are valid for any number of stages and microbatches of at least one.

The zero-bubble schedules are the handcrafted ones of "Zero Bubble Pipeline Parallelism" (Qi et al., ICLR 2024), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program


def gpipe(stages: int, microbatches: int, split: bool = True) -> Program:
    """All forwards, then all backwards; every stage holds all microbatches at once.

    Args:
        stages: The number of stages, one per rank.
        microbatches: The number of microbatches of one step.
        split: Emit each backward as I followed by its W, so that the gradient leaves before W; else as one B.

    Raises:
        ScheduleError: A number is below one.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=microbatches, deferred=0, split=split)

    return _program("gpipe", stages, microbatches, order)


def one_f_one_b(stages: int, microbatches: int, split: bool = True) -> Program:
    """Stage s runs S-s forwards ahead, then one backward and one forward in turn; it holds at most S-s microbatches.

    Arguments and errors are those of :func:`gpipe`.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=stages - stage, deferred=0, split=split)

    return _program("1f1b", stages, microbatches, order)


def zb_h1(stages: int, microbatches: int) -> Program:
    """Zero-bubble H1: 1F1B whose stage s runs each W s input gradients late, so that W fills the bubbles at the end.

    Every stage holds at most S microbatches between F and W, what stage 0 of 1F1B holds.

    Raises:
        ScheduleError: A number is below one.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=stages - stage, deferred=stage)

    return _program("zb_h1", stages, microbatches, order)


def zb_h2(stages: int, microbatches: int) -> Program:
    """Zero-bubble H2: stage s runs 2(S-s)-1 forwards ahead and each W 2s input gradients late.

    With equal op times, no delays and at least 2S-1 microbatches no stage idles between its first and its last op. Every stage
    holds at most 2S-1 microbatches between F and W.

    Raises:
        ScheduleError: A number is below one.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=2 * (stages - stage) - 1, deferred=2 * stage)

    return _program("zb_h2", stages, microbatches, order)


def forward_only(stages: int, microbatches: int) -> Program:
    """Every stage runs its forwards in order and nothing else: evaluation.

    Raises:
        ScheduleError: A number is below one.
    """

    def order(stage: int) -> Iterable[Op]:
        return (Op(stage, Kind.F, microbatch) for microbatch in range(microbatches))

    return _program("forward_only", stages, microbatches, order)


GENERATORS: Final[dict[str, Callable[[int, int], Program]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}
"""The training schedules by the name that the command line and :func:`adaptra.compile` take."""


def generate(name: str, stages: int, microbatches: int) -> Program:
    """The schedule of this name, its backwards split into I and W.

    Raises:
        ScheduleError: The name is unknown, or a number is below one.
    """
    if name not in GENERATORS:
        raise ScheduleError(f"schedule {name!r}: expected one of {', '.join(GENERATORS)}")
    return GENERATORS[name](stages, microbatches)


def _alternate(stage: int, microbatches: int, warm_up: int, deferred: int, split: bool = True) -> Iterable[Op]:
    """``warm_up`` forwards, then in turn: I, the W that is ``deferred`` input gradients older, and one forward."""
    forwards = iter([Op(stage, Kind.F, microbatch) for microbatch in range(microbatches)])
    for _ in range(min(warm_up, microbatches)):
        yield next(forwards)
    for microbatch in range(microbatches):
        if not split:
            yield Op(stage, Kind.B, microbatch)
        else:
            yield Op(stage, Kind.I, microbatch)
            if microbatch >= deferred:
                yield Op(stage, Kind.W, microbatch - deferred)
        yield from (forward for forward in [next(forwards, None)] if forward is not None)
    for microbatch in range(max(0, microbatches - deferred), microbatches):
        yield Op(stage, Kind.W, microbatch)


def _program(name: str, stages: int, microbatches: int, order: Callable[[int], Iterable[Op]]) -> Program:
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if number < 1:
            raise ScheduleError(f"{name}: {what}={number}: expected at least 1")
    return Program(name, tuple(range(stages)), microbatches, tuple(tuple(order(stage)) for stage in range(stages)))
