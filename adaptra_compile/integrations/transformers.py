"""A Trainer of Hugging Face transformers that trains over a pipeline and its replicas."""

# The Trainer's methods are replaced by their names, private ones too, and its types are loose.
# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adaptra.errors import MissingExtraError, OptionError, StateError
from adaptra.frontend.api import Pipeline
from adaptra.frontend.api import compile as compile_pipeline
from adaptra.frontend.checkpoint_state import TrainingState
from adaptra.integrations.transformers_refusals import (
    refuse_arguments,
    refuse_functions,
    refuse_model,
    require_version,
    require_whole_batches,
)

try:
    import accelerate  # noqa: F401
    import transformers
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise MissingExtraError("PipelineTrainer needs transformers and accelerate: pip install 'adaptra[transformers]'") from error

require_version(transformers.__version__)

_STATE = "pipeline"
"""The folder in a checkpoint with what all ranks need to go on."""


class PipelineTrainer(transformers.Trainer):
    """A ``transformers.Trainer`` of a causal language model over a pipeline, with replicas under a launcher.

    ``per_device_train_batch_size`` is the batch of one replica, which is cut into ``microbatches``. Its gradients and losses
    are those of a plain Trainer with the same rows in a step. After construction the model has no memory: the stages hold
    the parameters, and :meth:`save_model` writes them all.

    Args:
        arguments: Those of ``transformers.Trainer``, by name.
        stages, microbatches: As for :func:`adaptra.compile`.
        compile_options: Other named arguments of :func:`adaptra.compile`, such as ``memory`` or ``placement``.

    Attributes:
        pipe: The pipeline.

    Raises:
        OptionError: An argument can't be followed. The text names it.
    """

    def __init__(
        self, *, stages: int, microbatches: int, compile_options: dict[str, Any] | None = None, **arguments: Any
    ) -> None:
        refuse_functions(arguments)
        args = arguments.get("args")
        if args is None:
            raise OptionError("PipelineTrainer: args: none were given: expected TrainingArguments")
        refuse_arguments(args)
        refuse_model(arguments.get("model"))
        super().__init__(**arguments)
        if not self.model_accepts_loss_kwargs or not self._loss_shifts_labels:
            raise OptionError(
                f"model: a {type(self.model).__name__}: expected a causal language model, whose loss takes num_items_in_batch: "
                "use adaptra.compile for others"
            )
        if self.label_names != ["labels"]:
            raise OptionError(f"TrainingArguments: label_names={self.label_names!r}: expected ['labels']")
        self.pipe = self._compiled(stages, microbatches, compile_options or {})
        self._pipeline_model = _PipelineModel(self.pipe)
        self._check_batches()
        self._decayed = super().get_decay_parameter_names(self.model)
        whole: Any = self.model
        whole.to("meta")

    def _compiled(self, stages: int, microbatches: int, options: dict[str, Any]) -> Pipeline:
        """Return the pipeline of the model, compiled for the data set's first batch."""
        rows: Any = self.train_dataset
        size = self.args.per_device_train_batch_size
        require_whole_batches(rows, "train_dataset", size, 1, True)
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        batch = dict(collate([rows[index] for index in range(size)]))
        batch["num_items_in_batch"] = torch.ones(())
        whole: Any = self.model
        whole.train()
        given = {"example_kwargs": batch, "reduction": "sum"} | options
        return compile_pipeline(self.model, stages=stages, microbatches=microbatches, **given)

    def _check_batches(self) -> None:
        """Refuse data whose batches differ in size from those the pipeline was compiled for."""
        args, replicas = self.args, self.pipe.replicas
        size = args.per_device_train_batch_size
        require_whole_batches(self.train_dataset, "train_dataset", size, replicas, args.dataloader_drop_last)
        if self.eval_dataset is not None:
            self._check_evaluation(self.eval_dataset)

    def _check_evaluation(self, given: Any) -> None:
        args = self.args
        size = args.per_device_train_batch_size
        if args.per_device_eval_batch_size != size:
            raise OptionError(
                f"TrainingArguments: per_device_eval_batch_size={args.per_device_eval_batch_size}: expected {size}, which is "
                "per_device_train_batch_size: all batches of a pipeline have one size"
            )
        for name, rows in given.items() if isinstance(given, dict) else [("eval_dataset", given)]:
            require_whole_batches(rows, name, size, self.pipe.replicas, args.dataloader_drop_last)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, whose data loaders divide rows among replicas, not among ranks."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_data_loader = self._prepare_data_loader

    def _prepare_data_loader(self, loader: Any, *_: Any, **__: Any) -> Any:
        accelerator = self.accelerator
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self.pipe.replicas,
            process_index=self.pipe.replica,
            put_on_device=True,
            rng_types=list(accelerator.rng_types or ()),
            even_batches=True,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=self.args.data_seed,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of one optimizer step over all replicas."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.pipe.replicas

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Count the labels of a step over all replicas, each replica once."""
        counted: Any = super()._get_num_items_in_batch(batch_samples, device)
        if counted is None:
            return None
        # Every rank of a replica has counted the same rows.
        return counted.float() / (self.args.world_size // self.pipe.replicas)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Return the pipeline in place of a model that DDP would wrap."""
        return self._pipeline_model

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the parameters with weight decay, in the whole model."""
        return self._decayed

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer of this rank's parameters, in the plain Trainer's groups."""
        return super().create_optimizer(self._pipeline_model)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a step of the pipeline. Returns the share of the loss that these rows have."""
        if num_items_in_batch is None:
            raise OptionError("PipelineTrainer: a batch without labels: expected 'labels' in every batch")
        given: dict[str, Any] = dict(self._prepare_inputs(inputs))
        loss = self.pipe.step(**given, num_items_in_batch=num_items_in_batch)
        return loss.to(self.args.device)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def evaluate(self, eval_dataset: Any = None, *arguments: Any, **named: Any) -> dict[str, float]:
        """Return the loss over a data set, the mean of its batches. All ranks call this and get the same."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            self._check_evaluation(eval_dataset)
        return super().evaluate(eval_dataset, *arguments, **named)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        """Return the loss of a batch over all replicas. Logits stay on the last stage's rank."""
        items = self._get_num_items_in_batch([inputs], self.args.device)
        if items is None:
            raise OptionError("PipelineTrainer: a batch without labels: expected 'labels' in every batch")
        loss = self.pipe.eval_step(**self._prepare_inputs(inputs), num_items_in_batch=items)
        return loss.to(self.args.device), None, None

    def predict(self, *_: Any, **__: Any) -> Any:
        """Refuse predictions, which would need the logits on all ranks."""
        raise OptionError("PipelineTrainer: predict: expected evaluate(), or trainer.pipe.eval_step for the logits")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as ``from_pretrained`` reads it. All ranks call this, and rank 0 writes."""
        state = self.pipe.full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _training_state(self) -> dict[str, Any]:
        optimizer: Any = self.optimizer
        return {"training": TrainingState(self.pipe, getattr(optimizer, "optimizer", optimizer))}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._training_state(), checkpoint_id=str(Path(output_dir) / _STATE))
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that a checkpoint has what all ranks need. The optimizer's state comes with the parameters, later."""
        if not (Path(resume_from_checkpoint) / _STATE).is_dir():
            raise StateError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: it has no folder {_STATE!r}: expected a checkpoint of a "
                "PipelineTrainer, without save_only_model"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        if checkpoint is None:
            return
        load(self._training_state(), checkpoint_id=str(Path(checkpoint) / _STATE))
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))


class _PipelineModel:
    """What a Trainer asks of the model that it trains, answered by this rank's stages."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self.no_sync = nullcontext

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages."""
        return self.pipe.named_parameters()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages."""
        return self.pipe.parameters()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.pipe.zero_grad()

    def train(self) -> None:
        """Do nothing: a step runs in training mode."""

    def eval(self) -> None:
        """Do nothing: an eval_step runs in evaluation mode."""
