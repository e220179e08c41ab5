"""What batches of other shapes cost: four processes over gloo train on batches of 20 shapes in random order.

The rows show how often a shape was compiled, and the time that took. Then come steps of a shape that is known, each after a
step of another shape. Beside them are steps of the same batch under a pipeline compiled for it alone, in turn with them. The
last row is the memory of rank 0 at the end, beside that after the last new shape.

``--random N`` measures one process instead, which trains a small GPT-2 on N lengths in random order. Its first row has the
processor time of all compilations, in captures of one length. Then come steps of mixed lengths beside those of a pipeline of
one length.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from _memory import resident_bytes
from _ranks import run_on_ranks, timed
from _table import Row, parser, print_rows
from torch import Tensor, nn

import adaptra
from adaptra.graph import compile_stages

ROWS, CLASSES = 16, 64
MOST_CAPTURES = 3
"""How many captures the compilations of all random lengths may take together."""


def token_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss over tokens."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    tokens, labels = (torch.randint(CLASSES, (rows, length), generator=generator) for _ in range(2))
    return tokens, labels


def measure(rank: int, ranks: int, microbatches: int, shapes: int, runs: int, width: int) -> dict[str, Any]:
    """One rank: all shapes in random order, then the pairs."""
    order = [(ROWS - number % 4, 32 + 8 * number) for number in range(shapes)]

    def make(rows: int, length: int) -> adaptra.Pipeline:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2 * ranks)]
        model = nn.Sequential(nn.Embedding(CLASSES, width), *layers, nn.Linear(width, CLASSES))
        return adaptra.compile(
            model,
            stages=ranks,
            microbatches=microbatches,
            example_inputs=batch(rows, length),
            loss=token_loss,
            options=adaptra.Options(adapt=False, shapes=shapes),
        )

    shuffled = order * 3
    random.Random(0).shuffle(shuffled)
    known, other = order[shapes // 8 * 4], order[-1]
    with make(*order[0]) as varying, make(*known) as fixed:
        for shape in shuffled:
            varying.step(*batch(*shape))
        compiled, after = len(varying.shapes), resident_bytes()
        seconds = [one.seconds for one in varying.shapes[1:]]
        pairs: list[list[float]] = []
        for _ in range(runs + 1):
            varying.step(*batch(*other))
            first = timed(lambda: varying.step(*batch(*known)))[0]
            fixed.step(*batch(*known))
            pairs.append([first, timed(lambda: fixed.step(*batch(*known)))[0]])
        for shape in shuffled:
            varying.step(*batch(*shape))
        again = [one.seconds for one in varying.shapes[1:]]
        return {
            "compiled": compiled if sorted(seconds) == sorted(again) else -1,
            "seconds": seconds,
            "pairs": pairs[1:],
            "memory": [resident_bytes(), after],
        }


def gpt2(longest: int) -> nn.Module:
    """A GPT-2 of four narrow layers: what takes time to compile is the number of ops."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": longest, "vocab_size": CLASSES}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def measure_lengths(count: int, runs: int, microbatches: int) -> list[Row]:
    """One process with two stages: lengths in random order, the first of them the example's, then pairs of steps."""
    lengths = [8 * (number + 2) for number in range(count)]
    random.Random(0).shuffle(lengths)
    rows, model = 2 * microbatches, gpt2(max(lengths))

    def given(length: int) -> dict[str, Any]:
        tokens, _ = batch(rows, length)
        return {"input_ids": tokens, "labels": tokens}

    def make(length: int) -> adaptra.Pipeline:
        options = adaptra.Options(adapt=False, shapes=count)
        model, example = gpt2(max(lengths)), given(length)
        return adaptra.compile(model, stages=2, microbatches=microbatches, example_kwargs=example, options=options)

    def seconds(pipe: adaptra.Pipeline, length: int, clock: Callable[[], float] = time.perf_counter) -> float:
        kwargs, began = given(length), clock()
        pipe.step(**kwargs)
        return clock() - began

    captures: list[float] = []
    for length in lengths[:4]:
        one = {name: tensor[:2] for name, tensor in given(length).items()}
        began = time.process_time()
        compile_stages(model, (), one, stages=2)
        captures.append(time.process_time() - began)
    capture = median(captures[1:])  # torch does more in the first one
    known = lengths[count // 2]
    with make(lengths[0]) as varying, make(known) as fixed:
        first, again = ([seconds(varying, length, time.process_time) for length in lengths[1:]] for _ in range(2))
        others = sum(first) - sum(again)
        pairs: list[tuple[float, float]] = []
        for number in range(runs + 1):
            varying.step(**given(lengths[number % count]))
            fixed.step(**given(known))
            pairs.append((seconds(varying, known), seconds(fixed, known)))
    ours, alone = ([1e3 * pair[side] for pair in pairs[1:]] for side in (0, 1))
    return [
        Row(f"captures that {count} lengths take", 1 + others / capture, MOST_CAPTURES, "", 1),
        Row("capture of one length", capture, None, "s", len(captures) - 1),
        Row("step among mixed lengths (beside: of one length)", median(ours), median(alone), "ms", runs),
    ]


def main() -> int:
    """Measure and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--shapes", type=int, default=20)
    arguments.add_argument("--runs", type=int, default=40, help="pairs of steps")
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--random", type=int, metavar="N", help="train a GPT-2 on N lengths in one process instead")
    given = arguments.parse_args()
    if given.random:
        title = f"GPT-2, {given.random} lengths in random order, 2 stages"
        rows = measure_lengths(given.random, given.runs, given.microbatches)
        print_rows(title, rows, baseline="bar", as_json=given.json)
        return 0
    found = run_on_ranks(measure, given.ranks, given.ranks, given.microbatches, given.shapes, given.runs, given.width)
    ours, alone = ([pair[side] for pair in found["pairs"]] for side in (0, 1))
    at_end, after_last = (size / 2**20 for size in found["memory"])
    rows = [
        Row("compiled shapes (beside: shapes)", found["compiled"], given.shapes, "", 1),
        Row("compilation of a new shape", median(found["seconds"]), None, "s", len(found["seconds"])),
        Row("step of a known shape after another", 1e3 * median(ours), 1e3 * median(alone), "ms", given.runs),
        Row("memory at the end (beside: after the last new shape)", at_end, after_last, "MiB", 1),
    ]
    title = f"batches of {given.shapes} shapes, {given.ranks} ranks, {given.microbatches} microbatches"
    print_rows(title, rows, baseline="one shape", as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
