"""Reports what the order of streams and events allows to go wrong: races, early frees, waits for nothing, wrong devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from fake_cuda.places import Place, here, named
from fake_cuda.threads import Clock, merge, own_clock

Line = tuple[int, int]
"""A stream: its device and its number; 0 is the device's default stream."""


class Kind(Enum):
    """What kind of fault a report is about."""

    RACE = "race"
    EARLY_FREE = "early free"
    USE_AFTER_FREE = "use after free"
    UNRECORDED_EVENT = "event that was never recorded"
    WRONG_DEVICE = "wrong device"
    FAILED_WORK = "result of a failed operation"
    ORDER = "order of operations on a communicator"


@dataclass(frozen=True, slots=True)
class Report:
    """A fault: what would go wrong, and where it was seen."""

    kind: Kind
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind.value} at {self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Access:
    """A use of memory by a stream's piece of work."""

    line: Line
    tick: int
    op: str
    place: Place

    def __str__(self) -> str:
        return f"{self.op} at {named(self.place)} on stream {self.line[1]} of device {self.line[0]}"


@dataclass(slots=True)
class Block:
    """Memory, and who used it: its last write, and by stream the last read since."""

    owner: Line | None
    write: Access | None = None
    reads: dict[Line, Access] = field(default_factory=dict[Line, Access])
    recorded: set[Line] = field(default_factory=set[Line])
    is_of_failed_work: bool = False


class Detector:
    """Follows the order of all streams, and collects reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._streams: dict[Line, Clock] = {}
        self._blocks: dict[int, Block] = {}
        self._host_blocks: dict[int, Block] = {}

    def report(self, kind: Kind, text: str) -> None:
        """Collect a report, once for each place."""
        made = Report(kind, text, named(here()))
        if made not in self.reports:
            self.reports.append(made)

    def clock(self, line: Line) -> Clock:
        """Return what is done before the next work on a stream begins; it is changed in place."""
        return self._streams.setdefault(line, Clock())

    def launch(self, line: Line) -> Clock:
        """Put one more piece of work on a stream: all that the launching thread knows is done before."""
        clock = self.clock(line)
        merge(clock, own_clock())
        clock[line] = clock.get(line, 0) + 1
        return clock

    def host_waits(self, clock: Clock) -> None:
        """Let the calling thread know what was waited for."""
        merge(own_clock(), clock)

    def stream_waits(self, line: Line, clock: Clock) -> None:
        """Let a stream's next work begin after what an event stands for."""
        merge(self.clock(line), clock)

    def lines(self) -> list[Line]:
        """Return all streams that had work."""
        return list(self._streams)

    def allocated(self, address: int, line: Line, *, is_intact: bool) -> None:
        """Begin to watch memory that an allocation returned."""
        clock = self.clock(line)
        self._blocks[address] = Block(line, Access(line, clock.get(line, 0), "the allocation", here()))
        if not is_intact:
            self.report(Kind.USE_AFTER_FREE, f"memory of device {line[0]} was written after it was freed")

    def freed(self, address: int) -> Block:
        """Stop to watch memory, and report streams that may still use it."""
        block = self._blocks.pop(address)
        assert block.owner is not None
        clock = self.clock(block.owner) | own_clock()
        merge(clock, self.clock(block.owner))
        uses = [*block.reads.values(), *([block.write] if block.write else [])]
        for use in uses:
            if use.line != block.owner and use.line not in block.recorded and clock.get(use.line, 0) < use.tick:
                self.report(
                    Kind.EARLY_FREE,
                    f"memory of stream {block.owner[1]} is freed while {use} may use it, and no record_stream said so",
                )
        return block

    def unpinned(self, first: int, size: int, *, is_registered: bool) -> None:
        """Stop to watch host memory, and report streams that may still copy from or to registered memory.

        torch's own allocator of pinned memory waits for copies before it gives memory to others.
        """
        for address in [address for address in self._host_blocks if first <= address < first + size]:
            block = self._host_blocks.pop(address)
            for use in [*block.reads.values(), *([block.write] if block.write else [])]:
                if is_registered and own_clock().get(use.line, 0) < use.tick:
                    self.report(Kind.EARLY_FREE, f"pinned memory is given back while {use} may use it")

    def record_stream(self, address: int, line: Line) -> None:
        """Let the allocator know that a stream uses memory; a tensor without elements has none."""
        if block := self._blocks.get(address):
            block.recorded.add(line)

    def work_failed(self, address: int) -> None:
        """Note that memory holds what is left of a failed operation."""
        if block := self._blocks.get(address):
            block.is_of_failed_work = True

    def work(self, op: str, line: Line, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Put work on a stream, and report what it uses too early. A tensor without elements has no memory, at address 0."""
        clock = self.launch(line)
        place = here()
        written = {*writes} - {0}
        for address in {*reads} - written - {0}:
            self._use(self._block(address), Access(line, clock[line], op, place), clock, is_write=False)
        for address in written:
            self._use(self._block(address), Access(line, clock[line], op, place), clock, is_write=True)

    def host_op(self, op: str, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Report an op of the host on pinned memory that a stream may still copy."""
        known, written = own_clock(), set(writes)
        for address in {*reads, *written}:
            block = self._host_blocks.get(address)
            if block is None:
                continue
            uses = [block.write] if block.write else []
            uses += block.reads.values() if address in written else ()
            for use in uses:
                if known.get(use.line, 0) < use.tick:
                    verb = "writes" if address in written else "reads"
                    self.report(Kind.RACE, f"{op} on the host {verb} pinned memory that {use} may still use")

    def _block(self, address: int) -> Block:
        return self._blocks.get(address) or self._host_blocks.setdefault(address, Block(None))

    def _use(self, block: Block, access: Access, clock: Clock, *, is_write: bool) -> None:
        if block.is_of_failed_work:
            if not is_write:
                self.report(Kind.FAILED_WORK, f"{access} reads what an operation that failed was to write")
            block.is_of_failed_work = not is_write
        verb = "writes" if is_write else "reads"
        if (before := block.write) and before.line != access.line and clock.get(before.line, 0) < before.tick:
            self.report(Kind.RACE, f"{access} {verb} what {before} made, without waiting for it")
        if is_write:
            for use in block.reads.values():
                if use.line != access.line and clock.get(use.line, 0) < use.tick:
                    self.report(Kind.RACE, f"{access} overwrites what {use} may still read")
            block.write, block.reads = access, {}
        else:
            block.reads[access.line] = access
