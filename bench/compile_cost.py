"""What compiling a large model costs: a Llama of 48 layers over 16 stages, from the model to the first plan.

The model is made from its configuration on the meta device, with the shapes of a 7B model's layers; a compilation needs no
weights. Each part's seconds and the process's peak memory so far (torch and the model's classes included) stand beside what all
of it may cost.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from _table import Row, parser, print_rows

from adaptra.frontend.planned.first_plan import first_plan
from adaptra.graph import CompiledStages, compile_stages
from adaptra.graph.estimated_cost import estimated_cost
from adaptra.progress import Progress, shown_progress
from adaptra.runtime.options import Options
from adaptra.simulation.case import Case

SECONDS, GIBIBYTES = 60.0, 4.0
"""What a compilation may cost."""

TOKENS, VOCABULARY = 2048, 32000


class Parts:
    """The time and memory of each part. :meth:`record` is called when one more of its items is done."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, float] = {}

    def record(self, what: str, done: int, total: int) -> None:
        """See :data:`adaptra.progress.Progress`."""
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._last
        self.peak[what] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._last = now
        self._shown(what, done, total)


def llama(layers: int) -> torch.nn.Module:
    """A Llama without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next tokens."""
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def measure(layers: int, stages: int, microbatches: int, shown: Progress) -> tuple[CompiledStages, Parts]:
    """Compile and plan as :func:`adaptra.compile` does."""
    model, tokens = llama(layers), torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    parts = Parts(shown)
    compiled = compile_stages(model, (tokens,), {}, stages=stages, loss=token_loss, targets=tokens, progress=parts.record)
    cost = estimated_cost(compiled, range(len(compiled.train)))
    parts.record("cost estimated", 1, 1)
    first_plan(Options(), Case(cost, microbatches, tuple(range(stages)), name="compiled"))
    parts.record("planned", 1, 1)
    return compiled, parts


def rows_of(parts: Parts) -> list[Row]:
    """One row for each part, then all of them beside what they may cost."""
    rows = [Row(f"{what}: time", seconds, None, "s", 1) for what, seconds in parts.seconds.items()]
    rows += [Row(f"{what}: peak memory", peak, None, "GiB", 1) for what, peak in parts.peak.items()]
    rows.append(Row("all: time", sum(parts.seconds.values()), SECONDS, "s", 1))
    rows.append(Row("all: peak memory", max(parts.peak.values()), GIBIBYTES, "GiB", 1))
    return rows


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--layers", type=int, default=48)
    arguments.add_argument("--stages", type=int, default=16)
    arguments.add_argument("--microbatches", type=int, default=64)
    given = arguments.parse_args()
    with shown_progress(after=0.0) as shown:
        compiled, parts = measure(given.layers, given.stages, given.microbatches, shown)
    billions = sum(stage.parameter_bytes for stage in compiled.train) / 4e9
    title = f"Llama, {given.layers} layers, {billions:.1f} billion parameters, {given.stages} stages, M = {given.microbatches}"
    print_rows(title, rows_of(parts), baseline="may cost", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
