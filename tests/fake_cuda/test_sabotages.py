"""Each kind of fault that adaptra may have on GPUs is reported in a small training, and the same training without it is not."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from processes import run_processes

RANKS = DEVICES = 2
STEPS, HELD_SECONDS, SOON = 2, 0.005, 200.0

Sabotage = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Generator[None]:
    """Put what ``make`` returns of an attribute in its place."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def missing(owner: Any, name: str, caller: str, result: Any = None, thread: str = "") -> AbstractContextManager[None]:
    """Leave out the calls of a function from the functions of a name, in threads whose name has a text."""

    def make(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_left_out = sys._getframe(1).f_code.co_name == caller and thread in threading.current_thread().name
            return result if is_left_out else before(*args, **kwargs)

        return call

    return replaced(owner, name, make)


def before_each(owner: Any, name: str, do: Callable[..., Any]) -> AbstractContextManager[None]:
    """Do something before each call of a function, with its arguments."""

    def make(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            do(*args, **kwargs)
            return before(*args, **kwargs)

        return call

    return replaced(owner, name, make)


def after_each(owner: Any, name: str, do: Callable[..., Any]) -> AbstractContextManager[None]:
    """Do something after each call of a function, with its result and its arguments."""

    def make(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = before(*args, **kwargs)
            do(result, *args, **kwargs)
            return result

        return call

    return replaced(owner, name, make)


def sabotages() -> Mapping[str, tuple[Sabotage, str]]:
    """Return the sabotages, each with a part of what is reported of it: a fault, a wait of the host, or an error."""
    import torch
    from torch.cuda import Event, Stream

    from adaptra.graph.capture import batch
    from adaptra.runtime.devices.device_clock import OpClock
    from adaptra.runtime.transports.delegate.gpu import GpuDelegateTransport
    from adaptra.runtime.transports.staging import staging
    from adaptra.runtime.transports.staging.room import Room
    from adaptra.runtime.worker.stages import loss_reduction, stage

    copies = staging.Staging
    cuda: Any = torch.cuda

    def together(*sabotages: Sabotage) -> Sabotage:
        @contextlib.contextmanager
        def enter() -> Generator[None]:
            with contextlib.ExitStack() as stack:
                for sabotage in sabotages:
                    stack.enter_context(sabotage())
                yield

        return enter

    def on_a_side_stream(before: Any) -> Any:
        side: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            side[:] = side or [Stream()]
            with torch.cuda.stream(side[0]):
                return before(*args, **kwargs)

        return call

    def in_a_new_thread(before: Any) -> Any:
        def call(*args: Any) -> None:
            thread = threading.Thread(target=before, args=args)
            thread.start()
            thread.join()

        return call

    def on_the_present_stream(before: Any) -> Any:
        return lambda stream: cuda.current_stream(stream.device).record_event()

    def the_first(before: Any) -> Any:
        first: dict[Any, Any] = {}
        return lambda stream: first.setdefault(stream, before(stream))

    def on_the_host(before: Any) -> Any:
        def call(self: Any, specs: Any) -> Any:
            room = before(self, specs)
            room.tensors = tuple(one.cpu() for one in room.tensors)
            return room

        return call

    def blocking(before: Any) -> Any:
        def call(to: Any, source: Any, non_blocking: bool = False) -> Any:
            return before(to, source, non_blocking=non_blocking and sys._getframe(1).f_code.co_name != "to_host")

        return call

    def overwrite(_: Any, self: Any, message: Any, tensors: Any, start: Any) -> None:
        tensors[0].detach().mul_(1)

    def hold(*_: Any, **__: Any) -> None:
        from fake_cuda.machine import the_machine

        the_machine().hold_for(HELD_SECONDS)

    def ask_the_host(_: Any, self: Any, *args: Any) -> None:
        args[0].views[0].sum()

    def look(outputs: Any, *_: Any) -> None:
        outputs[0].sum().item()

    of = functools.partial
    return {
        # Order between streams.
        "a sent tensor is copied before it is made": (of(missing, Stream, "wait_stream", "to_host"), "race"),
        "what arrived is used before its copy": (of(missing, Stream, "wait_event", "hand_over"), "race"),
        "an op computes on a stream of its own": (of(replaced, stage.TrainingStage, "forward", on_a_side_stream), "race"),
        "a gradient is added on a stream of its own": (
            of(replaced, stage.TrainingStage, "weight_grad", on_a_side_stream),
            "race",
        ),
        "an event is recorded on another stream": (of(replaced, staging, "recorded", on_the_present_stream), "race"),
        "an event of an earlier copy is waited for": (of(replaced, staging, "recorded", the_first), "race"),
        "an event is never recorded": (of(missing, Event, "record", "recorded"), "event that was never recorded"),
        "a sent tensor is changed before its copy": (
            of(after_each, GpuDelegateTransport, "_fill", overwrite),
            "overwrites what",
        ),
        # Memory.
        "a sent tensor is freed before its copy": (of(missing, torch.Tensor, "record_stream", "to_host"), "early free"),
        "what arrived is overwritten before its use": (of(replaced, Room, "wait", lambda _: lambda self: None), "race"),
        "memory is unpinned while it is copied": (
            together(of(missing, Event, "synchronize", "_run"), of(missing, Stream, "synchronize", "close")),
            "pinned memory is given back",
        ),
        # The host and pinned memory.
        "a message is sent before its copy": (of(missing, Event, "synchronize", "_run", thread="sends"), "the engine's send"),
        "a slot is refilled before its copy": (
            of(missing, Event, "synchronize", "_run", thread="arrivals"),
            "the engine's next arrival",
        ),
        "the host reads a message before its copy": (of(after_each, copies, "to_host", ask_the_host), "reads pinned memory"),
        # Waits of the host.
        "a copy to the host blocks": (of(replaced, torch.Tensor, "copy_", blocking), "copy to the host at test_sabotages.py"),
        "the engine's memory is not pinned": (
            of(replaced, staging, "_runtime", lambda _: lambda: _NothingIsPinned),
            "of pageable memory at staging.py",
        ),
        "an op waits for its result": (of(after_each, stage.TrainingStage, "forward", look), ".item() at test_sabotages.py"),
        "a send waits for the device": (
            of(before_each, copies, "to_host", lambda self, *_: cuda.synchronize(self._device)),
            "cuda.synchronize at test_sabotages.py",
        ),
        "a send waits for its stream": (
            of(before_each, copies, "to_host", lambda self, *_: cuda.current_stream(self._device).synchronize()),
            "stream.synchronize at test_sabotages.py",
        ),
        # Devices.
        "a thread keeps device 0": (of(missing, cuda, "set_device", "_prefetch"), "wrong device"),
        "memory is pinned by a thread on device 0": (of(replaced, copies, "pin", in_a_new_thread), "cudaHostRegister"),
        "what arrived stays on the host": (
            of(replaced, copies, "make_room", on_the_host),
            "on the same device",
        ),
        "the first gradient is on the host": (
            of(replaced, loss_reduction.RootGradient, "of", lambda before: lambda *args: before(*args).cpu()),
            "on the same device",
        ),
        "a batch stays on the host": (of(replaced, batch, "beside", lambda _: lambda value, *_: value), "at least two devices"),
        # Times.
        "a time is read before it has passed": (
            together(of(before_each, OpClock, "read", hold), of(missing, Event, "synchronize", "seconds_of")),
            "device not ready",
        ),
    }


class _NothingIsPinned:
    cudaHostRegister = staticmethod(lambda *_: 0)  # noqa: N815
    cudaHostUnregister = staticmethod(lambda *_: 0)  # noqa: N815


def train(rank: int, names: list[str | None]) -> list[list[str]]:
    """Train with one sabotage after the other, and return what was reported of each."""
    import torch
    import torch.distributed as dist
    from fake_cuda import engine
    from fake_cuda.machine import the_machine
    from torch import nn

    import adaptra

    dist.init_process_group("gloo")
    engine.watch()
    machine, table = the_machine(), sabotages()
    found: list[list[str]] = []
    for name in names:
        machine.forget()
        torch.cuda.set_device(rank % DEVICES)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5)).cuda()
        inputs, targets = torch.randn(8, 8, pin_memory=True), torch.randint(0, 5, (8,)).pin_memory()
        error = ""
        with contextlib.nullcontext() if name is None else table[name][0]():
            pipe = None
            try:
                pipe = adaptra.compile(
                    model, stages=RANKS, microbatches=4, example_inputs=(inputs, targets), loss=nn.functional.cross_entropy
                )
                optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
                machine.syncs.clear()
                for _ in range(STEPS):
                    machine.hold_for(HELD_SECONDS)
                    pipe.step(inputs, targets)
                    optimizer.step()
                    optimizer.zero_grad()
                    inputs.normal_()
                    targets.random_(5)
            except Exception as raised:
                error = repr(raised)
            if pipe is not None:
                pipe.close()
        found.append([*map(str, machine.detector.reports), *map(str, machine.syncs), error])
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return found


def test_each_sabotage_is_reported_and_the_training_itself_is_not() -> None:
    table = sabotages()
    assert len(table) >= 20
    of_none, *of_sabotages = zip(*run_processes(train, RANKS, [None, *table], timeout=SOON), strict=True)
    reported = [*zip(table.items(), of_sabotages, strict=True)]
    missed = {name: of_ranks for (name, (_, said)), of_ranks in reported if not _is_said(said, of_ranks)}
    assert not missed
    assert not [said for _, said in table.values() if _is_said(said, of_none)], of_none


def _is_said(text: str, of_ranks: Iterable[Iterable[str]]) -> bool:
    return any(text in one for reports in of_ranks for one in reports)
