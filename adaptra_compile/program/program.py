"""The pipeline program: the order of ops on every rank, without times.

A :class:`Program` is the representation that all parts of the compiler share. Passes transform it, the verifier proves that
ranks can execute it, the simulator times it and the runtime runs it. Golden tests compare its text form, and files contain
it::

    schedule 1f1b placement=0,1 microbatches=3
    0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2

The letters are those of torch.distributed.pipelining and never change their meaning: F forward, I input gradient,
W weight gradient, B both gradients at once.

One pipeline is a job of one replica. The text of a program of several replicas is of version 2. It also has the
:class:`.routing.Routing`, ops name the replica of their microbatch, and every worker may end with REDUCE and STEP::

    schedule rerouted version=2 stages=2 microbatches=2
    workers 0,1 2,-
    route 0 0-1 by 0,1
    route 1 0-1 by 2,1
    0: 0:0F0 0:0F1 0:0B0 0:0B1 0REDUCE 0STEP
    1: 0:1F0 0:1B0 1:1F0 1:1B0 0:1F1 0:1B1 1:1F1 1:1B1 1REDUCE 1STEP
    2: 1:0F0 1:0F1 1:0B0 1:0B1 0REDUCE 0STEP
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final

from adaptra.errors import ProgramTextError, ScheduleError
from adaptra.program.routing import NUMBER, Routing, TextLine

FORMAT_VERSION: Final = 2
"""The newest version of the text form. The text of a program of one pipeline has version 1."""
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
    SEND_W = "SEND_W"
    RECV_W = "RECV_W"
    SEND_INPUT = "SEND_INPUT"
    RECV_INPUT = "RECV_INPUT"
    SEND_TARGET = "SEND_TARGET"
    RECV_TARGET = "RECV_TARGET"
    SEND_RESULT = "SEND_RESULT"
    RECV_RESULT = "RECV_RESULT"
    SEND_SUM = "SEND_SUM"
    RECV_SUM = "RECV_SUM"
    SEND_BUFFERS = "SEND_BUFFERS"
    RECV_BUFFERS = "RECV_BUFFERS"
    REDUCE = "REDUCE"
    STEP = "STEP"

    @property
    def is_compute(self) -> bool:
        """Whether ops of this kind compute a microbatch on the stage's device."""
        return self in COMPUTE_KINDS

    @property
    def is_message(self) -> bool:
        """Whether ops of this kind send or receive."""
        return self in MESSAGE_KINDS

    @property
    def is_crossing(self) -> bool:
        """Whether messages of this kind go between the home of a replica's stage and workers that compute for it."""
        return self in CROSSING_KINDS

    @property
    def is_update(self) -> bool:
        """Whether ops of this kind update the stage's parameters, once per step: REDUCE and STEP."""
        return self in UPDATE_KINDS

    def __repr__(self) -> str:
        return self.value

    # Members are singletons; Enum's own hash is a Python function, which programs of 100,000 ops call millions of times.
    __hash__ = object.__hash__


COMPUTE_KINDS: Final = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
UPDATE_KINDS: Final = frozenset({Kind.REDUCE, Kind.STEP})
MESSAGE_KINDS: Final = frozenset(Kind) - COMPUTE_KINDS - UPDATE_KINDS
CROSSING_KINDS: Final = MESSAGE_KINDS - {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.SEND_W, Kind.RECV_W}


def refuse_size(stages: int, microbatches: int) -> str | None:
    """Return why a program of this size is too large, or None if it is not."""
    ops = 3 * stages * microbatches
    if ops <= MOST_OPS:
        return None
    return f"{stages:,} stages × {microbatches:,} microbatches are {ops:,} ops F, I and W: expected at most {MOST_OPS:,}"


@dataclass(frozen=True, slots=True)
class Op:
    """One op of one stage on one microbatch.

    Attributes:
        stage: The stage.
        kind: The kind.
        microbatch: The number of the microbatch in its replica; 0 for REDUCE and STEP, which have none. Both ends of a message
            with buffers have that of the F which needs them. Behind the last F that is the number of microbatches.
        lane: The path of a message. It is not part of the op's identity.
        replica: The replica of the microbatch, and for REDUCE and STEP that of the worker. 0 in a program of one pipeline.
    """

    stage: int
    kind: Kind
    microbatch: int
    lane: str | None = field(default=None, compare=False)
    replica: int = 0

    def __str__(self) -> str:
        """Return the op as the text of one pipeline has it. Replica 0 is not named; :meth:`Program.text_of` may name it."""
        return f"{self.replica}:{_short_text(self)}" if self.replica and not self.kind.is_update else _short_text(self)

    @property
    def with_replica(self) -> str:
        """The op as the text of several replicas has it."""
        return _short_text(self) if self.kind.is_update else f"{self.replica}:{_short_text(self)}"


