"""Puts what tests make on the device, so that suites written for CPUs run on the stand-in, or on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from fake_cuda import engine
from fake_cuda.loading import is_enabled
from fake_cuda.machine import the_machine

_HERE: Final = Path(__file__).resolve().parent
_TESTS: Final = _HERE.parents[1]
_TORCH: Final = Path(torch.__file__).resolve().parent
_OF_ITS_OWN: Final = {"optim", "distributed"}
"""The parts of torch that keep their tensors where they want them. Others make them for whoever calls."""


class MadeByTests(TorchFunctionMode):
    """Gives a device to each call that makes a tensor, names none, and comes from a test.

    A library's model counts as the test's that makes it. Product code that forgets the device of its model still gets a tensor
    on the CPU, as a user would.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, on the device if a test makes a tensor by it."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # which traces this function too, and can't look at its callers
            return func(*args, **kwargs)
        if func in _device_constructors() and kwargs.get("device") is None and _is_called_by_a_test():
            device = torch.device("cuda", torch.cuda.current_device())
            generator: torch.Generator | None = kwargs.get("generator")
            if generator is not None and generator.device.type == "cpu":
                return func(*args, **kwargs).to(device)
            kwargs["device"] = device
        return func(*args, **kwargs)


@contextmanager
def on_cuda(rank: int = 0) -> Generator[None]:
    """Have the calling thread's tests on a rank's device.

    Raises:
        AssertionError: The stand-in reported a fault in their order of streams, events and memory.
    """
    with _watched() if is_enabled() else _deterministic():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        with MadeByTests():
            yield


@contextmanager
def _watched() -> Generator[None]:
    engine.watch()
    machine = the_machine()
    machine.forget()
    yield
    reports = [*map(str, machine.detector.reports)]
    assert not reports, "\n".join(reports)


@contextmanager
def _deterministic() -> Generator[None]:
    """Have a GPU give the same bits each time, and leave its memory to other processes afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.cuda.empty_cache()


def is_on_cuda() -> bool:
    """Whether tests of the calling thread make their tensors on the device."""
    return any(isinstance(mode, MadeByTests) for mode in torch.overrides._get_current_function_mode_stack())


def _is_called_by_a_test() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if (is_test := _is_of_a_test(frame.f_code.co_filename)) is not None:
            return is_test
        frame = frame.f_back
    return False


@cache
def _is_of_a_test(file: str) -> bool | None:
    """Whether a file is a test's; None for one that makes tensors for whoever calls it."""
    path = Path(file)
    if _HERE in path.parents:
        return None
    if _TESTS in path.parents:
        return True
    if _TORCH in path.parents:
        return False if path.relative_to(_TORCH).parts[0] in _OF_ITS_OWN else None
    return None if "site-packages" in path.parts or not path.is_relative_to(_TESTS.parent) else False
