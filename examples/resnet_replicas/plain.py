"""Train a small ResNet, in one process or on two replicas of two stages."""

from __future__ import annotations

import task
import torch

given = task.arguments()
torch.manual_seed(0)
model = task.ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
losses: list[float] = []
for images, labels in task.batches(given.steps):
    loss = task.accumulate(model, images, labels)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    losses.append(loss.item())
task.write_losses(given.losses, losses)