@dataclass(frozen=True)
class Program:
    """The order of ops on every rank.

    Attributes:
        name: A word for people: letters, digits and ``_ . + -``.
        routing: The workers, and the routes that microbatches take through them.
        orders: ``orders[rank]`` is the op sequence of that rank. The ranks of several replicas are called workers; a lost
            worker has no ops.

    Raises:
        ScheduleError: The parts don't fit together. :func:`adaptra.program.verify.verify` checks whether the ranks can
            execute the program.
    """

    name: str
    routing: Routing
    orders: tuple[tuple[Op, ...], ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"name {self.name!r}: expected letters, digits and _ . + -")
        workers = self.routing.ranks
        if len(self.orders) != workers:
            raise ScheduleError(f"{len(self.orders)} op sequences: expected {workers}, one for each worker 0..{workers - 1}")

    @staticmethod
    def of_pipeline(name: str, placement: tuple[int, ...], microbatches: int, orders: tuple[tuple[Op, ...], ...]) -> Program:
        """Return the program of one pipeline.

        Args:
            name, orders: As of :class:`Program`.
            placement: ``placement[stage]`` is the stage's rank. Ranks are 0 … R-1, and each has at least one stage.
            microbatches: The number of microbatches of one step.

        Raises:
            ScheduleError: The parts don't fit together.
        """
        if microbatches < 1:
            raise ScheduleError(f"microbatches={microbatches}: expected at least 1")
        ranks = len(orders)
        if not placement or set(placement) != set(range(ranks)):
            raise ScheduleError(
                f"placement={','.join(map(str, placement))} with {ranks} op sequences: "
                f"expected every rank 0..{ranks - 1} to hold at least one stage and no other rank to be named"
            )
        return Program(name, Routing.of_pipeline(placement, microbatches), orders)

    @property
    def placement(self) -> tuple[int, ...]:
        """``placement[stage]`` is the rank of the stage in its replica."""
        return self.routing.placement

    @property
    def microbatches(self) -> int:
        """The number of microbatches of one step, of each replica."""
        return self.routing.microbatches

    @property
    def stages(self) -> int:
        """The number of stages of each replica."""
        return self.routing.stages

    @property
    def ranks(self) -> int:
        """The number of ranks, lost workers included."""
        return len(self.orders)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.routing.replicas

    @property
    def is_one_pipeline(self) -> bool:
        """Whether there is one replica, so that texts need not name replicas and workers."""
        return self.routing.is_one_pipeline

    @property
    def rank_word(self) -> str:
        """The word for a rank in texts: "rank" in a program of one pipeline, else "worker"."""
        return "rank" if self.is_one_pipeline else "worker"

    def text_of(self, op: Op) -> str:
        """Return one of its ops as it stands in the program's text."""
        return str(op) if self.is_one_pipeline else op.with_replica

    def holder(self, replica: int, stage: int, microbatch: int) -> int:
        """Return the rank that computes a microbatch of a replica on a stage."""
        return self.routing.path_of[replica][microbatch][stage]

    def rank_of(self, op: Op) -> int:
        """Return the rank that runs an op of a microbatch: the one that computes it, or the home if the op is its end.

        Buffers come from the worker of the microbatch before. Before the first one and behind the last one they are at home.
        """
        microbatch = op.microbatch - 1 if op.kind is Kind.SEND_BUFFERS else op.microbatch
        if op.kind in _AT_HOME or not 0 <= microbatch < self.microbatches:
            return self.home_of(op)
        return self.holder(op.replica, op.stage, microbatch)

    def home_of(self, op: Op) -> int:
        """Return the worker that has the parameters of an op's stage in the replica of its microbatch; -1 if it is lost."""
        home = self.routing.workers[op.replica][op.stage]
        return -1 if home is None else home

    def require_one_pipeline(self, user: str) -> None:
        """Refuse a program of several replicas where only one pipeline has a meaning.

        Raises:
            ScheduleError: The program has several replicas; names it and the ``user`` of the program.
        """
        if not self.is_one_pipeline:
            raise ScheduleError(f"{user}: {self.name} has {self.replicas} replicas: expected a program of one pipeline")

    @property
    def is_lowered(self) -> bool:
        """Whether the program contains its communication ops. If not, messages are implied."""
        return any(op.kind in MESSAGE_KINDS for order in self.orders for op in order)

    @property
    def is_forward_only(self) -> bool:
        """Whether no op computes a gradient."""
        return not any(op.kind in _BACKWARD for order in self.orders for op in order)

    def compute_only(self) -> Program:
        """Return the program without its communication ops."""
        return self.only(COMPUTE_KINDS)

    def only(self, kinds: Collection[Kind]) -> Program:
        """Return the program with ops of these kinds only."""
        return replace(self, orders=tuple(tuple(op for op in order if op.kind in kinds) for order in self.orders))

    def __str__(self) -> str:
        """Return the text form: a header, the routing of several replicas, and one line per live rank; ends in a newline."""
        return "".join(lines_of(self.name, self.routing, self.orders.__getitem__))

    @staticmethod
    def parse(text: str) -> Program:
        """Parse the text form. Blank lines and comments after ``#`` are ignored. Everything else must match in full.

        A header without ``version=`` is of version 1, a program of one pipeline.

        Raises:
            ProgramTextError: The text is invalid. The error has line and column, and names the token and the expected form.
        """
        lines = text_lines(text)
        if not lines:
            raise ProgramTextError("empty schedule: expected a line 'schedule NAME placement=0,1 microbatches=M'")
        header, *rest = lines
        match = _HEADER.fullmatch(header.text) or _ROUTED_HEADER.fullmatch(header.text)
        if match is None:
            expected = (
                "'schedule NAME placement=RANK,RANK,… microbatches=M' or 'schedule NAME version=2 stages=S microbatches=M'"
            )
            raise header.error(f"header {header.text!r}: expected {expected}")
        name, version, microbatches = match["name"], int(match["version"] or 1), int(match["microbatches"])
        is_routed = match.re is _ROUTED_HEADER
        if version != (2 if is_routed else 1):
            expected = "version 2 with stages=, or version 1 with placement="
            raise header.error(f"schedule version {match['version']}: this adaptra reads {expected}", match.start("version"))
        if not is_routed:
            placement = tuple(map(int, match["placement"].split(",")))
            orders = tuple(_parse_order(line, rank, parse_op) for rank, line in enumerate(rest))
            return _placed(header, partial(Program.of_pipeline, name, placement, microbatches), orders)
        if refused := refuse_size(int(match["stages"]), microbatches):
            raise header.error(refused)
        split = next((i for i, line in enumerate(rest) if not line.text.startswith(("workers ", "route "))), len(rest))
        routing = Routing.parse(header, rest[:split], int(match["stages"]), microbatches)
        return _placed(header, partial(Program, name, routing), _parse_routed_orders(header, rest[split:], routing))


