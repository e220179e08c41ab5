"""Fine-tune a small Llama by LoRA with accelerate and peft, in one process or on two ranks."""

from __future__ import annotations

import task
import torch
from accelerate import Accelerator

given = task.arguments()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = task.adapted_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, task.loader(2))
losses: list[float] = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
task.write_losses(given.losses, losses)
