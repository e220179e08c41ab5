"""Losses that are no mean of equal parts: sums, and sums with weights, as plain torch has them of the whole batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from errors_table import check_documented
from processes import run_processes
from torch import Tensor, nn

import adaptra
from adaptra.errors import AdaptraError
from adaptra.runtime.worker.stages import loss_reduction

DOCUMENTED = {
    "reduction": "reduction=…: expected 'mean', 'sum' or 'weighted'",
    "sum": "loss=: it is … of some rows and … of the same rows twice, so it looks like a sum: expected a mean over the rows, "
    "as reduction='mean' takes that of the microbatches; give reduction='sum', or reduction='weighted' with a loss that "
    "returns (sum, weight)",
    "pair": "reduction='weighted': the … returned …: expected (sum, weight), two scalar tensors: the sum of the losses and "
    "what to divide it by, such as the number of labels",
    "integer": "reduction='weighted': a sum of …: expected a floating-point dtype",
    "weight": "reduction='weighted': the weight depends on trained parameters: expected a weight without gradient, such as "
    "the number of labels; detach it",
    "nothing": "reduction='weighted': the weights of all microbatches and replicas add up to …: expected more than 0, such as "
    "one label; the gradients are as before this step",
    "items": "inputs: num_items_in_batch is … with reduction='…': expected each batch's own number as a tensor without "
    "dimensions, and reduction='sum', since each microbatch's loss is a part of the batch's; or none, and a loss= that "
    "returns (sum, weight), with reduction='weighted'",
}

ROWS, MICROBATCHES, CLASSES = 8, 4, 11


def make() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(CLASSES, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES)
    )
    model[5].weight = model[0].weight
    return model


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens and labels, most of which are padding; the second microbatch has no label at all."""
    random = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(CLASSES, (rows, 5), generator=random) for _ in range(2))
    labels[torch.rand(rows, 5, generator=random) < 0.6] = -100
    labels[rows // MICROBATCHES : 2 * rows // MICROBATCHES] = -100
    return tokens, labels


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def weighted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return summed(logits, labels), (labels != -100).sum()


def compiled(loss: Any, reduction: str, model: nn.Module | list[nn.Module] | None = None, **how: Any) -> adaptra.Pipeline:
    return adaptra.compile(
        make() if model is None else model,
        stages=how.pop("stages", 3),
        microbatches=MICROBATCHES,
        example_inputs=batch(0),
        loss=loss,
        reduction=reduction,
        **how,
    )


def gradients(pipe: adaptra.Pipeline) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}


def in_parts(steps: int, reduction: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain torch: one backward pass of each microbatch's sum, divided at the end of each step; gradients are kept."""
    model, losses, kept = make(), [], {}
    for step in range(steps):
        tokens, labels = batch(step)
        model.zero_grad()
        sums = [summed(model(x), y) for x, y in zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)]
        for one in sums:
            one.backward()
        weight = (labels != -100).sum().item() if reduction == "weighted" else 1
        losses.append((torch.stack(sums).detach().double().sum() / weight).float())
        for name, one in model.named_parameters():
            assert one.grad is not None
            one.grad /= weight
            kept[name] = kept[name] + one.grad if name in kept else one.grad.clone()
    return losses, kept


def of_whole_batch(step: int, reduction: str, rows: int = ROWS) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain torch: one backward pass of the batch's loss."""
    model = make()
    tokens, labels = batch(step, rows)
    loss = (mean if reduction == "weighted" else summed)(model(tokens), labels)
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(("reduction", "loss"), [("weighted", weighted), ("sum", summed)])
def test_steps_are_those_of_the_whole_batch(reduction: str, loss: Any) -> None:
    with compiled(loss, reduction) as pipe:
        losses = [pipe.step(*batch(step)) for step in range(2)]
        evaluated = pipe.eval_step(*batch(1))
        found = gradients(pipe)
    expected, kept = in_parts(2, reduction)
    assert torch.equal(evaluated, losses[1])
    torch.testing.assert_close(losses, expected, rtol=1e-7 if reduction == "weighted" else 1e-6, atol=0)
    assert found.keys() == kept.keys()
    assert [name for name in kept if not torch.equal(found[name], kept[name])] == [], "not bitwise what the same sums give"
    whole = [of_whole_batch(step, reduction) for step in range(2)]
    torch.testing.assert_close(losses, [one for one, _ in whole])
    torch.testing.assert_close(found, {name: whole[0][1][name] + whole[1][1][name] for name in kept}, rtol=1e-5, atol=1e-6)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.inner(tokens)
        return (*weighted(logits, labels), logits)


def test_a_model_returns_the_pair_itself() -> None:
    with compiled(None, "weighted", WithLoss()) as pipe:
        losses = pipe.step(*batch(0)), pipe.eval_step(*batch(0))
        of_microbatches, found = pipe.microbatch_losses, gradients(pipe)
    expected, kept = of_whole_batch(0, "weighted")
    torch.testing.assert_close(losses, (expected, expected))
    assert of_microbatches.shape == (MICROBATCHES, 2) and of_microbatches[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found, {f"inner.{name}": one for name, one in kept.items()})


