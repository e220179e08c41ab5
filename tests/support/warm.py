"""Compiles a small model once, where tests fork processes from.

The forks then have the modules that compiling imports, and torch's tables. Both take seconds in a process of its own.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import torch
from chained import compile_example
from models import EXAMPLES

for name in ("frontend.api", "frontend.builder", "runtime.transports.c10d.c10d", "runtime.transports.delegate.join"):
    import_module(f"adaptra.{name}")
import_module("training")
# What a first step and the import of a test's module load, half a second in each rank. No step runs here, as it starts threads.
for name in ("pytest", "sympy.physics.units", "sympy.tensor.tensor", "torch._dynamo.backends.debugging"):
    import_module(name)
torch.set_num_threads(1)
# On the stand-in for CUDA autograd has a thread for each device, which no fork would have.
if "fake_cuda.loading" not in sys.modules:
    example = EXAMPLES["gpt_tied"]
    compile_example(example, example.make(), example.rows(2, 0), 2)
# A fork's collector need not look at what is here, which would also copy its pages.
gc.collect()
gc.freeze()
