"""Train a GPT that begins with a safetensors checkpoint, in one process or on four ranks."""

from __future__ import annotations

import task
import torch

import adaptra

given = task.arguments()
with torch.device("meta"):
    model = task.GPT()
model = adaptra.compile(model, stages=4, microbatches=8, example_inputs=task.EXAMPLE, loss=task.loss_of, weights=task.WEIGHTS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses: list[float] = []
for inputs, targets in task.batches(given.steps):
    loss = model.step(inputs, targets)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
task.write_losses(given.losses, losses)
