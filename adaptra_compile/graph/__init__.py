"""The compiler from a model to stage graphs: capture, partition, differentiation. Imports torch."""

from adaptra.graph.compile import CompiledStages, TiedParameter, compile_stages
from adaptra.graph.ops.random_state import RandomKey, reference_randomness
from adaptra.graph.ops.specs import MessageSpec, TensorSpec
from adaptra.graph.stages.stages import EvalStage, TrainStage

__all__ = [
    "CompiledStages",
    "EvalStage",
    "MessageSpec",
    "RandomKey",
    "TensorSpec",
    "TiedParameter",
    "TrainStage",
    "compile_stages",
    "reference_randomness",
]
