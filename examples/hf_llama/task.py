"""What both scripts share: a small Llama, its rows, and the arguments."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

sys.path.append(str(Path(__file__).resolve().parent.parent))
import small_llama

llama = small_llama.llama


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, default=Path("losses.json"))
    parser.add_argument("--output", default="trained")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eval-rows", type=int, default=8)
    return parser.parse_args()


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Draw rows of 16 tokens, of which some have padding in place of labels."""
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(64, (count, 16), generator=generator)
    labels = drawn.clone()
    labels[::3, 10:] = -100
    return [{"input_ids": tokens, "labels": label} for tokens, label in zip(drawn, labels, strict=True)]


def training_arguments(given: argparse.Namespace, **sizes: Any) -> TrainingArguments:
    """Return what both Trainers get, but for the size of their batches."""
    return TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_eval_batch_size=given.eval_rows,
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **sizes,
    )


def write_losses(path: Path, trainer: Any) -> None:
    """Write the losses of the steps and of the evaluation, on rank 0."""
    if trainer.is_world_process_zero():
        logged = trainer.state.log_history
        path.write_text(json.dumps([one[name] for name in ("loss", "eval_loss") for one in logged if name in one]))
