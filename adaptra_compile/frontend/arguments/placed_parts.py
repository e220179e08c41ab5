"""Where the user has placed the parts of a model: on one device, or in one process each stage of a list on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from adaptra.errors import OptionError
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.graph.stage_devices import stage_devices
from adaptra.runtime.launch.launch import is_launched


def devices_of(request: CompileArguments) -> tuple[torch.device, ...]:
    """Return the device of each stage; the CPU for a model without parameters or on the meta device.

    Raises:
        OptionError: The parts lie on several GPUs, where the model can't train. Names one on each of two.
    """
    model, modules = request.whole_model, request.stage_modules
    parameters = dict(model.named_parameters())
    first = next((one.device for one in parameters.values()), torch.device("cpu"))
    first = torch.device("cpu") if first.type == "meta" else first
    gpus = {name: one for name, one in parameters.items() if one.is_cuda}
    if modules is None:
        _refuse_two("model", gpus, "expected all on one device, or a list of stages, each on a GPU")
    if modules is None or not gpus or len({one.device for one in parameters.values()}) < 2:
        return (first,) * request.stages
    if request.transport != "local" and (request.transport is not None or is_launched()):
        _refuse_two("model", parameters, "expected all on one device, since each rank is a process and trains on one")
    if len(gpus) < len(parameters):
        others = {name: one for name, one in parameters.items() if not one.is_cuda}
        _refuse_two("model", {**dict([*gpus.items()][:1]), **others}, "expected all on GPUs, or all on the host")
    for rank in range(request.ranks):
        stages = [stage for stage, place in enumerate(request.placed) if place == rank]
        own = {f"{stage}.{name}": one for stage in stages for name, one in _tensors(modules[stage]).items()}
        _refuse_two(f"model: rank {rank} has stages {stages}", own, "expected all of a rank on one device")
        if any(not _tensors(modules[stage]) for stage in stages):
            raise OptionError(
                f"model: rank {rank} has stages {stages}, and one has no parameters and buffers that say its device: expected "
                "some in each stage of a list on several GPUs; torch.nn.Sequential joins a stage to the next"
            )
    return stage_devices(modules, first)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _refuse_two(what: str, tensors: Mapping[str, Tensor], expected: str) -> None:
    """Refuse tensors that lie on two devices."""
    names: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.device, name)
    if len(names) > 1:
        (device, name), (other, name_there), *_ = names.items()
        raise OptionError(f"{what}: {name} is on {device}, and {name_there} on {other}: {expected}")
