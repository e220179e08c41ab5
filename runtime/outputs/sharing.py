"""Outputs of a step that cross ranks when it has ended: to the home of their microbatches, and to all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor, device

from adaptra.program import Program
from adaptra.runtime.exchange.state_stream import StateStream
from adaptra.runtime.outputs.step_outputs import StepOutputs
from adaptra.runtime.transports.base import Purpose, Transport


class SharedOutputs:
    """One rank's end of both. Used by the thread that runs the steps, between two of them.

    Args:
        source: The rank of the last stage.
        transport: Carries messages of this pipeline.
        job: Carries messages of all replicas.
        device: The device on which received outputs are placed.
        reserve: Provides receive buffers of a stream from a worker of the job, until it is called again.
        timeout: Seconds to wait for a message from a rank that has nothing to do before.
    """

    def __init__(
        self,
        source: int,
        transport: Transport,
        job: Transport,
        device: device,
        reserve: Callable[[int | None], None],
        timeout: float,
    ) -> None:
        self._source: Final = source
        self._transport: Final = transport
        self._job: Final = job
        self._device: Final = device
        self._reserve: Final = reserve
        self._timeout: Final = timeout

    def bring_home(self, program: Program, step: int, kept: Mapping[int, StepOutputs]) -> None:
        """Exchange outputs of microbatches whose last stage another replica's worker has computed, if their home has asked.

        Args:
            program: The step's program.
            step: Its number.
            kept: The outputs that this rank has kept, by the replica that has asked. Those of its own replica are completed.
        """
        routing = program.routing
        # All workers go through the same list, so two that wait for each other never both send.
        for holder, home, replica in sorted({(one.holder, one.home, one.replica) for one in routing.away(program.stages - 1)}):
            if replica not in kept:
                continue
            if self._job.rank == holder:
                parts = {f"{microbatch}/{index}": one for (microbatch, index), one in kept[replica].parts().items()}
                self._stream(self._job, step).send(home, parts, self._patience)
            elif self._job.rank == home:
                for name, one in self._received(self._job, holder, step).items():
                    microbatch, index = map(int, name.split("/"))
                    kept[replica].add_one(microbatch, index, one)

    def give_to_all(self, step: int, outputs: list[Tensor] | None) -> list[Tensor]:
        """Return the flat outputs of the whole batch, on every rank of this pipeline. All of them call it.

        Args:
            step: The step's number.
            outputs: The outputs, on the rank of the last stage.
        """
        transport = self._transport
        if outputs is None:
            found = self._received(transport, self._source, step)
            return [found[str(index)] for index in range(len(found))]
        named = {str(index): one for index, one in enumerate(outputs)}
        for other in range(transport.world_size):
            if other != transport.rank:
                self._stream(transport, step).send(other, named, self._patience)
        return outputs

    @property
    def _patience(self) -> float:
        """Seconds to wait for a rank that may exchange outputs with all others before."""
        return self._timeout * self._job.world_size

    def _stream(self, transport: Transport, step: int) -> StateStream:
        return StateStream(transport, step, self._patience, Purpose.MODEL_OUTPUTS)

    def _received(self, transport: Transport, source: int, step: int) -> dict[str, Tensor]:
        self._reserve(transport.worker_of(source))
        found = self._stream(transport, step).receive(source)
        self._reserve(None)
        return {name: one.to(self._device) for name, one in found.items()}
