"""The verifier checks that ranks can execute a program and that it is a complete training step or evaluation.

It is a table of small rules. Rules on one op come first, then rules on all ops of the program. Last comes an abstract run, with
one op per rank and step and without times. Each rule may rely on those before it.

The abstract run makes the same assumptions as the executor. A compute op waits only for the ops that
:func:`adaptra.program.dependencies.needs` names. A SEND never waits for the receiver. A RECV only posts a receive and runs at
once; the compute op that uses the message waits for the matching SEND. So a RECV must come before its compute op on its own
rank, at any distance.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import SENT_BY, needs, peer_stage
from adaptra.program.lockstep import run_in_lockstep


class Position(NamedTuple):
    """Position of an op: its rank, and its number in that rank's order, counted from zero."""

    rank: int
    number: int

    def __str__(self) -> str:
        return f"op {self.number} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Facts:
    """A program and the facts about it that rules need.

    Attributes:
        program: The program.
        places: The position of every op, rank by rank in program order.
        lowered: Whether the program contains its communication ops.
        forward_only: Whether no op computes a gradient.
    """

    program: Program
    places: Mapping[Op, Position]
    lowered: bool
    forward_only: bool

    def needed(self, op: Op) -> Iterator[Op]:
        """Yield the program's own ops, lanes included, that meet the needs of ``op``."""
        for need in needs(op, self.program.placement, self.lowered):
            for kind in need.kinds:
                place = self.places.get(Op(need.stage, kind, need.microbatch))
                if place is not None:
                    yield self.program.orders[place.rank][place.number]

    def error(self, text: str) -> ScheduleError:
        """Return the error of a broken rule: the program's name and the text."""
        return ScheduleError(f"{self.program.name}: {text}")


def verify(program: Program, *, ordered_channels: bool = True) -> None:
    """Prove that the ranks can execute the program and that it is one complete training step or evaluation.

    A verified program has these properties:

    - Every op is on its stage's rank, once.
    - Every stage and microbatch has F and either I and W or B. Or the program has F everywhere and no other compute op.
    - On each stage the F ops, the I and B ops, and the W and B ops are in microbatch order.
    - If the program has communication ops, every message between ranks has one SEND and one RECV of the same lane. There are no
      other communication ops.
    - No rank waits forever.

    Args:
        program: The program.
        ordered_channels: Whether to prove also that messages of every channel are received in the order in which they are
            sent. A channel is (source rank, destination rank, forward or backward). Transports that keep order need this.

    Raises:
        ScheduleError: A rule is broken. The text names the first broken rule, the op and its position, the expectation and the
            other op. For a deadlock it names every waiting rank, its op, the op that it waits for and that op's position. It
            also shows the grid of ranks and steps.
    """
    for rank, order in enumerate(program.orders):
        for number, op in enumerate(order):
            for check in OP_RULES:
                problem = check(program, rank, op)
                if problem is not None:
                    raise ScheduleError(f"{program.name}: {op}, {Position(rank, number)}: {problem}")
    facts = Facts(program, _places(program), program.is_lowered, program.is_forward_only)
    for rule in PROGRAM_RULES:
        rule(facts)
    if ordered_channels:
        _channels_keep_their_order(facts)
    _no_deadlock(facts)


def _stage_is_on_this_rank(program: Program, rank: int, op: Op) -> str | None:
    if not 0 <= op.stage < program.stages:
        return f"stage {op.stage} does not exist: expected 0..{program.stages - 1}"
    if program.placement[op.stage] != rank:
        return f"the placement puts stage {op.stage} on rank {program.placement[op.stage]}"
    return None


def _microbatch_exists(program: Program, rank: int, op: Op) -> str | None:
    if not 0 <= op.microbatch < program.microbatches:
        return f"microbatch {op.microbatch} does not exist: expected 0..{program.microbatches - 1}"
    return None