def test_stages_given_as_modules() -> None:
    model = make()
    model[5].weight = nn.Parameter(model[5].weight.detach().clone())
    with compiled(weighted, "weighted", [model[:2], model[2:]], stages=2) as pipe:
        losses = pipe.step(*batch(0)), pipe.eval_step(*batch(0))
        found = {name: one.grad for name, one in pipe.named_parameters()}
    expected = mean(model(batch(0)[0]), batch(0)[1])
    torch.testing.assert_close(losses, (expected.detach(), expected.detach()))
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(found["0.1.weight"], model[1].weight.grad)


def test_gradients_are_divided_once_under_a_scaled_loss() -> None:
    with compiled(weighted, "weighted") as pipe:
        scaler, optimizer = pipe.grad_scaler(init_scale=2.0**10), torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = [pipe.step(*batch(0)), pipe.step(*batch(1))]
        scaler.unscale_(optimizer)
        found = gradients(pipe)
    expected, kept = in_parts(2, "weighted")
    torch.testing.assert_close(losses, expected, rtol=1e-7, atol=0)
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_hooks_see_the_gradients_of_the_whole_batch() -> None:
    model, seen = make(), []
    model[1].weight.register_hook(lambda one: seen.append(one.clone()))
    with compiled(weighted, "weighted", model) as pipe:
        pipe.step(*batch(0))
        pipe.step(*batch(0))
    _, kept = in_parts(1, "weighted")
    assert len(seen) == 2 and all(torch.equal(one, kept["1.weight"]) for one in seen)


def test_a_batch_without_any_label_adds_nothing() -> None:
    tokens, labels = batch(0)
    nothing = torch.full_like(labels, -100)
    with compiled(weighted, "weighted") as pipe:
        for run in (pipe.step, pipe.eval_step):
            with pytest.raises(AdaptraError) as caught:
                run(tokens, nothing)
            check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["nothing"])
            assert gradients(pipe) == {}
        before = pipe.step(tokens, labels), gradients(pipe)
        with pytest.raises(AdaptraError):
            pipe.step(tokens, nothing)
        after = gradients(pipe)
    assert all(torch.equal(after[name], one) for name, one in before[1].items())


LOSSES = {"weighted": weighted, "sum": summed}


def train_replicas(rank: int) -> dict[str, tuple[list[float], float, dict[str, Any]]]:
    """Two steps under each reduction: the losses, the evaluated one, the gradients."""
    torch.distributed.init_process_group("gloo")
    found = {}
    for reduction, loss in LOSSES.items():
        with compiled(loss, reduction, stages=2) as pipe:
            batches = [tuple(one.chunk(2)[pipe.replica] for one in batch(step, 2 * ROWS)) for step in (1, 2)]
            losses = [pipe.step(*one).item() for one in batches]
            kept = {name: one.tolist() for name, one in gradients(pipe).items()}
            assert pipe.replica == rank // 2
            found[reduction] = (losses, pipe.eval_step(*batches[1]).item(), kept)
    return found


@pytest.mark.processes
def test_replicas_have_the_numbers_of_all_their_batches() -> None:
    results = run_processes(train_replicas, 4)
    for reduction in LOSSES:
        whole = [of_whole_batch(step, reduction, 2 * ROWS) for step in (1, 2)]
        expected = {name: whole[0][1][name] + whole[1][1][name] for name in whole[0][1]}
        for losses, evaluated, found in (one[reduction] for one in results):
            torch.testing.assert_close(losses, [loss.item() for loss, _ in whole], rtol=1e-6, atol=0)
            assert abs(evaluated - losses[1]) < 1e-5 and found
            for name, one in found.items():
                # Small elements are what large terms of either sign leave, so rounding goes by the largest.
                rounding = 1e-6 * expected[name].abs().max().item()
                torch.testing.assert_close(torch.tensor(one), expected[name], rtol=1e-5, atol=rounding)


def refused(case: str) -> None:
    match case:
        case "reduction":
            compiled(mean, "average")
        case "sum":
            compiled(summed, "mean")
        case "pair":
            compiled(mean, "weighted")
        case "integer":
            compiled(lambda _, labels: (labels.sum(), labels.sum()), "weighted")
        case "weight":
            compiled(lambda logits, _: (logits.sum(), logits.mean()), "weighted")
        case "items":
            tokens, labels = batch(0)
            adaptra.compile(
                causal(),
                stages=2,
                microbatches=2,
                example_kwargs=given(tokens, labels, 5),
                options=adaptra.Options(adapt=False),
            )
        case _:
            raise AssertionError(case)


