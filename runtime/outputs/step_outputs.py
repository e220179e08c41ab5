"""The model's outputs of one step or evaluation, on the rank of the last stage, kept only if the user asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.stages.stages import TrainStage
from adaptra.runtime.outputs.joined_rows import JoinedRows


class StepOutputs:
    """Takes the outputs of each microbatch. Used by the thread that runs the step.

    Args:
        rows: The rows of each microbatch; empty for those of another replica, which are not joined here.
    """

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self._rows: Final = rows
        self._joined: dict[int, JoinedRows] = {}

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
        for index, (one, is_own) in enumerate(zip(outputs, _are_own(outputs, others), strict=True)):
            self.add_one(microbatch, index, one, is_own=is_own)

    def add_one(self, microbatch: int, index: int, output: Tensor, *, is_own: bool = True) -> None:
        """Take one of the flat outputs of a microbatch; see :meth:`adaptra.runtime.outputs.joined_rows.JoinedRows.add`."""
        if index not in self._joined:
            self._joined[index] = JoinedRows(self._rows)
        self._joined[index].add(microbatch, output, is_own=is_own)

    def parts(self) -> dict[tuple[int, int], Tensor]:
        """Return the outputs by number of the microbatch and position among the flat outputs."""
        columns = self._joined.items()
        return {(microbatch, index): one for index, column in columns for microbatch, one in column.parts().items()}

    def joined(self) -> list[Tensor]:
        """Return the flat outputs of the whole batch."""
        return [self._joined[index].joined() for index in sorted(self._joined)]


def own_copies(results: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results, with copies of those in the memory of others; see :meth:`StepOutputs.add`."""
    own = _are_own(results, others)
    return tuple(one if is_own else one.clone() for one, is_own in zip(results, own, strict=True))


def _are_own(results: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    known = {one.untyped_storage().data_ptr() for one in others}
    return [one.untyped_storage().data_ptr() not in known for one in results]
