"""Train a small Llama by the Trainer of Hugging Face transformers, in one process or on four ranks."""

from __future__ import annotations

import task
import transformers

from adaptra.integrations.transformers import PipelineTrainer

given = task.arguments()
transformers.set_seed(0)
model = task.llama()
trainer = PipelineTrainer(
    model=model,
    args=task.training_arguments(given, per_device_train_batch_size=8),
    train_dataset=task.rows(64),
    eval_dataset=task.rows(16),
    stages=4,
    microbatches=4,
)
trainer.train()
trainer.evaluate()
trainer.save_model()
task.write_losses(given.losses, trainer)
