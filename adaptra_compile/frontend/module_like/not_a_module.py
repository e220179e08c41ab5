"""A clear error for objects that look like a torch.nn.Module but are not one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from adaptra.errors import PipelineError
from adaptra.frontend.module_like.never_wrapped import PREPARED, refuse_wrapping


class NotAModule:
    """Refuses a module's methods that a pipeline does not have, such as those that ``get_model_state_dict`` calls first."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be saved or copied.

        Raises:
            PipelineError: Always. The text says what to save.
        """
        raise PipelineError(
            f"a {type(self).__name__} can't be pickled or copied, as it has threads and connections: expected "
            "pipe.full_state_dict() to be saved, or adaptra.TrainingState with the optimizer"
        )

    if not TYPE_CHECKING:  # else the type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse an attribute that does not exist.

            Raises:
                AttributeError: For names of a module's methods, the text says what to call instead.
                PipelineError: The name is one that ``Accelerator.prepare_model`` reads.
            """
            if name == PREPARED:
                refuse_wrapping()
            kind = type(self).__name__
            if not name.startswith("__") and hasattr(nn.Module, name):
                raise AttributeError(
                    f"{kind}.{name}: a pipeline is no torch.nn.Module, of which each rank has its stages only: expected "
                    "pipe.full_state_dict() for the whole model's state, pipe.state_dict() for this rank's, "
                    "adaptra.TrainingState for torch.distributed.checkpoint, or the model itself before adaptra.compile"
                )
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
