"""Architectures that people train, over two and four stages, are bitwise what they are in one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from architecture_table import DOCUMENT, row_of, rows_of
from architecture_table import STAGES as TABLED
from architectures import ARCHITECTURES, Checkpointed
from models import GPT, Batch, Example, token_loss, tokens
from processes import are_on_cuda, run_processes
from training import Step, compiled, differences, train, train_alone

from adaptra.graph.ops.fake import without_onednn

STEPS, ROWS, MICROBATCHES = 20, 6, 3

ROUNDED_OTHERWISE = {"LSTM": "oneDNN's kernel of a whole layer can't be differentiated op by op, so torch's own ops run"}
"""Why a model is not bitwise as eager torch runs it by default; with oneDNN off it is. Only its stages run other ops."""

WAYS = [("T5", "c10d", 4), ("U-Net", "c10d", 4)]
"""Architectures, transports and numbers of ranks that are tried without being asked for."""

# Compiling one takes some ten seconds of a processor, and CI has two for all.
pytestmark = [pytest.mark.usefixtures("one_thread")]


@cache
def batches(name: str) -> list[Batch]:
    return [ARCHITECTURES[name].rows(ROWS, seed) for seed in range(STEPS)]


def dtype_of(name: str) -> torch.dtype:
    """The one to train in: torch's fake tensors of cuda take a grouped product of matrices in bfloat16 only."""
    return torch.bfloat16 if name == "Mixtral" and are_on_cuda() else torch.float32


@cache
def alone(name: str, steps: int = STEPS) -> list[Step]:
    with without_onednn() if name in ROUNDED_OTHERWISE else nullcontext():
        return train_alone(ARCHITECTURES[name], batches(name)[:steps], MICROBATCHES, dtype=dtype_of(name))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_trains_bitwise_as_in_one_process(name: str, stages: int) -> None:
    """Its stages run eager torch's ops; losses, gradients, parameters and buffers of every step; its row of the table."""
    example, expected, dtype = ARCHITECTURES[name], alone(name), dtype_of(name)
    with compiled(example, batches(name)[0], stages=stages, microbatches=MICROBATCHES, dtype=dtype) as pipe:
        built = pipe._session
        assert built is not None
        other = str(built.compiled.difference)
        assert ("module layers.0 (LSTM)" in other and "mkldnn" in other) if name in ROUNDED_OTHERWISE else other == "None"
        assert differences(train(pipe, batches(name)), expected) == []
        # The table is of CPUs: attention has another form on the stand-in for CUDA, and the stages other lengths.
        if stages == TABLED and not are_on_cuda():
            assert row_of(name, example.make(), built.compiled) == rows_of(DOCUMENT.read_text())[name][:-1]


@pytest.mark.parametrize("name", ROUNDED_OTHERWISE)
def test_what_rounds_otherwise_than_eager_torch_stays_close(name: str) -> None:
    usual = train_alone(ARCHITECTURES[name], batches(name), MICROBATCHES)
    for step, other in zip(alone(name), usual, strict=True):
        torch.testing.assert_close(step.losses, other.losses, rtol=1e-5, atol=1e-5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the ways over processes: some, or with ``--transport`` each architecture over two and over four ranks."""
    if "transport" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--transport")
        ways = [(name, chosen, ranks) for ranks in (2, 4) for name in ARCHITECTURES] if chosen else WAYS
        metafunc.parametrize(("name", "transport", "ranks"), ways)


def train_over_processes(rank: int, ranks: int, name: str, transport: str) -> list[str]:
    torch.distributed.init_process_group("gloo")
    steps = batches(name)[:3]
    how: Any = {"microbatches": MICROBATCHES, "transport": transport, "dtype": dtype_of(name)}
    with compiled(ARCHITECTURES[name], steps[0], stages=ranks, **how) as pipe:
        return differences(train(pipe, steps), alone(name, len(steps)), whole=False)


@pytest.mark.processes
def test_it_trains_bitwise_over_processes(name: str, transport: str, ranks: int) -> None:
    """What an early stage makes for a late one, as of T5 and U-Net, travels through all stages between."""
    assert run_processes(train_over_processes, ranks, ranks, name, transport) == [[]] * ranks


# Activation checkpointing: nothing is captured of it but ops, so it is done anew.


def peaks(model: Example) -> list[int]:
    with compiled(model, model.rows(4, 0), stages=2, microbatches=2) as pipe:
        built = pipe._session
        assert built is not None
        return [stage.kept_after_forward for stage in built.compiled.train]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_checkpointed_block_is_computed_again_on_its_own_stage(dropout: float) -> None:
    """It keeps far less between F and I, costs another forward pass in the backward pass, and changes no number.

    With dropout too: the mask is kept, where eager torch draws it again from a generator that it has put back.
    """
    plain = Example("plain", lambda: GPT(blocks=4, dropout=dropout), tokens, token_loss)
    checkpointed = Example("checkpointed", lambda: Checkpointed(blocks=4, dropout=dropout), tokens, token_loss)
    given = [plain.rows(4, seed) for seed in range(3)]
    stages, flops = {}, {}
    for example in (plain, checkpointed):
        with compiled(example, given[0], stages=2, microbatches=2, split=["blocks.2"]) as pipe:
            assert differences(train(pipe, given), train_alone(plain, given, 2)) == []
            built = pipe._session
            assert built is not None
            stages[example.name] = [one.kept_after_forward for one in built.compiled.train]
            flops[example.name] = [
                (one.flops.forward, one.flops.input_grad + one.flops.weight_grad) for one in built.compiled.train
            ]
    for kept, before in zip(stages["checkpointed"], stages["plain"], strict=True):
        assert kept < (0.8 if dropout else 0.6) * before
    for (forward, backward), (forward_before, backward_before) in zip(flops["checkpointed"], flops["plain"], strict=True):
        assert forward == forward_before and backward > backward_before + 0.4 * forward


def test_both_forms_of_checkpointing_are_the_same_here() -> None:
    """The older form is an autograd.Function, which a graph can't hold; as a checkpoint it is understood."""
    newer = Example("newer", lambda: Checkpointed(blocks=2), tokens, token_loss)
    older = Example("older", lambda: Checkpointed(blocks=2, reentrant=True), tokens, token_loss)
    assert peaks(newer) == peaks(older)


def test_the_documented_table_names_every_architecture_in_order() -> None:
    assert list(rows_of(DOCUMENT.read_text())) == list(ARCHITECTURES)
