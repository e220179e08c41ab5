"""The session of a pipeline, which its subjects share."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from adaptra.errors import PipelineError
from adaptra.frontend.module_like.module_methods import ModuleMethods
from adaptra.frontend.running.session import Session
from adaptra.runtime.control.plans.plan import Plan


class HeldSession(ModuleMethods):
    """What runs a pipeline in this process, once it is compiled."""

    _session: Session | None = None
    _losses: Tensor | None = None
    _is_closed = False

    @property
    def session(self) -> Session:
        """The session with the workers, for adaptra's own modules. It changes from version to version."""
        return self._require()

    def _require(self) -> Session:
        if self._session is None:
            raise PipelineError("this pipeline is not compiled yet: give adaptra.compile example_inputs=, or run a first step")
        return self._session

    def close(self) -> None:
        """End the pipeline's threads and connections. It may be called twice. The parameters stay usable."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """The rank of this process in the job; 0 if one process runs all stages. Use it to print on one rank only."""
        return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0

    @property
    def replicas(self) -> int:
        """The number of data-parallel replicas of the job, 1 without a launcher. Divide the rows into this number of parts."""
        return self._require().launched.world.replicas

    @property
    def replica(self) -> int:
        """The data-parallel replica of this process, 0 if there is only one. Give its part of a batch to step."""
        return self._require().launched.replica

    @property
    def plan(self) -> Plan:
        """The plan of the last step, or that of the first step if none has run."""
        return self._require().workers[0].plan
