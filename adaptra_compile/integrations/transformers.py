"""A Trainer of Hugging Face transformers that trains over a pipeline and its replicas."""

# The Trainer's methods are replaced by their names, private ones too, and its types are loose.
# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adaptra.errors import MissingExtraError, OptionError, StateError
from adaptra.frontend.api import Pipeline
from adaptra.frontend.api import compile as compile_pipeline
from adaptra.frontend.checkpoint_state import TrainingState
from adaptra.integrations.transformers_loss import SCALE, checkpoint_activations, divides_by_items, with_trainer_loss
from adaptra.integrations.transformers_refusals import (
    refuse_arguments,
    refuse_functions,
    refuse_loss,
    refuse_model,
    refuse_own_loss,
    refuse_replicas,
    refuse_smoothing,
    refuse_survival,
    require_labels,
    require_length,
    require_version,
)
from adaptra.integrations.transformers_rows import NOWHERE, ReplicaRows, padding_to_few_sizes
from adaptra.runtime.worker.stages.loss_reduction import NO_LABEL

try:
    import accelerate  # noqa: F401
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from transformers.trainer_pt_utils import nested_truncate
except ImportError as error:
    raise MissingExtraError("PipelineTrainer needs transformers and accelerate: pip install 'adaptra[transformers]'") from error

require_version(transformers.__version__)

_STATE = "pipeline"
"""The folder in a checkpoint with what all ranks need to go on."""