def _lane_belongs_to_a_message(program: Program, rank: int, op: Op) -> str | None:
    if op.lane is None:
        return None
    if op.kind.is_compute:
        return f"a compute op has no lane, this one has {op.lane!r}"
    if not _LANE.fullmatch(op.lane):
        return f"lane {op.lane!r}: expected a lower-case letter, then lower-case letters, digits and _ . -"
    return None


def _message_crosses_ranks(program: Program, rank: int, op: Op) -> str | None:
    if op.kind.is_compute:
        return None
    peer = peer_stage(op)
    if not 0 <= peer < program.stages:
        return f"there is no stage {peer} at the other end: stages are 0..{program.stages - 1}"
    if program.placement[peer] == rank:
        return f"no message is needed: stages {op.stage} and {peer} are both on rank {rank}"
    return None


def _places(program: Program) -> Mapping[Op, Position]:
    """Return the position of every op. An op that occurs twice is refused."""
    places: dict[Op, Position] = {}
    for rank, order in enumerate(program.orders):
        for number, op in enumerate(order):
            place = Position(rank, number)
            first = places.setdefault(op, place)
            if first is not place:
                raise ScheduleError(f"{program.name}: {op} stands twice: {first} and {place}")
    return places


def _every_microbatch_is_complete(facts: Facts) -> None:
    found: defaultdict[tuple[int, int], set[Kind]] = defaultdict(set)
    for op in facts.places:
        if op.kind.is_compute:
            found[op.stage, op.microbatch].add(op.kind)
    allowed = _FORWARD_ONLY if facts.forward_only else _TRAINING
    for stage in range(facts.program.stages):
        for microbatch in range(facts.program.microbatches):
            kinds = found[stage, microbatch]
            if kinds not in allowed:
                has, *expected = [
                    " ".join(str(Op(stage, kind, microbatch)) for kind in Kind if kind in some) for some in (kinds, *allowed)
                ]
                raise facts.error(
                    f"stage {stage}, microbatch {microbatch}: rank {facts.program.placement[stage]} has {has or 'nothing'}: "
                    f"expected {' or '.join(expected)}"
                )


def _stages_keep_microbatch_order(facts: Facts) -> None:
    latest: dict[tuple[int, str], Op] = {}
    for op, place in facts.places.items():
        for what in _IN_ORDER[op.kind]:
            before = latest.get((op.stage, what))
            if before is not None and before.microbatch > op.microbatch:
                raise facts.error(
                    f"{op}, {place}, stands behind {before}, {facts.places[before]}: expected the {what} of a stage in "
                    f"microbatch order, which makes results independent of the plan"
                )
            latest[op.stage, what] = op


def _every_message_has_two_ends(facts: Facts) -> None:
    if not facts.lowered:
        return
    for producer in facts.places:
        for end, other in _ends_of_message(facts.program, producer):
            if end not in facts.places:
                rank = facts.program.placement[end.stage]
                there = facts.places.get(other, "missing too")
                raise facts.error(f"{end} is missing on rank {rank}: {producer} has a message to send; {other} is {there}")
    if facts.forward_only:
        for op, place in facts.places.items():
            if op.kind in (Kind.SEND_B, Kind.RECV_B):
                raise facts.error(f"{op}, {place}: expected no backward message, as no op computes a gradient")


def _ends_of_message(program: Program, producer: Op) -> tuple[tuple[Op, Op], ...]:
    """Return (SEND, RECV) and (RECV, SEND) of a compute op's message to another rank; empty if it sends none."""
    match producer.kind:
        case Kind.F:
            send, receive, stage = Kind.SEND_F, Kind.RECV_F, producer.stage + 1
        case Kind.I | Kind.B:
            send, receive, stage = Kind.SEND_B, Kind.RECV_B, producer.stage - 1
        case Kind.W | Kind.SEND_F | Kind.RECV_F | Kind.SEND_B | Kind.RECV_B:
            return ()
    if not 0 <= stage < program.stages or program.placement[stage] == program.placement[producer.stage]:
        return ()
    source, destination = Op(producer.stage, send, producer.microbatch), Op(stage, receive, producer.microbatch)
    return (source, destination), (destination, source)


