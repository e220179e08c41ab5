# ruff: noqa: N999 - the underscore and capital say that this is the extension module, as in torch._C
"""The C++ extension: simulation, search for orders, the engine of the delegate transport, and checksums."""

from collections.abc import Mapping, Sequence
from typing import final

from adaptra.program import Kind, Op, Program
from adaptra.program.dependencies import Row
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

@final
class Orders:
    """Op sequences outside Python, without communication ops. ``len()`` is the number of ops."""

    def __len__(self) -> int: ...
    def of(self, worker: int, replica: int | None = None) -> tuple[Op, ...]:
        """The order of a worker, its ops of ``replica`` if that is given."""

    def computed(self) -> tuple[tuple[Op, ...], ...]:
        """The orders of all workers without REDUCE and STEP."""

@final
class Problem:
    """The ops, costs and routes of one or several replicas as plain numbers.

    Args:
        planning_case: The case.
        holder: The worker of each microbatch on each stage of each replica, -1 for none.
        home: The replica of each worker.
        columns: The live workers of each stage.
        rule: The dependency rule.

    Raises:
        ValueError: The numbers of stages or microbatches don't fit together, or the rule is not of compute ops.
    """

    def __init__(
        self,
        planning_case: Case,
        holder: Sequence[int],
        home: Sequence[int],
        columns: Sequence[Sequence[int]],
        rule: Mapping[Kind, Sequence[Row]],
    ) -> None: ...
    @staticmethod
    def of_pipeline(owner: Case | Program, cost: CostModel, rule: Mapping[Kind, Sequence[Row]]) -> Problem:
        """Return the problem of one replica with ``owner``'s placement and microbatches.

        A STEP takes the time of ``CostModel.update``. Without STEPs in an order, a worker spends it after its last op.

        Raises:
            ValueError: The placement and the cost model have different numbers of stages.
        """

@final
class Simulated:
    """The result of a simulation. Tuples have one entry per worker; all but the period are of the first step."""

    @property
    def complete(self) -> bool:
        """False if the workers deadlock, or an op is misplaced, occurs twice, or is missing where steps repeat.

        No other result is valid then.
        """

    @property
    def makespan(self) -> float: ...
    @property
    def period(self) -> float:
        """Zero if one step was simulated."""

    @property
    def busy(self) -> tuple[float, ...]: ...
    @property
    def first_start(self) -> tuple[float, ...]: ...
    @property
    def last_end(self) -> tuple[float, ...]: ...
    def intervals(self, worker: int) -> bytes:
        """One record ``=2d`` per op of the worker's order, once per step: start, end."""

    def messages(self) -> bytes:
        """One record ``=4i3d`` per message: replica, sending and receiving stage, microbatch; posted, departed, arrived."""

def to_orders(orders: tuple[tuple[Op, ...], ...]) -> Orders:
    """Copy the ops of a program that occupy a worker out of Python.

    Raises:
        ValueError: A stage, replica or microbatch is negative or too large.
    """

def simulate(problem: Problem, orders: Orders, steps: int, times: bool = True) -> Simulated:
    """Simulate so many steps in a row. Releases the interpreter lock.

    Without ``times`` the result has the makespan and the period alone.

    Raises:
        ValueError: There is no step, or needs of the problem's rule span more than neighbouring stages.
    """

def runs_whole(problem: Problem, orders: Orders) -> bool:
    """Return whether orders are a complete step, or all its forwards, that the workers can execute.

    Releases the interpreter lock. Each worker keeps microbatch order, and updates its stages behind their gradients, or none.
    """

