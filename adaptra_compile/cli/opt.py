"""The command ``opt``: reads a program, runs passes over it, and prints the result."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

from adaptra.cli.inputs import ProgramSource, VerifierArguments, read_case, read_source, source_for, verifier_arguments
from adaptra.cli.output import as_json
from adaptra.errors import PassError, ScheduleError
from adaptra.passes import InsertComm, InsertCrossing, PassPipeline, parse_pipeline
from adaptra.program import Program
from adaptra.program.schedules import GENERATORS, PLACED
from adaptra.simulation.cost import CostModel


class _Input(NamedTuple):
    """A program, and what the case says about it.

    Without a case there are no costs, accumulators are handed over, and no stage changes buffers.
    """

    source: ProgramSource
    cost: CostModel | None
    facts: VerifierArguments
    fold: str = "handover"
    buffers: tuple[int, ...] = ()


def run_opt(options: Namespace) -> str:
    """Run the command ``opt`` and return its standard output.

    Raises:
        AdaptraError: Wrong input.
    """
    pipeline = _pipeline(options)
    source, cost, facts, fold, buffers = _read(options)
    source.verify(facts)
    if pipeline is None:
        return as_json(_size(source.program)) if options.json else _verified(source)
    _check_case(pipeline, source.program, cost, fold, buffers)
    # Passes that use no costs get some, which decide nothing.
    program = pipeline.apply(source.program, cost or CostModel.uniform(source.program.stages, 1, 1, 1), **facts)
    if options.json:
        return as_json({**_size(program), "passes": str(pipeline), "program": str(program)})
    return str(program)


def _pipeline(options: Namespace) -> PassPipeline | None:
    if options.verify_only:
        if options.passes is not None:
            raise PassError(f"--verify-only with {options.passes}: expected no passes, as none is run")
        return None
    if options.passes is None:
        raise PassError("opt: expected PASSES before PROGRAM, such as split-backward, or --verify-only")
    return parse_pipeline(options.passes)


def _read(options: Namespace) -> _Input:
    if options.case is None:
        if options.program in (*GENERATORS, *PLACED):
            raise ScheduleError(f"{options.program}: a schedule of the case's size: expected --case CASE, or a file")
        return _Input(read_source(options.program), None, {})
    case = read_case(options)
    source = source_for(options.program, case)
    return _Input(source, case.cost, verifier_arguments(case), case.fold, tuple(sorted(case.changing)))


def _check_case(pipeline: PassPipeline, program: Program, cost: CostModel | None, fold: str, buffers: tuple[int, ...]) -> None:
    """Refuse passes that need what the case does not say."""
    for step in pipeline.passes:
        if cost is None and step.uses_cost:
            raise PassError(f"{step}: the result depends on costs: expected --case CASE")
        if not program.is_one_pipeline and isinstance(step, (InsertComm, InsertCrossing)) and step.fold != fold:
            raise PassError(f"{step}: fold={fold} in the case, or without one: expected the same")
        if not program.is_one_pipeline and isinstance(step, InsertCrossing) and tuple(sorted(set(step.buffers))) != buffers:
            raise PassError(
                f"{step}: changing={list(buffers)} in the case, or without one: expected the same stages as buffers="
            )


def _size(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "stages": program.stages,
        "ranks": program.ranks,
        "microbatches": program.microbatches,
        "ops": sum(map(len, program.orders)),
    }


def _verified(source: ProgramSource) -> str:
    program, ops = source.program, sum(map(len, source.program.orders))
    size = f"{program.stages} stages, {program.ranks} {program.rank_word}s, {program.microbatches} microbatches, {ops} ops"
    return f"{source.name}: {program.name} is a program that its {program.rank_word}s can execute: {size}\n"
