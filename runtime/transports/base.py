"""The interface of all transports, which carry messages with an identity from one rank to another.

A message is the tensors that one stage sends another for one microbatch of one step; its :class:`Identity` names it. Both sides
state the identity, and the receiver refuses a message other than the expected one.

A :class:`Transport` belongs to one rank. Neither :meth:`Transport.send` nor :meth:`Transport.receive` ever waits for the other
side; both return a :class:`Pending`. A channel is (source rank, destination rank, :class:`ChannelClass`). Messages of one
channel are received in the order of their sends, and channels never queue behind each other.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from torch import Tensor

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec, TensorSpec, dtype_name
from adaptra.program import Kind, Program
from adaptra.program.transport_contract import Contract
from adaptra.runtime.world.world import Attempt, WorkerId

if TYPE_CHECKING:
    from torch.distributed import Store

MessageLayout = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of every tensor of a message: the part of a :data:`MessageSpec` on which both sides must agree."""


def layout_of(specs: MessageSpec) -> MessageLayout:
    """Return the part of ``specs`` on which both sides must agree. Each side decides for itself whether a tensor requires a
    gradient.
    """
    return tuple((tuple(spec.shape), _dtype_text(spec)) for spec in specs)


def _dtype_text(spec: TensorSpec) -> str:
    text = dtype_name(spec.dtype)
    return f"{text}→bfloat16" if spec.lossy_bf16 else text


class ChannelClass(IntEnum):
    """A class of channels. Two ranks have one channel of each class in each direction, opened on first use.

    The values travel in the delegate's handshake.
    """

    FORWARD = 0
    """Activations, and what never meets gradients of activations in a queue."""
    BACKWARD = 1
    """Gradients of activations, and what never meets activations in a queue."""
    BULK = 2
    """What one worker does for another's replica, sums of weight gradients, and shared gradients of ranks with several stages.
    It gives way to the classes before where a transport can order messages."""
    SUMS = 3
    """Sums over replicas. They give way as bulk messages do, and their order depends on no other message's."""


class Purpose(Enum):
    """The purpose of a message. The value is its name in errors."""

    ACTIVATION = "activation"
    """The output of F, sent by a SEND_F."""
    GRADIENT = "gradient"
    """The output of I, sent by a SEND_B."""
    OUTPUT = "output"
    """The output of the last stage, for all ranks."""
    INPUT_GRADIENT = "input gradient"
    """The gradient of the model's inputs, for all ranks."""
    LOSS = "losses"
    """The losses of all microbatches, for all ranks."""
    SHARED_GRADIENT = "shared gradient"
    """A stage's contribution to the gradient of a parameter that several stages use, for its owner."""
    SHARED_SUM = "shared gradients' sum"
    """The sum of such contributions, for every stage that has a copy."""
    PROBE = "probe"
    """A few bytes whose flight is measured."""
    GRADIENT_NORM = "gradient norms"
    """The norms of a rank's gradients, for all ranks."""
    MODEL_STATE = "model state"
    """A part of a rank's parameters and buffers."""
    # Codes of messages are positions in this list, so new purposes come last.
    INPUT = "inputs"
    """The inputs of a microbatch that another replica's worker computes."""
    TARGET = "targets"
    """The targets of such a microbatch, and whether its home asks for the model's outputs."""
    RESULT = "results"
    """The results of such a microbatch, for its home replica."""
    ACCUMULATOR = "weight gradients so far"
    """A stage's sums of weight gradients, which the worker of the next microbatch continues; sent by a SEND_W."""
    TERM = "term"
    """A part of a replica's gradients, for the sum over replicas."""
    BUFFERS = "buffers"
    """The buffers that a stage changes, for the worker of the next microbatch; or behind the last one, for their home."""
    RANK_GRADIENTS = "shared gradients of a rank"
    """The contributions of all stages of a rank with several, for the rank that owns the parameters."""
    RANK_SUMS = "shared gradients' sums of a rank"
    """The sums of such contributions, for every other rank that has copies."""
    RATE_PROBE = "rate probe"
    """One of two messages of an activation's size over an edge that no microbatch takes, whose arrivals are measured."""
    MODEL_OUTPUTS = "model outputs"
    """A part of the outputs beside the loss, when their step has ended."""
    SUM = "sum of weight gradients"
    """A stage's sums of all microbatches, for their home."""
    SLOT = "slot"
    """What a slot of a pipeline's program holds, for the ranks behind the first stage."""
    STOLEN = "gradients of a stolen microbatch"
    """The weight gradients of a microbatch that another replica has taken, for its home, with the last stage's results."""


