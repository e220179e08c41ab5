"""Adapters by peft train in a loop of accelerate as in one process, bitwise, and are saved as the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from script_pairs import losses_of_pipeline, losses_of_plain, page_of

pytest.importorskip("accelerate", reason="the scripts need accelerate")
pytest.importorskip("peft", reason="the scripts need peft")

PAIR, PARTS = "lora_accelerate", 4
SAVED = "adapter_model.safetensors"


@pytest.mark.processes
def test_losses_and_adapters_are_those_of_one_process(one_thread: None, tmp_path: Path) -> None:
    shown = re.findall(r"^```py\n(.*?)^```$", page_of(PAIR).read_text(), re.DOTALL | re.MULTILINE)
    of_parts = losses_of_plain(PAIR, tmp_path, then='accelerator.unwrap_model(model).save_pretrained("plain")\n')
    expected = [torch.tensor(of_parts[first : first + PARTS]).mean().item() for first in range(0, len(of_parts), PARTS)]
    assert losses_of_pipeline(PAIR, tmp_path, 2, then=shown[0]) == expected and len(expected) == 4
    adapters, ours = (load_file(tmp_path / folder / SAVED) for folder in ("plain", "adapters"))
    assert adapters.keys() == ours.keys() and len(adapters) == 16
    assert all(torch.equal(one, ours[name]) for name, one in adapters.items())
    assert any(one.any() for name, one in adapters.items() if "lora_B" in name), "nothing was trained"