def peaks(cost: CostModel, orders: Orders) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the most microbatches in flight per stage on one worker, and the most memory held per worker."""

def search_period(
    problem: Problem,
    memory: Sequence[int] | None,
    effort: int,
    seed: int,
    seconds: float | None,
    enough: float,
    start: Orders | None = None,
) -> tuple[float, Orders] | None:
    """Search for the orders of all workers with the shortest period, and return it with them.

    Releases the interpreter lock. None if every try ended in a deadlock, which only memory limits cause.

    Args:
        problem: The problem.
        memory: The most microbatches that each worker holds; None for the limits of the cost model.
        effort: About how many ops to schedule.
        seed: Seed of all random choices.
        seconds: Time limit of the search, or None.
        enough: The period at which the search ends.
        start: F, I and W of each worker, tried first and made to fit the memory.

    Raises:
        ValueError: Edges are half duplex, communication blocks, or the start is not of this problem.
    """

def insert_foreign(
    pipeline: Problem,
    orders: Orders,
    homes: Sequence[tuple[int, Orders]],
    foreign: Sequence[tuple[int, int, int, int]],
    memory: Sequence[int],
    slack: float,
) -> tuple[float, list[tuple[int, int]], Orders] | None:
    """Insert microbatches of lost workers into the orders of one healthy replica.

    Releases the interpreter lock. ``homes`` has the replicas with lost workers and their orders, ``foreign`` tuples of home,
    stage, microbatch and host. Returns the most that steps are apart, the replica and stage of each worker that hosts, and
    their orders. Returns None if memory or times allow none.

    Raises:
        ValueError: An op of the orders is misplaced or missing.
    """

def lower_bound(problem: Problem) -> tuple[float, str, int]:
    """Return the greatest lower bound: its value, its name, and the stage, edge or rank that causes it."""

def search_orders(
    problem: Problem,
    in_flight: Sequence[int],
    warm_ups: Sequence[Sequence[int]],
    alternations: Sequence[tuple[Sequence[int], Sequence[int]]],
    effort: int,
    seed: int,
    seconds: float | None,
    enough: float = 0.0,
    start: Orders | None = None,
) -> tuple[float, Orders] | None:
    """Search for the orders of one pipeline with the shortest makespan.

    Releases the interpreter lock during the search. Even if stopped early, it continues until it has orders or has tried all
    starting points.

    Args:
        problem: Times, memory, placement and microbatches. ``memory_limit`` is observed.
        in_flight: The most microbatches in flight per stage.
        warm_ups: Warm-up counts to start from, each with one number per stage, at least 1.
        alternations: (warm-up, number of microbatches by which W is deferred) per stage. The result is never worse than any of
            these that fits.
        effort: The approximate number of ops to dispatch and simulate.
        seed: Seed of all random choices.
        seconds: Time limit of the search, or None.
        enough: Makespan at which the search ends; 0 to find the shortest.
        start: Orders of the pipeline, made to fit its memory and tried first.

    Returns:
        The makespan and the orders, rank by rank, or None if nothing was found within the limits.

    Raises:
        ValueError: The numbers per stage are not as many as the pipeline has stages.
    """

def spare_memory(problem: Problem, orders: Orders, at_most: float, effort: int, steps: int = 1) -> Orders:
    """Find orders of F, I and W within a time that need less memory, and on no rank more. Releases the interpreter lock.

    Args:
        problem: Times, memory, placement and microbatches. ``memory_limit`` is not used.
        orders: Orders of this pipeline, each kind in microbatch order.
        at_most: The longest makespan, or period.
        effort: The number of ops to simulate.
        steps: 1 for the makespan; else the period over so many steps in a row.
    """

@final
class Memory:
    """Page-aligned host memory of the engine, kept alive by this object. ``len()`` is its size in bytes."""

    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...

@final
class Request:
    """A message in transit."""

    @property
    def done(self) -> bool:
        """Whether the message was exchanged or failed."""

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds until it is done, without the interpreter lock. Return whether it is done."""

    def cancel(self, why: str) -> None:
        """End every wait with this error, unless it is done."""

    @property
    def error(self) -> str | None:
        """The reason of its failure, or None."""

    @property
    def other(self) -> bytes | None:
        """The first bytes of the next message, if that is of another size than this receive expects."""

    @property
    def memory(self) -> Memory | None:
        """The message, if one arrived. Do not use it after its release."""

    @property
    def moment(self) -> float:
        """The time of its end, in seconds of ``time.monotonic``."""

