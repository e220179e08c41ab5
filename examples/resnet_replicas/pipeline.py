"""Train a small ResNet, in one process or on two replicas of two stages."""

from __future__ import annotations

import task
import torch

import adaptra

given = task.arguments()
torch.manual_seed(0)
model = task.ResNet()
example = next(task.batches(1, replicas=2))
model = adaptra.compile(model, stages=2, microbatches=4, example_inputs=example, loss=task.loss_of)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
losses: list[float] = []
for images, labels in task.batches(given.steps, model.replicas, model.replica):
    loss = model.step(images, labels)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    losses.append(loss.item())
task.write_losses(given.losses, losses)