_BACKWARD = frozenset({Kind.I, Kind.W, Kind.B})
_AT_HOME = frozenset({Kind.SEND_INPUT, Kind.SEND_TARGET, Kind.RECV_RESULT, Kind.RECV_SUM})
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_HEADER = re.compile(
    rf"schedule (?P<name>[A-Za-z0-9_.+-]+)(?: version=(?P<version>{NUMBER}))?"
    rf" placement=(?P<placement>{NUMBER}(?:,{NUMBER})*) microbatches=(?P<microbatches>{NUMBER})"
)
_ROUTED_HEADER = re.compile(
    rf"schedule (?P<name>[A-Za-z0-9_.+-]+) version=(?P<version>{NUMBER})"
    rf" stages=(?P<stages>[1-9][0-9]{{0,8}}) microbatches=(?P<microbatches>{NUMBER})"
)
_LANE_SUFFIX = "(?:@([a-z][a-z0-9_.-]*))?"
_OP = re.compile(rf"({NUMBER})(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)({NUMBER}){_LANE_SUFFIX}")
_ROUTED_OP = re.compile(
    rf"({NUMBER}):({NUMBER})((?:SEND|RECV)_(?:[FBW]|INPUT|TARGET|RESULT|SUM|BUFFERS)|F|I|W|B)({NUMBER}){_LANE_SUFFIX}"
)
_UPDATE = re.compile(rf"({NUMBER})(REDUCE|STEP)")


def parse_op(token: str) -> Op:
    """Parse one op of one pipeline, such as ``2F0`` or ``1SEND_B3@delegate``.

    Raises:
        ScheduleError: The token is invalid. The error names it and the expected form.
    """
    match = _OP.fullmatch(token)
    if match is None:
        if update := _UPDATE.fullmatch(token):
            return Op(int(update[1]), Kind(update[2]), 0)
        raise ScheduleError(f"op {token!r}: expected STAGE KIND MICROBATCH [@LANE] such as 2F0 or 1SEND_B3@delegate")
    stage, kind, microbatch, lane = match.groups()
    return Op(int(stage), Kind(kind), int(microbatch), lane)


