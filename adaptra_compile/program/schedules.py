"""The schedules of the literature as functions of the number of stages and microbatches.

None depends on times: they are the programs from which adaptation starts and with which it is compared. All have compute ops
only and are valid for any number of ranks and microbatches of at least one. Those of :data:`GENERATORS` have one stage per
rank; :func:`interleaved_1f1b` and :func:`zbv` have several.

The zero-bubble schedules are the handcrafted ones of two papers:

- "Zero Bubble Pipeline Parallelism" (Qi et al., ICLR 2024), section 2;
- "Pipeline Parallelism with Controllable Memory" (Qi et al., NeurIPS 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program, refuse_size


def gpipe(stages: int, microbatches: int, split: bool = True) -> Program:
    """Generate GPipe: all forwards, then all backwards. On every stage all microbatches are in flight at once.

    Args:
        stages: The number of stages, one per rank.
        microbatches: The number of microbatches of one step.
        split: Whether each backward is I followed by its W, so that the gradient is sent before W, or one B.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=microbatches, deferred=0, split=split)

    return _program("gpipe", stages, microbatches, order)


def one_f_one_b(stages: int, microbatches: int, split: bool = True) -> Program:
    """Generate 1F1B: stage s runs S-s warm-up forwards, then one backward and one forward in turn.

    At most S-s microbatches are in flight on stage s.

    Arguments and errors are those of :func:`gpipe`.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=stages - stage, deferred=0, split=split)

    return _program("1f1b", stages, microbatches, order)


def zb_h1(stages: int, microbatches: int) -> Program:
    """Generate zero-bubble H1: 1F1B in which stage s defers each W by s input gradients, to fill the bubbles at the end.

    Every stage has at most S microbatches between F and W, as many as stage 0 of 1F1B.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=stages - stage, deferred=stage)

    return _program("zb_h1", stages, microbatches, order)


