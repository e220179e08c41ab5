"""How long it takes to move a cut in a running pipeline, beside what one does without that: save, compile anew, load.

Two processes on this machine train a stack of blocks with AdamW. A block moves from the first stage to the second, with its
parameters, gradients and optimizer state, and the next time a block moves back. The baseline writes parameters and optimizer
state to files, compiles the model with the other cut and loads them. It does not count the start of processes, which a
restart also takes. Both are done in turn in one run, and what a step takes is given beside them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _ranks import run_on_ranks, squared_error, timed
from _table import Row, parser, print_rows
from torch import Tensor, nn

import adaptra

STAGES = 2


class Block(nn.Module):
    """A block of a transformer without its attention: 8 · width² parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → the same."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Run:
    """A pipeline and its optimizer; the first stage has ``first`` blocks."""

    def __init__(self, width: int, blocks: int, first: int, microbatches: int) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(2 * microbatches, width)
        self.batch = (inputs, torch.zeros_like(inputs))
        self.pipe = adaptra.compile(
            nn.Sequential(*(Block(width) for _ in range(blocks))),
            stages=STAGES,
            microbatches=microbatches,
            example_inputs=self.batch,
            loss=squared_error,
            split=[str(first)],
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-3)

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.pipe.step(*self.batch)
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Write this rank's parameters and what the optimizer keeps of them."""
        kept = {name: self.optimizer.state[one] for name, one in self.pipe.named_parameters()}
        torch.save((self.pipe.state_dict(), kept), folder / f"{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Take what belongs to this rank's stage of what all ranks have written."""
        values, kept = {}, {}
        for rank in range(STAGES):
            state, of_optimizer = torch.load(folder / f"{rank}.pt", weights_only=True)
            values |= state
            kept |= of_optimizer
        self.pipe.load_state_dict(values)
        for name, one in self.pipe.named_parameters():
            self.optimizer.state[one] = kept[name]


def measure(_rank: int, width: int, blocks: int, microbatches: int, runs: int) -> dict[str, list[float]]:
    """One rank: seconds of steps, of moves, and of saving, compiling anew and loading."""
    half = blocks // 2
    found: dict[str, list[float]] = {"step": [], "move": [], "anew": []}
    run = Run(width, blocks, half, microbatches)
    for _ in range(2):
        run.step()
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        for turn in range(runs):
            first = half - 1 if turn % 2 == 0 else half
            found["step"].append(timed(run.step)[0])
            found["move"].append(timed(lambda first=first: run.pipe.take_split([str(first)], run.optimizer))[0])
            run.step()

            def anew(first: int) -> None:
                nonlocal run
                run.save(folder)
                run.pipe.close()
                run = Run(width, blocks, first, microbatches)
                run.load(folder)

            found["anew"].append(timed(lambda first=first: anew(first))[0])
            run.step()
        dist.barrier()
    run.pipe.close()
    return found


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--widths", type=int, nargs="+", default=[256, 1024, 2048], help="of the blocks")
    arguments.add_argument("--blocks", type=int, default=8)
    arguments.add_argument("--microbatches", type=int, default=4)
    arguments.add_argument("--runs", type=int, default=4)
    given = arguments.parse_args()
    rows: list[Row] = []
    for width in given.widths:
        found = run_on_ranks(measure, STAGES, width, given.blocks, given.microbatches, given.runs)
        whole, block = (8e-6 * width**2 * count for count in (given.blocks, 1))
        name = f"{whole:.0f} M parameters, {16 * block:.0f} MB move"
        rows.append(Row(f"{name}: save, compile anew, load", median(found["move"]), median(found["anew"]), "s", given.runs))
        rows.append(Row(f"{name}: a step", median(found["move"]), median(found["step"]), "s", given.runs))
    print_rows(f"a moved cut, {STAGES} ranks, {given.blocks} blocks", rows, as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
