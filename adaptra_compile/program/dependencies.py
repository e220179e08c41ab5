"""The dependency rule: the ops that each kind of op needs before it can start.

The rule is a table. The verifier, the passes and the runtime read it here, and the simulators in C++ get the same rows. A row
has a kind, an offset, a list of kinds, ``later`` and ``when``. An op of this kind on stage ``s`` and microbatch ``m`` needs
another op: one of the listed kinds on stage ``s + offset`` and microbatch ``m + later``. A need before the first microbatch,
or before the first or after the last stage, does not exist. A message meets a need with an offset. In a lowered program this
message is the RECV op, if the stages are on different ranks.

Where a microbatch's W is on another worker than the one before it, the accumulator is handed over between them. A message
meets that need too. So weight gradients are added in microbatch order whoever computes them. Rows with such a ``when`` count
between two workers only, since a worker runs each stage's W and F in microbatch order anyway.

Where a worker of another replica computes a microbatch, messages cross between it and the home of the replica's stage. They
are no needs between compute ops: an F waits for the RECV of its inputs or targets, once a program has these messages. A REDUCE
waits for the sum of its replica. An F waits for the RECV of buffers that the F before it has changed on another worker.

The search that inserts ops of lost workers, and lower bounds, are written for the kinds and rows that the table has today.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from typing import Final, NamedTuple

from adaptra.program import Kind, Op, Program


class When(Enum):
    """When a row of the rule counts."""

    ALWAYS = "always"
    HANDED_OVER = "handed over"
    """Between two workers, if accumulators of weight gradients are handed over."""
    CHANGING = "changing"
    """Between two workers, on a stage whose forwards change buffers."""


class Row(NamedTuple):
    """One row of the rule: the kinds that meet a need, their stage and microbatch relative to the op's own, and its time."""

    offset: int
    kinds: tuple[Kind, ...]
    later: int = 0
    when: When = When.ALWAYS


class Need(NamedTuple):
    """One need of an op: an op of one of ``kinds`` on this stage and microbatch."""

    stage: int
    kinds: tuple[Kind, ...]
    microbatch: int
    replica: int = 0

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops that meet the need; a program has one of them."""
        return tuple(Op(self.stage, kind, self.microbatch, None, self.replica) for kind in self.kinds)

    def __str__(self) -> str:
        return " or ".join(map(str, self.ops))


INPUT_GRADIENT: Final = (Kind.I, Kind.B)
"""The kinds that compute the gradient of a stage's inputs."""
WEIGHT_GRADIENT: Final = (Kind.W, Kind.B)
"""The kinds that add to a stage's accumulator of weight gradients."""

RULE: Final[dict[Kind, tuple[Row, ...]]] = {
    Kind.F: (Row(-1, (Kind.F,)), Row(0, (Kind.F,), -1, When.CHANGING)),
    Kind.I: (Row(0, (Kind.F,)), Row(+1, INPUT_GRADIENT)),
    Kind.B: (Row(0, (Kind.F,)), Row(+1, INPUT_GRADIENT), Row(0, WEIGHT_GRADIENT, -1, When.HANDED_OVER)),
    Kind.W: (Row(0, (Kind.I,)), Row(0, WEIGHT_GRADIENT, -1, When.HANDED_OVER)),
    Kind.SEND_F: (Row(0, (Kind.F,)),),
    Kind.SEND_B: (Row(0, INPUT_GRADIENT),),
    Kind.RECV_F: (Row(-1, (Kind.SEND_F,)),),
    Kind.RECV_B: (Row(+1, (Kind.SEND_B,)),),
    Kind.SEND_W: (Row(0, WEIGHT_GRADIENT),),
    Kind.RECV_W: (Row(0, (Kind.SEND_W,), -1),),
    Kind.SEND_INPUT: (),
    Kind.RECV_INPUT: (Row(0, (Kind.SEND_INPUT,)),),
    Kind.SEND_TARGET: (),
    Kind.RECV_TARGET: (Row(0, (Kind.SEND_TARGET,)),),
    Kind.SEND_RESULT: (Row(0, (Kind.F,)),),
    Kind.RECV_RESULT: (Row(0, (Kind.SEND_RESULT,)),),
    Kind.SEND_SUM: (Row(0, WEIGHT_GRADIENT),),
    Kind.RECV_SUM: (Row(0, (Kind.SEND_SUM,)),),
    Kind.SEND_BUFFERS: (Row(0, (Kind.F,), -1),),
    Kind.RECV_BUFFERS: (Row(0, (Kind.SEND_BUFFERS,)),),
    Kind.REDUCE: (),
    Kind.STEP: (),
}

