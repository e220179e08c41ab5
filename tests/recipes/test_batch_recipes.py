"""Packing and bucketing: what the recipes print and save is bitwise that of one process in plain torch, with few shapes."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import MICROBATCHES, made_by, write_recipe
from torch import Tensor
from torch.nn import functional


def train_alone(made: dict[str, Any], batches: Iterable[tuple[tuple[Tensor, ...], Tensor]]) -> list[str]:
    """The lines of losses, with an optimizer step per batch, whose microbatches add up to a sum and a count."""
    model, loss = made["model"], made["loss"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lines: list[str] = []
    for inputs, labels in batches:
        sums: list[Tensor] = []
        for part in zip(*(one.chunk(MICROBATCHES) for one in (*inputs, labels)), strict=True):
            total, _ = loss(model(*part[:-1]), part[-1])
            total.backward()
            sums.append(total.detach())
        count = (labels != made["NO_LABEL"]).sum().item()
        for parameter in model.parameters():
            parameter.grad /= count
        lines.append(f"loss {(torch.stack(sums).double().sum() / count).float().item()}")
        optimizer.step()
        optimizer.zero_grad()
    return lines


def printed_by(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.chdir(folder)
    runpy.run_path("train.py")
    return capsys.readouterr().out.splitlines()


def test_packed_documents_train_as_one_process_and_as_documents_one_by_one(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe("packing", tmp_path)
    printed = printed_by(tmp_path, monkeypatch, capsys)
    made = made_by(tmp_path)
    (_, _, numbers), labels = made["pack"](made["batches"][0])
    assert numbers.max() > 1, "some row has several documents"
    assert len(set((labels != made["NO_LABEL"]).sum(1).tolist())) > 1, "rows have unequally many labels"
    total, count = torch.zeros(()), 0
    for one in made["batches"][0]:
        inputs = functional.pad(one, (0, made["LENGTH"] - len(one)))[None], torch.arange(made["LENGTH"])[None]
        same = (torch.arange(made["LENGTH"]) < len(one)).long()[None]
        with torch.no_grad():
            logits = made["model"](*inputs, same)[0, : len(one) - 1]
        total, count = total + functional.cross_entropy(logits, one[1:], reduction="sum"), count + len(one) - 1
    torch.testing.assert_close(float(printed[0].split()[1]), (total / count).item(), rtol=1e-5, atol=0)
    assert printed == train_alone(made, map(made["pack"], made["batches"])) and len(printed) == 2
    trained = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(one, trained[name]) for name, one in made["model"].state_dict().items())


def test_batches_by_length_have_few_shapes_and_train_as_one_process(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe("bucketing", tmp_path)
    *printed, shapes = printed_by(tmp_path, monkeypatch, capsys)
    made = made_by(tmp_path)
    grouped = [texts for epoch in range(2) for texts in made["by_length"](made["texts"], epoch)]
    batches = [((tokens,), labels) for tokens, labels in map(made["collate"], grouped)]
    assert shapes == "4 shapes" and {tokens.shape[1] for (tokens,), _ in batches} == {8, 16, 24, 32}
    assert printed == train_alone(made, batches) and len(printed) == 16
    trained = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(one, trained[name]) for name, one in made["model"].state_dict().items())
