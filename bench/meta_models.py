"""Models built on the meta device: peak memory of each rank beside its stage, and how fast weights are read.

A Llama with the widths of 8 billion parameters is written as bfloat16 shards, one for each layer. Then processes on this
machine compile it over gloo, each with the values of its own stage. ``--layers 32`` is the whole model, 16 GB in all.

Memory is what a rank's peak exceeds what it had after the imports, less its stage; the bar is 1 GiB. The rate is that of one
rank's tensors, with all ranks at once and nothing cached. Its baseline reads as many bytes of the same files plainly.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _memory import peak_bytes, reset_peak, resident_bytes
from _ranks import run_on_ranks
from _table import Row, parser, print_rows
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import adaptra
from adaptra.frontend.weights.safetensors_files import INDEX, read_safetensors
from adaptra.progress import log_progress

MIB = 2**20


def config(layers: int, width: int) -> LlamaConfig:
    """A Llama's configuration: with a width of 4096 and 32 layers that of 8 billion parameters."""
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
        vocab_size=128_256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def empty_model(layers: int, width: int) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return nn.Module.to(LlamaForCausalLM(config(layers, width)), torch.bfloat16)


def write(folder: Path, layers: int, width: int) -> int:
    """Write random values as shards; return their bytes."""
    noise = (0.02 * torch.randn(2**22)).bfloat16()
    shards: dict[str, dict[str, Tensor]] = {}
    state: Mapping[str, Tensor] = empty_model(layers, width).state_dict()
    for name in state:
        shards.setdefault(name.split(".")[2] if ".layers." in name else name, {})[name] = state[name]
    places: dict[str, str] = {}
    for number, shard in enumerate(shards.values(), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {
            name: noise.repeat(-(-one.numel() // noise.numel()))[: one.numel()].view(one.shape) for name, one in shard.items()
        }
        save_file({name: one.contiguous() for name, one in made.items()}, folder / file)
        places |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(one.nbytes for one in state.values())


def forget_files(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path, names: list[str]) -> None:
    """Read the bytes of these tensors from their files, in order."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    piece = bytearray(16 * MIB)
    for file in dict.fromkeys(places[name] for name in names):
        with (folder / file).open("rb", buffering=0) as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
            for name in (name for name in names if places[name] == file):
                first, last = header[name]["data_offsets"]
                opened.seek(8 + size + first)
                left = last - first
                while left > 0:
                    left -= opened.readinto(memoryview(piece)[: min(left, len(piece))])


def together(run: Any) -> float:
    """The seconds until the last rank has done something that all begin at once."""
    dist.barrier()
    begun = time.monotonic()
    run()
    dist.barrier()
    return time.monotonic() - begun


def measure(rank: int, path: str, layers: int, width: int, stages: int, runs: int) -> dict[str, Any]:
    """Compile, and then read again and again. Rank 0 returns what all have found."""
    folder = Path(path)
    torch.set_num_threads(1)
    ids = torch.randint(0, 1000, (stages, 16))
    given = {"input_ids": ids, "labels": ids}
    reset_peak()
    before = resident_bytes()
    forget_files(folder)
    dist.barrier()
    begun = time.monotonic()
    pipe = adaptra.compile(empty_model(layers, width), stages=stages, microbatches=stages, example_kwargs=given, weights=folder)
    seconds, peak = time.monotonic() - begun, peak_bytes()
    held = dict(pipe.named_parameters())
    stage = sum(one.nbytes for one in held.values())
    wrong = differing(folder, held)
    targets = {name: one.detach() for name, one in held.items()}
    pipe.close()
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(runs):
        forget_files(folder)
        ours.append(together(lambda: read_safetensors(folder, targets, {name: [name] for name in targets}, log_progress)))
        forget_files(folder)
        plain.append(together(lambda: read_plainly(folder, list(targets))))
    own = {"stage": stage, "over": peak - before - stage, "wrong": wrong, "compile": seconds}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {"ranks": everyone, "ours": ours, "plain": plain}


def differing(folder: Path, held: Mapping[str, Tensor]) -> int:
    """The number of tensors that differ from the files'."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    count = 0
    for name, tensor in held.items():
        opened: Any = safe_open
        with opened(folder / places[name], framework="pt") as file:
            count += not torch.equal(file.get_tensor(name), tensor.detach())
    return count


def main() -> int:
    """Measure and print; ends with 1 if a bar is missed."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--folder", help="where the files are written and deleted; by default a temporary folder")
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        size = write(folder, given.layers, given.width)
        found = run_on_ranks(measure, given.ranks, str(folder), given.layers, given.width, given.ranks, given.runs)
    finally:
        shutil.rmtree(folder)
    ranks = found["ranks"]
    rows = [
        Row(f"rank {rank}: peak beside its stage of {one['stage'] / MIB:,.0f} MiB", one["over"] / MIB, 1024.0, "MiB", 1)
        for rank, one in enumerate(ranks)
    ]
    ours, plain = (size / 1e6 / median(found[name]) for name in ("ours", "plain"))
    rows.append(Row("reading all stages (more is better)", ours, plain, "MB/s", given.runs))
    rows.append(Row("tensors that differ from the files", sum(one["wrong"] for one in ranks), 0.0, "tensors", 1))
    rows.append(Row("compiling with the weights", max(one["compile"] for one in ranks), None, "s", 1))
    billions = size / 2e9
    title = f"a Llama of {billions:.2f} billion parameters on the meta device, {given.ranks} ranks"
    print_rows(title, rows, baseline="bar or plain read", as_json=given.json)
    is_met = all(one["over"] <= 2**30 and not one["wrong"] for one in ranks) and ours >= 0.8 * plain
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