PURPOSE_OF: Final = {
    Kind.SEND_F: Purpose.ACTIVATION,
    Kind.SEND_B: Purpose.GRADIENT,
    Kind.SEND_W: Purpose.ACCUMULATOR,
    Kind.SEND_INPUT: Purpose.INPUT,
    Kind.SEND_TARGET: Purpose.TARGET,
    Kind.SEND_RESULT: Purpose.RESULT,
    Kind.SEND_SUM: Purpose.SUM,
    Kind.SEND_BUFFERS: Purpose.BUFFERS,
}
"""The purpose of the message that an op sends."""

_SENT_BY: Final = {purpose: kind for kind, purpose in PURPOSE_OF.items()}
_OF_EACH_MICROBATCH: Final = frozenset(
    (
        *(Purpose.OUTPUT, Purpose.INPUT_GRADIENT, Purpose.SHARED_GRADIENT),
        *(Purpose.RANK_GRADIENTS, Purpose.STOLEN),
    )
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a message, the same on both sides.

    Attributes:
        step: The training step; negative steps are evaluations. For sums over replicas, the number of the sum.
        purpose: The message's purpose, which decides the class of its channel.
        source: The sending stage. For messages between ranks, a rank's first stage, and for model state the rank.
        destination: The receiving stage.
        microbatch: The microbatch within the step, negative for one of the step before. Or the number of several messages of
            one purpose, or the part of a sum.
        specs: One per tensor.
        replica: The replica of the microbatch, or the one that sends a part of a sum.
        shape: The code of the batch's shape, 0 for that of the compilation; for a part of a sum, of what is added and how. Both
            sides compare it.
        span: For a part of a sum, the first replica whose term is in it, and the one behind the last.
        about: What a sum adds at this end of the message, for people.
    """

    step: int
    purpose: Purpose
    source: int
    destination: int
    microbatch: int
    specs: MessageSpec
    replica: int = 0
    shape: int = 0
    span: tuple[int, int] = (0, 0)
    about: str = ""

    @property
    def key(self) -> tuple[int, Purpose, int, int, int, int, tuple[int, int]]:
        """All fields but the specs, the batch's shape and the text."""
        return (self.step, self.purpose, self.source, self.destination, self.microbatch, self.replica, self.span)

    @property
    def channel(self) -> ChannelClass:
        """The class of the channel on which the message travels.

        Some messages of a pipeline are neither activations nor gradients of activations. They take the class on which these
        travel the other way, so they never queue with these.
        """
        match self.purpose:
            case Purpose.GRADIENT | Purpose.INPUT_GRADIENT:
                return ChannelClass.BACKWARD
            case Purpose.ACTIVATION | Purpose.OUTPUT | Purpose.LOSS:
                return ChannelClass.FORWARD
            case Purpose.SHARED_GRADIENT | Purpose.SHARED_SUM | Purpose.PROBE | Purpose.GRADIENT_NORM:
                return ChannelClass.BACKWARD if self.source < self.destination else ChannelClass.FORWARD
            case Purpose.MODEL_STATE | Purpose.MODEL_OUTPUTS:
                return ChannelClass.BACKWARD if self.source < self.destination else ChannelClass.FORWARD
            case Purpose.TERM:
                return ChannelClass.SUMS
            case (
                (Purpose.INPUT | Purpose.TARGET | Purpose.RESULT | Purpose.ACCUMULATOR | Purpose.SUM)
                | (Purpose.BUFFERS | Purpose.RANK_GRADIENTS | Purpose.RANK_SUMS | Purpose.RATE_PROBE)
                | (Purpose.SLOT | Purpose.STOLEN)
            ):
                # Between ranks with several stages, activations go both ways.
                return ChannelClass.BULK

    @property
    def is_for_host(self) -> bool:
        """Whether all of the message stays in host memory, also on a transport for a device."""
        return all(spec.stays_on_host for spec in self.specs)

    @property
    def may_be_lost(self) -> bool:
        """Whether the message may be lost with its other end, since nobody waits for it. That end may be done with the job."""
        return self.purpose is Purpose.RATE_PROBE

    @property
    def op(self) -> str:
        """The op that sends the message, such as ``1SEND_F3``, or the message's purpose if no op does."""
        return name_of(self.purpose, self.source, self.microbatch, self.replica, self.span)

    @property
    def edge(self) -> tuple[int, int]:
        """The directed edge of stages that the message crosses."""
        return (self.source, self.destination)

    def __str__(self) -> str:
        edge = f"edge {self.source}→{self.destination}"
        return f"{self.op} of step {self.step} on {edge} with {describe_layout(layout_of(self.specs))}"


def name_of(purpose: Purpose, source: int, microbatch: int, replica: int = 0, span: tuple[int, int] = (0, 0)) -> str:
    """Return the name of a message in errors: the op that sends it, or its purpose. Replica 0 is not named."""
    if purpose is Purpose.TERM:
        return f"part {microbatch} with the terms of replicas {span[0]} to {span[1] - 1} from replica {replica}"
    home = f"{replica}:" if replica else ""
    if purpose in _SENT_BY:
        return f"{home}{source}{_SENT_BY[purpose].value}{microbatch}"
    return f"{purpose.value} of microbatch {home}{microbatch}" if purpose in _OF_EACH_MICROBATCH else purpose.value


def describe_layout(layout: MessageLayout) -> str:
    """Return the layout as text: ``float32[2,3] int64[]``."""
    return " ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in layout) or "no tensors"


def check_tensors(identity: Identity, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that don't fit the identity of their message.

    Raises:
        TransportError: Names the message, the tensors and the expected ones.
    """
    fits = len(tensors) == len(identity.specs) and all(
        tensor.shape == spec.shape and tensor.dtype == spec.dtype for tensor, spec in zip(tensors, identity.specs, strict=True)
    )
    if not fits:
        given = tuple((tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors)
        raise TransportError(f"send of {identity}: got {describe_layout(given)}")


class Pending(ABC):
    """A message under way, as :meth:`Transport.send` and :meth:`Transport.receive` return it."""

    identity: Identity
    sent_at: float
    """A received message's posting time at its sender, in seconds of this rank's ``time.monotonic``."""
    departed_at: float
    """``sent_at``, or the time of the receiver's request if sends wait for receivers and that was later; seconds.

    The part of the way that the message had covered by then is unknown.
    """
    arrived_at: float
    """The arrival time of a received message, in seconds of this rank's ``time.monotonic``, even if no thread waited for it."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if :meth:`wait` returns or raises at once."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> tuple[Tensor, ...]:
        """Wait until the message has arrived, or until a sent message's buffer is no longer needed.

        Args:
            timeout: Seconds, or None to wait for ever. A wait that times out may be repeated.

        Returns:
            The tensors of a received message, () for a sent one.

        Raises:
            TransportError: The message is not the expected one, was not exchanged, or nothing happened within ``timeout``.
        """


class PathCounts(NamedTuple):
    """Counters of the paths of a channel so far: failed paths, and changes of path by messages."""

    source: int
    destination: int
    channel: ChannelClass
    failures: int
    changes: int


@dataclass(frozen=True, slots=True)
class LaneTraffic:
    """The messages of a program on one lane, as one rank sends and receives them.

    Attributes:
        sent: For the specs of a message, the largest number of such messages that are under way at a time.
        received: For (source rank, specs of a message), the largest number that are posted or kept at a time.
        lane: See :meth:`Transport.use_lanes`.
    """

    sent: Mapping[MessageSpec, int]
    received: Mapping[tuple[int, MessageSpec], int]
    lane: str | None = None


class Transport(ABC):
    """One rank's end of the network.

    Sent tensors must not be written to before the send is done, unless the contract says that the transport buffers them. Those
    of sums never are before they are sent: transports that need no copy send them from where they are. All
    methods may be called from any thread.

    Attributes:
        contract: The behaviour of messages; decides the positions of SEND and RECV in a program.
        rank: This rank, 0 … world_size-1.
        world_size: The number of ranks that the transport joins.
        store: The control plane: small texts under names, seen by all ranks.
        rdma_devices: The RDMA devices that messages may pass, by name.
    """

    contract: Contract
    rank: int
    world_size: int
    store: Store
    rdma_devices: tuple[str, ...] = ()

    @abstractmethod
    def send(
        self, destination_rank: int, identity: Identity, tensors: Sequence[Tensor], *, posted_at: float | None = None
    ) -> Pending:
        """Start to send a message.

        Args:
            destination_rank: Another rank.
            identity: The message's identity.
            tensors: As the identity's specs say.
            posted_at: The time of the hand-over in ``time.monotonic`` seconds, if that was before this call.

        Raises:
            TransportError: The tensors don't fit the identity, there is no such rank, or the transport was aborted or closed.
        """

    @abstractmethod
    def receive(self, source_rank: int, identity: Identity, into: Tensor | None = None) -> Pending:
        """Post a receive of exactly this message. It takes a buffer of the pool until :meth:`release`.

        Args:
            source_rank: Another rank.
            identity: The message's identity.
            into: Host memory for the message's only tensor, contiguous, which is filled at the end of :meth:`Pending.wait`.
                Such a message takes no buffer of the pool and is not released. Its bytes are those of a flat buffer, as
                :func:`.message_format.flat_bytes` returns them, unless it is a part of a sum.

        Raises:
            TransportError: There is no such rank, or the transport was aborted or closed.
            AssertionError: The pool has no such buffer left: the program needs more than it gave to :meth:`reserve`.
        """

    @abstractmethod
    def release(self, pending: Pending) -> None:
        """Give a received message's buffer back to the pool; its tensors must not be used any more."""

    @abstractmethod
    def reserve(self, counts: Mapping[tuple[int, MessageSpec], int]) -> None:
        """Size the pool of receive buffers.

        Args:
            counts: For (source rank, specs of a message), the largest number of such messages that are posted or kept at a
                time. It replaces earlier reservations; buffers in use stay valid.
        """

    @property
    @abstractmethod
    def attempt(self) -> Attempt:
        """The attempt of which messages are sent and received."""

    @abstractmethod
    def begin(self, attempt: Attempt) -> None:
        """Begin a later attempt, the same on all ranks. Messages of earlier ones are dropped where they arrive, and counted.

        Operations under way fail. Received messages no longer need to be released, and their tensors must not be used.

        Raises:
            TransportError: The transport was aborted or closed, or can't tell messages of two attempts apart.
        """

    @property
    @abstractmethod
    def dropped(self) -> int:
        """The number of messages of earlier attempts that came here."""

    def worker_of(self, rank: int) -> WorkerId:
        """Return the worker that a rank of this transport is; its own number unless the transport joins a part of the job."""
        return WorkerId(rank)

    def clock_of(self, rank: int) -> float:
        """Return the seconds by which the clock of a rank was ahead of this rank's when they connected; 0 on one host."""
        return 0.0

    def carries(self, identity: Identity, source: int, destination: int) -> bool:
        """Return whether a message between two ranks can travel here; each can, unless a transport says otherwise.

        Both ends of the message find the same.
        """
        return True

    def stand_by(self, source_rank: int, like: Identity, count: int) -> None:  # noqa: B027 - few have anything to do
        """Pre-post receives for the first messages of the next step, because all messages of this step on a channel have
        arrived.

        A transport whose sends wait for receives does so; others ignore the call. The plan and the messages may still change.

        Args:
            source_rank: The rank that sends the messages.
            like: A message of the channel, with the probable layout of the next ones.
            count: The number of messages.
        """

    def prepare(self, traffic: LaneTraffic) -> None:  # noqa: B027 - few have anything to do
        """Do ahead what the first messages of a program would wait for, such as to pin their memory. Runs beside training.

        Raises:
            LaunchError: A device refuses.
        """

    def use_lanes(self, step: int, program: Program) -> None:
        """Let each message from ``step`` on travel on the lane of its ops in the lowered program.

        Raises:
            TransportError: The program names a lane that this transport doesn't have.
        """
        for order in program.orders:
            for op in order:
                if op.lane is not None:
                    raise TransportError(f"{op}: {type(self).__name__} has no lanes")

    def path_counts(self) -> tuple[PathCounts, ...]:
        """Return the counters of each channel that has several paths and ends here. Does not delay messages."""
        return ()

    @abstractmethod
    def waiting_for(self, rank: int) -> Identity | None:
        """Return the oldest message for which this rank has posted a receive and that ``rank`` has not delivered."""

    @abstractmethod
    def abort(self, error: Exception) -> None:
        """Make every pending and every later operation raise ``error``. Only the first call counts. Never blocks for long."""

    @abstractmethod
    def close(self) -> None:
        """End the transport's threads. Sends under way get a few seconds, and operations still pending then fail. May be
        repeated.
        """


def now() -> float:
    """Return the time on the clock of all posting and arrival times, in seconds."""
    return time.monotonic()
