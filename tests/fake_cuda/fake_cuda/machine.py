"""The devices: their streams, which do work in order, events in them, and gates by which a test holds a stream back.

They report events and memory to torch's race sanitizer, as torch itself does on a GPU.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch.cuda import _gpu_trace

from fake_cuda.detector import Detector, Kind, Line
from fake_cuda.places import here, named
from fake_cuda.threads import Clock

_POLL_SECONDS: Final = 2e-4
_DEADLOCK_SECONDS: Final = 60.0


class Point:
    """A point in a stream's order, and when the stream passed it.

    Attributes:
        done_at: The time, as :func:`time.monotonic` has it; None as long as the stream hasn't passed it.
    """

    def __init__(self, done_at: float | None = None) -> None:
        self.done_at = done_at

    @property
    def is_done(self) -> bool:
        """Whether the stream has passed it."""
        return self.done_at is not None


class Gate(Point):
    """Holds back all work that is put on a stream behind it, until the test releases it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def release(self) -> None:
        """Let the stream go on, and return at once."""
        self._machine.pass_point(self)


@dataclass(slots=True)
class _Work:
    """What a stream does next: it waits for a point, takes a time, and does something."""

    waits_for: Point | None = None
    seconds: float = 0.0
    action: Callable[[], None] | None = None
    point: Point = field(default_factory=Point)
    begun_at: float | None = None

    def is_due(self, now: float) -> bool:
        if self.waits_for is not None and not self.waits_for.is_done:
            return False
        if self.begun_at is None:
            self.begun_at = now
        return now >= self.begun_at + self.seconds


