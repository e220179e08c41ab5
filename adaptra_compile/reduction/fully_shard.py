"""The collectives of FSDP2, ``torch.distributed.fsdp.fully_shard``, by those of :mod:`.functions`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule

from adaptra.errors import BatchError, OptionError
from adaptra.reduction.functions import all_gather, all_reduce, reduce_scatter
from adaptra.runtime.options.reduce_options import Reduce


class _Allocates:
    """Allocates what a collective of FSDP2 reads and writes, as torch's own do."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor that nothing has filled."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocates):
    """For ``FSDPModule.set_custom_all_gather``: :func:`.functions.all_gather`, done when it returns."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> None:
        """Write the parameters of all ranks to the output."""
        all_gather(output_tensor, input_tensor, group)


class ReduceScatter(_Allocates):
    """For ``FSDPModule.set_custom_reduce_scatter``: :func:`.functions.reduce_scatter`, done when it returns.

    Args:
        how: How gradients are added.
    """

    def __init__(self, how: Reduce | None = None) -> None:
        self._how: Final = how

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the gradients' sum or mean to the output.

        Raises:
            BatchError: Another operation than these, as ``set_gradient_divide_factor`` has on NCCL.
        """
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise BatchError(
                f"reduce_scatter of FSDP2 by {op}: expected a sum or a mean: where a divide factor is set, call "
                "set_force_sum_reduction_for_comms(True)"
            )
        reduce_scatter(output_tensor, input_tensor, group, mean=op == ReduceOp.AVG, how=self._how)


def use_in(model: nn.Module, replicas: ProcessGroup | None = None, how: Reduce | None = None) -> None:
    """Have all FSDP2 modules of a model gather and add by adaptra's collectives.

    Args:
        model: Has been given to ``fully_shard``.
        replicas: The ranks that have the same shards in other replicas, over which gradients are averaged too; None if there is
            one replica. The mesh of ``fully_shard`` has one dimension then, as torch itself adds over a second one. A divide
            factor of a module is what the sum is divided by, and by nothing else, as with such a mesh.
        how: How gradients are added.

    Raises:
        OptionError: No module of it has, or one has parameters on several meshes, which torch refuses.
    """
    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if not modules:
        raise OptionError(
            f"use_in({type(model).__name__}): no module was given to fully_shard: expected it to be called before"
        )
    for module in modules:
        try:
            module.set_custom_all_gather(AllGather())  # pyright: ignore[reportArgumentType] - its base is private
            module.set_custom_reduce_scatter(ReduceScatter(how))  # pyright: ignore[reportArgumentType]
            if replicas is not None:
                module.set_all_reduce_hook(partial(_add_replicas, module, replicas, how))
        except ValueError as error:
            raise OptionError(f"use_in({type(model).__name__}): {error}") from error


def _add_replicas(module: FSDPModule, replicas: ProcessGroup, how: Reduce | None, gradients: Tensor) -> None:
    """Add a shard's gradients over replicas. A divide factor, which may be set at any time, is in place of all divisions."""
    state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage] - nothing public tells the factor
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    all_reduce(gradients, replicas, mean=all(one.gradient_divide_factor is None for one in groups), how=how)
