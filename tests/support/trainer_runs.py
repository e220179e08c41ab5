"""A small Llama under the plain Trainer and under PipelineTrainer, with the same rows, in tests and as a script of ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from processes import are_on_cuda

MEASURED = ("runtime", "per_second", "preparation_time")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def gpt2() -> Any:
    """A model with a tied weight at both ends, and a class name that doesn't say what its loss is."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens: Any = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=8, **rates, **tokens))


def rows(count: int, shorter: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of 8 tokens on the host, some with labels that don't count. The first ones may be shorter."""
    drawn = torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(count), device="cpu")
    labels = drawn.clone()
    labels[::3, 5:] = -100
    lengths = [6 if index < shorter else 8 for index in range(count)]
    return [{"input_ids": row[:n], "labels": label[:n]} for row, label, n in zip(drawn, labels, lengths, strict=True)]


def padded(given: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate rows of several lengths."""
    fills = {"input_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in given], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
        if name in given[0]
    }


def most_likely(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """Take the most likely tokens, which depend on the logits' values."""
    assert labels is None or labels.shape == logits.shape[:2]
    return logits.argmax(-1)


def scores(found: Any) -> dict[str, float]:
    """A metric that depends on the number of rows and on their order."""
    counts = found.label_ids != -100
    weighted = found.predictions * (1 + np.arange(len(counts)))[:, None]
    return {"rows": len(counts), "score": float(weighted[counts].sum())}


def trainer(kind: Any, folder: Path, named: dict[str, Any] | None = None, **given: Any) -> Any:
    """Make a Trainer of the kind, on one GPU if the calling test is on cuda."""
    from transformers import TrainingArguments, set_seed

    common: Any = {
        "output_dir": str(folder),
        "use_cpu": not are_on_cuda(),
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    common |= {"save_strategy": "no", "learning_rate": 1e-2, "num_train_epochs": 1} | given
    sets: Any = {"model": llama(), "train_dataset": rows(14), "eval_dataset": rows(13, shorter=4), "data_collator": padded}
    functions: Any = {"compute_metrics": scores, "preprocess_logits_for_metrics": most_likely}
    set_seed(0)
    args = TrainingArguments(**common)
    args._n_gpu = min(args.n_gpu, 1)  # the plain Trainer takes all GPUs, each with rows of its own
    return kind(args=args, **sets | functions | (named or {}))


def history(made: Any) -> list[dict[str, Any]]:
    """What a Trainer has logged, without times."""
    return [without_times(one) for one in made.state.log_history]


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in metrics.items() if not name.endswith(MEASURED)}


def replicas(folder: Path) -> None:
    """Train and predict with two replicas. Each rank writes what it has found."""
    from adaptra.integrations.transformers import PipelineTrainer

    sizes: Any = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    best: Any = {"num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    made = trainer(PipelineTrainer, folder / "ranks", {"stages": 2, "microbatches": 2}, **sizes, **best)
    made.train()
    found = made.predict(rows(6, shorter=4))
    shown: Any = {"history": history(made), "predictions": found.predictions.tolist(), "labels": found.label_ids.tolist()}
    (folder / f"{made.args.process_index}.json").write_text(json.dumps(shown | {"metrics": without_times(found.metrics)}))
    made.pipe.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    replicas(Path(sys.argv[1]))