RECEIVED_BY: Final = {-1: Kind.RECV_F, +1: Kind.RECV_B}
"""The RECV that meets a need with this offset."""

SENT_BY: Final = {
    Kind.RECV_F: Kind.SEND_F,
    Kind.RECV_B: Kind.SEND_B,
    Kind.RECV_W: Kind.SEND_W,
    Kind.RECV_INPUT: Kind.SEND_INPUT,
    Kind.RECV_TARGET: Kind.SEND_TARGET,
    Kind.RECV_RESULT: Kind.SEND_RESULT,
    Kind.RECV_SUM: Kind.SEND_SUM,
    Kind.RECV_BUFFERS: Kind.SEND_BUFFERS,
}
"""The SEND at the other end of a RECV."""

USED_BY: Final[dict[Kind, tuple[Kind, ...]]] = {
    Kind.RECV_F: (Kind.F,),
    Kind.RECV_B: INPUT_GRADIENT,
    Kind.RECV_W: WEIGHT_GRADIENT,
    **dict.fromkeys((Kind.RECV_INPUT, Kind.RECV_TARGET, Kind.RECV_BUFFERS), (Kind.F,)),
}
"""The kinds of the op of the same stage and microbatch that waits for a RECV. What comes home waits for the end of the step."""

_OTHER_END: Final = {
    Kind.SEND_F: (Kind.RECV_F, +1, 0),
    Kind.RECV_F: (Kind.SEND_F, -1, 0),
    Kind.SEND_B: (Kind.RECV_B, -1, 0),
    Kind.RECV_B: (Kind.SEND_B, +1, 0),
    Kind.SEND_W: (Kind.RECV_W, 0, +1),
    Kind.RECV_W: (Kind.SEND_W, 0, -1),
    **{receive: (send, 0, 0) for receive, send in SENT_BY.items() if send.is_crossing},
    **{send: (receive, 0, 0) for receive, send in SENT_BY.items() if send.is_crossing},
}
"""The kind at the other end of a message, its stage and its microbatch relative to the op's own."""


