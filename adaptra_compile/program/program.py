"""The pipeline program: the order of ops on every rank, without times.

A :class:`Program` is the representation that all parts of the compiler share. Passes transform it, the verifier proves that
ranks can execute it, the simulator times it and the runtime runs it. Golden tests compare its text form, and files contain
it::

    schedule 1f1b placement=0,1 microbatches=3
    0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2

The letters are those of torch.distributed.pipelining and never change their meaning: F forward, I input gradient,
W weight gradient, B both gradients at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from adaptra.errors import ScheduleError

FORMAT_VERSION: Final = 1
MOST_OPS: Final = 10_000_000
"""The most F, I and W of a program, which take seconds and gigabytes. More are refused before they fill the memory."""


class Kind(Enum):
    """The kind of an op, named as in torch.distributed.pipelining."""

    F = "F"
    I = "I"  # noqa: E741 - the field's own letter
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        """Whether ops of this kind occupy the stage's device. Communication ops do not."""
        return self in COMPUTE_KINDS

    def __repr__(self) -> str:
        return self.value

    # Members are singletons; Enum's own hash is a Python function, which programs of 100,000 ops call millions of times.
    __hash__ = object.__hash__


COMPUTE_KINDS: Final = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})


def refuse_size(stages: int, microbatches: int) -> str | None:
    """Return why a program of this size is too large, or None if it is not."""
    ops = 3 * stages * microbatches
    if ops <= MOST_OPS:
        return None
    return f"{stages:,} stages × {microbatches:,} microbatches are {ops:,} ops F, I and W: expected at most {MOST_OPS:,}"


@dataclass(frozen=True, slots=True)
class Op:
    """One op of one stage on one microbatch. ``lane`` is the path of a message and is not part of the op's identity."""

    stage: int
    kind: Kind
    microbatch: int
    lane: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        return text if self.lane is None else f"{text}@{self.lane}"


@dataclass(frozen=True)
class Program:
    """The order of ops on every rank.

    Attributes:
        name: A word for people: letters, digits and ``_ . + -``.
        placement: ``placement[stage]`` is the stage's rank. Ranks are 0 … R-1, and each has at least one stage.
        microbatches: The number of microbatches of one step.
        orders: ``orders[rank]`` is the op sequence of that rank.

    Raises:
        ScheduleError: The parts don't fit together. :func:`adaptra.program.verify.verify` checks whether the ranks can
            execute the program.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    orders: tuple[tuple[Op, ...], ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"name {self.name!r}: expected letters, digits and _ . + -")
        if self.microbatches < 1:
            raise ScheduleError(f"microbatches={self.microbatches}: expected at least 1")
        ranks = len(self.orders)
        if not self.placement or set(self.placement) != set(range(ranks)):
            raise ScheduleError(
                f"placement={','.join(map(str, self.placement))} with {ranks} op sequences: "
                f"expected every rank 0..{ranks - 1} to hold at least one stage and no other rank to be named"
            )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.orders)

    @property
    def is_lowered(self) -> bool:
        """Whether the program contains its communication ops. If not, messages are implied."""
        return any(not op.kind.is_compute for order in self.orders for op in order)

    @property
    def is_forward_only(self) -> bool:
        """Whether no op computes a gradient."""
        return not any(op.kind in _BACKWARD for order in self.orders for op in order)

    def compute_only(self) -> Program:
        """Return the program without its communication ops."""
        return self.only(COMPUTE_KINDS)

    def only(self, kinds: Collection[Kind]) -> Program:
        """Return the program with ops of these kinds only."""
        orders = tuple(tuple(op for op in order if op.kind in kinds) for order in self.orders)
        return Program(self.name, self.placement, self.microbatches, orders)

    def __str__(self) -> str:
        """Return the text form: a header and one line per rank, ending in a newline."""
        placement = ",".join(map(str, self.placement))
        lines = [f"schedule {self.name} placement={placement} microbatches={self.microbatches}"]
        lines += [" ".join([f"{rank}:", *map(str, order)]) for rank, order in enumerate(self.orders)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> Program:
        """Parse the text form. Blank lines and comments after ``#`` are ignored. Everything else must match in full.

        A header without ``version=`` is of version 1, the only one so far.

        Raises:
            ScheduleError: The text is invalid. The error names the line, the token and the expected form.
        """
        lines = [(n, line.split("#", 1)[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
        lines = [(n, line) for n, line in lines if line]
        if not lines:
            raise ScheduleError("empty schedule: expected a line 'schedule NAME placement=0,1 microbatches=M'")
        name, placement, microbatches = _parse_header(*lines[0])
        orders = tuple(_parse_order(n, line, rank) for rank, (n, line) in enumerate(lines[1:]))
        return Program(name, placement, microbatches, orders)


_BACKWARD = frozenset({Kind.I, Kind.W, Kind.B})
_NUMBER = "(?:0|[1-9][0-9]{0,8})"
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_HEADER = re.compile(
    rf"schedule (?P<name>[A-Za-z0-9_.+-]+)(?: version=(?P<version>{_NUMBER}))?"
    rf" placement=(?P<placement>{_NUMBER}(?:,{_NUMBER})*) microbatches=(?P<microbatches>{_NUMBER})"
)
_OP = re.compile(rf"({_NUMBER})(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)({_NUMBER})(?:@([a-z][a-z0-9_.-]*))?")


def parse_op(token: str) -> Op:
    """Parse one op such as ``2F0`` or ``1SEND_B3@delegate``.

    Raises:
        ScheduleError: The token is invalid. The error names it and the expected form.
    """
    match = _OP.fullmatch(token)
    if match is None:
        raise ScheduleError(f"op {token!r}: expected STAGE KIND MICROBATCH [@LANE] such as 2F0 or 1SEND_B3@delegate")
    stage, kind, microbatch, lane = match.groups()
    return Op(int(stage), Kind(kind), int(microbatch), lane)


def _parse_header(number: int, line: str) -> tuple[str, tuple[int, ...], int]:
    match = _HEADER.fullmatch(line)
    if match is None:
        raise ScheduleError(f"line {number}: header {line!r}: expected 'schedule NAME placement=RANK,RANK,… microbatches=M'")
    if int(match["version"] or FORMAT_VERSION) != FORMAT_VERSION:
        raise ScheduleError(f"line {number}: schedule version {match['version']}: this adaptra reads version {FORMAT_VERSION}")
    return match["name"], tuple(map(int, match["placement"].split(","))), int(match["microbatches"])


def _parse_order(number: int, line: str, rank: int) -> tuple[Op, ...]:
    label, *tokens = line.split()
    if label != f"{rank}:":
        raise ScheduleError(f"line {number}: {label!r}: expected the line of rank {rank} to start with '{rank}:'")
    try:
        return tuple(map(parse_op, tokens))
    except ScheduleError as error:
        raise ScheduleError(f"line {number}: {error}") from None