def parse_recorded_op(token: str) -> Op:
    """Parse one op as it prints, of one pipeline or of several replicas, but for REDUCE and STEP.

    Raises:
        ScheduleError: The token is neither.
    """
    return _parse_routed_op(0, token) if ":" in token else parse_op(token)


def place_in(text: str, rank: int, number: int | None) -> tuple[int, int]:
    """Return line and column, counted from one, at which an op stands in a program's text.

    Args:
        text: A text that :meth:`Program.parse` reads.
        rank: The rank or worker, which has a line.
        number: The number of the op in its order, counted from zero. None for the start of the line.
    """
    line = next(line for line in text_lines(text) if line.text.startswith(f"{rank}:"))
    return line.number, line.column + (0 if number is None else _offset(line, number + 1))


def text_lines(text: str) -> list[TextLine]:
    """Return the lines that say something."""
    said = [(number, line.split("#", 1)[0]) for number, line in enumerate(text.splitlines(), 1)]
    return [
        TextLine(number, len(line) - len(line.lstrip()) + 1, stripped) for number, line in said if (stripped := line.strip())
    ]


def _offset(line: TextLine, number: int) -> int:
    """Return how many characters stand before a word of a line; words are counted from zero."""
    return next(islice(re.finditer(r"\S+", line.text), number, None)).start()


def _placed(
    header: TextLine, program: Callable[[tuple[tuple[Op, ...], ...]], Program], orders: tuple[tuple[Op, ...], ...]
) -> Program:
    try:
        return program(orders)
    except ScheduleError as error:
        raise header.error(str(error)) from None


def _parse_order(line: TextLine, rank: int, parse: Callable[[str], Op], what: str = "rank") -> tuple[Op, ...]:
    label, *tokens = line.text.split()
    if label != f"{rank}:":
        raise line.error(f"{label!r}: expected the line of {what} {rank} to start with '{rank}:'")
    ops: list[Op] = []
    for token in tokens:
        try:
            ops.append(parse(token))
        except ScheduleError as error:
            raise line.error(str(error), _offset(line, len(ops) + 1)) from None
    return tuple(ops)


def _parse_routed_orders(header: TextLine, lines: Sequence[TextLine], routing: Routing) -> tuple[tuple[Op, ...], ...]:
    live = routing.live
    if len(lines) != len(live):
        raise header.error(f"{len(lines)} lines of ops: expected {len(live)}, one for each live worker")
    orders: list[tuple[Op, ...]] = [()] * routing.ranks
    for worker, line in zip(live, lines, strict=True):
        orders[worker] = _parse_order(line, worker, partial(_parse_routed_op, routing.replica_of(worker)), "worker")
    return tuple(orders)


def _parse_routed_op(home: int, token: str) -> Op:
    """Parse one op of several replicas; ``home`` is the replica of its worker."""
    if update := _UPDATE.fullmatch(token):
        return Op(int(update[1]), Kind(update[2]), 0, None, home)
    match = _ROUTED_OP.fullmatch(token)
    if match is None:
        raise ScheduleError(
            f"op {token!r}: expected REPLICA:STAGE KIND MICROBATCH [@LANE] such as 1:2F0, or STAGE with REDUCE or STEP"
        )
    replica, stage, kind, microbatch, lane = match.groups()
    return Op(int(stage), Kind(kind), int(microbatch), lane, int(replica))


def lines_of(name: str, routing: Routing, order_of: Callable[[int], Sequence[Op]]) -> Iterator[str]:
    """Yield the lines of a program's text form, each with its newline: a header, the routes of several replicas, and the ops.

    Args:
        name, routing: As of :class:`Program`.
        order_of: Returns the ops of a live worker.
    """
    microbatches, text_of = routing.microbatches, _short_text if routing.is_one_pipeline else _with_replica
    if routing.is_one_pipeline:
        yield f"schedule {name} placement={','.join(map(str, routing.placement))} microbatches={microbatches}\n"
    else:
        yield f"schedule {name} version={FORMAT_VERSION} stages={routing.stages} microbatches={microbatches}\n"
        for line in routing.lines():
            yield f"{line}\n"
    for worker in routing.live:
        yield " ".join([f"{worker}:", *map(text_of, order_of(worker))]) + "\n"


_with_replica = attrgetter("with_replica")


def _short_text(op: Op) -> str:
    """Return an op's text without its replica."""
    if op.kind.is_update:
        return f"{op.stage}{op.kind.value}"
    text = f"{op.stage}{op.kind.value}{op.microbatch}"
    return text if op.lane is None else f"{text}@{op.lane}"
