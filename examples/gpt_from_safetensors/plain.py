"""Train a GPT that begins with a safetensors checkpoint, in one process or on four ranks."""

from __future__ import annotations

import task
import torch
from safetensors.torch import load_model

given = task.arguments()
model = task.GPT()
load_model(model, task.WEIGHTS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses: list[float] = []
for inputs, targets in task.batches(given.steps):
    loss = task.accumulate(model, inputs, targets)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
task.write_losses(given.losses, losses)
