"""The dependency rule, written once: the ops that each kind of op needs before it can start.

The rule is a table. The verifier, the passes and the runtime read it here, and the C++ simulator gets the same rows. A row has
a kind, an offset and a list of kinds. An op of this kind on stage ``s`` needs an op of one of the listed kinds on
stage ``s + offset``, of the same microbatch. A need before the first or after the last stage does not exist. A message meets a
need with an offset. In a lowered program this message is the RECV op, if the stages are on different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from adaptra.program import Kind, Op


class Row(NamedTuple):
    """One row of the rule: the stage of the needed op, relative to the op's own, and the kinds that meet the need."""

    offset: int
    kinds: tuple[Kind, ...]


class Need(NamedTuple):
    """One need of an op: an op of one of ``kinds`` on this stage and microbatch."""

    stage: int
    kinds: tuple[Kind, ...]
    microbatch: int

    def __str__(self) -> str:
        return " or ".join(f"{self.stage}{kind.value}{self.microbatch}" for kind in self.kinds)


_INPUT_GRADIENT = (Kind.I, Kind.B)

RULE: Final[dict[Kind, tuple[Row, ...]]] = {
    Kind.F: (Row(-1, (Kind.F,)),),
    Kind.I: (Row(0, (Kind.F,)), Row(+1, _INPUT_GRADIENT)),
    Kind.B: (Row(0, (Kind.F,)), Row(+1, _INPUT_GRADIENT)),
    Kind.W: (Row(0, (Kind.I,)),),
    Kind.SEND_F: (Row(0, (Kind.F,)),),
    Kind.SEND_B: (Row(0, _INPUT_GRADIENT),),
    Kind.RECV_F: (Row(-1, (Kind.SEND_F,)),),
    Kind.RECV_B: (Row(+1, (Kind.SEND_B,)),),
}

RECEIVED_BY: Final = {-1: Kind.RECV_F, +1: Kind.RECV_B}
"""The RECV that meets a need with this offset."""

SENT_BY: Final = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
"""The SEND on the neighbouring stage that meets a RECV."""


def needs(op: Op, placement: Sequence[int], lowered: bool) -> tuple[Need, ...]:
    """Return the needs of ``op``, besides the op before it on its own rank.

    Args:
        op: The op.
        placement: ``placement[stage]`` is the stage's rank.
        lowered: Whether messages between ranks are ops of the program. If so, a compute op waits for its own rank's RECV, and
            the RECV for the other rank's SEND. If not, it waits for the producing op itself.
    """
    found: list[Need] = []
    for offset, kinds in RULE[op.kind]:
        stage = op.stage + offset
        if not 0 <= stage < len(placement):
            continue
        crosses = offset != 0 and placement[stage] != placement[op.stage]
        if crosses and lowered and op.kind.is_compute:
            found.append(Need(op.stage, (RECEIVED_BY[offset],), op.microbatch))
        else:
            found.append(Need(stage, kinds, op.microbatch))
    return tuple(found)


def peer_stage(op: Op) -> int:
    """Return the stage at the other end of a communication op.

    Raises:
        ValueError: ``op`` is a compute op.
    """
    match op.kind:
        case Kind.SEND_F | Kind.RECV_B:
            return op.stage + 1
        case Kind.RECV_F | Kind.SEND_B:
            return op.stage - 1
        case Kind.F | Kind.I | Kind.W | Kind.B:
            raise ValueError(f"{op} has no peer: it computes")
