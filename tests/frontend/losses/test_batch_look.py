"""Each batch is looked at for microbatches of unequal weight, and losses over pairs of rows are told what they need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from torch import Tensor, nn

import adaptra
from adaptra.frontend.losses import batch_look

ROWS, LENGTH, CLASSES = 8, 6, 11

Warned = Callable[[], list[str]]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Warned]:
    """Returns what was said of the mean since the last call."""

    def told() -> list[str]:
        found = [one.getMessage() for one in caplog.records if one.getMessage().startswith("reduction='mean'")]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING):
        yield told


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def batch(padded: int = 0, rows: int = ROWS, length: int = LENGTH, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Tokens and labels. Of the first row the last labels are padding."""
    random = torch.Generator().manual_seed(rows + length)
    tokens, labels = (torch.randint(CLASSES, (rows, length), generator=random) for _ in range(2))
    labels[0, length - padded :] = ignored
    return tokens, labels


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_another_padding(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return of_tokens(logits[:, :-1], labels[:, 1:])


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def written(logits: Tensor, labels: Tensor) -> Tensor:
    changed = labels.clone()
    changed.masked_fill_(labels < 0, -1)
    return F.cross_entropy(logits.transpose(1, 2), changed, ignore_index=-1)


def scaled(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    return (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum() * (1 / mask.sum())


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model(), loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(tokens), labels)


LOSSES: dict[str, Any] = {
    "tokens": of_tokens,
    "shifted": shifted,
    "likelihood": likelihood,
    "masked": masked,
    "written": written,
    "scaled": scaled,
}


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_later_batch_with_unequal_labels_is_told_once(kind: str, returns: bool, warned: Warned) -> None:
    loss = LOSSES[kind]
    made = WithLoss(loss) if returns else model()
    with adaptra.compile(
        made,
        stages=2,
        microbatches=4,
        example_inputs=batch(),
        loss=None if returns else loss,
        options=adaptra.Options(adapt=False),
    ) as pipe:
        pipe.step(*batch())
        assert warned() == []
        pipe.step(*batch(4))
        (text,) = warned()
        assert "reduction='weighted'" in text and ("have" in text or "scale" in text)
        if kind == "tokens":
            assert "microbatches of a batch have 8 to 12 labels, but" in text
        pipe.step(*batch(2))
        assert warned() == []


def test_the_label_that_the_loss_leaves_out_counts(warned: Warned) -> None:
    """Only labels of the range that the loss reads, in batches of other sizes too, whose rows may not divide."""
    example = tuple(one.clamp(min=1) for one in batch())
    with adaptra.compile(model(), stages=1, microbatches=2, example_inputs=example, loss=with_another_padding) as pipe:
        pipe.step(*example)
        assert warned() == []
        pipe.step(*(one.clamp(min=1) for one in batch(rows=5, length=4)))
        assert warned() == [], "three rows and two have 12 and 8 labels"
        tokens, labels = (one.clamp(min=1) for one in batch(rows=5, length=4))
        labels[1] = 0
        pipe.step(tokens, labels)
        (text,) = warned()
        assert "have 8 to 8 labels" in text


def test_padding_that_the_shift_drops_and_equal_padding_is_none(warned: Warned) -> None:
    tokens, labels = batch()
    with adaptra.compile(WithLoss(shifted), stages=1, microbatches=4, example_inputs=batch()) as pipe:
        labels[0, 0] = -100
        pipe.step(tokens, labels)
        labels[::2, 4:] = -100
        pipe.step(tokens, labels)
        assert warned() == []
        labels[0, 1] = -100
        pipe.step(tokens, labels)
        assert len(warned()) == 1


def test_models_that_return_their_loss_tell_of_the_example(warned: Warned) -> None:
    with adaptra.compile(WithLoss(of_tokens), stages=1, microbatches=4, example_inputs=batch(5)):
        (text,) = warned()
        assert "microbatches of the example have 7 to 12 labels" in text


def test_a_label_for_each_row_may_be_left_out(warned: Warned) -> None:
    random = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(8, 6, generator=random), torch.randint(4, (8,), generator=random)
    with adaptra.compile(
        nn.Linear(6, 4), stages=1, microbatches=4, example_inputs=(inputs, labels), loss=F.cross_entropy
    ) as pipe:
        pipe.step(inputs, labels)
        assert warned() == []
        labels[1] = -100
        pipe.step(inputs, labels)
        (text,) = warned()
        assert "have 1 to 2 labels" in text


def test_large_batches_are_looked_at_in_turn(warned: Warned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_look, "MOST_LABELS", ROWS * LENGTH - 1)
    with adaptra.compile(model(), stages=1, microbatches=4, example_inputs=batch(), loss=of_tokens) as pipe:
        counts = []
        for _ in range(2):
            pipe.step(*batch(3))
            counts.append(len(warned()))
        assert counts == [0, 1]


class Towers(nn.Module):
    """Two towers, whose loss is over all pairs of rows."""

    def __init__(self, loss: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = nn.Linear(6, 4), nn.Linear(6, 4)
        self.loss = loss

    def forward(self, images: Tensor, texts: Tensor) -> Any:
        pair = self.images(images), self.texts(texts)
        return pair if self.loss is None else self.loss(pair, None)


def contrastive(pair: tuple[Tensor, Tensor], _: Any) -> Tensor:
    one, other = (F.normalize(side) for side in pair)
    return F.cross_entropy(one @ other.T * 5, torch.arange(len(one)))


def of_distances(pair: tuple[Tensor, Tensor], _: Any) -> Tensor:
    return (pair[0][:, None] - pair[1][None]).square().sum(-1).neg().logsumexp(1).mean()


def of_moments(pair: tuple[Tensor, Tensor], _: Any) -> Tensor:
    return (1 - pair[0].var(0, correction=0)).relu().mean() + (pair[0] - pair[1]).square().mean()


def per_row(pair: tuple[Tensor, Tensor], _: Any) -> Tensor:
    return (pair[0] - pair[1]).square().sum(1).mean()


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("loss", [contrastive, of_distances, of_moments])
def test_losses_over_several_rows_are_told_what_they_need(loss: Any, returns: bool, warned: Warned) -> None:
    pair = tuple(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    given: Any = {"example_inputs": pair} if returns else {"example_inputs": (pair, torch.zeros(8)), "loss": loss}
    with adaptra.compile(Towers(loss if returns else None), stages=1, microbatches=4, **given):
        (text,) = warned()
        assert "microbatches=1" in text and "torch.compile(backend='adaptra')" in text
        assert ("reduction='weighted'" in text) == (returns and loss is of_moments)
    with adaptra.compile(Towers(loss if returns else None), stages=1, microbatches=1, **given):
        assert warned() == []


def test_rows_that_count_alike_and_random_models_are_let_be(warned: Warned) -> None:
    pair = torch.randn(8, 6), torch.randn(8, 6)
    for made in (Towers(per_row), Towers(lambda pair, _: per_row((pair[0] + torch.randn_like(pair[0]), pair[1]), None))):
        made.train()
        with adaptra.compile(made, stages=1, microbatches=4, example_inputs=pair):
            assert warned() == []
        assert made.training
    summed = Towers(lambda pair, _: per_row(pair, None) * len(pair[0]))
    with adaptra.compile(summed, stages=1, microbatches=4, example_inputs=pair):
        (text,) = warned()
        assert text.endswith("looks like a sum over rows; give reduction='sum'")
