"""A transformer that really computes, over fast links, beside torch.distributed.pipelining: no op is padded, none sleeps.

Each rank is a process with one thread, joined to the others over loopback by gloo. Both sides train the same layers, cut
at the same places, with the same microbatches, and begin with the same loss. Steps are taken in turn. With more ranks than
cores the figures mostly show how ranks share the cores.

adaptra takes part with as many microbatches in flight as 1F1B's first stage, with the same limit as a V, and without a limit.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import torch
from _ranks import run_on_ranks, timed
from _table import Row, parser, print_rows
from _torch_schedules import CHUNKS, stages_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional

import adaptra

VOCABULARY = 512
SIDES = {
    "adaptra, as much in flight as 1F1B": ("straight", True),
    "adaptra as a V, as much in flight": ("v", True),
    "adaptra, no limit": ("straight", False),
}
"""The placement of each of adaptra's sides, and whether its microbatches in flight are limited."""


def transformer(layers: int, width: int) -> nn.Sequential:
    """Embedding, layers and head. Dropout is off, as torch's stages and adaptra's draw other masks."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


def cuts(layers: int, stages: int) -> list[int]:
    """The modules that begin stages 1, 2, …, each stage with as many layers."""
    return [1 + stage * layers // stages for stage in range(1, stages)]


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class TorchSide:
    """One of torch's schedules, unmodified."""

    def __init__(self, name: str, rank: int, ranks: int, microbatches: int, layers: int, width: int) -> None:
        model, mine = transformer(layers, width), stages_of(name, rank, ranks)
        count = ranks * CHUNKS[name]
        begins = [0, *cuts(layers, count), len(model)]
        self._stages = [PipelineStage(model[begins[one] : begins[one + 1]], one, count, torch.device("cpu")) for one in mine]
        made: Any = get_schedule_class(name)
        self._schedule = made(self._stages if len(mine) > 1 else self._stages[0], microbatches, loss_fn=token_loss)
        self._is_first, self._is_last = 0 in mine, count - 1 in mine

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """One training step from gradients of None; the loss on the last stage's rank."""
        for stage in self._stages:
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        given = (inputs,) if self._is_first else ()
        self._schedule.step(*given, target=targets if self._is_last else None, losses=losses if self._is_last else None)
        return torch.stack(losses).mean().item() if self._is_last else None


def measure(rank: int, given: dict[str, Any], names: list[str]) -> dict[str, list[tuple[float, float, float]]]:
    """One rank: the times of every contender's steps, taken in turn."""
    ranks, microbatches, layers, width = (given[name] for name in ("ranks", "microbatches", "layers", "width"))
    torch.manual_seed(1)
    inputs = torch.randint(VOCABULARY, (microbatches * given["rows"], given["length"]))
    targets = torch.randint(VOCABULARY, inputs.shape)
    contenders: dict[str, Any] = {name: TorchSide(name, rank, ranks, microbatches, layers, width) for name in names}
    pipes: dict[str, adaptra.Pipeline] = {}
    for name, (placement, is_limited) in SIDES.items():
        stages = 2 * ranks if placement == "v" else ranks
        pipes[name] = adaptra.compile(
            transformer(layers, width),
            stages=stages,
            microbatches=microbatches,
            example_inputs=(inputs, targets),
            loss=token_loss,
            split=[str(one) for one in cuts(layers, stages)],
            placement=placement,
            memory=ranks if is_limited else None,
        )

    def ours(pipe: adaptra.Pipeline) -> float:
        for one in pipe.parameters():
            one.grad = None
        return pipe.step(inputs, targets).item()

    def theirs(side: TorchSide) -> float | None:
        return side.step(inputs, targets)

    steps: dict[str, Any] = {name: lambda side=side: theirs(side) for name, side in contenders.items()}
    steps |= {name: lambda pipe=pipe: ours(pipe) for name, pipe in pipes.items()}
    losses = {name: loss for name, step in steps.items() if (loss := step()) is not None}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the contenders train unlike: losses {losses}")
    for _ in range(given["warm"]):  # new plans run by then
        for step in steps.values():
            step()
    found = {name: list[tuple[float, float, float]]() for name in steps}
    for _ in range(given["runs"]):
        for name, step in steps.items():
            found[name].append(timed(step))
    for pipe in pipes.values():
        pipe.close()
    return found


def main() -> int:
    """Start the ranks and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--layers", type=int, default=8, help="a multiple of twice the ranks")
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--rows", type=int, default=2, help="of a microbatch")
    arguments.add_argument("--length", type=int, default=128, help="tokens of a row")
    arguments.add_argument("--against", nargs="+", choices=CHUNKS, default=list(CHUNKS), help="which of torch's schedules")
    arguments.add_argument("--warm", type=int, default=10, help="steps of each before those that count")
    arguments.add_argument("--runs", type=int, default=15, help="steps of each, in turn")
    given = arguments.parse_args()
    found = run_on_ranks(measure, given.ranks, vars(given), given.against)
    rows = [
        Row(f"{side}; {name}; {what}", 1e3 * median(one[clock] for one in found[side]),
            1e3 * median(one[clock] for one in found[name]), "ms", given.runs)
        for clock, what in ((0, "step"), (1, "processor time, mean of ranks"))
        for side in SIDES
        for name in given.against
    ]  # fmt: skip
    title = (
        f"{given.layers} layers of width {given.width}, {given.ranks} ranks, {given.microbatches} microbatches, nothing padded"
    )
    print_rows(title, rows, baseline="torch", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
