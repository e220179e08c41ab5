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
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from adaptra.errors import InvalidProgramError
from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import RULE, SENT_BY, WEIGHT_GRADIENT, Way, channel_of, crossings, needs, other_end
from adaptra.program.lockstep import run_in_lockstep
from adaptra.program.program import COMPUTE_KINDS


class Position(NamedTuple):
    """Position of an op: its rank or worker, and its number in that one's order, counted from zero."""

    rank: int
    number: int
    word: str

    def __str__(self) -> str:
        return f"op {self.number} of {self.word} {self.rank}"


@dataclass(frozen=True, slots=True)
class Facts:
    """A program and the facts about it that rules need.

    Attributes:
        program: The program.
        places: The position of every op, rank by rank in program order.
        lowered: Whether the program contains its communication ops.
        forward_only: Whether no op computes a gradient.
        hands_over: Whether workers hand over the accumulator of weight gradients.
        barrier: Whether every STEP waits for the REDUCE of all workers.
        changing: The stages whose forwards change buffers, which workers hand over.
        ranks: The ranks whose messages are checked.
    """

    program: Program
    places: Mapping[Op, Position]
    lowered: bool
    forward_only: bool
    hands_over: bool
    barrier: bool
    changing: Container[int]
    ranks: Collection[int]

    def needed(self, op: Op) -> Iterator[Op]:
        """Yield the program's own ops, lanes included, that meet the needs of ``op``."""
        for need in needs(op, self.program, self.lowered, self.hands_over, self.changing):
            for one in need.ops:
                place = self.places.get(one)
                if place is not None:
                    yield self.program.orders[place.rank][place.number]

    def text_of(self, op: Op) -> str:
        """Return the text of one of the program's ops and of its position."""
        return f"{self.program.text_of(op)}, {self.places[op]}"

    def missing(self, end: Op, other: Op, why: str) -> InvalidProgramError:
        """Return the error of a message whose one end is missing, and why there is a message."""
        rank, there = self.program.rank_of(end), self.places.get(other, "missing too")
        text = f"{self.program.text_of(end)} is missing on {self.program.rank_word} {rank}: {why}; "
        return self.error(f"{text}{self.program.text_of(other)} is {there}", rank)

    def error(self, text: str, at: Position | int) -> InvalidProgramError:
        """Return the error of a broken rule: the program's name and the text, with the op or the rank that it is about."""
        rank, number = (at, None) if isinstance(at, int) else (at.rank, at.number)
        return InvalidProgramError(f"{self.program.name}: {text}", rank=rank, number=number)


def verify(
    program: Program,
    *,
    ordered_channels: bool = True,
    hands_over: bool = True,
    barrier: bool = False,
    changing: Container[int] = (),
) -> None:
    """Prove that the ranks can execute the program and that it is one complete training step or evaluation.

    A verified program has these properties:

    - Every op is on its stage's rank, once. With several replicas that is the worker on the microbatch's route.
    - Every stage and microbatch has F and either I and W or B. Or the program has F everywhere and no other compute op.
    - On each rank and stage, a replica's F ops are in microbatch order. So are its I and B ops, and its W and B ops.
    - If the program has communication ops, every message between ranks has one SEND and one RECV of the same lane. There are no
      other communication ops.
    - If it has messages of microbatches that workers of other replicas compute, it has all of them, each with both ends. Those
      with buffers are the ones of ``changing``.
    - No op is a REDUCE or STEP, or each live worker has one of each per stage, behind the stage's last W.
    - No rank waits forever.

    Args:
        program: The program.
        ordered_channels: Whether to prove also that messages of every channel are received in the order in which they are
            sent. A channel is (source rank, destination rank, forward, backward or bulk). Transports that keep order need this.
        hands_over: Whether workers hand over the accumulator of weight gradients, so that each W waits for the one before it.
        barrier: Whether every STEP waits for the REDUCE of all workers, not of its own stage alone.
        changing: The stages whose forwards change buffers. They run in microbatch order over all workers too, since the worker
            of each microbatch takes the buffers from that of the one before.

    Raises:
        InvalidProgramError: A rule is broken. The text names the first broken rule, the op and its position, the
            expectation and the other op. For a deadlock it names every waiting rank, its op, the op that it waits for and that
            op's position. It also shows the grid of ranks and steps.
    """
    ranks = range(program.ranks)
    check_ops(program, ranks)
    places = places_of(program, ranks)
    facts = Facts(program, places, program.is_lowered, program.is_forward_only, hands_over, barrier, changing, ranks)
    for rule in PROGRAM_RULES:
        rule(facts)
    if ordered_channels:
        channels_keep_their_order(facts)
    _no_deadlock(facts)


