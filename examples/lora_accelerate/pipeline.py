"""Fine-tune a small Llama by LoRA with accelerate and peft, in one process or on two ranks."""

from __future__ import annotations

import task
import torch
from accelerate import Accelerator

import adaptra

given = task.arguments()
accelerator = Accelerator(cpu=True)
model = task.adapted_llama()
loader = task.loader(8)
model = adaptra.compile(model, stages=2, microbatches=4, example_kwargs=next(iter(loader)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses: list[float] = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
task.write_losses(given.losses, losses)
