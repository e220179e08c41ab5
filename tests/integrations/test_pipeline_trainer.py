"""What a PipelineTrainer computes is what the plain Trainer computes in one process with the same rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs
from commands import run_command, under_torchrun
from trainer_runs import gpt2, history, rows, trainer, without_times

pytest.importorskip("accelerate", reason="PipelineTrainer needs accelerate")

pytestmark = pytest.mark.usefixtures("no_accelerator_left")

SIZES: dict[str, Any] = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
PARTS: dict[str, Any] = SIZES | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
"""The plain Trainer's arguments for the sums of a pipeline with four microbatches."""


def piped(folder: Path, named: dict[str, Any] | None = None, **given: Any) -> Any:
    from adaptra.integrations.transformers import PipelineTrainer

    return trainer(PipelineTrainer, folder, {"stages": 2, "microbatches": 4} | (named or {}), **SIZES | given)


def plain(folder: Path, named: dict[str, Any] | None = None, **given: Any) -> Any:
    from transformers import Trainer

    return trainer(Trainer, folder, named, **SIZES | given)


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=rel)


@pytest.mark.usefixtures("one_thread")
def test_short_batches_metrics_and_predictions(tmp_path: Path) -> None:
    """With accumulation: 14 rows are a batch of 8 and one of 6, and both are one step. 13 rows to evaluate are 8 and 5."""
    settings: Any = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "epoch", "eval_on_start": True}
    made, other = piped(tmp_path, **settings), plain(tmp_path, **settings)
    for one in (made, other):
        one.train()
    assert_close(history(made), history(other))
    assert any("eval_score" in one for one in history(made))

    found, expected = (one.predict(rows(5)) for one in (made, other))
    assert (found.predictions == expected.predictions).all()
    assert (found.label_ids == expected.label_ids).all()
    assert without_times(found.metrics) == pytest.approx(without_times(expected.metrics), rel=1e-5)

    made.preprocess_logits_for_metrics = other.preprocess_logits_for_metrics = None
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows(5)]
    found, expected = (one.predict(unlabelled) for one in (made, other))
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(expected.predictions), rtol=1e-4, atol=1e-5)
    assert found.label_ids is None
    assert "test_loss" not in found.metrics
    made.pipe.close()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("settings", [{"bf16": True}, {"label_smoothing_factor": 0.1, "bf16": True}])
def test_label_smoothing_and_bfloat16_are_bitwise(settings: dict[str, Any], tmp_path: Path) -> None:
    """The batch of 8 has the sums of the plain Trainer's four parts. Those of the batch of 6 are in another order."""
    named: Any = {"train_dataset": rows(14), "eval_dataset": None}
    made = piped(tmp_path, named, **settings)
    assert made.pipe.session.compiled.difference is None
    made.train()
    other = plain(tmp_path, named, **PARTS | settings)  # its accelerator has a precision of its own
    other.train()
    found, expected = history(made), history(other)
    assert all(found[0][name] == expected[0][name] for name in ("loss", "grad_norm"))
    assert [one["loss"] for one in found[:-1]] == pytest.approx([one["loss"] for one in expected[:-1]], rel=1e-4)
    made.pipe.close()


@pytest.mark.usefixtures("one_thread")
def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    """The learning rate is so high that the model gets worse after its first steps."""
    best: Any = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    best |= {"learning_rate": 0.3, "num_train_epochs": 2, "metric_for_best_model": "loss"}
    made, other = piped(tmp_path / "piped", {"model": gpt2()}, **best), plain(tmp_path / "plain", {"model": gpt2()}, **best)
    for one in (made, other):
        one.train()
    assert_close(history(made), history(other), rel=1e-3)  # the learning rate makes rounding grow
    losses = [one["eval_loss"] for one in made.state.log_history if "eval_loss" in one]
    assert losses[-1] > min(losses)
    assert made.evaluate()["eval_loss"] == min(losses)
    made.pipe.close()


@pytest.mark.processes
def test_replicas_count_each_row_once(tmp_path: Path) -> None:
    """Two replicas are one process with the rows of both. The rows that fill up the last batches count nowhere."""
    command = [*under_torchrun(4, Path(trainer_runs.__file__)), trainer_runs.__file__, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = run_command(command, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(one == ranks[0] for one in ranks)

    settings: Any = {"num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    other = plain(tmp_path / "plain", **settings)
    other.train()
    expected = other.predict(rows(6, shorter=4))
    found = ranks[0]
    ended = history(other)
    ended[-1]["total_flos"] *= 16 / 14  # the rows that fill up are computed
    assert_close(found["history"], ended)
    counts = expected.label_ids != -100
    assert found["labels"] == expected.label_ids.tolist()
    assert (torch.tensor(found["predictions"]).numpy()[counts] == expected.predictions[counts]).all()
    assert found["metrics"] == pytest.approx(without_times(expected.metrics), rel=1e-5)
