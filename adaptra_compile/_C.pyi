# ruff: noqa: N999 - the underscore and capital say that this is the extension module, as in torch._C
"""The C++ part: event simulation and list scheduling. Its callers are ``simulation.simulate`` and the passes, nobody else."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import Row
from adaptra.simulation.cost import Case, CostModel

@final
class Orders:
    """Op sequences outside Python, without communication ops. ``len()`` is the number of ops."""

    def __len__(self) -> int: ...

@final
class Simulated:
    """What a simulation found. Tuples have one entry per rank, ``peak_in_flight`` one per stage."""

    @property
    def complete(self) -> bool:
        """False when the ranks deadlock or an op is misplaced or occurs twice; nothing else has a meaning then."""

    @property
    def makespan(self) -> float: ...
    @property
    def busy(self) -> tuple[float, ...]: ...
    @property
    def first_start(self) -> tuple[float, ...]: ...
    @property
    def last_end(self) -> tuple[float, ...]: ...
    @property
    def peak_in_flight(self) -> tuple[int, ...]: ...
    @property
    def peak_memory(self) -> tuple[float, ...]: ...
    def intervals(self, rank: int) -> bytes:
        """One record ``=2d`` per compute op of the rank, in its order: start, end."""

    def messages(self) -> bytes:
        """One record ``=3i4x3d`` per message: source stage, destination stage, microbatch; posted, departed, arrived."""

def to_orders(orders: tuple[tuple[Op, ...], ...]) -> Orders:
    """Take the compute ops of a program out of Python."""

def simulate(program: Program, cost: CostModel, orders: Orders, rule: Mapping[Kind, Sequence[Row]]) -> Simulated:
    """Run ``orders`` (of ``program``, whose placement and microbatches count) under the rule; releases the interpreter lock.

    Raises:
        ValueError: The program and the cost model have different numbers of stages.
    """

def lower_bound(planning_case: Case) -> tuple[float, str, int]:
    """The greatest lower bound: its value, its name, and the stage, edge or rank that binds."""

def search_orders(
    planning_case: Case,
    in_flight: Sequence[int],
    warm_ups: Sequence[Sequence[int]],
    alternations: Sequence[tuple[Sequence[int], Sequence[int]]],
    effort: int,
    seed: int,
    seconds: float | None,
    should_stop: Callable[[], bool] | None,
    rule: Mapping[Kind, Sequence[Row]],
    enough: float = 0.0,
    start: Orders | None = None,
) -> tuple[float, tuple[tuple[Op, ...], ...]] | None:
    """The shortest makespan found for a case and its orders, rank by rank, or None when nothing was found within the limits.

    Releases the interpreter lock while it searches. However soon it is stopped, it looks until it has orders or has tried
    everything it starts from.

    Args:
        planning_case: Times, memory, placement and microbatches; ``memory_limit`` is kept.
        in_flight: Per stage, the most microbatches in flight.
        warm_ups: Where to start; every one has a number per stage, at least 1.
        alternations: (warm-up, W deferred by) per stage; the result is never worse than any of these that fits.
        effort: About how many ops to dispatch and simulate before the search ends.
        seed: Of all random choices.
        seconds: How long to search, if that is limited.
        should_stop: Asked every few milliseconds; True ends the search.
        rule: The dependency rule.
        enough: The search ends once orders take no longer; 0 for the shortest.
        start: Orders of the case, made to fit its memory and tried first.

    Raises:
        ValueError: The numbers per stage are not as many as the case has stages.
        Exception: What ``should_stop`` raised.
    """

def spare_memory(
    planning_case: Case, orders: Orders, at_most: float, effort: int, rule: Mapping[Kind, Sequence[Row]]
) -> tuple[tuple[Op, ...], ...]:
    """Orders of F, I and W that take at most so long and hold less, on no rank more; releases the interpreter lock.

    Args:
        planning_case: Times, memory, placement and microbatches; ``memory_limit`` doesn't matter.
        orders: Of this case, each kind in microbatch order.
        at_most: The longest makespan.
        effort: How many ops to time before it ends.
        rule: The dependency rule.
    """

@final
class Turns:
    """How long a thread that gives way works, and rests."""

def give_way(work: float, rest: float) -> None:
    """From now on this thread rests for ``rest`` seconds without the interpreter lock whenever it has worked for ``work``.

    It is the thread's profile function that does so, with every call of a function: ``sys.setprofile(None)`` ends it.
    """

@final
class Memory:
    """Page-aligned host memory of the engine's, kept alive by this object. ``len()`` is its size in bytes."""

    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...

