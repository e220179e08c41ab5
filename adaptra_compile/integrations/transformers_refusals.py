"""What a PipelineTrainer can't do, refused before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptra.errors import MissingExtraError, OptionError
from adaptra.integrations.transformers_loss import ROUTERS

OLDEST, NEWEST = (5, 23), (5, 24)
"""The versions of transformers whose Trainer the tests run; the extra of the package allows the same."""

OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"}
"""Optimizers that step each parameter by itself, so that each rank can step those of its stages."""


def require_version(version: str) -> None:
    """Refuse a version of transformers whose Trainer may call other methods than those the tests run."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        low, high = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        raise MissingExtraError(f"transformers {version}: expected {low} to {high}: pip install 'adaptra[transformers]'")


def refuse_arguments(args: Any) -> None:
    """Refuse training arguments that a pipeline can't follow. The text names the first one and what to do."""
    where = "TrainingArguments"
    off = {
        "fsdp": "stages hold whole parameters; more stages hold less on each rank",
        "deepspeed": "adaptra is the parallel engine; more stages hold less on each rank",
        "parallelism_config": "only stages and replicas; more stages hold less on each rank",
        "torch_compile": "the stages are compiled already; options=adaptra.Options(inner='inductor') compiles their graphs",
        "auto_find_batch_size": "a pipeline is compiled for one size of batch; memory= limits the activations",
        "fp16": "put torch.autocast into the model's forward and train by pipe.step with pipe.grad_scaler()",
        "fp16_full_eval": "evaluation uses the model as it was compiled",
        "bf16_full_eval": "evaluation uses the model as it was compiled",
        "neftune_noise_alpha": "its hook would not be captured",
        "use_liger_kernel": "its autograd functions can't be captured",
        "predict_with_generate": "generation needs the whole model; use save_model and from_pretrained",
        "save_on_each_node": "rank 0 alone receives the whole model",
    }
    for name, instead in off.items():
        value: Any = getattr(args, name, None)
        if value:
            raise OptionError(f"{where}: {name}={value!r}: a PipelineTrainer can't follow it: {instead}")
    if str(getattr(args.include_num_input_tokens_seen, "value", args.include_num_input_tokens_seen)) not in {"no", "False"}:
        raise OptionError(
            f"{where}: include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}: expected 'no': ranks of one "
            "replica would count the same tokens several times"
        )
    if args.mixed_precision not in {"no", "bf16"}:
        raise OptionError(
            f"{where}: mixed_precision={args.mixed_precision!r}: expected 'no' or 'bf16': put torch.autocast into the model's "
            "forward and train by pipe.step with pipe.grad_scaler()"
        )
    if args.load_best_model_at_end and args.save_only_model:
        raise OptionError(
            f"{where}: load_best_model_at_end=True with save_only_model=True: expected False: each rank reads its stages from "
            "what checkpoints have beside the model"
        )
    if not args.average_tokens_across_devices:
        raise OptionError(
            f"{where}: average_tokens_across_devices=False: expected True: the loss is the mean over all replicas' tokens"
        )
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise OptionError(
            f"{where}: optim={name!r}: expected one of {sorted(OPTIMIZERS)}: others were not tested on the stages of one rank"
        )
    if args.n_gpu > 1:
        raise OptionError(f"{where}: n_gpu={args.n_gpu}: expected one device for each rank: start the script by torchrun")
    accelerator = args.accelerator_config
    for name, expected in {"split_batches": False, "dispatch_batches": False, "even_batches": True}.items():
        if getattr(accelerator, name) not in {expected, None}:
            raise OptionError(
                f"{where}: accelerator_config: {name}={not expected}: expected {expected}: each replica reads its own rows, as "
                "many as the others"
            )
    sampling = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    if sampling not in {"random", "sequential"}:
        raise OptionError(f"{where}: train_sampling_strategy={sampling!r}: expected 'random' or 'sequential'")