class PipelineTrainer(transformers.Trainer):
    """A ``transformers.Trainer`` of a model with labels over a pipeline, with replicas under a launcher.

    ``per_device_train_batch_size`` is the batch of one replica, which is cut into ``microbatches``. Its gradients, losses and
    metrics are those of a plain Trainer in one process, whose batch has the rows of all replicas. After construction the
    model has no memory: the stages hold the parameters, and :meth:`save_model` writes them all.

    Args:
        stages, microbatches: As for :func:`adaptra.compile`.
        compile_options: Other named arguments of :func:`adaptra.compile`, such as ``memory`` or ``placement``.
        arguments: Those of ``transformers.Trainer``, by name.

    Attributes:
        pipe: The pipeline.

    Raises:
        OptionError: An argument can't be followed. The text names it.
    """

    def __init__(
        self, *, stages: int, microbatches: int, compile_options: dict[str, Any] | None = None, **arguments: Any
    ) -> None:
        refuse_own_loss(self, PipelineTrainer)
        refuse_functions(arguments)
        args = arguments.get("args")
        if args is None:
            raise OptionError("PipelineTrainer: args: none were given: expected TrainingArguments")
        refuse_arguments(args)
        refuse_model(arguments.get("model"))
        super().__init__(**arguments)
        self.data_collator = padding_to_few_sizes(self.data_collator)
        if self.label_names != ["labels"]:
            raise OptionError(f"TrainingArguments: label_names={self.label_names!r}: expected ['labels']")
        if self.eval_dataset is not None:
            sets: Any = self.eval_dataset
            for name, rows in sets.items() if isinstance(sets, dict) else [("eval_dataset", sets)]:
                require_length(rows, name)
        refuse_survival((compile_options or {}).get("options"))
        self.pipe = self._compiled(stages, microbatches, compile_options or {})
        self._pipeline_model = _PipelineModel(self.pipe)
        self._rows = ReplicaRows(self.pipe, self.args.device)
        self._preprocess: Any = None
        self._decayed = super().get_decay_parameter_names(self.model)
        whole: Any = self.model
        whole.to("meta")
        whole.tie_weights()  # the Trainer counts the model's parameters, each once

    def _compiled(self, stages: int, microbatches: int, options: dict[str, Any]) -> Pipeline:
        """Return the pipeline of the model, compiled for a whole batch of the data set."""
        rows: Any = self.train_dataset
        require_length(rows, "train_dataset")
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        given = collate([rows[index % len(rows)] for index in range(self.args.per_device_train_batch_size)])
        batch: dict[str, Any] = dict(self._prepare_inputs(given))
        require_labels(batch)
        self._label = batch["labels"][:1]
        whole: Any = self.model
        if self.label_smoother is not None:
            refuse_smoothing(whole)
        whole.train()
        checkpoint_activations(whole, self.args)
        is_empty = any(one.is_meta for one in whole.parameters())
        by_items = is_empty or (divides_by_items(whole, batch) if self.model_accepts_loss_kwargs else False)
        refuse_loss(whole, is_known=by_items is not None and (by_items or self.label_smoother is None))
        self._of_labels = not by_items
        batch["num_items_in_batch" if by_items else SCALE] = torch.ones((), device=self.args.device)
        dtype = torch.bfloat16 if self.args.mixed_precision == "bf16" else None
        replicas = max(1, self.args.world_size // stages)
        how: Any = {"of_labels": self._of_labels, "parts": microbatches * replicas}
        trained = with_trainer_loss(whole, self.accelerator.device.type, dtype, self.label_smoother, **how)
        settings = {"example_kwargs": batch, "reduction": "weighted" if self._of_labels else "sum"} | options
        pipe = compile_pipeline(trained, stages=stages, microbatches=microbatches, **settings)
        try:
            refuse_loss(whole, is_known=self._of_labels or _reads(pipe, "num_items_in_batch"))
            refuse_replicas(whole, self._label, pipe.replicas, expected=replicas)
        except OptionError:
            pipe.close()
            raise
        return pipe

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        """Return the accelerator's arguments. Its mixed precision takes effect in models that it prepares: none."""
        return super()._build_accelerator_args(**named) | {"mixed_precision": "no"}

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

    def _get_dataloader(self, dataset: Any, description: str, *arguments: Any, **named: Any) -> Any:
        require_length(dataset, f"the data set for {description.lower()}")
        return super()._get_dataloader(dataset, description, *arguments, **named)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of an optimizer step and the number of their labels. Each row of an epoch counts once."""
        return super().get_batch_samples(self._counted_once(epoch_iterator), num_batches, device)

    def _counted_once(self, batches: Iterator[Any]) -> Iterator[Any]:
        rest = len(self.train_dataset) % (self._train_batch_size * self.pipe.replicas)
        fills_up = rest > 0 and self.pipe.replicas > 1 and not self.args.dataloader_drop_last
        for batch in batches:
            is_last = self.accelerator.gradient_state.end_of_dataloader
            yield self._rows.counted_once(batch, rest) if fills_up and is_last else batch

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

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's part of the operations of a batch, whose rows all ranks of a replica have."""
        return super().floating_point_ops(inputs) * self.pipe.replicas / self.args.world_size

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a step of the pipeline. Returns the share of the loss that these rows have."""
        batch: dict[str, Any] = dict(self._prepare_inputs(inputs))
        require_labels(batch)
        # As the plain Trainer, which trusts a forward that takes any argument to divide by the number of items.
        steps = 1 if num_items_in_batch is not None else self.current_gradient_accumulation_steps
        loss = self.pipe.step(**batch, **self._divisor(num_items_in_batch, steps))
        return loss.to(self.args.device)

    def _divisor(self, items: Any, steps: int = 1) -> dict[str, Any]:
        """Return the argument by which the loss is divided: that of the model's forward, or a factor."""
        if not self._of_labels:
            return {"num_items_in_batch": items}
        return {SCALE: torch.full((), 1 / steps, device=self.args.device)}

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """Return losses, predictions and metrics of a data set. All ranks call this and get the same, in the order of rows."""
        with self._gathering():
            return super().evaluation_loop(*arguments, **named)

    @contextmanager
    def _gathering(self) -> Generator[None]:
        """Have the Trainer gather rows of replicas, not of ranks, within this context."""
        accelerator, preprocess = self.accelerator, self.preprocess_logits_for_metrics
        pads = accelerator.pad_across_processes
        self._preprocess, self.preprocess_logits_for_metrics = preprocess, None
        self.gather_function = self._gathered
        accelerator.pad_across_processes = lambda tensor, *_, **__: tensor  # gathering pads
        try:
            yield
        finally:
            self.preprocess_logits_for_metrics = preprocess
            accelerator.pad_across_processes = pads

    def _gathered(self, given: Any) -> Any:
        """Return the rows of all replicas without those that are repeated to fill up the last batch."""
        found = self._rows.gather(given)
        rest = self._rest_of_evaluation
        return nested_truncate(found, rest) if rest else found

    @property
    def _rest_of_evaluation(self) -> int:
        """The rows of all replicas in the last batch of an evaluation, if it is short and the next one; else 0."""
        state = self.accelerator.gradient_state
        return max(0, state.remainder) if state.end_of_dataloader else 0

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """Return the loss of a batch over all replicas, this replica's logits on its last stage's rank, and its labels."""
        batch: dict[str, Any] = dict(self._prepare_inputs(inputs))
        labels = batch.get("labels")
        if labels is None:
            batch["labels"] = self._no_labels(batch)
            items: Any = torch.ones((), device=self.args.device)
        else:
            if self._rest_of_evaluation and self.pipe.replicas > 1:
                batch = self._rows.counted_once(batch, self._rest_of_evaluation)
            items = self._get_num_items_in_batch([batch], self.args.device)
        found = self.pipe.eval_step(**batch, **self._divisor(items), outputs=not prediction_loss_only)
        loss, outputs = (found, None) if prediction_loss_only else found
        loss = None if labels is None else loss.to(self.args.device)
        if prediction_loss_only:
            return loss, None, None
        return loss, NOWHERE if outputs is None else self._logits(outputs, labels, ignore_keys), labels

    def _no_labels(self, batch: dict[str, Any]) -> Tensor:
        """Return labels for rows without any. Those of a mean must count, and those of a sum are as long as the inputs."""
        whole: Any = self.model
        rows: Tensor = batch[whole.main_input_name]
        if self._of_labels or self._label.dim() != rows.dim():
            return self._label.new_zeros((rows.shape[0], *self._label.shape[1:]))
        return torch.full_like(rows, NO_LABEL)

    def _logits(self, outputs: Any, labels: Any, ignore_keys: Any) -> Any:
        """Return the outputs that a Trainer takes for predictions, as its user wants them preprocessed."""
        if ignore_keys is None:
            whole: Any = self.model
            ignore_keys = getattr(whole.config, "keys_to_ignore_at_inference", ["cache"])
        left_out = {"loss", *ignore_keys, *self._scalars(outputs)}
        outputs = outputs[2] if self._of_labels else outputs
        named = isinstance(outputs, dict)
        logits: Any = tuple(one for name, one in outputs.items() if name not in left_out) if named else outputs[1:]
        logits = logits[0] if len(logits) == 1 else logits
        return logits if self._preprocess is None else self._preprocess(logits, labels)

    @staticmethod
    def _scalars(outputs: Any) -> set[str]:
        """Return the names of outputs without rows, such as a routers' loss."""
        named = outputs.items() if isinstance(outputs, dict) else ()
        return {name for name, one in named if isinstance(one, Tensor) and not one.dim()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as ``from_pretrained`` reads it. All ranks call this, and rank 0 writes."""
        state = self.pipe.full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

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

    def _load_best_model(self) -> None:
        """Load the parameters of the best checkpoint, and leave the optimizer as it is. All ranks call this."""
        from torch.distributed.checkpoint.state_dict_loader import load

        state: dict[str, Any] = self.pipe.state_dict()
        values = {name: torch.empty_like(one, device="cpu") if isinstance(one, Tensor) else one for name, one in state.items()}
        load({"training": {"model": values}}, checkpoint_id=str(Path(self.state.best_model_checkpoint) / _STATE))
        self.pipe.load_state_dict(values)


def _reads(pipe: Pipeline, argument: str) -> bool:
    """Return whether a captured model uses an argument."""
    compiled = pipe.session.compiled
    if compiled.captured is None:
        return True
    named = zip(compiled.inputs.labels, compiled.captured.flat.inputs, strict=True)
    return any(argument in label and node.users for label, node in named)


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