class Way(Enum):
    """The class of the channels that a message takes between two ranks. The value is its name in errors."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BULK = "bulk"


def way_of(kind: Kind) -> Way:
    """Return the class of channels of a communication kind."""
    match kind:
        case Kind.SEND_F | Kind.RECV_F:
            return Way.FORWARD
        case Kind.SEND_B | Kind.RECV_B:
            return Way.BACKWARD
        case _:
            return Way.BULK


def channel_of(send: Op, program: Program) -> tuple[int, int, Way]:
    """Return source rank, destination rank and class of a message. Its channel keeps the order of such messages."""
    return program.rank_of(send), program.rank_of(other_end(send)), way_of(send.kind)


def crossings(program: Program, hands_over: bool, changing: Container[int]) -> Iterator[Op]:
    """Yield the SEND of each message between the home of a replica's stage and a worker of another one that computes for it.

    Buffers also go between two such workers.

    Args:
        program: A program, with or without these messages.
        hands_over: As of :func:`needs`. If so, the accumulator comes home when another worker computes the last microbatch.
        changing: As of :func:`needs`. Their buffers go from worker to worker with the microbatches, and then home.
    """
    last = program.stages - 1

    def away(stage: int, kind: Kind) -> Iterator[Op]:
        return (Op(stage, kind, one.microbatch, None, one.replica) for one in program.routing.away(stage))

    yield from away(0, Kind.SEND_INPUT)
    yield from away(last, Kind.SEND_TARGET)
    for replica, row in enumerate(program.routing.workers):
        for stage, home in enumerate(row):
            if home is not None and stage in changing:
                sends = (Op(stage, Kind.SEND_BUFFERS, number, None, replica) for number in range(program.microbatches + 1))
                yield from (send for send in sends if program.rank_of(send) != program.rank_of(other_end(send)))
    yield from away(last, Kind.SEND_RESULT)
    if not hands_over or program.is_forward_only:
        return
    for stage in range(program.stages):
        for one in program.routing.away(stage):
            if one.microbatch == program.microbatches - 1:
                yield Op(stage, Kind.SEND_SUM, one.microbatch, None, one.replica)


def needs(op: Op, program: Program, lowered: bool, hands_over: bool = True, changing: Container[int] = ()) -> tuple[Need, ...]:
    """Return the needs of ``op``, besides the ops before it on its own rank.

    Args:
        op: The op.
        program: The program, whose stages and holders count and whose orders don't.
        lowered: Whether messages between ranks are ops of the program. If so, a compute op waits for its own rank's RECV, and
            the RECV for the other rank's SEND. If not, it waits for the producing op itself.
        hands_over: Whether the accumulator of weight gradients is handed over between workers. If not, each worker adds up its
            own, and the order of W matters on each worker alone.
        changing: The stages whose forwards change buffers. There an F waits for that of the microbatch before, since its worker
            hands the buffers over.
    """
    needed = [*_crossing_needs(op, program, hands_over, changing)] if lowered and not program.routing.stays_at_home else []
    paths = program.routing.path_of[op.replica]
    is_compute = op.kind.is_compute
    for offset, kinds, later, when in RULE[op.kind]:
        stage, microbatch = op.stage + offset, op.microbatch + later
        if not 0 <= stage < program.stages or microbatch < 0:
            continue
        crosses = is_compute and paths[microbatch][stage] != paths[op.microbatch][op.stage]
        if when is not When.ALWAYS and not (crosses and (hands_over if when is When.HANDED_OVER else stage in changing)):
            continue
        received = None
        if crosses and lowered:
            received = Kind.RECV_W if when is When.HANDED_OVER else RECEIVED_BY.get(offset)
        if received is None:
            needed.append(Need(stage, kinds, microbatch, op.replica))
        else:
            needed.append(Need(op.stage, (received,), op.microbatch, op.replica))
    return tuple(needed)


def _crossing_needs(op: Op, program: Program, hands_over: bool, changing: Container[int]) -> Iterator[Need]:
    """Yield the RECV of each crossing message that an op waits for."""
    is_away = op.kind is Kind.F and program.home_of(op) not in (-1, program.rank_of(op))
    for stage, kind in ((0, Kind.RECV_INPUT), (program.stages - 1, Kind.RECV_TARGET)):
        if is_away and op.stage == stage:
            yield Need(stage, (kind,), op.microbatch, op.replica)
    if op.kind is Kind.F and op.stage in changing and program.home_of(op) != -1:
        receive = Op(op.stage, Kind.RECV_BUFFERS, op.microbatch, None, op.replica)
        if program.rank_of(other_end(receive)) != program.rank_of(op):
            yield Need(op.stage, (Kind.RECV_BUFFERS,), op.microbatch, op.replica)
    last = program.microbatches - 1
    if op.kind is Kind.REDUCE and hands_over and program.holder(op.replica, op.stage, last) != program.home_of(op):
        yield Need(op.stage, (Kind.RECV_SUM,), last, op.replica)


def other_end(op: Op) -> Op:
    """Return the op at the other end of a communication op, on the same lane.

    Raises:
        ValueError: ``op`` is no communication op.
    """
    if op.kind not in _OTHER_END:
        raise ValueError(f"{op} has no peer: it sends and receives nothing")
    kind, offset, later = _OTHER_END[op.kind]
    return Op(op.stage + offset, kind, op.microbatch + later, op.lane, op.replica)


def peer_stage(op: Op) -> int:
    """Return the stage at the other end of a communication op.

    Raises:
        ValueError: ``op`` is no communication op.
    """
    return other_end(op).stage
