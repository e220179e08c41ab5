"""The verifier of one rank's messages, for ranks that insert theirs alone into a program that all have verified.

It uses the rules of :mod:`adaptra.program.verify`, and one more in place of the abstract run. Each SEND stands right behind the
op whose result it sends, and each RECV before the op that uses it. Neither waits. So messages at such places delay no rank, and
a program that runs without them runs with them.
"""

from __future__ import annotations

from collections.abc import Container

from adaptra.program import Op, Program
from adaptra.program.dependencies import SENT_BY
from adaptra.program.verify import (
    Facts,
    Position,
    channels_keep_their_order,
    check_ops,
    every_message_has_two_ends,
    foreign_microbatches_have_their_messages,
    lanes_agree,
    places_of,
)


def verify_messages(program: Program, rank: int, *, changing: Container[int] = ()) -> None:
    """Prove one rank's part of what :func:`.verify` proves of all messages.

    If every rank proves its part, and the program without messages is verified, then so is the program with all messages.

    Args:
        program: The program, with both ends of all messages to and from the rank. Without messages it is verified.
        rank: The rank.
        changing: The stages whose forwards change buffers.

    Raises:
        InvalidProgramError: A rule is broken, as of :func:`.verify`.
    """
    near = sorted(program.routing.peers((rank,)))
    check_ops(program, near)  # those of other ranks are looked up too
    places = places_of(program, near)
    facts = Facts(program, places, True, program.is_forward_only, True, False, changing, (rank,))
    every_message_has_two_ends(facts)
    foreign_microbatches_have_their_messages(facts, wanted=True)
    lanes_agree(facts)
    channels_keep_their_order(facts)
    _messages_stand_where_they_delay_nobody(facts, rank)


def _messages_stand_where_they_delay_nobody(facts: Facts, rank: int) -> None:
    last: Op | None = None
    received: set[Op] = set()
    for number, op in enumerate(facts.program.orders[rank]):
        if op.kind in SENT_BY:
            received.add(op)
            continue
        place = Position(rank, number, facts.program.rank_word)
        if op.kind.is_message:
            source = next(facts.needed(op), None)
            if source != last:
                expected = "at the start of the step" if source is None else f"right behind {facts.text_of(source)}"
                behind = "at the start" if last is None else f"behind {facts.text_of(last)}"
                raise facts.error(f"{facts.text_of(op)}, stands {behind}: expected it {expected}", place)
            continue
        last = op
        for receive in facts.needed(op):
            if receive.kind in SENT_BY and receive not in received:
                text = f"{facts.text_of(receive)}, stands behind {facts.text_of(op)}, which needs it: expected it before"
                raise facts.error(text, place)
