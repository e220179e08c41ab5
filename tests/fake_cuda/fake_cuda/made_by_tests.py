"""Puts what tests make on the device, so that suites written for CPUs run on the stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from fake_cuda.places import here

_TESTS: Final = Path(__file__).resolve().parents[2]


class MadeByTests(TorchFunctionMode):
    """Gives a device to each call that makes a tensor, names none, and comes from a file of tests.

    Product code that forgets the device of its model still gets a tensor on the CPU, as a user would.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, on the device if a test makes a tensor by it."""
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and _is_called_by_a_test():
            device = torch.device("cuda", torch.cuda.current_device())
            generator: torch.Generator | None = kwargs.get("generator")
            if generator is not None and generator.device.type == "cpu":
                return func(*args, **kwargs).to(device)
            kwargs["device"] = device
        return func(*args, **kwargs)


def _is_called_by_a_test() -> bool:
    place = here()
    return bool(place) and _TESTS in Path(place[0][0]).parents
