"""Memory of activations in bytes: the needs of a plan and of one microbatch, and remedies if they exceed the limit.

A rank needs memory for the activations that its microbatches keep from F to I and from I to W. While an op runs, it also needs
that op's temporary memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptra.errors import PlanError
from adaptra.graph.stages.stages import TrainStage
from adaptra.program import Kind, Program
from adaptra.program.placement import stages_of
from adaptra.simulation.cost import CostModel
from adaptra.sizes import MemoryLimit, MemoryUnit, size_text


def in_bytes(cost: CostModel, stages: Sequence[TrainStage]) -> CostModel:
    """Return the cost model with its memory in bytes and without a memory limit."""
    return replace(
        cost,
        memory_forward=tuple(float(_counted(stage)) for stage in stages),
        memory_input_grad=tuple(float(_counted(stage) - stage.kept_after_input_grad) for stage in stages),
        memory_limit=None,
    )


def limits_within(memory: MemoryLimit, stages: Sequence[TrainStage], placement: Sequence[int]) -> MemoryLimit:
    """Return the bytes that microbatches may keep if activations may take ``memory``, a limit in bytes, in all.

    Raises:
        PlanError: One microbatch does not fit on a rank. The text says how much it needs and what would help.
    """
    by_rank = _by_rank(stages, placement)
    for rank, (held, limit) in enumerate(zip(by_rank, memory, strict=True)):
        needed = sum(map(_counted, held)) + _beside(held)
        if needed > limit:
            what = f"stage {held[0].index} needs" if len(held) == 1 else f"rank {rank} with its {len(held)} stages needs"
            raise PlanError(
                f"memory={size_text(limit)}: {what} {size_text(needed)} for one microbatch, and keeps "
                f"{size_text(sum(stage.kept_after_forward for stage in held))} of it from F to I: expected at least what it "
                f"needs; half the rows per microbatch or twice the stages need about {size_text(needed / 2)}, activation "
                f"checkpointing keeps {size_text(sum(stage.input_bytes for stage in held))} or more"
            )
    return memory.of(limit - _beside(held) for held, limit in zip(by_rank, memory, strict=True))


def limits_free(
    free: Sequence[int], stages: Sequence[TrainStage], placement: Sequence[int], is_to_come: bool = False
) -> MemoryLimit:
    """Return the bytes that microbatches may keep if each rank's device has ``free`` bytes.

    A tenth is reserved, and so is the memory for a gradient of each parameter and AdamW's two moments. If the parameters are
    still to come (``is_to_come``), so is theirs.
    """
    copies = 4.0 if is_to_come else 3.0
    ranks = zip(free, _by_rank(stages, placement), strict=True)
    return MemoryLimit(
        tuple(max(0.0, 0.9 * size - copies * sum(one.parameter_bytes for one in held) - _beside(held)) for size, held in ranks),
        MemoryUnit.BYTES,
    )


def _by_rank(stages: Sequence[TrainStage], placement: Sequence[int]) -> list[list[TrainStage]]:
    return [[stages[stage] for stage in stages_of(rank, placement)] for rank in range(len(set(placement)))]


def predicted_peaks(program: Program, stages: Sequence[TrainStage]) -> tuple[int, ...]:
    """Return the peak bytes of activations on each rank under a program."""
    peaks: list[int] = []
    for rank, order in enumerate(program.orders):
        held = peak = 0
        for op in order:
            if op.kind not in (Kind.F, Kind.I, Kind.W, Kind.B):
                continue
            stage = stages[op.stage]
            first, second, at = stage.kept_after_forward, stage.kept_after_input_grad, stage.peaks
            match op.kind:
                case Kind.F:
                    peak, held = max(peak, held + at.forward), held + first
                case Kind.I:
                    peak, held = max(peak, held - first + at.input_grad), held - first + second
                case Kind.W:
                    peak, held = max(peak, held - second + at.weight_grad), held - second
                case Kind.B:
                    peak = max(peak, held - first + at.input_grad, held - first + at.weight_grad)
                    held -= first
        peaks.append(peak + sum(_travelling(stages[stage]) for stage in program.routing.stages_of(rank)))
    return tuple(peaks)


def _travelling(stage: TrainStage) -> int:
    """Return the bytes of sent messages that have not arrived: in each direction one in flight and one queued."""
    return 2 * (stage.output_bytes + stage.grad_input_bytes)


def _counted(stage: TrainStage) -> int:
    """Return the bytes that a plan counts for a microbatch until its I ends. I may keep more than F saved."""
    return max(stage.kept_after_forward, stage.kept_after_input_grad)


def _beside(stages: Sequence[TrainStage]) -> int:
    """Return a rank's peak bytes in addition to those counted in a plan: temporary memory of the running op, and messages."""
    return max(map(_running, stages)) + sum(map(_travelling, stages))


def _running(stage: TrainStage) -> int:
    counted, at = _counted(stage), stage.peaks
    return max(0, at.forward - counted, at.input_grad - counted, at.weight_grad - stage.kept_after_input_grad)