@final
class Request:
    """A message under way."""

    @property
    def done(self) -> bool:
        """Whether it was exchanged or failed."""

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds until it is done, without holding the interpreter; whether it is."""

    def cancel(self, why: str) -> None:
        """End every wait with this error, unless it is done."""

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""

    @property
    def other(self) -> bytes | None:
        """The first bytes of the next message, if that is of another size than this receive expects."""

    @property
    def memory(self) -> Memory | None:
        """The message, if one arrived; to be left alone once it is released."""

    @property
    def moment(self) -> float:
        """When it was done, in seconds of ``time.monotonic``."""

@final
class Engine:
    """One rank's engine: one thread moves all of its messages.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        secret: 32 bytes that only this job's ranks know.
        heartbeat: Seconds between the signs of life on each connection.
        silence: Seconds without one after which a path has failed.
        healthy_for: Seconds for which a better path must have been up before messages return to it.
        lost_after: Seconds without any path after which what is pending fails.
        handshake: Seconds that a new connection has to prove that it knows the secret.
        session: What tells the engines that join each other from others with the same secret.

    Raises:
        ValueError: The secret has another length; so do all methods for arguments that can't be.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        secret: bytes,
        *,
        heartbeat: float,
        silence: float,
        healthy_for: float,
        lost_after: float,
        handshake: float,
        session: bytes = b"",
    ) -> None: ...
    def add_tcp_path(self, local: str) -> int:
        """The next path in the order of preference, TCP over this local address; the port that it listens on. Before start.

        Raises:
            RuntimeError: The system refuses; carries its text.
        """

    def add_verbs_path(self, device: str, port: int, local: str) -> int:
        """The next path, RDMA over a port, whose connections are made by way of this local address; the port it listens on.

        Raises:
            ValueError: There is no such RDMA port here, or it can't be used now; says why.
            RuntimeError: The system refuses; carries its text.
        """

    def set_peer(self, peer: int, endpoints: Sequence[tuple[str, int]]) -> None:
        """Where a peer listens: address and port of each path. Before start."""

    def start(self) -> None: ...
    def allocate(self, size: int) -> Memory:
        """Memory for messages to be sent."""

    def reserve(self, peer: int, size: int, count: int) -> None:
        """Let a peer send at least ``count`` messages of ``size`` bytes in each direction before any is released."""

    def send(self, peer: int, is_backward: bool, message: Memory, size: int, posted_at: float) -> Request:
        """Send the first ``size`` bytes of ``message``, which stays untouched until the request is done."""

    def receive(self, peer: int, is_backward: bool, size: int) -> Request:
        """Expect the channel's next message."""

    def release(self, request: Request) -> None:
        """Give back the memory of a message that arrived."""

    def statistics(self) -> list[tuple[int, int, bool, bool, dict[str, int]]]:
        """Per channel: source, destination, whether it is backward, whether this rank sends, and its counters by name."""

    def refusals(self) -> list[tuple[str, str, int]]:
        """Strangers who were turned away: from which address, why the first time, how often."""

    def close(self, reason: str, linger: float) -> None:
        """Fail what is pending, say good-bye to the peers within ``linger`` seconds, and end the thread. May be repeated."""

def crc32c(data: bytes, before: int = 0) -> int:
    """The CRC32C of ``data``, or of what had the checksum ``before`` and then ``data``."""

def find_verbs_ports() -> tuple[list[tuple[str, int, str, str, str]], str]:
    """Every RDMA port as libibverbs finds it: device, number, address, interface, and why it is unusable ("" if it is not).

    If there is none, the second value says why: no library, no device, or an extension that was built without its header.
    """