def refuse_model(model: Any) -> None:
    """Refuse a model that isn't one of transformers, or isn't whole and plain. Adapters of PEFT may be in it."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    adapters = getattr(model, "peft_config", {})
    if any(getattr(one, "is_prompt_learning", False) for one in adapters.values()):
        raise OptionError(f"model: a PEFT {name} that learns a prompt: expected adapters within modules, such as LoRA")
    if not isinstance(model.get_base_model() if hasattr(model, "get_base_model") else model, PreTrainedModel):
        raise OptionError(f"model: a {name}: expected a PreTrainedModel of transformers: use adaptra.compile for other models")
    if getattr(model, "hf_device_map", None) is not None:
        raise OptionError("model: it was loaded with device_map=: expected none: adaptra places the stages itself")
    if getattr(model.config, "output_router_logits", False) and not hasattr(model, ROUTERS):
        raise OptionError(
            f"model: config.output_router_logits=True in a {name} without {ROUTERS}: expected False: the routers' loss can't "
            "be averaged over the parts of a batch"
        )


def refuse_functions(arguments: dict[str, Any]) -> None:
    """Refuse functions and optimizers that need the whole model or its logits."""
    off = {
        "model_init": "give the model itself",
        "compute_loss_func": "the loss is the model's own; write your own loop with adaptra.compile(loss=...)",
        "optimizer_cls_and_kwargs": "choose one by TrainingArguments(optim=...)",
    }
    for name, instead in off.items():
        if arguments.get(name) is not None:
            raise OptionError(f"PipelineTrainer: {name}: it was given: expected none: {instead}")
    if any(arguments.get("optimizers") or ()):
        raise OptionError(
            "PipelineTrainer: optimizers: they were given: expected none: their parameters are those of the whole model; "
            "choose one by TrainingArguments(optim=...)"
        )


def refuse_survival(options: Any) -> None:
    """Refuse a job that goes on after the loss of processes."""
    if getattr(options, "survive", False):
        raise OptionError(
            "PipelineTrainer: Options(survive=True): expected False: the Trainer's own sums and saves wait for all processes "
            "of the launcher; write your own loop with adaptra.compile"
        )


def refuse_loss(model: Any, *, is_known: bool) -> None:
    """Refuse a model whose loss is neither divided by the number of the batch's items nor a mean over labels."""
    if not is_known:
        raise OptionError(
            f"model: a {type(model).__name__}: expected a loss that is a sum divided by num_items_in_batch, or a mean over "
            "labels: use adaptra.compile for others"
        )


def refuse_own_loss(trainer: Any, plain: Any) -> None:
    """Refuse a subclass that computes the loss itself, which a pipeline would not call."""
    for name in ("compute_loss", "prediction_step"):
        if getattr(type(trainer), name) is not getattr(plain, name):
            raise OptionError(
                f"PipelineTrainer: {type(trainer).__name__} has its own {name}, as trl's trainers have: expected none: a "
                "pipeline captures the loss of the model's forward; put it there, or give it as loss= of adaptra.compile"
            )


def refuse_smoothing(model: Any) -> None:
    """Refuse a model whose labels the plain Trainer's label smoothing would not shift."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(model).__name__
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise OptionError(
            f"TrainingArguments: label_smoothing_factor: a {name}: expected a class that AutoModelForCausalLM knows, since the "
            "plain Trainer shifts the labels of no other"
        )


def refuse_replicas(model: Any, label: Any, replicas: int, *, expected: int) -> None:
    """Refuse what several replicas can't do: labels that can't be left out, and a routers' loss of other parts than it has.

    Args:
        model: The model.
        label: A row's labels.
        replicas: The number of replicas.
        expected: The same for one stage on each rank, by which routers' losses are averaged.
    """
    if replicas > 1 and label.is_floating_point():
        raise OptionError(
            "PipelineTrainer: labels of floating point with several replicas: expected whole numbers: the rows that fill up a "
            "last batch could not be left out"
        )
    if replicas != expected and getattr(model.config, "output_router_logits", False):
        raise OptionError("PipelineTrainer: placement= with a routers' loss and replicas: expected one stage on each rank")


def require_labels(batch: Mapping[str, Any]) -> None:
    """Refuse a batch without labels."""
    if batch.get("labels") is None:
        raise OptionError("PipelineTrainer: a batch without labels: expected 'labels' in every batch")


def require_length(rows: Any, name: str) -> None:
    """Refuse a data set without a length or an index."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or not len(rows):
        raise OptionError(
            f"PipelineTrainer: {name}: a {type(rows).__name__}: expected a data set with a length, an index and a row"
        )
