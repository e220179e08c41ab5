"""Refusal of what the package accelerate has prepared or is set up to do, where a pipeline can't follow it.

``Accelerator.prepare`` replaces a model's forward, or wraps the model. Its mixed precision, FSDP, DeepSpeed and Megatron-LM
take effect there alone. A pipeline is never prepared, so it would train without them, and nobody would notice.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from torch import nn

from adaptra.errors import OptionError

_ENGINES: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def refuse_accelerate(model: nn.Module) -> None:
    """Refuse a model that accelerate has prepared or placed, and what :func:`refuse_accelerator` refuses.

    Raises:
        OptionError: Something is refused. The text says what to give instead.
    """
    refuse_accelerator()
    for name, module in model.named_modules():
        at = f" at {name!r}" if name else ""
        has = vars(module)
        if "_hf_hook" in has:
            raise OptionError(
                f"model: a module{at} that accelerate has placed, as device_map= does: expected none: adaptra places the "
                "stages itself; weights= reads a checkpoint in parts"
            )
        if has.get("_is_accelerate_prepared"):
            raise OptionError(
                f"model: a module{at} that accelerator.prepare has changed: expected the plain model: give it to "
                "adaptra.compile, and neither it nor the pipeline to prepare"
            )


def refuse_accelerator() -> None:
    """Refuse an Accelerator in this process that is to change how models compute.

    The package is not imported: where nothing else has imported it, there is no Accelerator.

    Raises:
        OptionError: It has another engine or a precision of its own. The text names it.
    """
    package: Any = sys.modules.get("accelerate.state")
    if package is None or not package.is_initialized():
        return
    state = package.AcceleratorState()
    engine = getattr(state.distributed_type, "value", state.distributed_type)
    if engine in _ENGINES:
        raise OptionError(
            f"Accelerator: distributed_type={engine}: expected none of {', '.join(_ENGINES)}: they shard a model that is "
            "prepared, and each rank of a pipeline has the whole parameters of its stages; more stages hold less on each rank"
        )
    if state.parallelism_config is not None:
        raise OptionError(
            "Accelerator: parallelism_config: it was given: expected none: a pipeline has stages and replicas only; more "
            "stages hold less on each rank"
        )
    if state.mixed_precision != "no":
        raise OptionError(
            f"Accelerator: mixed_precision={state.mixed_precision!r}: expected 'no': it takes effect in prepare only, which a "
            "pipeline isn't given to; put torch.autocast into the model's forward"
        )
