"""Refuses programs that keep more activations than a job allows."""

from __future__ import annotations

from adaptra.errors import PlanError
from adaptra.program import Program
from adaptra.simulation.cost import CostModel
from adaptra.simulation.simulate import Simulation, simulate


def check_memory(what: str, program: Program, cost: CostModel) -> None:
    """Refuse a program that keeps more activations than the job allows, counting those that W still needs.

    Args:
        what: The program's name in the error.
        program: Without or with messages.
        cost: Gives the memory of microbatches and its limits.

    Raises:
        PlanError: Names the rank, the memory that it would need and its limit.
    """
    simulation = simulate(program, cost)
    if not program.is_one_pipeline:
        _check_memory_of_workers(what, simulation)
        return
    limit = cost.memory_limit
    for rank in simulation.over_memory:
        assert limit is not None, "only a limit can be exceeded"
        raise PlanError(
            f"{what}: rank {rank} holds activations of {limit.text(simulation.peak_memory[rank])}: expected at most "
            f"{limit.text(limit[rank])}, as memory= allows"
        )


def _check_memory_of_workers(what: str, simulation: Simulation) -> None:
    for worker in simulation.over_memory:
        case = simulation.case
        assert case.memory is not None, "only a limit can be exceeded"
        most = case.memory[worker % case.ranks]
        raise PlanError(
            f"{what}: worker {case.place_of(worker)} holds {simulation.held[worker]} microbatches, with those of other "
            f"replicas: expected at most {most}, as memory= allows"
        )
