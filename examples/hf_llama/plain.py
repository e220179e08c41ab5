"""Train a small Llama by the Trainer of Hugging Face transformers, in one process or on four ranks."""

from __future__ import annotations

import task
import transformers
from transformers import Trainer

given = task.arguments()
transformers.set_seed(0)
model = task.llama()
trainer = Trainer(
    model=model,
    args=task.training_arguments(given, per_device_train_batch_size=2, gradient_accumulation_steps=4),
    train_dataset=task.rows(64),
    eval_dataset=task.rows(16),
)
trainer.train()
trainer.evaluate()
trainer.save_model()
task.write_losses(given.losses, trainer)
