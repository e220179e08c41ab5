"""An attribute value that stops DistributedDataParallel and ``Accelerator.prepare`` before they touch a pipeline's modules.

Both begin with sending the first rank's parameters to all others, which would overwrite each stage with the first one. Neither
has a way for a module to say no, but both read an attribute of the module before they send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from adaptra.errors import PipelineError

PREPARED: Final = "_is_accelerate_prepared"
"""The attribute that accelerate reads first: whether it has prepared a model already."""


def refuse_wrapping() -> NoReturn:
    """Refuse to wrap a pipeline or a module of one.

    Raises:
        PipelineError: Always.
    """
    raise PipelineError(
        "a module of a pipeline was given to DistributedDataParallel or to accelerator.prepare: expected pipe.step without "
        "them: they would send the first rank's stage to all others, and a step averages the gradients of replicas itself"
    )


class NeverWrapped:
    """Raises an error whenever it is read as a sequence or as a truth value."""

    def __iter__(self) -> Iterator[str]:
        """Refuse, as DistributedDataParallel reads the names that it shall ignore."""
        refuse_wrapping()

    def __bool__(self) -> bool:  # noqa: PLE0304 - it never returns
        """Refuse, as accelerate reads whether a model is prepared."""
        refuse_wrapping()


GUARDS: Final[Mapping[str, Any]] = {PREPARED: NeverWrapped(), "_ddp_params_and_buffers_to_ignore": NeverWrapped()}
"""Attributes for each module of a pipeline."""
