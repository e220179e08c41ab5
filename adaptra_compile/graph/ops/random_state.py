"""Random numbers that depend only on the seed, the step, the microbatch and the op.

Every random op of a model draws from its own generator, seeded from (seed, step, microbatch, ordinal). The ordinal counts the
random ops in the order of the whole model's forward pass. So the numbers do not depend on the number of stages, the plan or the
rank. The process's own generators do not change.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adaptra.graph.ops.ops import is_random, takes_generator


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The seed, step and microbatch of random numbers. All three are not negative and below 2**64."""

    seed: int
    step: int
    microbatch: int

    def of_op(self, ordinal: int) -> int:
        """Return the 64-bit seed of the model's random op number ``ordinal``."""
        packed = struct.pack("<4Q", self.seed, self.step, self.microbatch, ordinal)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def run_seeded(key: RandomKey, ordinal: int, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call a random op with the numbers that belong to it."""
    seed = key.of_op(ordinal)
    device = _device(args, kwargs)
    if takes_generator(op):
        generator = torch.Generator(device)
        generator.manual_seed(seed)
        return op(*args, **{**kwargs, "generator": generator})
    with default_generator_seeded(device, seed):
        return op(*args, **kwargs)


@contextmanager
def default_generator_seeded(device: torch.device, seed: int) -> Generator[None]:
    """Seed the process's default generator of a device within this context, and restore it on exit."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.empty((), device=device).get_device()]
    with _DEFAULT_GENERATOR:
        before = generator.get_state()
        try:
            generator.manual_seed(seed)
            yield
        finally:
            generator.set_state(before)


@contextmanager
def reference_randomness(key: RandomKey) -> Generator[None]:
    """Let a model that runs eagerly within this context draw the same numbers as its pipeline for ``key``.

    Enter a new context for every microbatch's forward pass, since random ops are counted from its start.
    """
    with _Reference(key):
        yield


_DEFAULT_GENERATOR: Final = threading.Lock()
# Ops that take no generator draw from the process's default one. Ranks that are threads of one process share it.


class _Reference(TorchDispatchMode):
    def __init__(self, key: RandomKey) -> None:
        super().__init__()
        self._key = key
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        ordinal = self._next
        self._next += 1
        return run_seeded(self._key, ordinal, func, *args, **kwargs)


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