@pytest.mark.parametrize("case", [one for one in DOCUMENTED if one != "nothing"])
def test_what_is_no_such_loss_is_refused(case: str) -> None:
    with pytest.raises(AdaptraError) as caught:
        refused(case)
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED[case])


@pytest.mark.parametrize(
    "loss",
    [
        mean,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda logits, labels: (logits.square().flatten(1).sum(1) * (labels[:, 0] > 0)).mean(),
        lambda logits, labels: logits.exp().sum().log(),
    ],
)
def test_a_mean_is_taken(loss: Any) -> None:
    with compiled(
        (lambda logits, labels: loss(logits.transpose(1, 2), labels)) if isinstance(loss, nn.Module) else loss, "mean", stages=1
    ):
        pass


def warned(caplog: pytest.LogCaptureFixture, loss: Any, labels: Tensor, reduction: str = "mean", **how: Any) -> list[str]:
    caplog.clear()
    example = (batch(0)[0], labels)
    with (
        caplog.at_level("WARNING"),
        adaptra.compile(make(), stages=1, example_inputs=example, loss=loss, reduction=reduction, **how),
    ):
        return [one.getMessage() for one in caplog.records if one.getMessage().startswith("reduction='mean'")]


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, weight=torch.arange(1.0, CLASSES + 1))


def test_microbatches_of_unequal_weight_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """What counts is the loss, not the labels: a mean over rows may have any."""
    padded = batch(0)[1]
    full = torch.randint(CLASSES, (ROWS, 5), generator=torch.Generator().manual_seed(3))
    (text,) = warned(caplog, mean, padded, microbatches=4)
    assert re.search(r"microbatches of the example count 0.889 to 1.78 times .* reduction='weighted'$", text), text
    assert (full != -100).all() and warned(caplog, mean, full, microbatches=4) == []
    equal = full.clone()
    equal[:, 3:] = -100
    assert warned(caplog, mean, equal, microbatches=4) == [], "as much padding in each"
    equal[0, 2] = -100
    (text,) = warned(caplog, mean, equal, microbatches=2)
    assert f"{11 / 11.5:.3g} to {12 / 11.5:.3g}" in text
    assert warned(caplog, lambda logits, labels: logits.square().mean(), padded, microbatches=4) == []
    assert warned(caplog, mean, padded, microbatches=1) == []
    assert warned(caplog, weighted, padded, "weighted", microbatches=4) == []
    assert len(warned(caplog, of_classes, full, microbatches=4)) == 1, "classes have weights"


def test_labels_are_counted_where_outputs_are_large_or_the_model_returns_the_loss(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_reduction, "MOST_ELEMENTS_OF_BATCH", 1)
    padded = batch(0)[1]
    (text,) = warned(caplog, mean, padded, microbatches=4)
    counts = [int((part != -100).sum()) for part in padded.chunk(4)]
    assert f"have {min(counts)} to {max(counts)} labels" in text
    assert warned(caplog, mean, padded.clamp(min=0), microbatches=4) == []


def test_a_loss_that_changes_its_values_in_place_is_left_out_of_outputs() -> None:
    """Label smoothing masks by targets, which an evaluation for outputs is not given."""
    model, (tokens, labels) = make(), batch(0)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)

    with adaptra.compile(model, stages=2, microbatches=1, example_inputs=(tokens, labels), loss=loss) as pipe:
        torch.testing.assert_close(pipe.eval_step(tokens), model(tokens).detach())
        torch.testing.assert_close(pipe.step(tokens, labels), loss(model(tokens), labels).detach())


def test_one_microbatch_may_be_summed() -> None:
    tokens, labels = batch(0)
    with adaptra.compile(make(), stages=2, microbatches=1, example_inputs=(tokens, labels), loss=summed) as pipe:
        torch.testing.assert_close(pipe.step(tokens, labels), of_whole_batch(0, "sum")[0])


def causal() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=CLASSES, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def given(tokens: Tensor, labels: Tensor, number: Any) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": labels, "use_cache": False, "num_items_in_batch": number}


def test_the_number_of_items_is_that_of_each_step() -> None:
    model = causal()
    batches = [given(*batch(step), (batch(step)[1][:, 1:] != -100).sum()) for step in range(2)]
    assert batches[0]["num_items_in_batch"] != batches[1]["num_items_in_batch"]
    expected = [model(**one).loss for one in batches]
    for one in batches:
        model(**one).loss.backward()
    wanted = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    with adaptra.compile(model, stages=2, microbatches=4, example_kwargs=batches[0], reduction="sum") as pipe:
        losses = [pipe.step(**one) for one in batches]
        found = gradients(pipe)
    torch.testing.assert_close(losses, [one.detach() for one in expected])
    for name, one in found.items():
        torch.testing.assert_close(one, wanted[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(AdaptraError) as caught:
        adaptra.compile(model, stages=2, microbatches=4, example_kwargs=batches[0])
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["items"])
