"""What a step costs beside plain torch: a pipeline of one stage and a loop over the same microbatches, in turn.

Both train the same model with the same batches in one process on one core. So all that differs is what captures, schedules
and keeps the books. Seconds are processor time of all threads of the process. Dropout is off in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from _table import Row, parser, print_rows
from torch import Tensor, nn

import adaptra

DECODER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
"""Llama's sizes; two heads of queries for each of keys and values."""

VOCABULARY = 512


def llama(layers: int) -> nn.Module:
    """A Llama with grouped heads."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, use_cache=False, **DECODER)
    )


def gpt2(layers: int) -> nn.Module:
    """GPT-2."""
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_layer=layers, n_embd=256, n_head=8, use_cache=False)
    return transformers.GPT2LMHeadModel(without_dropout(config))


def bert(layers: int) -> nn.Module:
    """BERT, which predicts every token."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=256, num_attention_heads=8, intermediate_size=1024
    )
    return transformers.BertForMaskedLM(without_dropout(config))


class T5(nn.Module):
    """T5, given the same tokens on both sides."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            num_layers=layers // 2,
            num_decoder_layers=layers // 2,
            d_model=256,
            d_kv=32,
            d_ff=1024,
            num_heads=8,
            use_cache=False,
        )
        self.model = transformers.T5ForConditionalGeneration(without_dropout(config))

    def forward(self, tokens: Tensor) -> Any:
        """What the model makes of these tokens."""
        return self.model(input_ids=tokens, decoder_input_ids=tokens)


CASES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "Llama, 1,024 tokens": (llama, 1024),
    "Llama, 512 tokens": (llama, 512),
    "GPT-2, 512 tokens": (gpt2, 512),
    "BERT, 512 tokens": (bert, 512),
    "T5, 512 tokens": (T5, 512),
}


def without_dropout(config: Any) -> Any:
    """The same configuration, whose probabilities of dropout are all 0."""
    for name in (
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout_rate",
    ):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean of the tokens' cross entropies."""
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def measure(make: Callable[[], nn.Module], length: int, microbatches: int, runs: int) -> tuple[float, float]:
    """Processor seconds of a step of the pipeline and of plain torch, the medians of paired steps."""
    source = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCABULARY, (2, microbatches, length), generator=source)
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    ours: list[float] = []
    theirs: list[float] = []
    options = adaptra.Options(adapt=False, captured="error")
    with adaptra.compile(
        make(), stages=1, microbatches=microbatches, example_inputs=(tokens, targets), loss=token_loss, options=options
    ) as pipe:
        own = list(pipe.parameters())

        def step() -> None:
            pipe.step(tokens, targets)

        def plain_step() -> None:
            for one, wanted in zip(tokens.split(1), targets.split(1), strict=True):
                (token_loss(plain(one), wanted) / microbatches).backward()

        for _ in range(runs + 2):
            for work, parameters, times in ((step, own, ours), (plain_step, list(plain.parameters()), theirs)):
                for parameter in parameters:
                    parameter.grad = None
                started = time.process_time()
                work()
                times.append(time.process_time() - started)
    return median(ours[2:]), median(theirs[2:])


def main() -> int:
    """Measure each model and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=15, help="paired steps of each model")
    arguments.add_argument("--microbatches", type=int, default=4, help="of one row each")
    arguments.add_argument("--layers", type=int, default=4)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, (make, length) in CASES.items():
        ours, theirs = measure(lambda make=make: make(given.layers), length, given.microbatches, given.runs)
        rows.append(Row(f"{name}: a step", ours * 1e3, theirs * 1e3, "ms of processor time", given.runs))
    print_rows("A step over one stage and in plain torch", rows, baseline="plain torch", as_json=given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