@final
class Engine:
    """The engine of one rank. One thread moves all of its messages.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        secret: 32 bytes that only this job's ranks know.
        heartbeat: Seconds between heartbeats on each connection.
        silence: Seconds without a heartbeat after which a path has failed.
        healthy_for: Seconds for which a better path must have been up before messages return to it.
        lost_after: Seconds without any path after which pending messages fail.
        handshake: Seconds within which a new connection must prove that it knows the secret.
        session: Bytes that distinguish engines that join each other from others with the same secret.

    Raises:
        ValueError: The secret has another length. All methods raise it for impossible arguments.
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
        """Add the next path in the order of preference: TCP over this local address. Call it before the start.

        Returns:
            The port on which it listens.

        Raises:
            RuntimeError: The system refuses. The text includes its reason.
        """

    def add_verbs_path(self, device: str, port: int, local: str) -> int:
        """Add the next path: RDMA over a port, with connections made over this local address.

        Returns:
            The port on which it listens.

        Raises:
            ValueError: The RDMA port does not exist or can't be used now. The text says why.
            RuntimeError: The system refuses. The text includes its reason.
        """

    def set_peer(self, peer: int, endpoints: Sequence[tuple[str, int]]) -> None:
        """Set the address and port on which a peer listens, for each path. Call it before the start."""

    def start(self) -> None: ...
    def allocate(self, size: int) -> Memory:
        """Allocate memory for messages to be sent."""

    def stock(self, memory: Memory) -> None:
        """Let the next slot for messages of this size lie in this memory, such as memory that a device has registered."""

    def reserve(self, peer: int, size: int, count: int) -> None:
        """Let a peer send at least ``count`` messages of ``size`` bytes in each class before any is released."""

    def send(self, peer: int, channel: int, message: Memory, size: int, posted_at: float) -> Request:
        """Send the first ``size`` bytes of ``message``. Do not write to it until the request is done.

        Args:
            peer: The destination.
            channel: The value of a :class:`~adaptra.runtime.transports.base.ChannelClass`.
            message: Memory of this engine.
            size: Bytes, at least 1.
            posted_at: The time of the hand-over in ``time.monotonic`` seconds.

        Raises:
            ValueError: There is no such peer or class, or the memory has not as many bytes.
        """

    def receive(self, peer: int, channel: int, size: int) -> Request:
        """Expect the next message of a peer's channel of this class.

        Raises:
            ValueError: There is no such peer or class.
        """

    def release(self, request: Request) -> None:
        """Release the memory of a message that arrived."""

    def begin(self, attempt: int) -> None:
        """Begin a later attempt: receives under way fail, and messages of earlier attempts are dropped where they arrive."""

    def statistics(self) -> list[tuple[int, int, int, bool, dict[str, int]]]:
        """Return, per channel: source, destination, class, whether this rank sends, and its counters."""

    def refusals(self) -> list[tuple[str, str, int]]:
        """Return the refused connections: address, reason of the first refusal, number of refusals."""

    def close(self, reason: str, linger: float) -> None:
        """Fail pending messages, notify the peers within ``linger`` seconds, and end the thread. May be called again."""

@final
class LivenessListener:
    """Answers direct questions of other processes from a thread that never runs Python, until it is closed.

    Args:
        address: A numeric address of this host.
        key: The key under which a question, 16 bytes, is answered by its HMAC-SHA256.

    Raises:
        ValueError: ``address`` is no numeric address.
        RuntimeError: The system refuses. The text includes its reason.
    """

    def __init__(self, address: str, key: bytes) -> None: ...
    @property
    def port(self) -> int:
        """The port on which it listens."""

    def close(self) -> None:
        """End it, so that questions are refused from now on. May be called again."""

def weighted_sum(numbers: int, count: int, weights: int, block: int) -> int:
    """Return the weighted sum of 64-bit numbers modulo 2**64, see :mod:`adaptra.runtime.data_parallel.checksum`.

    Args:
        numbers: Their address, in memory that nobody changes or frees meanwhile.
        count: How many there are.
        weights: The address of those of a block.
        block: The number of weights.

    Raises:
        ValueError: There are no weights.
    """

def crc32c(data: bytes, before: int = 0) -> int:
    """Return the CRC32C of ``data``, or of earlier data with the checksum ``before`` followed by ``data``."""

def find_verbs_ports() -> tuple[list[tuple[str, int, str, str, str]], str]:
    """Find all RDMA ports by libibverbs.

    Returns:
        Per port: device, number, address, interface, and why it is unusable ("" if it is usable). If there are none, the second
        value says why: no library, no device, or an extension built without libibverbs' header.
    """
