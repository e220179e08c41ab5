"""Generators of random numbers that are not torch's, and torch's own: their states before and after a model's code."""

# pyright: reportPrivateUsage=false
# Numpy's shared generator has no public name.

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of Python, of numpy or of torch."""
    numpy: Any = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def global_generators() -> dict[str, Any]:
    """Return the generators that every module of the process shares, by the names of what draws from them."""
    functions: Any = random.random
    generators = {"Python's random": functions.__self__, "torch's generator": torch.default_generator}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        generators["numpy.random"] = numpy.random.mtrand._rand
    return generators


@contextmanager
def generators_kept() -> Generator[None]:
    """Put back, on exit, the states of the generators that every module of the process shares."""
    states = [(one, state_of(one)) for one in global_generators().values()]
    try:
        yield
    finally:
        for generator, state in states:
            if not is_at(generator, state):
                restore(generator, state)


def state_of(generator: Any) -> Any:
    """Return the state of a generator, for :func:`restore` and :func:`is_at`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.get_state(legacy=False) if _is_legacy(generator) else _bits(generator).state


def restore(generator: Any, state: Any) -> None:
    """Set a generator to a state of :func:`state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or _is_legacy(generator):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def is_at(generator: Any, state: Any) -> bool:
    """Return whether a generator has this state."""
    return _equal(state_of(generator), state)


def _bits(generator: Any) -> Any:
    """Return what holds the state of one of numpy's generators."""
    return getattr(generator, "bit_generator", generator)


def _is_legacy(generator: Any) -> bool:
    """Return whether a generator is a RandomState of numpy, which keeps a normal number beside its bits."""
    return isinstance(generator, sys.modules["numpy"].random.RandomState)


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_equal(state[key], other[key]) for key in state)
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    return state.tobytes() == other.tobytes() if hasattr(state, "tobytes") else state == other
