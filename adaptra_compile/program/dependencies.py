"""The dependency rule, written once: what each kind of op needs before it can start.

The rule is a table, so that the verifier, the passes and the runtime read it here and the C++ simulator is handed the same
rows. A row says: an op of this kind on stage ``s`` and microbatch ``k`` needs an op of one of the named kinds on stage
``s + offset`` and the same microbatch. A need that points before the first or behind the last stage does not exist. A
need with an offset is met by a message; in a lowered program whose stages lie on different ranks that message is the RECV op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from adaptra.program import Kind, Op


class Row(NamedTuple):
    """One line of the rule: the stage the need points to, relative to the op's own, and the kinds that meet it."""

    offset: int
    kinds: tuple[Kind, ...]


class Need(NamedTuple):
    """One thing an op waits for: the op of one of ``kinds`` on this stage and microbatch."""

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
"""Which RECV brings what a need with this offset points to."""

SENT_BY: Final = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
"""Which SEND on the neighbouring stage meets a RECV."""


def needs(op: Op, placement: Sequence[int], lowered: bool) -> tuple[Need, ...]:
    """What ``op`` waits for, besides the op before it on its own rank.

    Args:
        op: The op.
        placement: ``placement[stage]`` is the stage's rank.
        lowered: Whether messages between ranks are ops of the program. If so, a compute op waits for its own rank's RECV,
            and the RECV for the other rank's SEND; if not, it waits for the producing op itself.
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
    """The stage at the other end of a communication op.

    Raises:
        ValueError: ``op`` computes.
    """
    match op.kind:
        case Kind.SEND_F | Kind.RECV_B:
            return op.stage + 1
        case Kind.RECV_F | Kind.SEND_B:
            return op.stage - 1
        case Kind.F | Kind.I | Kind.W | Kind.B:
            raise ValueError(f"{op} has no peer: it computes")
