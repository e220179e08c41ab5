"""Exact stealing: replicas that are done take microbatches that others have not begun, within the step.

Each replica runs its pipeline's program with an open tail, see :mod:`adaptra.program.open_tail`. What a slot holds is claimed
when the first stage comes to it. Where it is another replica's microbatch, a stage with the same parameters computes it. Its
weight gradients go home by themselves, and are added there behind the replica's own, in microbatch order. So the bits are those
of a step in which nobody takes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.step_messages.stolen_gradients import PackedTensors, StolenGradients
from adaptra.runtime.synchrony.shared_batch import SharedBatch
from adaptra.runtime.synchrony.slots import SlotMicrobatch, Slots
from adaptra.runtime.transports.base import Identity, Pending, Purpose, Transport
from adaptra.runtime.worker.stages.open_microbatches import Batch, OpenMicrobatches
from adaptra.runtime.worker.stages.stage import TrainingStage
from adaptra.simulation.worker_steps import Moved

MakeStage = Callable[[int, StolenGradients], TrainingStage]
"""Makes a stage that computes microbatches of a replica, and gives their weight gradients to what keeps them."""


@dataclass(frozen=True, slots=True)
class StolenParts:
    """What a rank has for microbatches of other replicas.

    Attributes:
        stage: Its stage of its own replica.
        make: Makes the same of another replica.
        parameters: The stage's trainable parameters.
        contributions: The parameter of each of W's results.
        batch: The inputs of other replicas' microbatches on the first stage, and their targets on the last.
        results: The tensors that the last stage returns; none elsewhere.
    """

    stage: TrainingStage
    make: MakeStage
    parameters: Mapping[str, Tensor]
    contributions: Sequence[str]
    batch: SharedBatch
    results: MessageSpec


class StolenMicrobatches(OpenMicrobatches):
    """One rank's part. Used by the thread that runs the steps.

    Args:
        replica: This replica.
        number: The number of its stage.
        kept: How many of its first microbatches a replica keeps for itself.
        workers: The worker that has the stage, by replica.
        slots: What the slots of its pipeline hold.
        parts: What it computes others' microbatches with.
        job: Joins the workers of all replicas.
        timeout: Seconds to wait for others.

    Attributes:
        stolen: How many microbatches of others this rank has computed.
        given: How many of its own replica's others have computed.
    """

    event = EventKind.STOLEN

    def __init__(
        self,
        replica: int,
        number: int,
        kept: int,
        workers: Sequence[int],
        slots: Slots,
        parts: StolenParts,
        job: Transport,
        timeout: float,
    ) -> None:
        super().__init__(replica, slots)
        self._number = number
        self._first_slots = range(kept)
        self._workers = workers
        self._parts = parts
        self._job = job
        self._timeout = timeout
        parameters = [parts.parameters[name] for name in parts.contributions]
        sums = [TensorSpec(tuple(one.shape), one.dtype) for one in parameters]
        self._packed = PackedTensors([*sums, *parts.results])
        self._made: dict[int, tuple[TrainingStage, StolenGradients]] = {}
        self._results: dict[SlotMicrobatch, tuple[Tensor, ...]] = {}
        self._step = -1
        self._begin_stage = (1.0, 0)
        self.stolen = self.given = 0

    def receive_counts(self) -> Counter[tuple[int, MessageSpec]]:
        """Return the number of receive buffers needed at a time, per source worker and message, but for :attr:`slots`."""
        return Counter(self._parts.batch.receive_counts())

    def begin_step(
        self, step: int, inputs: Batch, targets: Batch, loss_scale: float, steps_before: int, *, is_open: bool
    ) -> None:
        """Begin a step, see :class:`.open_microbatches.OpenMicrobatches`."""
        self._step = step
        self._results.clear()
        if is_open:
            self._parts.batch.begin_step(step, inputs, targets)
        else:
            self._parts.batch.begin_closed_step(step)
        for stage, gradients in self._made.values():
            stage.begin_step(loss_scale, steps_before)
            gradients.begin_step(step)
        self._begin_stage = (loss_scale, steps_before)
        self.slots.begin_step(step, self._first_slots, is_open=is_open)

    def stage_of(self, held: SlotMicrobatch) -> TrainingStage:
        """Return the stage that computes what a slot holds."""
        return self._parts.stage if self.is_own(held) else self._foreign(held.replica)[0]

    def inputs_of(self, held: SlotMicrobatch, own: Batch) -> Sequence[Tensor]:
        """Return the inputs of what a slot holds, on the first stage."""
        return own[held.microbatch] if self.is_own(held) else self._parts.batch.inputs_of(held.replica, held.microbatch)

    def targets_of(self, held: SlotMicrobatch, own: Batch) -> Sequence[Tensor]:
        """Return the targets of what a slot holds, on the last stage."""
        return own[held.microbatch] if self.is_own(held) else self._parts.batch.targets_of(held.replica, held.microbatch)

    def keep_results(self, held: SlotMicrobatch, results: tuple[Tensor, ...]) -> None:
        """Keep what the last stage has returned for another replica's microbatch."""
        self._results[held] = results

    @torch.no_grad()
    def end_step(self, results: dict[int, tuple[Tensor, ...]]) -> bool:
        """Send home what was computed for others, and add what others have computed for this replica.

        See :class:`.open_microbatches.OpenMicrobatches`.
        """
        self.slots.end_step()
        self._parts.batch.end_step()  # what follows travels on the same channel
        for held in sorted(one for one in self.slots.held if not self.is_own(one)):
            _, gradients = self._foreign(held.replica)
            tensors = [*gradients.take(held.microbatch), *self._results.pop(held, ())]
            if self._packed:
                self._job.send(self._workers[held.replica], self._identity(held), (self._packed.pack(tensors),))
            self.stolen += 1
        self._take_home(results)
        return bool(self.slots.takers and self._parts.results)

    @property
    def moved(self) -> Moved:
        """How many microbatches have changed hands in the last step."""
        taken = Counter(held.replica for held in self.slots.held if not self.is_own(held))
        given = Counter(self._workers[taker] for taker in self.slots.takers.values())
        return Moved(tuple(sorted(taken.items())), tuple(sorted(given.items())))

    def close(self) -> None:
        """End what serves this rank alone."""
        super().close()
        self._parts.batch.close()

    def __str__(self) -> str:
        return (
            "replicas that are done take microbatches that others have not begun: so far this replica has taken "
            f"{self.stolen}, and others have taken {self.given} of its own"
        )

    def _take_home(self, results: dict[int, tuple[Tensor, ...]]) -> None:
        takers = sorted(self.slots.takers.items())
        self.told = self._text(takers) if takers else None
        self.given += len(takers)
        if not self._packed:  # a stage in the middle, without trainable parameters
            for microbatch, _ in takers:
                self._parts.stage.add_from_elsewhere(microbatch, ())
            return
        memory = [self._packed.empty() for _ in takers[:2]]  # one arrives while another one is added
        arriving: list[Pending] = []
        for number, (microbatch, _) in enumerate(takers):
            for ahead in range(len(arriving), min(number + 2, len(takers))):
                held, worker = SlotMicrobatch(self._replica, takers[ahead][0]), self._workers[takers[ahead][1]]
                arriving.append(self._job.receive(worker, self._identity(held), memory[ahead % 2]))
            arriving[number].wait(self._timeout)
            unpacked, count = self._packed.unpack(memory[number % 2]), len(self._parts.contributions)
            self._parts.stage.add_from_elsewhere(microbatch, unpacked[:count])
            if self._parts.results:
                results[microbatch] = tuple(one.clone() for one in unpacked[count:] if one is not None)

    def _text(self, takers: Sequence[tuple[int, int]]) -> str:
        by = {
            taker: ", ".join(str(microbatch) for microbatch, _ in group)
            for taker, group in groupby(sorted(takers, key=lambda one: one[1]), key=lambda one: one[1])
        }
        which = "; ".join(f"replica {taker} took {microbatches}" for taker, microbatches in by.items())
        return f"microbatches of replica {self._replica} that it had not begun: {which}"

    def _foreign(self, replica: int) -> tuple[TrainingStage, StolenGradients]:
        if replica not in self._made:
            gradients = StolenGradients(self._job.rank, self._parts.parameters, self._job, self._timeout)
            stage = self._parts.make(replica, gradients)
            stage.begin_step(*self._begin_stage)
            gradients.begin_step(self._step)
            self._made[replica] = stage, gradients
        return self._made[replica]

    def _identity(self, held: SlotMicrobatch) -> Identity:
        ends = self._number, self._number
        return Identity(self._step, Purpose.STOLEN, *ends, held.microbatch, self._packed.spec, held.replica)
