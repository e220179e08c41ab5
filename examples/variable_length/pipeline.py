"""Train a transformer with sentences of varying length, in one process or on two ranks."""

from __future__ import annotations

import task
import torch

import adaptra

given = task.arguments()
torch.manual_seed(0)
model = task.Transformer()
loader = task.loader(given.sentences)
example = task.collate(loader.dataset[: task.ROWS])
model = adaptra.compile(model, stages=2, microbatches=4, example_inputs=example, loss=task.sum_and_count, reduction="weighted")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses: list[float] = []
for _ in range(2):
    for inputs, labels in loader:
        loss = model.step(inputs, labels)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
task.write_losses(given.losses, losses)
