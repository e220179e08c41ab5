"""What is like a torch.nn.Module and is none says so where something takes it for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch import nn


class NotAModule:
    """Answers a module's methods that a pipeline has not, such as those that ``get_model_state_dict`` calls first."""

    if not TYPE_CHECKING:  # else every attribute would be known

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse an attribute that there is not.

            Raises:
                AttributeError: Of a module's names, says what to call instead.
            """
            kind = type(self).__name__
            if not name.startswith("__") and hasattr(nn.Module, name):
                raise AttributeError(
                    f"{kind}.{name}: a pipeline is no torch.nn.Module, of which each rank has its stages only: expected "
                    "pipe.full_state_dict() for the whole model's state, pipe.state_dict() for this rank's, "
                    "adaptra.TrainingState for torch.distributed.checkpoint, or the model itself before adaptra.compile"
                )
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
