"""A Llama trains by PipelineTrainer as by the plain Trainer, and what it can't do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from errors_table import check_documented
from script_pairs import losses_of_pipeline, losses_of_plain

from adaptra.errors import AdaptraError

pytest.importorskip("accelerate", reason="PipelineTrainer needs accelerate")

PAIR = "hf_llama"

NO = "TrainingArguments: …=…: a PipelineTrainer can't follow it: …"
GIVEN = "PipelineTrainer: …: it was given: expected none: …"
LENGTH = "PipelineTrainer: …: a …: expected a data set with a length, an index and a row"
OPTIMIZER = "TrainingArguments: optim=…: expected one of …: others were not tested on the stages of one rank"
MODEL = "model: a …: its forward fails on the first row of train_dataset: …: …: expected inputs and labels of this model"
VERSION = "transformers …: expected … to …: pip install 'adaptra[transformers]'"
RESUME = (
    "resume_from_checkpoint=…: it has no folder 'pipeline': expected a checkpoint of a PipelineTrainer, without save_only_model"
)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes))


def trainer(folder: Path, *, model: Any = None, count: int = 32, named: dict[str, Any] | None = None, **given: Any) -> Any:
    from transformers import TrainingArguments

    from adaptra.integrations.transformers import PipelineTrainer

    tokens = torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    common: Any = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    args = TrainingArguments(**common | {"per_device_train_batch_size": 8, "save_strategy": "no"} | given)
    whole: Any = llama() if model is None else model
    return PipelineTrainer(model=whole, args=args, train_dataset=rows, stages=2, microbatches=4, **named or {})


def losses(made: Any) -> list[float]:
    return [one["loss"] for one in made.state.log_history if "loss" in one]


@pytest.mark.processes
def test_losses_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    """The losses of steps are bitwise the same; the evaluation's is summed in another order."""
    from safetensors.torch import load_file

    expected = losses_of_plain(PAIR, tmp_path, "--steps", "4")
    found = losses_of_pipeline(PAIR, tmp_path, 4, "--steps", "4", "--output", "other")
    assert len(expected) == 5
    assert found[:-1] == expected[:-1]
    assert found[-1] == pytest.approx(expected[-1], rel=1e-6)
    plain, piped = (load_file(tmp_path / name / "model.safetensors") for name in ("trained", "other"))
    assert plain.keys() == piped.keys()
    assert all(torch.equal(plain[name], piped[name]) for name in plain)


@pytest.mark.usefixtures("one_thread")
def test_a_run_goes_on_bitwise(tmp_path: Path) -> None:
    """With accumulation, across the end of an epoch."""
    settings: Any = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    made = [trainer(tmp_path / name, **settings) for name in ("whole", "again")]
    made[0].train()
    made[1].train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(made[0]) == losses(made[1])
    states = [one.pipe.full_state_dict() for one in made]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for one in made:
        one.pipe.close()


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=1)
    with pytest.raises(AdaptraError) as caught:
        made.train(resume_from_checkpoint=str(tmp_path))
    made.pipe.close()
    check_documented("StateError", str(caught.value), RESUME)


@pytest.mark.parametrize(
    ("given", "row"),
    [
        ({"auto_find_batch_size": True}, NO),
        ({"torch_compile": True}, NO),
        ({"optim": "adafactor"}, OPTIMIZER),
        ({"count": 0}, LENGTH),
        ({"named": {"compute_loss_func": len}}, GIVEN),
        ({"named": {"eval_dataset": iter([0])}}, LENGTH),
    ],
)
def test_what_it_cannot_follow_is_refused(given: dict[str, Any], row: str, tmp_path: Path) -> None:
    with pytest.raises(AdaptraError) as caught:
        trainer(tmp_path, **given)
    check_documented(type(caught.value).__name__, str(caught.value), row)


def test_a_model_that_cannot_run_the_rows_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    small: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(AdaptraError) as caught:
        trainer(tmp_path, model=BertForSequenceClassification(BertConfig(**small)))  # labels of each token
    check_documented("OptionError", str(caught.value), MODEL)


def test_other_versions_are_refused() -> None:
    from adaptra.integrations.transformers_refusals import require_version

    require_version("5.24.0")
    with pytest.raises(AdaptraError) as caught:
        require_version("6.0.1")
    check_documented("MissingExtraError", str(caught.value), VERSION)
