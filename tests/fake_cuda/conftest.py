"""Tests of the stand-in run on it, and each begins without reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_cuda.loading import is_enabled

if TYPE_CHECKING:
    from fake_cuda.machine import Machine


HERE = Path(__file__).parent
WITHOUT = "it needs the stand-in for CUDA: make fake_cuda, or pytest --device=cuda with a torch for CPUs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests here without the stand-in, before their fixtures."""
    if not is_enabled():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=WITHOUT))


@pytest.fixture(autouse=True)
def on_device() -> None:
    """Tests here name their devices themselves."""


@pytest.fixture
def machine(on_device: None) -> Iterator[Machine]:
    """The devices, without reports and without work that waits."""
    import torch
    from fake_cuda.machine import the_machine

    machine = the_machine()
    for device in range(machine.devices):
        torch.cuda.synchronize(device)
    torch.cuda.set_device(0)
    machine.forget()
    yield machine
    machine.forget()