def check_ops(program: Program, ranks: Collection[int]) -> None:
    """Apply the rules on single ops to those of these ranks.

    Raises:
        InvalidProgramError: A rule is broken.
    """
    for rank in ranks:
        for number, op in enumerate(program.orders[rank]):
            for check in OP_RULES:
                problem = check(program, rank, op)
                if problem is not None:
                    where = Position(rank, number, program.rank_word)
                    text = f"{program.name}: {program.text_of(op)}, {where}: {problem}"
                    raise InvalidProgramError(text, rank=rank, number=number)


def _stage_exists(program: Program, rank: int, op: Op) -> str | None:
    if not 0 <= op.stage < program.stages:
        return f"stage {op.stage} does not exist: expected 0..{program.stages - 1}"
    return None


def _replica_exists(program: Program, rank: int, op: Op) -> str | None:
    if not 0 <= op.replica < program.replicas:
        return f"replica {op.replica} does not exist: expected 0..{program.replicas - 1}"
    return None


def _microbatch_exists(program: Program, rank: int, op: Op) -> str | None:
    last = program.microbatches - (op.kind not in _OF_BUFFERS)
    if not 0 <= op.microbatch <= last:
        return f"microbatch {op.microbatch} does not exist: expected 0..{last}"
    return None


def _stage_is_on_this_rank(program: Program, rank: int, op: Op) -> str | None:
    if op.kind.is_update:
        has_stage = op.stage in program.routing.stages_of(rank)
        return None if has_stage else f"{program.rank_word} {rank} does not have stage {op.stage}"
    holder = program.rank_of(op)
    if holder == rank:
        return None
    if op.kind.is_crossing and holder == program.home_of(op):
        return f"the home of stage {op.stage} of replica {op.replica} is worker {holder}"
    if program.is_one_pipeline:
        return f"the placement puts stage {op.stage} on rank {holder}"
    microbatch = op.microbatch - (op.kind is Kind.SEND_BUFFERS)
    return f"the route of microbatch {microbatch} of replica {op.replica} passes stage {op.stage} on worker {holder}"


def _lane_belongs_to_a_message(program: Program, rank: int, op: Op) -> str | None:
    if op.lane is None:
        return None
    if not op.kind.is_message:
        return f"a compute op has no lane, this one has {op.lane!r}"
    if not _LANE.fullmatch(op.lane):
        return f"lane {op.lane!r}: expected a lower-case letter, then lower-case letters, digits and _ . -"
    return None


def _message_crosses_ranks(program: Program, rank: int, op: Op) -> str | None:
    return _no_message_crosses(program, rank, op) if op.kind.is_message else None


def _no_message_crosses(program: Program, rank: int, op: Op) -> str | None:
    end = other_end(op)
    if not 0 <= end.stage < program.stages:
        return f"there is no stage {end.stage} at the other end: stages are 0..{program.stages - 1}"
    if not 0 <= end.microbatch < program.microbatches and op.kind not in _OF_BUFFERS:
        last = program.microbatches - 1
        return f"there is no microbatch {end.microbatch} at the other end: microbatches are 0..{last}"
    if program.rank_of(end) != rank:
        return None
    if op.kind.is_crossing:
        at_home = f"microbatch {op.microbatch} is computed at home, on worker {rank}"
        return f"no message is needed: {f'worker {rank} has the buffers' if op.kind in _OF_BUFFERS else at_home}"
    if end.stage != op.stage:
        return f"no message is needed: stages {op.stage} and {end.stage} are both on {program.rank_word} {rank}"
    return f"no message is needed: microbatches {op.microbatch} and {end.microbatch} are both on {program.rank_word} {rank}"


