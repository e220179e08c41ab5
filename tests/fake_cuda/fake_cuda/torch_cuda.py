"""What ``torch.cuda`` has in Python, for the stand-in's devices."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch

from fake_cuda.building import EXTENSION
from fake_cuda.machine import Event, Machine, the_machine

_MEMORY_BYTES: Final = 16 << 30
_CYCLES_PER_SECOND: Final = 1e9
_CUDA: Final = 1  # torch's number of this type of device


def _extension() -> Any:
    return sys.modules[EXTENSION]


def _index(device: Any = None) -> int:
    """The number of a device: the current one's, unless one is named with its number."""
    if isinstance(device, int):
        return device
    named = None if device is None else torch.device(device).index
    return _extension().device() if named is None else named


class Stream(torch.Stream):
    """See :class:`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kept: Any) -> Stream:
        """Make a stream, or one for the number of one that there is."""
        if not kept:
            index = _index(device)
            kept = {"stream_id": the_machine().new_stream(index), "device_index": index, "device_type": _CUDA}
        return super().__new__(cls, **kept)

    @property
    def cuda_stream(self) -> int:
        """The number that CUDA would know it by."""
        return self.stream_id

    @property
    def _line(self) -> tuple[int, int]:
        return self.device_index, self.stream_id

    def wait_stream(self, other: Any) -> None:
        """See :meth:`torch.cuda.Stream.wait_stream`."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Any) -> None:
        """See :meth:`torch.cuda.Stream.wait_event`."""
        event.block(self._line)

    def record_event(self, event: Any = None) -> Any:
        """See :meth:`torch.cuda.Stream.record_event`."""
        event = event or Event()
        event.record_on(self._line)
        return event

    def synchronize(self) -> None:
        """See :meth:`torch.cuda.Stream.synchronize`."""
        the_machine().waited("stream.synchronize", *self._line)

    def query(self) -> bool:
        """See :meth:`torch.cuda.Stream.query`."""
        return the_machine().is_idle(self._line)

    def __enter__(self) -> Stream:
        self._contexts: list[stream]
        if not hasattr(self, "_contexts"):
            self._contexts = []
        self._contexts.append(stream(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.pop().__exit__()


class stream:  # noqa: N801
    """See :class:`torch.cuda.StreamContext`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: tuple[Stream, Stream] | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = current_stream(), current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            outer, of_device = self._before
            set_stream(of_device)
            set_stream(outer)
            if outer.device_index != of_device.device_index:
                the_machine().touch(outer.device_index)


def current_stream(device: Any = None) -> Stream:
    """See :func:`torch.cuda.current_stream`."""
    index, number = the_machine().current_line(_index(device))
    return Stream(stream_id=number, device_index=index, device_type=_CUDA)


def default_stream(device: Any = None) -> Stream:
    """See :func:`torch.cuda.default_stream`."""
    return Stream(stream_id=0, device_index=_index(device), device_type=_CUDA)


def set_stream(stream: Stream | None) -> None:
    """See :func:`torch.cuda.set_stream`."""
    if stream is not None:
        _extension().set_device(stream.device_index)
        _extension().set_stream(stream.device_index, stream.stream_id)


def set_device(device: Any) -> None:
    """See :func:`torch.cuda.set_device`."""
    if (index := _index(device)) >= 0:
        the_machine().set_device(index)


def _exchange_device(device: int) -> int:
    before = _extension().device()
    if device >= 0:
        _extension().set_device(device)
    return before


def _maybe_exchange_device(device: int) -> int:
    return _exchange_device(device)  # torch.compile knows both, by what they are


def _new_storage(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a storage of the device too, which torch's own class refuses in a torch without CUDA."""
    if "device" not in kwargs or torch.device(kwargs["device"]).type != "cuda":
        return torch._C.StorageBase.__new__(cls, *args, **kwargs)
    return torch.empty(*args or (0,), dtype=torch.uint8, **kwargs).untyped_storage()


def _seen_by_the_detector(name: str) -> Callable[..., Any]:
    """Wrap a method of host tensors that reads memory without an op, and so might read what a stream still copies."""
    method = getattr(torch.Tensor, name)

    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided:
            the_machine().host_op(f"Tensor.{name}", [tensor.untyped_storage().data_ptr()], [])
        return method(tensor, *args, **kwargs)

    return functools.wraps(method)(read)


def synchronize(device: Any = None) -> None:
    """See :func:`torch.cuda.synchronize`."""
    the_machine().synchronize_device(_index(device))


def _sleep(cycles: int) -> None:
    """Keep the current stream busy, at a cycle per nanosecond."""
    machine = the_machine()
    machine.take(machine.current_line(), cycles / _CYCLES_PER_SECOND)


class _Runtime:
    """What of CUDA's runtime library is called by its own name."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        the_machine().use_implicitly("cudaHostRegister")
        _extension().pin(address, size)
        self._registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if (size := self._registered.pop(address, None)) is None:
            return 713  # cudaErrorHostMemoryNotRegistered
        the_machine().detector.unpinned(address, size, is_registered=True)
        _extension().unpin(address)
        return 0


def _properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    return SimpleNamespace(
        name="stand-in for CUDA",
        uuid=f"00000000-0000-0000-0000-{index:012}",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=_MEMORY_BYTES,
    )


def _allocated(device: Any = None) -> int:
    return _extension().memory(_index(device))[0]


def _peak(device: Any = None) -> int:
    return _extension().memory(_index(device))[1]


def _reserved(device: Any = None) -> int:
    return _extension().memory(_index(device))[2]


def install(machine: Machine) -> None:
    """Put the stand-in's functions and classes into ``torch.cuda``."""
    runtime = _Runtime()
    always: Callable[..., bool] = lambda *_, **__: True  # noqa: E731
    never: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    generators = tuple(_extension().default_generator(index) for index in range(machine.devices))
    torch.cuda.default_generators = generators
    for name in ("numpy", "tolist", "__array__"):
        setattr(torch.Tensor, name, _seen_by_the_detector(name))
    storages: Any = torch.UntypedStorage
    storages.__new__ = _new_storage
    functions: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": stream,
        "_exchange_device": _exchange_device,
        "_lazy_init": never,
        "_maybe_exchange_device": _maybe_exchange_device,
        "_sleep": _sleep,
        "cudart": lambda: runtime,
        "current_device": lambda: _extension().device(),
        "current_stream": current_stream,
        "default_stream": default_stream,
        "device_count": lambda: machine.devices,
        "empty_cache": never,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "stand-in for CUDA",
        "get_device_properties": _properties,
        "init": never,
        "is_available": always,
        "is_bf16_supported": always,
        "is_initialized": always,
        "max_memory_allocated": _peak,
        "max_memory_reserved": _reserved,  # what is reserved stays so
        "mem_get_info": lambda device=None: (_MEMORY_BYTES - _reserved(device), _MEMORY_BYTES),
        "memory_allocated": _allocated,
        "memory_reserved": _reserved,
        "reset_peak_memory_stats": lambda device=None: _extension().reset_peak(_index(device)),
        "set_device": set_device,
        "set_stream": set_stream,
        "stream": stream,
        "synchronize": synchronize,
    }
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.cuda.")]
    for name, function in functions.items():
        before = getattr(torch.cuda, name)
        setattr(torch.cuda, name, function)
        for module in modules:  # some have imported it by name
            if getattr(module, name, None) is before:
                setattr(module, name, function)
