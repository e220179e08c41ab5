"""Train a transformer with sentences of varying length, in one process or on two ranks."""

from __future__ import annotations

import task
import torch

given = task.arguments()
torch.manual_seed(0)
model = task.Transformer()
loader = task.loader(given.sentences)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses: list[float] = []
for _ in range(2):
    for inputs, labels in loader:
        loss = task.accumulate(model, inputs, labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
task.write_losses(given.losses, losses)
