"""What a PipelineTrainer refuses before it compiles: other engines, several devices of a process, models that are placed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from errors_table import check_documented
from paths import ROOT

from adaptra.errors import OptionError

pytest.importorskip("accelerate", reason="PipelineTrainer needs accelerate")

SURVIVES = (
    "PipelineTrainer: Options(survive=True): expected False: the Trainer's own sums and saves wait for all processes of the "
    "launcher; write your own loop with adaptra.compile"
)
NO = "TrainingArguments: …=…: a PipelineTrainer can't follow it: …"
DEVICES = "TrainingArguments: n_gpu=…: expected one device for each rank: start the script by torchrun"
PRECISION = (
    "TrainingArguments: mixed_precision=…: expected 'no' or 'bf16': put torch.autocast into the model's forward and train by "
    "pipe.step with pipe.grad_scaler()"
)
BEST = (
    "TrainingArguments: load_best_model_at_end=True with save_only_model=True: expected False: each rank reads its stages from "
    "what checkpoints have beside the model"
)
SMOOTHING = (
    "TrainingArguments: label_smoothing_factor: a …: expected a class that AutoModelForCausalLM knows, since the plain Trainer "
    "shifts the labels of no other"
)
ROWS = "TrainingArguments: accelerator_config: …=…: expected …: each replica reads its own rows, as many as the others"
PREDICTIONS = "predictions: a …: expected tensors, or tuples of them: name other outputs in ignore_keys="
PLACED = "model: it was loaded with device_map=: expected none: adaptra places the stages itself"
ROUTED = (
    "model: config.output_router_logits=True in a … without router_aux_loss_coef: expected False: the routers' loss can't be "
    "averaged over the parts of a batch"
)
PLAIN = "model: a …: expected a PreTrainedModel of transformers: use adaptra.compile for other models"
MISSING = "PipelineTrainer needs transformers and accelerate: pip install 'adaptra[transformers]'"


def arguments(folder: Path, **changed: Any) -> Any:
    """Arguments with some set after construction, where transformers asks for packages or devices that are not here."""
    from transformers import TrainingArguments

    made = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    for name, value in changed.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changed", "row"),
    [
        ({"fsdp": ["full_shard"]}, NO),
        ({"deepspeed": "stage2.json"}, NO),
        ({"predict_with_generate": True}, NO),
        ({"_n_gpu": 2}, DEVICES),
        ({"fp16": True}, NO),
    ],
)
def test_other_engines_and_devices_are_refused(changed: dict[str, Any], row: str, tmp_path: Path) -> None:
    from adaptra.integrations.transformers_refusals import refuse_arguments

    refuse_arguments(arguments(tmp_path))
    with pytest.raises(OptionError) as caught:
        refuse_arguments(arguments(tmp_path, **changed))
    check_documented("OptionError", str(caught.value), row)
    name = next(iter(changed)).removeprefix("_")
    assert f"TrainingArguments: {name}=" in str(caught.value)


def test_settings_of_precision_rows_and_checkpoints_are_refused(tmp_path: Path) -> None:
    from adaptra.integrations.transformers_refusals import refuse_arguments

    uneven = arguments(tmp_path)
    uneven.accelerator_config.even_batches = False
    best = arguments(tmp_path, load_best_model_at_end=True, save_only_model=True)
    for made, row in ((arguments(tmp_path, mixed_precision="fp8"), PRECISION), (best, BEST), (uneven, ROWS)):
        with pytest.raises(OptionError) as caught:
            refuse_arguments(made)
        check_documented("OptionError", str(caught.value), row)


def test_a_job_that_survives_is_refused() -> None:
    import adaptra
    from adaptra.integrations.transformers_refusals import refuse_survival

    refuse_survival(None)
    refuse_survival(adaptra.Options())
    with pytest.raises(OptionError) as refusal:
        refuse_survival(adaptra.Options(survive=True))
    check_documented("OptionError", str(refusal.value), SURVIVES)


def test_labels_that_the_plain_trainer_would_not_shift_are_not_smoothed() -> None:
    from transformers import LlamaForCausalLM

    from adaptra.integrations.transformers_refusals import refuse_smoothing

    class Renamed(LlamaForCausalLM):
        """A class of a user."""

    refuse_smoothing(object.__new__(LlamaForCausalLM))
    with pytest.raises(OptionError) as caught:
        refuse_smoothing(object.__new__(Renamed))
    check_documented("OptionError", str(caught.value), SMOOTHING)


def test_predictions_are_tensors() -> None:
    import torch

    from adaptra.integrations.transformers_rows import built, structure_of

    tensors: list[torch.Tensor] = []
    given = (torch.ones(2), (torch.zeros(3), torch.ones(1)))
    structure = structure_of(given, tensors)
    assert built(structure, tensors) == given
    with pytest.raises(OptionError) as caught:
        structure_of((torch.ones(2), {"scores": torch.ones(2)}), tensors)
    check_documented("OptionError", str(caught.value), PREDICTIONS)


def test_collators_pad_to_few_sizes() -> None:
    """The user's own number stays, and so do the collator that was given and functions."""
    from transformers import DataCollatorWithPadding, default_data_collator

    from adaptra.integrations.transformers_rows import padding_to_few_sizes

    tokenizer: Any = None
    given = DataCollatorWithPadding(tokenizer)
    assert (padding_to_few_sizes(given).pad_to_multiple_of, given.pad_to_multiple_of) == (8, None)
    for one in (DataCollatorWithPadding(tokenizer, pad_to_multiple_of=3), default_data_collator):
        assert padding_to_few_sizes(one) is one


def test_placed_routed_and_foreign_models_are_refused() -> None:
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    from adaptra.integrations.transformers_refusals import refuse_model

    small: Any = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    placed, routed = (LlamaForCausalLM(LlamaConfig(**small)) for _ in range(2))
    refuse_model(placed)
    placed.__dict__["hf_device_map"] = {"": "cpu"}
    routed.config.__dict__["output_router_logits"] = True
    for model, row in ((placed, PLACED), (routed, ROUTED), (nn.Linear(2, 2), PLAIN)):
        with pytest.raises(OptionError) as caught:
            refuse_model(model)
        check_documented("OptionError", str(caught.value), row)


def test_the_versions_of_the_error_the_extra_and_the_doctor_agree() -> None:
    """A version that the extra installs is one that is taken."""
    from adaptra.cli.tested_versions import TESTED
    from adaptra.integrations.transformers_refusals import NEWEST, OLDEST

    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["transformers"]
    (found,) = [one for one in extra if one.startswith("transformers")]
    assert found == f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    assert [one.rpartition(".")[0] for one in TESTED["transformers"]] == [".".join(map(str, one)) for one in (OLDEST, NEWEST)]
    assert any(one == f"accelerate>={TESTED['accelerate'][0].removesuffix('.0')}" for one in extra)


def test_a_missing_package_is_named() -> None:
    code = """
import sys
sys.modules["accelerate"] = None
try:
    import adaptra.integrations.transformers
except ImportError as error:
    print(f"{type(error).__name__}|{error}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kind, _, message = done.stdout.strip().partition("|")
    check_documented(kind, message, MISSING)