def places_of(program: Program, ranks: Collection[int]) -> Mapping[Op, Position]:
    """Return the position of every op of these ranks.

    Raises:
        InvalidProgramError: An op occurs twice.
    """
    places: dict[Op, Position] = {}
    word = program.rank_word
    for rank in ranks:
        for number, op in enumerate(program.orders[rank]):
            place = Position(rank, number, word)
            first = places.setdefault(op, place)
            if first is not place:
                text = f"{program.name}: {program.text_of(op)} stands twice: {first} and {place}"
                raise InvalidProgramError(text, rank=rank, number=number)
    return places


def _every_microbatch_is_complete(facts: Facts) -> None:
    computed: defaultdict[tuple[int, int, int], set[Kind]] = defaultdict(set)
    for op in facts.places:
        if op.kind.is_compute:
            computed[op.replica, op.stage, op.microbatch].add(op.kind)
    allowed = _FORWARD_ONLY if facts.forward_only else _TRAINING
    program = facts.program
    for replica, stage, microbatch in product(*map(range, (program.replicas, program.stages, program.microbatches))):
        kinds = computed[replica, stage, microbatch]
        if kinds not in allowed:
            has, *expected = [
                " ".join(program.text_of(Op(stage, kind, microbatch, None, replica)) for kind in Kind if kind in some)
                for some in (kinds, *allowed)
            ]
            of_replica = "" if program.is_one_pipeline else f"replica {replica}, "
            where = f"{of_replica}stage {stage}, microbatch {microbatch}"
            rank = program.holder(replica, stage, microbatch)
            text = f"{where}: {program.rank_word} {rank} has {has or 'nothing'}: expected {' or '.join(expected)}"
            raise facts.error(text, rank)


def _stages_keep_microbatch_order(facts: Facts) -> None:
    latest: dict[tuple[int, int, int, str], Op] = {}
    for op, place in facts.places.items():
        for what in _IN_ORDER.get(op.kind, ()):
            key = place.rank, op.replica, op.stage, what
            before = latest.get(key)
            if before is not None and before.microbatch > op.microbatch:
                raise facts.error(
                    f"{facts.text_of(op)}, stands behind {facts.text_of(before)}: expected the {what} of a stage in "
                    f"microbatch order, which makes results independent of the plan",
                    place,
                )
            latest[key] = op


def every_message_has_two_ends(facts: Facts) -> None:
    """Refuse a message of one of the ranks, between stages or microbatches, that lacks an end, and one that may not be."""
    if not facts.lowered:
        return
    for producer in facts.places:
        for send in _sends_of(facts, producer):
            for end, other in ((send, other_end(send)), (other_end(send), send)):
                if end not in facts.places:
                    source = facts.program.text_of(producer)
                    raise facts.missing(end, other, f"{source} has a message to send")
    for op, place in facts.places.items():
        if facts.forward_only and op.kind.is_message and op.kind not in (Kind.SEND_F, Kind.RECV_F):
            raise facts.error(f"{facts.text_of(op)}: expected no backward message, as no op computes a gradient", place)
        if not facts.hands_over and op.kind in (Kind.SEND_W, Kind.RECV_W):
            text = f"{facts.text_of(op)}: expected no accumulator to be handed over, as each worker adds up its own"
            raise facts.error(text, place)


def foreign_microbatches_have_their_messages(facts: Facts, *, wanted: bool = False) -> None:
    """Refuse what crosses replicas, to or from one of the ranks, and lacks an end, and what need not cross.

    Unless such messages are ``wanted``, a program may do without any of them.
    """
    if facts.program.routing.stays_at_home:
        return
    crossing_ops = [op for op in facts.places if op.kind.is_crossing]
    sends = crossings(facts.program, facts.hands_over, facts.changing) if crossing_ops or wanted else ()
    needed = {end: send for send in sends for end in (send, other_end(send))}
    for end, send in needed.items():
        if not any(facts.program.rank_of(one) in facts.ranks for one in (send, other_end(send))):
            continue
        if end not in facts.places:
            raise facts.missing(end, other_end(end), _why_it_crosses(send, facts.program))
    for op in crossing_ops:
        if op not in needed:
            raise facts.error(f"{facts.text_of(op)}: no such message is needed on stage {op.stage}", facts.places[op])