def _sender(receive: Op) -> Op:
    """Return the SEND of the message that a RECV receives. It equals the program's own, which may have a lane."""
    return Op(peer_stage(receive), SENT_BY[receive.kind], receive.microbatch)


def _lanes_agree(facts: Facts) -> None:
    for receive, place in facts.places.items():
        if receive.kind in SENT_BY:
            there = facts.places[_sender(receive)]
            send = facts.program.orders[there.rank][there.number]
            if send.lane != receive.lane:
                raise facts.error(f"{send}, {there}, but {receive}, {place}: expected both ends of a message on one lane")


def _channels_keep_their_order(facts: Facts) -> None:
    sent: defaultdict[tuple[int, int, str], list[Op]] = defaultdict(list)
    received: defaultdict[tuple[int, int, str], list[Op]] = defaultdict(list)
    for op, place in facts.places.items():
        match op.kind:
            case Kind.SEND_F | Kind.SEND_B:
                sent[place.rank, facts.program.placement[peer_stage(op)], _DIRECTION[op.kind]].append(op)
            case Kind.RECV_F | Kind.RECV_B:
                received[facts.program.placement[peer_stage(op)], place.rank, _DIRECTION[op.kind]].append(op)
            case Kind.F | Kind.I | Kind.W | Kind.B:
                pass
    for channel, sends in sent.items():
        for number, (send, receive) in enumerate(zip(sends, received[channel], strict=True)):
            expected = _sender(receive)
            if send != expected:
                raise facts.error(
                    f"channel {channel[0]}→{channel[1]} {channel[2]}, message {number}: sent is {send}, {facts.places[send]}, "
                    f"but received is {receive}, {facts.places[receive]}, which {expected}, {facts.places[expected]}, sends: "
                    f"expected messages to be received in the order in which they are sent"
                )


def _no_deadlock(facts: Facts) -> None:
    def waits_for(op: Op, executed: Container[Op]) -> Op | None:
        if op.kind in SENT_BY:
            return None
        for needed in facts.needed(op):
            if needed not in executed:
                return needed
            if needed.kind in SENT_BY and _sender(needed) not in executed:
                return _sender(needed)
        return None

    run = run_in_lockstep(facts.program, waits_for)
    if run.stuck:
        lines = [f"deadlock: {len(run.stuck)} of {facts.program.ranks} ranks wait forever"]
        for rank, (number, missing) in run.stuck.items():
            there = facts.places[missing]
            behind = ", behind it" if there.rank == rank else ""
            lines.append(
                f"  rank {rank}: {facts.program.orders[rank][number]}, op {number}, waits for {missing}, {there}{behind}"
            )
        raise facts.error("\n".join([*lines, *(f"  {line}" for line in run.grid())]))


_LANE: Final = re.compile(r"[a-z][a-z0-9_.-]*")
_FORWARD_ONLY: Final = ({Kind.F},)
_TRAINING: Final = ({Kind.F, Kind.I, Kind.W}, {Kind.F, Kind.B})
_DIRECTION: Final = {Kind.SEND_F: "forward", Kind.RECV_F: "forward", Kind.SEND_B: "backward", Kind.RECV_B: "backward"}
_IN_ORDER: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.F: ("forwards",),
    Kind.I: ("input gradients",),
    Kind.W: ("weight gradients",),
    Kind.B: ("input gradients", "weight gradients"),
    Kind.SEND_F: (),
    Kind.RECV_F: (),
    Kind.SEND_B: (),
    Kind.RECV_B: (),
}

OP_RULES: Final[tuple[Callable[[Program, int, Op], str | None], ...]] = (
    _stage_is_on_this_rank,
    _microbatch_exists,
    _lane_belongs_to_a_message,
    _message_crosses_ranks,
)
"""The rules on single ops, given the op's rank."""

PROGRAM_RULES: Final[tuple[Callable[[Facts], None], ...]] = (
    _every_microbatch_is_complete,
    _stages_keep_microbatch_order,
    _every_message_has_two_ends,
    _lanes_agree,
)
"""The rules on all ops together. Each relies on the rules before it."""
