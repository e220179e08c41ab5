"""The values of one rank's parameters and buffers: compared with copies elsewhere, and gathered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from adaptra.runtime.exchange.state_stream import SPEC, UNDER_WAY, StateStream
from adaptra.runtime.state.shared_values import SharedValues
from adaptra.runtime.worker.call_numbers import CallNumbers
from adaptra.runtime.worker.step.rank_context import RankContext
from adaptra.runtime.worker.step.receive_pool import ReceivePool
from adaptra.runtime.worker.step.stage_factory import StageFactory


class RankValues:
    """Moves the values of one rank between two steps.

    Args:
        context: This rank.
        factory: Has the rank's stages and their values.
        buffers: The rank's receive buffers.
        numbers: Numbers of calls.
        meeting: Encloses a call in which ranks wait for each other.
        check: Raises the error that has ended this rank's waits.
    """

    def __init__(
        self,
        context: RankContext,
        factory: StageFactory,
        buffers: ReceivePool,
        numbers: CallNumbers,
        meeting: Callable[[], AbstractContextManager[None]],
        check: Callable[[], None],
    ) -> None:
        self._context = context
        self._factory = factory
        self._buffers = buffers
        self._numbers = numbers
        self._meeting = meeting
        self._shared = SharedValues(
            factory.state,
            factory.compiled.train,
            context.placement,
            context.transport,
            context.replicas,
            context.sites,
            context.options.timeout,
            check,
        )

    def align_copies(self) -> None:
        """Replace copies of values by the first holder's, and log it if any differed; all ranks call it."""
        with self._meeting():
            self._shared.align(self._stream(), self._receive_state)
            self._buffers.lend({})

    @property
    def shares_values(self) -> bool:
        """True if ranks of this job have copies of the same values."""
        return self._shared.exist

    def full_state(self, collector: int, takes_part: bool, from_first: bool) -> dict[str, Tensor]:
        """Return the model's parameters and persistent buffers by name, on one rank of a pipeline; nothing elsewhere.

        All ranks call it; their states are sent one after the other.

        Args:
            collector: The rank of the pipeline that gets them, as CPU tensors of its own.
            takes_part: Whether the pipeline is that of the collector.
            from_first: Whether to take the first replica's buffers, because this is another replica.
        """
        with self._meeting():
            buffers = self.buffers_of_first_replica() if from_first else {}
            if not takes_part:
                return {}
            stream = self._stream()
            names = [
                name
                for name in self._saved_here()
                if self._context.placement[self._factory.compiled.names[name][0]] == self._context.rank
            ]
            own = {name: buffers.get(name, self._factory.state[name]).detach() for name in names}
            if self._context.rank != collector:
                stream.send(collector, own, self._context.options.timeout * self._context.ranks)
                return {}
            state = {name: tensor.cpu().clone() for name, tensor in own.items()}
            for source in range(self._context.ranks):
                if source != collector:
                    state |= self._receive_state(stream, source)
            self._buffers.lend({})
        return state

    def _stream(self) -> StateStream:
        return StateStream(self._context.transport, max(self._numbers.next_step - 1, 0), self._context.options.timeout)

    def _receive_state(self, stream: StateStream, source: int) -> dict[str, Tensor]:
        self.reserve_stream(self._context.transport.worker_of(source))
        return stream.receive(source)

    def reserve_stream(self, worker: int | None) -> None:
        """Provide receive buffers of a stream from a worker of the job until the next call; of none without a worker."""
        if worker is None:
            self._buffers.lend({})
        else:
            self._buffers.lend({(worker, SPEC): UNDER_WAY})

    def buffers_of_first_replica(self) -> dict[str, Tensor]:
        """Return copies of the first replica's persistent buffers, if there are other replicas. All of them call it."""
        stages = [self._factory.compiled.train[stage] for stage in self._factory.own]
        parameters = {name for stage in stages for name in stage.parameters}
        buffers = {name: self._factory.state[name] for name in self._saved_here() if name not in parameters}
        if self._context.replicas.count == 1 or not buffers:
            return {}
        return dict(zip(buffers, self._context.replicas.values_of(0, list(buffers.values())), strict=True))

    def _saved_here(self) -> list[str]:
        return [name for name in self._factory.state if name not in self._factory.compiled.non_persistent]