def _why_it_crosses(send: Op, program: Program) -> str:
    of_replica = f"of replica {send.replica}"
    if send.kind is Kind.SEND_BUFFERS:
        source, destination = program.rank_of(send), program.rank_of(other_end(send))
        until = f"for microbatch {send.microbatch}" if send.microbatch < program.microbatches else "at the end"
        return f"buffers of stage {send.stage} {of_replica} go from worker {source} to {destination} {until}"
    where = program.holder(send.replica, send.stage, send.microbatch)
    return f"worker {where} computes microbatch {send.microbatch} {of_replica} on stage {send.stage}"


def _sends_of(facts: Facts, producer: Op) -> Iterator[Op]:
    """Yield the SEND of each message of a compute op to another rank, if one of the two is checked."""
    program, ranks = facts.program, facts.ranks
    stage, microbatch, replica = producer.stage, producer.microbatch, producer.replica
    for kind in _SENT_AFTER.get(producer.kind, ()):
        if kind is Kind.SEND_W and not facts.hands_over:
            continue
        send = Op(stage, kind, microbatch, None, replica)
        end = other_end(send)
        if 0 <= end.stage < program.stages and end.microbatch < program.microbatches:
            source, destination = program.rank_of(send), program.holder(replica, end.stage, end.microbatch)
            if source != destination and (source in ranks or destination in ranks):
                yield send


def _updates_stand_behind_gradients(facts: Facts) -> None:
    routing = facts.program.routing
    if not any(op.kind.is_update for op in facts.places):
        return
    last: dict[tuple[int, int], Position] = {}
    for op, place in facts.places.items():
        if op.kind in WEIGHT_GRADIENT:
            last[place.rank, op.stage] = place
    for worker in routing.live:
        for stage in routing.stages_of(worker):
            before = last.get((worker, stage))
            for kind in (Kind.REDUCE, Kind.STEP):
                update = Op(stage, kind, 0, None, routing.replica_of(worker))
                place = facts.places.get(update)
                if place is None:
                    word = facts.program.rank_word
                    text = f"{word} {worker} has no {update}: expected one REDUCE and one STEP per {word} and stage"
                    raise facts.error(text, worker)
                if before is not None and place < before:
                    there = facts.text_of(facts.program.orders[before.rank][before.number])
                    raise facts.error(f"{facts.text_of(update)}, stands before {there}: expected it behind", place)
                before = place


def lanes_agree(facts: Facts) -> None:
    """Refuse a message to one of the ranks whose two ends are on different lanes."""
    for receive, place in facts.places.items():
        if receive.kind in SENT_BY and place.rank in facts.ranks:
            there = facts.places[other_end(receive)]
            send = facts.program.orders[there.rank][there.number]
            if send.lane != receive.lane:
                ends = f"{facts.program.text_of(send)}, {there}, but {facts.program.text_of(receive)}, {place}"
                raise facts.error(f"{ends}: expected both ends of a message on one lane", place)


def channels_keep_their_order(facts: Facts) -> None:
    """Refuse a channel to or from one of the ranks whose messages are not received in the order in which they are sent."""
    sent: defaultdict[tuple[int, int, Way], list[Op]] = defaultdict(list)
    received: defaultdict[tuple[int, int, Way], list[Op]] = defaultdict(list)
    for op in facts.places:
        if op.kind in SENT_BY:
            received[channel_of(other_end(op), facts.program)].append(op)
        elif op.kind.is_message:
            sent[channel_of(op, facts.program)].append(op)
    for channel, sends in sent.items():
        if not any(rank in facts.ranks for rank in channel[:2]):
            continue
        for number, (send, receive) in enumerate(zip(sends, received[channel], strict=True)):
            expected = other_end(receive)
            if send != expected:
                raise facts.error(
                    f"channel {channel[0]}→{channel[1]} {channel[2].value}, message {number}: sent is {facts.text_of(send)}, "
                    f"but received is {facts.text_of(receive)}, which {facts.text_of(expected)}, sends: "
                    f"expected messages to be received in the order in which they are sent",
                    facts.places[receive],
                )


