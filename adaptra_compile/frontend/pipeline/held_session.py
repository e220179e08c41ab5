"""The session of a pipeline, which its subjects share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from adaptra.errors import PipelineError
from adaptra.frontend.module_like.module_methods import ModuleMethods
from adaptra.frontend.running.session import Session
from adaptra.runtime.control.plans.plan import Plan


class HeldSession(ModuleMethods):
    """What runs a pipeline in this process, once it is compiled."""

    _session: Session | None = None
    _losses: Tensor | None = None
    _batches: Callable[[int, int], Any] | None = None
    _is_closed = False
    _group: tuple[int, Any] = 0, None

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
        """The rank of this process in the job; 0 if one process runs all stages. Use it to print on one rank only.

        After the loss of processes it is the number among those that are left, so there is always a rank 0.
        """
        if self._session is not None and self._session.launched.job.keeper is not None:
            return self._session.launched.world.number(self._session.launched.process)
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
    def hosting(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The workers that each process of the job hosts, as (replica, rank in the pipeline), by the launcher's rank."""
        world = self._require().launched.world
        seats = {process: map(world.seat, world.hosted(process)) for process in world.processes}
        return {int(process): tuple((seat.replica, int(seat.place)) for seat in of) for process, of in seats.items()}

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the job's processes that are left, for collectives and checkpoints of one's own.

        It is the default group as long as none is lost, and None without a launcher. After a loss all that are left ask for
        it, and get another one. Its tensors are in host memory then.

        Raises:
            RuntimeError: A process of it was lost meanwhile. After the next call of the pipeline there is another group.
        """
        launched = self._require().launched
        if launched.in_threads:
            return None
        if len(launched.world.processes) == dist.get_world_size():
            return dist.group.WORLD
        epoch = launched.world.epoch
        if self._group[0] != epoch:
            self._group = epoch, launched.group_of_user()
        return self._group[1]

    @property
    def plan(self) -> Plan:
        """The plan of the last step, or that of the first step if none has run."""
        return self._require().workers[0].plan
