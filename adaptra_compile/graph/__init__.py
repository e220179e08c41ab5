"""From a model to stage graphs: capture, partition, differentiate. Imports torch."""

from adaptra.graph.compile import CompiledStages, TiedParameter, compile_stages
from adaptra.graph.random_state import RandomKey, reference_randomness
from adaptra.graph.specs import MessageSpec, TensorSpec
from adaptra.graph.stage_graphs import EvalStage, StageGraphs

__all__ = [
    "CompiledStages",
    "EvalStage",
    "MessageSpec",
    "RandomKey",
    "StageGraphs",
    "TensorSpec",
    "TiedParameter",
    "compile_stages",
    "reference_randomness",
]
