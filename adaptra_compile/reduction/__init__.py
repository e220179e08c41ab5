"""Sums over the ranks of a group without a pipeline: functions, a hook for DistributedDataParallel, and FSDP2.

The sum is that of pipelines, see :mod:`adaptra.runtime.data_parallel.collectives.fold`: a left fold in the group's order. Its
bits are the same in every run, for every bucket size and for every way that the terms take. A rank that dies or freezes is
named on all others.
"""

from __future__ import annotations

from adaptra.reduction.ddp_hook import HookState, hook
from adaptra.reduction.fully_shard import AllGather, ReduceScatter, use_in
from adaptra.reduction.functions import all_gather, all_reduce, reduce_scatter

__all__ = ["AllGather", "HookState", "ReduceScatter", "all_gather", "all_reduce", "hook", "reduce_scatter", "use_in"]
