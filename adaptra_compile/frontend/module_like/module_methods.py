"""The methods of a torch.nn.Module that a pipeline has, with a module's meaning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from adaptra.errors import OptionError, PipelineError
from adaptra.frontend.module_like.local_modules import ModuleOutline
from adaptra.frontend.module_like.not_a_module import NotAModule


class ModuleMethods(NotAModule, ABC):
    """What reads and sets modes, modules, buffers and gradients of a pipeline as of a module.

    Args:
        model: The model, which is only read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outline(model)
        self._trains = True

    def outline(self, model: nn.Module) -> None:
        """Take the names and attributes of the modules from the model as it is now. It is only read."""
        self._outline = ModuleOutline.of(model)

    @abstractmethod
    def held_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """Return names and tensors of all parameters and buffers in this process, once per stage that uses them."""

    @abstractmethod
    def _aliases(self) -> Mapping[str, str]:
        """Return all names in the model of every parameter and buffer, with the one name of each in the stages."""

    @abstractmethod
    def _infer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's outputs in evaluation mode, on the rank of the last stage."""

    @property
    def training(self) -> bool:
        """True unless :meth:`eval` was called, or ``train(False)``."""
        return self._trains

    def train(self, mode: bool = True) -> Self:
        """Set training mode or evaluation mode, as of a module.

        :meth:`Pipeline.step` runs in training mode only, and a call of the pipeline in evaluation mode only. Parts of the model
        that were in evaluation mode at compilation stay so. :meth:`Pipeline.eval_step` runs in either.
        """
        given: Any = mode
        if not isinstance(given, bool):
            raise OptionError(f"train({mode!r}): expected True for training mode, or False for evaluation mode")
        self._trains = mode
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as :meth:`train` with False."""
        return self.train(False)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a batch in evaluation mode, without gradients.

        Its arguments are those of the model's forward, for a whole batch. All ranks call it.

        Returns:
            What the model returns, on the rank of the last stage, and None on other ranks. Each tensor is concatenated over the
            microbatches.

        Raises:
            PipelineError: The pipeline is in training mode. Or it has failed before or is closed.
            BatchError, PeerLostError: As :meth:`Pipeline.step`.
        """
        if self._trains:
            raise PipelineError(
                "a pipeline was called in training mode: expected pipe.eval() first, for outputs without gradients; in "
                "training call pipe.step(inputs, targets, outputs=True), which runs the backward pass too"
            )
        return self._infer(inputs, kwargs)

    def require_training(self) -> None:
        """Refuse a training step in evaluation mode.

        Raises:
            PipelineError: :meth:`eval` was called.
        """
        if not self._trains:
            raise PipelineError(
                "a step in evaluation mode, set by pipe.eval(): expected pipe.train() first; freeze a part of the model by "
                "its own eval() before adaptra.compile"
            )

    @property
    def local_module(self) -> nn.Module:
        """This process's part of the model as a new module: the modules with tensors here, under their names in the model.

        Parameters and buffers are the pipeline's tensors, not copies. So torch's ``AveragedModel`` can average them, and groups
        of parameters can be chosen by the classes of modules. Attributes that are no numbers, texts or dtypes are left out. A
        change of cuts or roles moves tensors, so ask anew after it. It can't be called, and its modules take no hooks.
        """
        # Of a parameter with several copies the first stage's counts.
        state = dict(reversed(self.held_tensors()))
        return self._outline.filled({name: state[one] for name, one in self._aliases().items() if one in state})

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of :attr:`local_module` with their names in the user's model."""
        return self.local_module.named_modules()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules of :attr:`local_module`."""
        return self.local_module.modules()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the stages in this process with their names in the user's model, each once, in its order."""
        found = {name: one for name, one in reversed(self.held_tensors()) if not isinstance(one, nn.Parameter)}
        return iter([(name, found[name]) for name in self._aliases() if name in found])

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers of the stages in this process."""
        return (one for _, one in self.named_buffers())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the stages in this process, as a module or an optimizer does.

        Args:
            set_to_none: Whether ``grad`` becomes None, else zeros.
        """
        whole = nn.ParameterList(one for _, one in self.held_tensors() if isinstance(one, nn.Parameter))
        whole.zero_grad(set_to_none)

    def to(self, *where: torch.device | str | int | torch.dtype | Tensor | None, **kwargs: Any) -> Self:
        """Return the pipeline if all of it is on this device and of this dtype already, as ``torch.nn.Module.to``.

        Args:
            where: A device, a dtype, both, or a tensor that has both.
            kwargs: ``device`` and ``dtype`` by name. Other arguments of a module's ``to`` say how to move, and don't matter.

        Raises:
            OptionError: A tensor would have to move or change. The text says what to call instead.
        """
        wanted = [one for one in (*where, kwargs.get("device"), kwargs.get("dtype")) if one is not None]
        wanted = [part for one in wanted for part in ((one.device, one.dtype) if isinstance(one, Tensor) else (one,))]
        for part in (one for one in wanted if not isinstance(one, bool)):
            for name, tensor in self.held_tensors():
                if not _is_so(tensor, part):
                    raise OptionError(
                        f"to: {name} is {tensor.dtype} on {tensor.device}: expected {part}, as the model had before "
                        "adaptra.compile: stages, messages and optimizers are made for its device and dtype; "
                        "call model.to(...) there"
                    )
        return self


def _is_so(tensor: Tensor, part: torch.device | torch.dtype | str | int) -> bool:
    """Return whether a tensor has a dtype, which only numbers with fractions take, or is on a device."""
    if isinstance(part, torch.dtype):
        return tensor.dtype == part or not (tensor.is_floating_point() or tensor.is_complex())
    device = torch.device(part)
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
