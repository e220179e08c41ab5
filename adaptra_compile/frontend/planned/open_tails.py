"""Refuses jobs in which it can't be decided within a step which microbatches a replica computes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from adaptra.errors import OptionError
from adaptra.frontend.planned.stage_planning import PlannedPipeline
from adaptra.planning.check_memory import check_memory
from adaptra.planning.synchrony.modes import Stealing, WithinStep
from adaptra.program.open_tail import open_tail
from adaptra.program.placement import has_several, stages_of
from adaptra.runtime.launch.free_memory import require_host_memory
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.world.world import World


def check_within_step(mode: WithinStep, planned: PlannedPipeline, world: World, *, in_order: bool) -> None:
    """Refuse what shows only once the stages and the job are known. All ranks refuse it alike.

    Args:
        mode: How it is decided.
        planned: The pipeline.
        world: The job's workers.
        in_order: Whether a transport has one queue for all messages between two ranks.

    Raises:
        OptionError: There is nothing to decide; or other replicas can't compute what they take with the same bits.
        PlanError: With further microbatches, a rank would hold more activations than it may.
    """
    compiled, case, program = planned.compiled, planned.initial.case, planned.initial.program
    stages, microbatches = len(compiled.train), program.microbatches
    steals = isinstance(mode, Stealing)
    changing = compiled.changing_in(*range(stages)) if steals else ()
    how = "forwards change in microbatch order" if compiled.captured is not None else "a stage given as a module may change"
    reasons = {
        "one replica": (world.replicas == 1, "several"),
        "a rank that hosts several workers": (len(set(world.hosts)) < len(world.hosts), "a rank for each"),
        f"{microbatches} microbatches": (
            microbatches <= stages if steals else microbatches < 2,
            f"more than the {stages} stages, as a replica keeps as many of its first ones"
            if steals
            else "at least 2, as a replica computes one in each step",
        ),
        f"the buffer {changing[0] if changing else ''}, which {how}": (
            bool(changing),
            "a model without such buffers",
        ),
        "several stages on a rank": (has_several(case.placement), "one on each"),
        "a transport that has one queue for all messages between two ranks, as NCCL has": (in_order, "another one"),
    }
    for what, (holds, expected) in reasons.items():
        if holds:
            raise OptionError(f"synchrony={mode} with {what}: expected {expected}")
    check_memory(f"synchrony={mode}", open_tail(program, mode.extra_slots(microbatches)), case.cost)


def require_tail_memory(
    mode: WithinStep, planned: PlannedPipeline, launched: Launch, parameters: Mapping[str, Tensor], timeout: float
) -> None:
    """Refuse stealing where what a rank keeps for it does not fit. All ranks refuse it alike.

    A rank keeps the weight gradients of what it takes until its own program has ended. They leave in a message of the host's
    memory each, and two such messages arrive at a time. Inputs and targets of the other replicas are there for the whole step.

    Args:
        mode: How it is decided within a step who computes what; after :func:`check_within_step`.
        planned: The pipeline.
        launched: The rank of this process.
        parameters: At least those of its stage, by name.
        timeout: Seconds to wait for the other ranks.

    Raises:
        OptionError: It does not fit the memory of a device, or of a host.
    """
    if not isinstance(mode, Stealing):
        return
    stages, placement, program = planned.compiled.train, planned.initial.case.placement, planned.initial.program
    (stage,) = (stages[number] for rank in launched.ranks for number in stages_of(rank, placement))
    most = mode.extra_slots(program.microbatches)
    gradients = sum(parameters[name].nbytes for name in stage.contributions)
    taken = (*(stage.inputs if stage.index == 0 else ()), *stage.targets)
    batches = (launched.world.replicas - 1) * (program.microbatches - len(stages)) * sum(spec.bytes for spec in taken)
    what, host = f"synchrony={mode}", (most + 2) * gradients + batches
    if launched.device.type == "cuda":
        require_host_memory(launched, most * gradients + batches, what, timeout, launched.device)
    require_host_memory(launched, host, what, timeout)
