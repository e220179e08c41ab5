"""What both scripts share: a small Llama with LoRA adapters by peft, its rows, and the arguments."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH = 32, 16


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, default=Path("losses.json"))
    return parser.parse_args()


def adapted_llama() -> Any:
    """Build a Llama of four layers whose weights stay as they are, with adapters that are trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def loader(batch_size: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Return the loader of the rows, in batches of this size."""
    drawn = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows: Any = [{"input_ids": tokens, "labels": tokens} for tokens in drawn]
    return DataLoader(rows, batch_size)


def write_losses(path: Path, losses: list[float]) -> None:
    """Write the losses on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        path.write_text(json.dumps(losses))
