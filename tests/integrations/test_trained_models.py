"""PipelineTrainer trains classifiers, sequence to sequence models, mixed experts, adapters and checkpointed layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors_table import check_documented
from trainer_runs import gpt2, history, rows, trainer

from adaptra.errors import OptionError

pytest.importorskip("accelerate", reason="PipelineTrainer needs accelerate")

pytestmark = [pytest.mark.usefixtures("no_accelerator_left"), pytest.mark.usefixtures("one_thread")]

OWN = (
    "PipelineTrainer: … has its own …, as trl's trainers have: expected none: a pipeline captures the loss of the model's "
    "forward; put it there, or give it as loss= of adaptra.compile"
)


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates: Any = {"num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=64, **sizes, **rates))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    sizes["decoder_start_token_id"] = 0
    return T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts: Any = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, router_aux_loss_coef=0.5, **sizes, **experts))


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def classes(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": index % 3} for index, row in enumerate(rows(count))]


def images(count: int) -> list[dict[str, Any]]:
    drawn = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))
    return [{"pixel_values": one, "labels": index % 3} for index, one in enumerate(drawn)]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], dict[str, Any]]] = {
    "bert": (bert, classes, {}),
    "vit": (vit, images, {}),
    "t5": (t5, rows, {}),
    "mixtral": (mixtral, rows, {}),
    "lora": (lora, rows, {}),
    "checkpointed": (gpt2, rows, {"gradient_checkpointing": True}),
}


def both(kind: str, folder: Path) -> tuple[Any, Any]:
    from transformers import Trainer, default_data_collator

    from adaptra.integrations.transformers import PipelineTrainer

    model, data, settings = MODELS[kind]
    found: list[Any] = []
    for made, how in ((PipelineTrainer, {"stages": 2, "microbatches": 4}), (Trainer, {})):
        torch.manual_seed(0)
        named: Any = {
            "model": model(),
            "train_dataset": data(14 if kind == "bert" else 16),
            "eval_dataset": data(8),
            "data_collator": default_data_collator,
        }
        named |= {"compute_metrics": None, "preprocess_logits_for_metrics": None}
        sizes: Any = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "eval_strategy": "epoch"}
        found.append(trainer(made, folder, named | how, **sizes | settings))
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_what_most_scripts_train(kind: str, tmp_path: Path) -> None:
    """The losses are those of the plain Trainer. Routers' losses are means over the parts of a batch, so near those only."""
    made, other = both(kind, tmp_path)
    for one in (made, other):
        one.train()
    found, expected = history(made), history(other)
    near = 0.05 if kind == "mixtral" else 1e-4
    for name in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = ([one[name] for one in each if name in one] for each in (found, expected))
        assert ours and ours == pytest.approx(theirs, rel=near), name
    logits, wanted = (one.predict(one.eval_dataset).predictions for one in (made, other))
    first, second = (
        max(one, key=lambda each: getattr(each, "ndim", 0)) if isinstance(one, tuple) else one for one in (logits, wanted)
    )
    assert first.shape == second.shape
    if kind == "bert":
        unlabelled = [{"input_ids": row["input_ids"]} for row in classes(6)]
        assert made.predict(unlabelled).predictions.shape == (6, 3)
    if kind == "lora":
        made.save_model(str(tmp_path / "adapter"))
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {one.name for one in (tmp_path / "adapter").iterdir()}
    made.pipe.close()


def test_what_is_pushed_is_the_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.trainer as plain
    from transformers import BertForSequenceClassification

    pushed: list[dict[str, Any]] = []

    class Hub:
        def upload_folder(self, **given: Any) -> None:
            loaded = BertForSequenceClassification.from_pretrained(given["folder_path"])
            pushed.append({"state": loaded.state_dict(), "repo": given["repo_id"]})

    monkeypatch.setattr(plain, "hf_api", Hub)
    monkeypatch.setattr(plain.Trainer, "init_hf_repo", lambda self, **_: setattr(self, "hub_model_id", "me/trained"))
    monkeypatch.setattr(plain.Trainer, "create_model_card", lambda *_, **__: None)
    from adaptra.integrations.transformers import PipelineTrainer

    named: Any = {"model": bert(), "train_dataset": classes(4), "eval_dataset": None, "compute_metrics": None}
    named |= {"stages": 1, "microbatches": 2, "data_collator": None, "preprocess_logits_for_metrics": None}
    made = trainer(PipelineTrainer, tmp_path, named, per_device_train_batch_size=4, push_to_hub=True)
    made.save_model()
    made.push_to_hub()
    state = made.pipe.full_state_dict()
    made.pipe.close()
    assert [one["repo"] for one in pushed] == ["me/trained"] * 2
    assert all(torch.equal(one, pushed[0]["state"][name].cpu()) for name, one in state.items())


def test_a_loss_of_a_subclass_is_refused(tmp_path: Path) -> None:
    from adaptra.integrations.transformers import PipelineTrainer

    class Own(PipelineTrainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named)

    with pytest.raises(OptionError) as caught:
        trainer(Own, tmp_path, {"stages": 1, "microbatches": 2})
    check_documented("OptionError", str(caught.value), OWN)


REFUSED = {
    "labels": "PipelineTrainer: a batch without labels: expected 'labels' in every batch",
    "offload": "TrainingArguments: activation_checkpointing_kwargs: expected no offload=True and no use_reentrant=True, which "
    "can't be captured",
    "prompt": "model: a PEFT … that learns a prompt: expected adapters within modules, such as LoRA",
    "loss": "model: a …: expected a loss that is a sum divided by num_items_in_batch, or a mean over labels: use "
    "adaptra.compile for others",
    "floats": "PipelineTrainer: labels of floating point with several replicas: expected whole numbers: the rows that fill up "
    "a last batch could not be left out",
    "placement": "PipelineTrainer: placement= with a routers' loss and replicas: expected one stage on each rank",
}


def refused(case: str) -> None:
    from adaptra.integrations import transformers_loss, transformers_refusals

    one = SimpleNamespace
    match case:
        case "labels":
            transformers_refusals.require_labels({"input_ids": torch.ones(2)})
        case "offload":
            given = one(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})
            transformers_loss.checkpoint_activations(None, given)
        case "prompt":
            transformers_refusals.refuse_model(one(peft_config={"default": one(is_prompt_learning=True)}))
        case "loss":
            transformers_refusals.refuse_loss(None, is_known=False)
        case "floats":
            transformers_refusals.refuse_replicas(None, torch.ones(1), 2, expected=2)
        case _:
            routed = one(config=one(output_router_logits=True))
            transformers_refusals.refuse_replicas(routed, torch.ones(1, dtype=torch.long), 2, expected=1)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_sum_of_parts_is_refused(case: str) -> None:
    with pytest.raises(OptionError) as caught:
        refused(case)
    check_documented("OptionError", str(caught.value), REFUSED[case])


def test_a_loss_that_is_neither_is_noticed() -> None:
    from adaptra.integrations.transformers_loss import divides_by_items

    class Own(torch.nn.Module):
        def __init__(self, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.of = of

        def forward(self, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.of(labels.double().sum(), num_items_in_batch),)

    batch = {"labels": torch.tensor([[3, -100], [1, 1]])}
    losses: list[Any] = [lambda total, items: total / items, lambda total, _: total, lambda total, items: total / items + 1]
    assert [divides_by_items(Own(one), batch) for one in losses] == [True, False, None]