def zb_h2(stages: int, microbatches: int) -> Program:
    """Generate zero-bubble H2: stage s runs 2(S-s)-1 warm-up forwards and defers each W by 2s input gradients.

    With equal op times, no delays and at least 2S-1 microbatches, no stage idles between its first and its last op. Every stage
    has at most 2S-1 microbatches between F and W.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """

    def order(stage: int) -> Iterable[Op]:
        return _alternate(stage, microbatches, warm_up=2 * (stages - stage) - 1, deferred=2 * stage)

    return _program("zb_h2", stages, microbatches, order)


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """Generate interleaved 1F1B: rank r alternates between stages r, r + ranks, …, which fills the pipeline sooner.

    Microbatches go in rounds of ``ranks``. In a round a rank runs the forwards from its first stage to its last, and the
    backwards from its last stage to its first. Rank r runs (chunks-1) ranks + 2 (ranks-r) - 1 warm-up forwards, and at most
    that number is in flight. With one chunk it is 1F1B. From "Efficient Large-Scale Language Model Training on GPU Clusters"
    (Narayanan et al., SC 2021), section 2.2.

    Args:
        ranks: The number of ranks.
        microbatches: The number of microbatches. A last round that is not full is a full one without the missing microbatches.
        chunks: The number of stages per rank.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """
    _check("interleaved", ranks * chunks, ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = -(-microbatches // ranks)

    def units(kind: Kind, rank: int) -> list[Op]:
        order = range(chunks) if kind is Kind.F else reversed(range(chunks))
        in_round = [(chunk, place) for chunk in order for place in range(ranks)]
        return [Op(chunk * ranks + rank, kind, n * ranks + place) for n in range(rounds) for chunk, place in in_round]

    def order(rank: int) -> Iterable[Op]:
        forwards, backwards = units(Kind.F, rank), units(Kind.I, rank)
        behind = ranks - rank - 1
        ahead = min(len(forwards), (chunks - 1) * ranks + (2 if chunks > 1 else 1) * behind + 1)
        yield from forwards[:ahead]
        for index, backward in enumerate(backwards):
            yield backward
            yield Op(backward.stage, Kind.W, backward.microbatch)
            yield from forwards[ahead + index : ahead + index + 1]

    placement = tuple(range(ranks)) * chunks
    orders = (tuple(op for op in order(rank) if op.microbatch < microbatches) for rank in range(ranks))
    return Program.of_pipeline("interleaved", placement, microbatches, tuple(orders))


def zbv(ranks: int, microbatches: int) -> Program:
    """Generate ZB-V: rank r has stages r and 2 ranks - 1 - r, so that a microbatch turns round on the last rank.

    With equal op times, no delays and at least 2 ranks - 1 microbatches, no rank idles between its first and its last op. Every
    rank has at most 2 ranks microbatches between F and W, each on one stage. That is the memory of 1F1B with half as many
    stages of twice the size. A program of fewer microbatches is that of 2 ranks - 1 without the others.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """
    _check("zbv", 2 * ranks, ranks=ranks, microbatches=microbatches)
    full = max(microbatches, 2 * ranks - 1)

    def order(rank: int) -> Iterable[Op]:
        first, second = rank, 2 * ranks - 1 - rank
        behind = ranks - rank
        turn = [(second, Kind.F), (second, Kind.I), (second, Kind.W)]
        script = [
            *[(first, Kind.F)] * (2 * behind - 1),
            *[(second, Kind.F), (first, Kind.F)] * rank,
            *turn * behind,
            *[(first, Kind.F), (first, Kind.I), (first, Kind.W), *turn] * (full - ranks),
            *[(first, Kind.I), (second, Kind.I)] * rank,
            *[(first, Kind.I), (first, Kind.W)] * behind,
            *[(second, Kind.W)] * rank,
            *[(first, Kind.W)] * rank,
        ]
        done = dict.fromkeys(script, 0)
        for stage, kind in script:
            yield Op(stage, kind, done[stage, kind])
            done[stage, kind] += 1

    placement = (*range(ranks), *reversed(range(ranks)))
    orders = (tuple(op for op in order(rank) if op.microbatch < microbatches) for rank in range(ranks))
    return Program.of_pipeline("zbv", placement, microbatches, tuple(orders))


def forward_only(placement: Sequence[int], microbatches: int) -> Program:
    """Generate the program of evaluation: every stage runs its forwards in order and nothing else.

    A rank with several stages alternates between them. Its later stages begin when the first microbatch arrives there. No rank
    waits for ever, since all ranks follow one order of ops in which every op comes after those that it needs.

    Args:
        placement: ``placement[stage]`` is the stage's rank. Ranks may have different numbers of stages.
        microbatches: The number of microbatches of one step.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """
    _check("forward_only", len(placement), stages=len(placement), microbatches=microbatches)
    chunks = len(placement) // len(set(placement))
    ops = [Op(stage, Kind.F, microbatch) for stage in range(len(placement)) for microbatch in range(microbatches)]
    ops.sort(key=lambda op: chunks * op.microbatch + op.stage)
    orders = (tuple(op for op in ops if placement[op.stage] == rank) for rank in range(len(set(placement))))
    return Program.of_pipeline("forward_only", tuple(placement), microbatches, tuple(orders))


def two_phases(stages: int, microbatches: int) -> Program:
    """Generate the program of two phases: every stage runs all F, then all I, then all W, in microbatch order.

    It can be cut in two between F and I, for gradients that come from outside after all forwards. An edge's delay is paid once
    forward and once backward. No order of either half is shorter, since there are no other ops to run in the meantime. All
    microbatches are in flight at once on every stage.

    Raises:
        ScheduleError: A number is below one, or there are too many ops.
    """

    def order(stage: int) -> Iterable[Op]:
        return (Op(stage, kind, microbatch) for kind in (Kind.F, Kind.I, Kind.W) for microbatch in range(microbatches))

    return _program("two_phases", stages, microbatches, order)


GENERATORS: Final[dict[str, Callable[[int, int], Program]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}
"""The training schedules by their names on the command line and in :func:`adaptra.compile`."""


def generate(name: str, stages: int, microbatches: int) -> Program:
    """Generate the schedule of this name, with backwards split into I and W.

    Raises:
        ScheduleError: The name is unknown, or a number is below one.
    """
    if name not in GENERATORS:
        raise ScheduleError(f"schedule {name!r}: expected one of {', '.join(GENERATORS)}")
    return GENERATORS[name](stages, microbatches)


PLACED: Final = ("interleaved", "zbv")
"""The names on the command line of the schedules with several stages per rank."""


def generate_for(name: str, placement: tuple[int, ...], microbatches: int) -> Program:
    """Generate the schedule of this name, of :data:`GENERATORS` or :data:`PLACED`, for a pipeline with this placement.

    Raises:
        ScheduleError: The name is unknown, a number is out of range, or the schedule has another placement.
    """
    ranks = len(set(placement))
    if name == "interleaved":
        program = interleaved_1f1b(ranks, microbatches, max(1, len(placement) // ranks))
    elif name == "zbv":
        program = zbv(ranks, microbatches)
    elif name in GENERATORS:
        program = generate(name, len(placement), microbatches)
    else:
        raise ScheduleError(f"schedule {name!r}: expected one of {', '.join((*GENERATORS, *PLACED))}")
    if program.placement != placement:
        given, placed = (",".join(map(str, which)) for which in (placement, program.placement))
        raise ScheduleError(f"placement {given}: {name} places stages on ranks {placed}")
    return program


def _alternate(stage: int, microbatches: int, warm_up: int, deferred: int, split: bool = True) -> Iterable[Op]:
    """Yield ``warm_up`` forwards, then in turn: I, the W of the microbatch ``deferred`` earlier, and one forward."""
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
    _check(name, stages, stages=stages, microbatches=microbatches)
    return Program.of_pipeline(name, tuple(range(stages)), microbatches, tuple(tuple(order(stage)) for stage in range(stages)))


def _check(name: str, total: int, /, **numbers: int) -> None:
    """Refuse a number below one, and too many ops on ``total`` stages."""
    for what, number in numbers.items():
        if number < 1:
            raise ScheduleError(f"{name}: {what}={number}: expected at least 1")
    if refused := refuse_size(total, numbers["microbatches"]):
        raise ScheduleError(f"{name}: {refused}")