def _no_deadlock(facts: Facts) -> None:
    arrivals = _arrivals(facts)
    reduces = [op for op in facts.places if op.kind is Kind.REDUCE]

    def waits_for(op: Op, executed: Container[Op]) -> Op | None:
        if op.kind in SENT_BY:
            return None
        if op.kind is Kind.REDUCE:
            return next((before for before in arrivals[op.stage] if before not in executed), None)
        if op.kind is Kind.STEP and facts.barrier:
            return next((reduce for reduce in reduces if reduce not in executed), None)
        for needed in facts.needed(op):
            if needed not in executed:
                return needed
            if needed.kind in SENT_BY and other_end(needed) not in executed:
                return other_end(needed)
        return None

    run = run_in_lockstep(facts.program, waits_for)
    if run.stuck:
        word = facts.program.rank_word
        lines = [f"deadlock: {len(run.stuck)} of {facts.program.ranks} {word}s wait forever"]
        for rank, (number, missing) in run.stuck.items():
            there = facts.places[missing]
            behind = ", behind it" if there.rank == rank else ""
            waiting = facts.program.text_of(facts.program.orders[rank][number])
            awaited = facts.program.text_of(missing)
            lines.append(f"  {word} {rank}: {waiting}, op {number}, waits for {awaited}, {there}{behind}")
        rank, (number, _) = next(iter(run.stuck.items()))
        raise facts.error("\n".join([*lines, *(f"  {line}" for line in run.grid())]), Position(rank, number, word))


def _arrivals(facts: Facts) -> Mapping[int, list[Op]]:
    """Return, per stage, what a REDUCE waits for, since it begins when the last worker has come to it.

    That is the op before each worker's REDUCE, and both ends of the sums that these need.
    """
    arrivals: defaultdict[int, list[Op]] = defaultdict(list)
    for op, place in facts.places.items():
        if op.kind is Kind.REDUCE:
            arrivals[op.stage] += facts.program.orders[place.rank][: place.number][-1:]
            for receive in facts.needed(op):
                arrivals[op.stage] += [receive, other_end(receive)]
    return arrivals


_OF_BUFFERS: Final = frozenset({Kind.SEND_BUFFERS, Kind.RECV_BUFFERS})
_LANE: Final = re.compile(r"[a-z][a-z0-9_.-]*")
_FORWARD_ONLY: Final = ({Kind.F},)
_TRAINING: Final = ({Kind.F, Kind.I, Kind.W}, {Kind.F, Kind.B})
_SENT_AFTER: Final = {
    producer: tuple(send for send in SENT_BY.values() if not send.is_crossing and producer in RULE[send][0].kinds)
    for producer in COMPUTE_KINDS
}
"""The kinds of messages to other stages or later microbatches that each kind of compute op sends."""
_IN_ORDER: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.F: ("forwards",),
    Kind.I: ("input gradients",),
    Kind.W: ("weight gradients",),
    Kind.B: ("input gradients", "weight gradients"),
}

OP_RULES: Final[tuple[Callable[[Program, int, Op], str | None], ...]] = (
    _stage_exists,
    _replica_exists,
    _microbatch_exists,
    _stage_is_on_this_rank,
    _lane_belongs_to_a_message,
    _message_crosses_ranks,
)
"""The rules on single ops, given the op's rank."""

PROGRAM_RULES: Final[tuple[Callable[[Facts], None], ...]] = (
    _every_microbatch_is_complete,
    _stages_keep_microbatch_order,
    every_message_has_two_ends,
    foreign_microbatches_have_their_messages,
    lanes_agree,
    _updates_stand_behind_gradients,
)
"""The rules on all ops together. Each relies on the rules before it."""
