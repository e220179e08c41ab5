"""A measured step of two replicas of two stages, made by hand: worker 1.1 is slow and gives one microbatch to worker 0.1."""

from __future__ import annotations

from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Kind, Op
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel
from adaptra.simulation.timeline import MessageInterval, OpInterval, ReduceInterval, Source, Timeline


def job_timeline() -> Timeline:
    """Forwards alone, of two microbatches. Times are seconds."""
    paths = [[(0, 1)] * 2, [(2, 1), (2, 3)]]
    case = Case(CostModel.uniform(2, 1.0, 1.0, 1.0), 2, (0, 1)).of_replicas(2)
    program = plan_job(case, routing=Routing.of_paths(((0, 1), (2, 3)), paths))

    def forward(worker: int, replica: int, microbatch: int, start: float, seconds: float = 0.1) -> OpInterval:
        return OpInterval(worker, Op(worker % 2, Kind.F, microbatch, None, replica), start, start + seconds)

    def message(replica: int, microbatch: int, posted: float, arrived: float) -> MessageInterval:
        return MessageInterval(Kind.SEND_F, 0, 1, microbatch, posted, posted, arrived, replica)

    ops = (
        (forward(0, 0, 0, 0.0), forward(0, 0, 1, 0.1)),
        (forward(1, 0, 0, 0.125), forward(1, 1, 0, 0.5), forward(1, 0, 1, 0.625)),
        (forward(2, 1, 0, 0.0), forward(2, 1, 1, 0.25)),
        (forward(3, 1, 1, 0.5, 0.25),),
    )
    messages = (message(0, 0, 0.1, 0.125), message(1, 0, 0.1, 0.5), message(0, 1, 0.2, 0.25), message(1, 1, 0.35, 0.5))
    reduces = (ReduceInterval(1, 0.725, 0.825, 64, 0.1), ReduceInterval(3, 0.75, 0.8, 64, 0.05))
    return Timeline(program, Source.MEASURED, ops, messages, 1.0, reduces)
