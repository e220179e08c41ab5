"""The model's outputs of one step or evaluation, on the rank of the last stage, kept only if the user asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from adaptra.errors import OptionError
from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.stages.stages import TrainStage
from adaptra.program import Program
from adaptra.runtime.outputs.joined_rows import JoinedRows


class StepOutputs:
    """Takes the outputs of each microbatch. Used by the thread that runs the step.

    Args:
        rows: The rows of each microbatch.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows: Final = rows
        self._joined: list[JoinedRows] | None = None

    def run_forward(
        self,
        stage: TrainStage,
        microbatch: int,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        random: RandomKey,
        targets: Sequence[Tensor],
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run F, take the outputs and return the rest, as :meth:`adaptra.graph.stages.stages.TrainStage.run_forward`."""
        results, saved, outputs = stage.forward_with_outputs()(state, inputs, random, targets)
        self.add(microbatch, outputs, (*inputs, *targets, *state.values()))
        return results, saved

    def add(self, microbatch: int, outputs: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Take the outputs of a microbatch.

        Args:
            microbatch: Its number.
            outputs: The flat outputs.
            others: Tensors whose memory changes later. Messages reuse that of inputs, and training changes the state.
        """
        if self._joined is None:
            self._joined = [JoinedRows(self._rows) for _ in outputs]
        for joined, one, is_own in zip(self._joined, outputs, _are_own(outputs, others), strict=True):
            joined.add(microbatch, one, is_own=is_own)

    def joined(self) -> list[Tensor]:
        """Return the flat outputs of the whole batch, and keep none."""
        found, self._joined = self._joined or [], None
        return [one.joined() for one in found]


def own_copies(results: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results, with copies of those in the memory of others; see :meth:`StepOutputs.add`."""
    own = _are_own(results, others)
    return tuple(one if is_own else one.clone() for one, is_own in zip(results, own, strict=True))


def _are_own(results: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    known = {one.untyped_storage().data_ptr() for one in others}
    return [one.untyped_storage().data_ptr() not in known for one in results]


def refuse_away(program: Program, replica: int) -> None:
    """Refuse outputs of a step in which other replicas compute the last stage of this one's microbatches.

    Raises:
        OptionError: There are such microbatches. The text names them.
    """
    routing, last = program.routing, program.stages - 1
    if routing is None:
        return
    home = routing.workers[replica][last]
    away = [one for one in range(program.microbatches) if routing.holder(replica, last, one) != home]
    if away:
        raise OptionError(
            f"outputs=True: microbatches {away} of replica {replica} have their last stage on another replica's worker under "
            "this plan, because one here is slow or lost: expected outputs of microbatches computed at home; ask for "
            "outputs with eval_step, which follows no routes"
        )