class Event:
    """See :class:`torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._is_timing = enable_timing
        self._line: Line | None = None
        self._point = Point()
        self._clock = Clock()

    @property
    def cuda_event(self) -> int:
        """See ``torch.cuda.Event.cuda_event``."""
        return id(self)

    def record(self, stream: Any = None) -> None:
        """See :meth:`torch.cuda.Event.record`."""
        machine = the_machine()
        self.record_on(machine.current_line() if stream is None else (stream.device_index, stream.stream_id))

    def record_on(self, line: Line) -> None:
        """Record the event on a stream.

        Raises:
            RuntimeError: It was recorded on another device before, where CUDA made it.
        """
        machine = the_machine()
        if self._line is not None and self._line[0] != line[0]:
            raise RuntimeError("CUDA error: invalid resource handle: an event is recorded on a stream of another device")
        machine.touch(line[0])
        self._line = line
        _gpu_trace.EventRecordCallbacks.fire_callbacks(self.cuda_event, line[1])
        self._clock = dict(machine.detector.launch(line))
        self._point = machine.mark(line)

    def wait(self, stream: Any = None) -> None:
        """See :meth:`torch.cuda.Event.wait`."""
        self.block(the_machine().current_line() if stream is None else (stream.device_index, stream.stream_id))

    def block(self, line: Line) -> None:
        """Have a stream wait for the event."""
        if self._is_recorded("a stream waits"):
            machine = the_machine()
            machine.detector.stream_waits(line, self._clock)
            machine.wait(line, self._point)
            _gpu_trace.EventWaitCallbacks.fire_callbacks(self.cuda_event, line[1])

    def query(self) -> bool:
        """See :meth:`torch.cuda.Event.query`."""
        if self._line is None or self._point.is_done:
            the_machine().detector.host_waits(self._clock)
            return True
        return False

    def synchronize(self) -> None:
        """See :meth:`torch.cuda.Event.synchronize`."""
        if self._is_recorded("the host waits"):
            the_machine().host_waits("event.synchronize", [self._point], self._clock)
            _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

    def elapsed_time(self, end_event: Event) -> float:
        """See :meth:`torch.cuda.Event.elapsed_time`."""
        begin, end = self._point.done_at, end_event._point.done_at
        if not (self._is_timing and end_event._is_timing) or None in {self._line, end_event._line}:
            raise ValueError("Both events must be created with argument 'enable_timing=True' and recorded.")
        if begin is None or end is None:
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end - begin)

    def _is_recorded(self, who: str) -> bool:
        if self._line is None:
            the_machine().detector.report(Kind.UNRECORDED_EVENT, f"{who} for an event that was never recorded: nothing waits")
        return self._line is not None


class Machine:
    """All devices of this process.

    Args:
        extension: The stand-in's extension.
        devices: How many devices there are.

    Attributes:
        devices: How many devices there are.
        detector: What is reported.
        extension: The stand-in's extension.
        syncs: How often the host waited, by what it waited for, where and on which thread.
    """

    def __init__(self, extension: Any, devices: int) -> None:
        self.devices: Final = devices
        self.detector: Final = Detector()
        self.syncs: Final = Counter[str]()
        self.extension: Final = extension
        self._lock = _thread.RLock()
        self._wake = _thread.allocate_lock()
        self._queues: dict[Line, deque[_Work]] = {}
        self._parked: list[tuple[list[Point], int]] = []
        self._streams = 0
        self._is_running = False
        self._error: BaseException | None = None
        self._contexts: dict[int, str] = {}
        self._chosen = threading.local()
        os.register_at_fork(after_in_child=self._forked)

    # What tests use.

    def hold(self, stream: Any = None) -> Gate:
        """Hold back what is put on a stream from now on, until the gate is released; None for the current stream."""
        gate = Gate(self)
        self.wait(self.current_line() if stream is None else (stream.device_index, stream.stream_id), gate)
        return gate

    def hold_for(self, seconds: float) -> None:
        """Hold back what is put on the current stream from now on for a time."""
        self.take(self.current_line(), seconds)

    def forget(self) -> None:
        """Begin anew: no reports, no synchronisations, no contexts."""
        self.detector.reports.clear()
        self.syncs.clear()
        self._contexts.clear()

    # Streams and their work.

    def current_line(self, device: int | None = None) -> Line:
        """Return the current stream of a device, the current one unless another is given."""
        index = self.extension.device() if device is None else device
        return index, self.extension.stream(index)

    def new_stream(self, device: int) -> int:
        """Make a stream, and return its number on its device."""
        with self._lock:
            self._streams += 1
            return self._streams

    def new_event(self) -> Event:
        """Make an event, for autograd's engine."""
        return Event()

    def record(self, event: Event, device: int, stream: int) -> None:
        """Record an event of autograd's engine."""
        event.record_on((device, stream))

    def block(self, event: Event, device: int, stream: int) -> None:
        """Have a stream wait for an event of autograd's engine."""
        event.block((device, stream))

    def mark(self, line: Line) -> Point:
        """Return the point behind all that a stream has to do."""
        with self._lock:
            if not self._queues.get(line):
                return Point(time.monotonic())
            return self._put(line, _Work())

    def wait(self, line: Line, point: Point) -> None:
        """Have a stream wait for a point of another one."""
        with self._lock:
            if not point.is_done:
                self._put(line, _Work(waits_for=point))

    def take(self, line: Line, seconds: float) -> None:
        """Keep a stream busy for a time."""
        self.detector.launch(line)
        self._put(line, _Work(seconds=seconds))

    def deferred(self, device: int, stream: int, action: Callable[[], None]) -> None:
        """Do something behind all that a stream has to do; at once if that is nothing."""
        with self._lock:
            if self._queues.get((device, stream)):
                self._put((device, stream), _Work(action=action))
                return
        action()

    def pass_point(self, point: Point) -> None:
        """Let what waits for a point go on."""
        with self._lock:
            if not point.is_done:
                point.done_at = time.monotonic()
        self._wake_up()

    def _put(self, line: Line, work: _Work) -> Point:
        with self._lock:
            self._queues.setdefault(line, deque()).append(work)
            self.extension.set_busy(*line, True)
            if not self._is_running:
                self._is_running = True
                _thread.start_new_thread(self._run, ())
        self._wake_up()
        return work.point

    def _wake_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake
            self._wake.release()

    def _run(self) -> None:
        """Do the work of all streams; the device's own thread."""
        while True:
            while self._progress():
                pass
            with self._lock:
                is_timed = any(queue and queue[0].begun_at is not None for queue in self._queues.values())
            self._wake.acquire(timeout=_POLL_SECONDS if is_timed else 1.0)

    def _progress(self) -> bool:
        """Do what is due now; whether anything was."""
        progressed = False
        for line, queue in list(self._queues.items()):
            while queue and queue[0].is_due(time.monotonic()):
                work = queue[0]
                if work.action is not None:
                    try:
                        work.action()
                    except Exception as error:
                        self._error = self._error or error
                with self._lock:
                    work.point.done_at = time.monotonic()
                    queue.popleft()
                    if not queue:
                        self.extension.set_busy(*line, False)
                progressed = True
        with self._lock:
            passed = [address for points, address in self._parked if all(point.is_done for point in points)]
            self._parked = [parked for parked in self._parked if parked[1] not in passed]
        for address in passed:
            self.extension.recycle(address)
        return progressed

    def _forked(self) -> None:
        self._lock, self._wake, self._is_running = _thread.RLock(), _thread.allocate_lock(), False

    # Waits of the host.

    def host_waits(self, what: str, points: Sequence[Point], clock: Clock) -> None:
        """Block the calling thread until streams have passed points, and write down that it waited.

        Raises:
            RuntimeError: A kernel failed before, or nothing passes the points.
        """
        place = here()
        with self._lock:
            self.syncs[f"{what} at {named(place[:1])} on {threading.current_thread().name}"] += 1
        latest = time.monotonic() + _DEADLOCK_SECONDS
        while not all(point.is_done for point in points):
            if time.monotonic() > latest:
                raise RuntimeError(f"the stand-in for CUDA waits for ever: {what} at {named(place)}")
            time.sleep(_POLL_SECONDS)
        self.detector.host_waits(clock)
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"CUDA error in a kernel launched before: {error}") from error

    def waited(self, what: str, device: int, stream: int) -> None:
        """Have the host wait for a stream."""
        line = device, stream
        self.host_waits(what, [self.mark(line)], dict(self.detector.clock(line)))
        _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(stream)

    def is_idle(self, line: Line) -> bool:
        """Whether a stream has done all its work; what it did is known to the calling thread then."""
        with self._lock:
            is_idle = not self._queues.get(line)
        if is_idle:
            self.detector.host_waits(self.detector.clock(line))
        return is_idle

    def synchronize_device(self, device: int) -> None:
        """Have the host wait for all streams of a device."""
        lines = [line for line in self.detector.lines() if line[0] == device]
        clock = Clock()
        for line in lines:
            clock |= {line: self.detector.clock(line).get(line, 0)}
        self.host_waits("cuda.synchronize", [self.mark(line) for line in lines], clock)
        _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()

    # What the extension reports.

    def launched(self, op: str, device: int, stream: int, reads: Sequence[int], writes: Sequence[int]) -> None:
        """An op was launched on a stream."""
        self.touch(device)
        with self._lock:
            self.detector.work(op, (device, stream), reads, writes)

    def joined(self, first: int, second: int) -> None:
        """Two devices' current streams wait for each other, before a copy between the devices."""
        lines = self.current_line(first), self.current_line(second)
        points = [self.mark(line) for line in lines]
        for line, other, point in zip(lines, lines[::-1], points[::-1], strict=True):
            self.detector.stream_waits(line, dict(self.detector.launch(other)))
            self.wait(line, point)

    def host_op(self, op: str, reads: Sequence[int], writes: Sequence[int]) -> None:
        """An op of the host uses pinned memory."""
        with self._lock:
            self.detector.host_op(op, reads, writes)

    def allocated(self, address: int, size: int, device: int, stream: int, is_intact: bool) -> None:
        """Memory was allocated on a stream."""
        self.touch(device)
        with self._lock:
            self.detector.allocated(address, (device, stream), is_intact=is_intact)
        _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(address)

    def freed(self, address: int) -> None:
        """Memory was freed: it is used again once its stream and the recorded ones have come this far."""
        _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(address)
        with self._lock:
            block = self.detector.freed(address)
            assert block.owner is not None
            points = [self.mark(line) for line in {block.owner, *block.recorded} if self._queues.get(line)]
            if points:
                self._parked.append((points, address))
                return
        self.extension.recycle(address)

    def pinned_freed(self, address: int, size: int) -> None:
        """Pinned memory of torch's allocator was freed."""
        with self._lock:
            self.detector.unpinned(address, size, is_registered=False)

    def record_stream(self, address: int, device: int, stream: int) -> None:
        """A stream uses memory of another one."""
        with self._lock:
            self.detector.record_stream(address, (device, stream))

    # Devices of threads.

    def set_device(self, device: int) -> None:
        """Choose the calling thread's device."""
        self.extension.set_device(device)
        self._chosen.has = True
        self.touch(device)

    def _has_chosen(self) -> bool:
        return getattr(self._chosen, "has", False)

    def touch(self, device: int) -> None:
        """Note that the calling thread uses a device, of which CUDA makes a context then; report one that nobody chose."""
        if device in self._contexts:
            return
        if self._contexts and not self._has_chosen() and self.extension.device() == device == 0:
            self.detector.report(
                Kind.WRONG_DEVICE,
                f"a thread that has never set its device makes a context on device 0, in a process that uses {self._contexts}",
            )
        self._contexts[device] = named(here()[:1])

    def use_implicitly(self, what: str) -> None:
        """Note a call for which CUDA takes the thread's current device; report a thread that has not set it.

        Such a thread gets device 0, although the process works on another one.
        """
        device = self.extension.device()
        if not self._has_chosen() and self._contexts and device not in self._contexts:
            self.detector.report(Kind.WRONG_DEVICE, f"{what} on device {device}, which this thread has not set")
        self._contexts.setdefault(device, named(here()[:1]))


MACHINE: Machine | None = None
"""The devices of this process, once torch is imported."""


def the_machine() -> Machine:
    """Return the devices of this process."""
    assert MACHINE is not None, "torch was imported without the stand-in"
    return MACHINE
