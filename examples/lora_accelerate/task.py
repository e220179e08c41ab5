"""What both scripts share: a small Llama with LoRA adapters by peft, its rows, and the arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parent.parent))
import losses
from small_llama import llama

ROWS, LENGTH = 32, 16
write_losses = losses.write_losses


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, default=Path("losses.json"))
    return parser.parse_args()


def adapted_llama() -> Any:
    """Build a Llama of four layers whose weights stay as they are, with adapters that are trained."""
    torch.manual_seed(0)
    return get_peft_model(llama(use_cache=False), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def loader(batch_size: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Return the loader of the rows, in batches of this size."""
    drawn = torch.randint(64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows: Any = [{"input_ids": tokens, "labels": tokens} for tokens in drawn]
    return DataLoader(rows, batch_size)
