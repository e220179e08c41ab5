"""The model's outputs of one step's microbatches, on the rank of the last stage, kept only if the user asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from adaptra.errors import OptionError
from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.stages.stages import TrainStage
from adaptra.program import Program


class StepOutputs:
    """Runs F of the last stage and keeps the outputs of each microbatch. Used by the thread that runs the step."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, ...]] = {}

    def run_forward(
        self,
        stage: TrainStage,
        microbatch: int,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        random: RandomKey,
        targets: Sequence[Tensor],
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Run F, keep the outputs and return the rest, as :meth:`adaptra.graph.stages.stages.TrainStage.run_forward`."""
        results, saved, outputs = stage.forward_with_outputs()(state, inputs, random, targets)
        self._found[microbatch] = own_copies(outputs, (*inputs, *targets, *state.values()))
        return results, saved

    def take(self) -> list[tuple[Tensor, ...]]:
        """Return the outputs of each microbatch, in order, and keep none."""
        found, self._found = self._found, {}
        return [found[microbatch] for microbatch in sorted(found)]


def own_copies(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs, with copies of those in the memory of others: messages reuse it, and training changes the state."""
    known = {one.untyped_storage().data_ptr() for one in others}
    return tuple(one.clone() if one.untyped_storage().data_ptr() in known else one for one in outputs)


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
