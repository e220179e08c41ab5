"""Refuses jobs in which no replica can take another one's microbatches within a step."""

from __future__ import annotations

from adaptra.errors import OptionError
from adaptra.frontend.planned.stage_planning import PlannedPipeline
from adaptra.planning.check_memory import check_memory
from adaptra.planning.synchrony.modes import Stealing
from adaptra.program.open_tail import open_tail
from adaptra.program.placement import has_several
from adaptra.runtime.world.world import World


def check_stealing(stealing: Stealing, planned: PlannedPipeline, world: World, *, in_order: bool) -> None:
    """Refuse what shows only once the stages and the job are known. All ranks refuse it alike.

    Args:
        stealing: What replicas may take.
        planned: The pipeline.
        world: The job's workers.
        in_order: Whether a transport has one queue for all messages between two ranks.

    Raises:
        OptionError: There is nothing to take, or nobody to take it; or others can't compute it with the same bits.
        PlanError: With others' microbatches, a rank would hold more activations than it may.
    """
    compiled, case, program = planned.compiled, planned.initial.case, planned.initial.program
    stages, microbatches = len(compiled.train), program.microbatches
    changing = compiled.changing_in(*range(stages))
    reasons = {
        "one replica": (world.replicas == 1, "several"),
        "a rank that hosts several workers": (len(set(world.hosts)) < len(world.hosts), "a rank for each"),
        f"{microbatches} microbatches": (
            microbatches <= stages,
            f"more than the {stages} stages, as a replica keeps as many of its first ones",
        ),
        f"the buffer {changing[0] if changing else ''}, which forwards change in microbatch order": (
            bool(changing),
            "a model without such buffers",
        ),
        "several stages on a rank": (has_several(case.placement), "one on each"),
        "a transport that has one queue for all messages between two ranks, as NCCL has": (in_order, "another one"),
    }
    for what, (holds, expected) in reasons.items():
        if holds:
            raise OptionError(f"synchrony={stealing} with {what}: expected {expected}")
    check_memory(f"synchrony={stealing}", open_tail(program, stealing.of(microbatches)), case.cost)
