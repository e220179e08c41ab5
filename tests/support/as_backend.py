"""Models compiled by torch.compile(..., backend="adaptra"), and the errors that come of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import adaptra
from adaptra.errors import AdaptraError

ROWS, MICROBATCHES = 8, 4
MADE: list[adaptra.Pipeline] = []
"""The pipelines of the test that runs."""


@contextmanager
def fresh_compiler() -> Generator[None, None, None]:
    """Nothing that was compiled before, and an end for the pipelines that are made within."""
    torch._dynamo.reset()
    yield
    while MADE:
        MADE.pop().close()


def compiled(model: Callable[..., Any], mode: str | None = None, **options: Any) -> Any:
    given = {"stages": 2, "microbatches": MICROBATCHES, "adapt": False, "on_pipeline": MADE.append} | options
    return torch.compile(model, backend="adaptra", options=given, mode=mode)


def caught(mistake: Callable[[], object]) -> AdaptraError:
    """The error of a mistake; torch wraps in its own what a backend raises while it compiles."""
    with pytest.raises((AdaptraError, BackendCompilerFailed)) as error:
        mistake()
    found = error.value.inner_exception if isinstance(error.value, BackendCompilerFailed) else error.value
    assert isinstance(found, AdaptraError)
    return found
