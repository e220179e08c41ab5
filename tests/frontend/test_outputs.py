"""Outputs beside the loss: those that plain torch's forward returns, and nothing else of the step changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from errors_table import check_documented
from models import EXAMPLES, Example, class_loss, square_loss, vectors
from processes import run_processes
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from training import MIXED, call, compiled, train_alone

import adaptra
from adaptra.errors import AdaptraError
from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

ROWS, MICROBATCHES = 8, 4
DOCUMENTED = {
    "kind": "outputs=…: expected True, for the model's outputs on the last stage's rank, 'all' for outputs on all ranks, or "
    "False",
    "absent": "outputs: the model's … computed before the last stage, which gets what it computes the loss from only: "
    "expected outputs that the last stage has; leave these out in training (such as by use_cache=False), or give split= a "
    "later stage that begins earlier",
    "varies": "outputs: the model returned … with this batch: expected what it returned with the example, with tensors "
    "for values that vary",
    "alone": "eval_step: outputs=True without targets: expected targets for the loss; without outputs=True the outputs are "
    "returned alone",
}


def merged(parts: list[Any]) -> Any:
    """What the microbatches' outputs are of the whole batch: the mean over rows of what has none."""
    rows = [next((len(leaf) for leaf in pytree.tree_leaves(one) if leaf.dim()), 1) for one in parts]
    columns = zip(*(pytree.tree_leaves(one) for one in parts), strict=True)
    leaves = [torch.cat(column) if column[0].dim() else mean_over(rows, column) for column in columns]
    return pytree.tree_unflatten([one.detach() for one in leaves], pytree.tree_structure(parts[0]))


def mean_over(rows: list[int], column: Any) -> Tensor:
    if len(set(rows)) == 1:
        return torch.stack(column).mean()
    return torch.stack([one * (count / sum(rows)) for one, count in zip(column, rows, strict=True)]).sum()


def same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return pytree.tree_structure(one) == pytree.tree_structure(other) and all(torch.equal(a, b) for a, b in pairs)


def outputs_alone(example: Example, batches: list[Any]) -> tuple[list[Any], list[Any]]:
    """Plain torch's steps and its outputs of each batch."""
    model, seen = example.make(), list[Any]()
    model.register_forward_hook(lambda _, __, returned: seen.append(pytree.tree_map_only(Tensor, torch.clone, returned)))
    steps = train_alone(example, batches, MICROBATCHES, model=model)
    return [merged(seen[at : at + MICROBATCHES]) for at in range(0, len(seen), MICROBATCHES)], steps


def train(example: Example, batches: list[Any], asked: list[bool], **how: Any) -> tuple[list[Any], list[Any]]:
    """A pipeline's outputs of the batches for which they are asked, and what each step leaves."""
    outputs, left = [], []
    with compiled(example, batches[0], stages=how.pop("stages", 2), microbatches=MICROBATCHES, **how) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for batch, asks in zip(batches, asked, strict=True):
            args, kwargs = call(batch)
            found = pipe.step(*args, **kwargs, outputs=True) if asks else pipe.step(*args, **kwargs)
            outputs += [found[1]] if isinstance(found, tuple) else []
            gradients = {name: one.grad for name, one in pipe.named_parameters()}
            optimizer.step()
            left.append(pytree.tree_map_only(Tensor, torch.clone, (pipe.microbatch_losses, gradients, pipe.state_dict())))
            optimizer.zero_grad()
    return outputs, left


@pytest.mark.parametrize("example", [*EXAMPLES.values(), MIXED], ids=lambda one: one.name)
def test_outputs_are_those_of_plain_torch_and_the_steps_too(example: Example) -> None:
    batches = [example.rows(ROWS, seed) for seed in range(3)]
    expected, alone = outputs_alone(example, batches)
    outputs, left = train(example, batches, [True, False, True])
    assert same(outputs, [expected[0], expected[2]])
    for (losses, gradients, state), step in zip(left, alone, strict=True):
        assert torch.equal(losses, step.losses)
        assert all(torch.equal(state[name], one) for name, one in step.state.items())
        wanted = {name: one for name, one in step.gradients if one is not None}
        assert all(torch.equal(gradients[name], one) for name, one in wanted.items() if name in gradients)
    assert outputs[0] is not None and not any(one.requires_grad for one in pytree.tree_leaves(outputs))


def looks(graph: fx.GraphModule) -> list[Any]:
    """The ops of a graph with the shapes and strides of what they return."""
    return [
        (str(node.target), pytree.tree_map_only(Tensor, lambda one: (one.shape, one.stride(), one.dtype), node.meta["val"]))
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=lambda one: one.name)
def test_the_last_stage_runs_the_same_ops_in_the_same_order(example: Example) -> None:
    with compiled(example, example.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES) as pipe:
        stage: Any = pipe.session.compiled.train[-1]
        assert looks(stage._forward_with_outputs().module) == looks(stage.graphs[0])


class Beside(nn.Module):
    """Outputs of all kinds: of ops that the loss does not need, random ones among them, of an input, a buffer, a constant."""

    count: Tensor

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("count", torch.zeros(()))
        self.plain = plain

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden + F.dropout(self.second(hidden), 0.3, self.training))
        self.count.add_(1.0)
        if self.plain:
            return {"logits": logits}
        return {
            "logits": logits,
            "nest": [logits.argmax(1), F.dropout(logits, 0.5), (logits > 0).sum(), 3],
            "hidden": hidden,
            "count": self.count,
        }


def beside_loss(outputs: Any, targets: Tensor) -> Tensor:
    return square_loss(outputs["logits"], targets)


def first_layer(x: Tensor) -> Tensor:
    model = BESIDE.make()
    assert isinstance(model, Beside)
    return model.first(x)


BESIDE = Example("beside", Beside, vectors(8), beside_loss)


def test_outputs_need_ops_of_their_own_and_outlive_messages() -> None:
    batches = [BESIDE.rows(ROWS, seed) for seed in range(2)]
    (first, second), left = train(BESIDE, batches, [True, True], split=["second"])
    plain = Example("plain", lambda: Beside(plain=True), vectors(8), beside_loss)
    expected, alone = outputs_alone(plain, batches)
    assert same([first["logits"], second["logits"]], [one["logits"] for one in expected])
    assert torch.equal(first["nest"][0], first["logits"].argmax(1))
    assert first["nest"][1].count_nonzero() < first["logits"].numel()
    assert first["nest"][2].item() == (first["logits"] > 0).sum().item() / MICROBATCHES and first["nest"][3] == 3
    assert first["count"].item() == 2.5 and second["count"].item() == 6.5, "the mean of its values at the microbatches"
    with torch.no_grad():
        hidden = [torch.tanh(first_layer(one)) for one in batches[0][0][0].chunk(MICROBATCHES)]
    assert torch.equal(first["hidden"], torch.cat(hidden)), "received, and then kept while messages reuse the memory"
    assert all(torch.equal(losses, step.losses) for (losses, _, _), step in zip(left, alone, strict=True))
    assert all(torch.equal(left[-1][2][name], one) for name, one in alone[-1].state.items())


def test_evaluation_returns_both() -> None:
    batch = BESIDE.rows(ROWS, 0)
    with compiled(BESIDE, batch, stages=2, microbatches=MICROBATCHES, split=["second"]) as pipe:
        (x, y), _ = call(batch)
        loss, outputs = pipe.eval_step(x, y, outputs=True)
        assert torch.equal(loss, pipe.eval_step(x, y))
        assert torch.equal(outputs["logits"], pipe.eval_step(x)["logits"])
        parts = [torch.tanh(first_layer(one)).detach() for one in x[0].chunk(MICROBATCHES)]
        assert torch.equal(outputs["hidden"], torch.cat(parts))
        again, of_all = pipe.eval_step(x, y, outputs="all")
        assert torch.equal(again, loss) and torch.equal(of_all["logits"], outputs["logits"])
        assert torch.equal(pipe.eval_step(x, outputs="all")["logits"], outputs["logits"])
        with pytest.raises(AdaptraError) as caught:
            pipe.eval_step(x, outputs=True)
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["alone"])


def test_outputs_that_the_last_stage_has_not_are_refused_and_training_goes_on() -> None:
    batch = BESIDE.rows(ROWS, 0)
    with compiled(BESIDE, batch, stages=2, microbatches=MICROBATCHES, split=["last"]) as pipe:
        (x, y), _ = call(batch)
        with pytest.raises(AdaptraError) as caught:
            pipe.step(x, y, outputs=True)
        check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["absent"])
        assert "outputs['hidden'] is computed" in str(caught.value)
        given: Any = "yes"
        with pytest.raises(AdaptraError) as caught:
            pipe.step(x, y, outputs=given)
        check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["kind"])
        assert pipe.step(x, y).isfinite()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return {"logits": self.layer(x), "passed": x, "calls": min(self.calls, 30)}


def test_stages_given_as_modules() -> None:
    torch.manual_seed(0)
    first, last = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Last()
    last.calls = 100
    x, y = torch.randn(2, ROWS, 8)
    stages: Any = [first, last]
    with adaptra.compile(
        stages, stages=2, microbatches=MICROBATCHES, example_inputs=(x, y), loss=lambda o, y: square_loss(o["logits"], y)
    ) as pipe:
        loss, outputs = pipe.step(x, y, outputs=True)
        with torch.no_grad():
            hidden = torch.cat([first(one) for one in x.chunk(MICROBATCHES)])
            logits = torch.cat([last.layer(one) for one in hidden.chunk(MICROBATCHES)])
        assert torch.equal(outputs["passed"], hidden) and torch.equal(outputs["logits"], logits)
        assert outputs["calls"] == 30 and not outputs["logits"].requires_grad
        assert torch.equal(loss, pipe.step(x, y))
        evaluated = pipe.eval_step(x, y, outputs=True)
        assert torch.equal(evaluated[1]["logits"], logits)


def test_a_module_that_returns_other_values_than_with_the_example_is_refused() -> None:
    x, y = torch.randn(2, ROWS, 8)
    stages: Any = [nn.Linear(8, 8), Last()]
    with adaptra.compile(
        stages, stages=2, microbatches=MICROBATCHES, example_inputs=(x, y), loss=lambda o, y: square_loss(o["logits"], y)
    ) as pipe:
        pipe.step(x, y)
        with pytest.raises(AdaptraError) as caught:
            pipe.step(x, y, outputs=True)
    check_documented(type(caught.value).__name__, str(caught.value), DOCUMENTED["varies"])


class Words(nn.Module):
    """Outputs of which one has a row per token, and one as many rows for any microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x)))
        return logits.flatten(0, 1), logits, logits.sum((0, 1)), logits.mean()


def test_microbatches_of_unequal_rows() -> None:
    torch.manual_seed(0)
    model, alone = Words(), Words()
    alone.load_state_dict(model.state_dict())
    x, y = torch.randn(ROWS, 3, 8), torch.randn(ROWS, 3, 6)
    with adaptra.compile(
        model,
        stages=2,
        microbatches=MICROBATCHES,
        example_inputs=(x, y),
        loss=lambda o, y: square_loss(o[1], y),
        split=["last"],
    ) as pipe:
        for rows in (7, 5, 2):
            x, y = torch.randn(rows, 4, 8), torch.randn(rows, 4, 6)
            parts = x.split({7: [2, 2, 2, 1], 5: [2, 1, 1, 1], 2: [1, 1]}[rows])
            with torch.no_grad():
                expected = merged([alone(one) for one in parts])
            assert same(pipe.step(x, y, outputs=True)[1], expected)
            assert same(pipe.eval_step(x, y, outputs="all")[1], expected)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = self.layers(x)
        return {"loss": class_loss(logits.float(), labels), "logits": logits, "best": logits.argmax(-1)}


def with_loss(rows: int, seed: int) -> Any:
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 8, generator=source), torch.randint(8, (rows,), generator=source)), {}, None


WITH_LOSS = Example("with_loss", WithLoss, with_loss, None)


@pytest.mark.parametrize("how", [{}, {"stages": 4, "placement": "v"}], ids=["straight", "v"])
def test_a_model_that_returns_its_loss_under_autocast(how: dict[str, Any]) -> None:
    batches = [WITH_LOSS.rows(ROWS, seed) for seed in range(2)]
    expected, alone = outputs_alone(WITH_LOSS, batches)
    split = {"split": ["layers.1", "layers.2"], "stages": 3, "placement": [0, 1, 0]} if how else {}
    outputs, left = train(WITH_LOSS, batches, [True, True], **split)
    assert same(outputs, expected) and outputs[0]["logits"].dtype == torch.bfloat16
    assert all(torch.equal(losses, step.losses) for (losses, _, _), step in zip(left, alone, strict=True))


def test_an_inner_compiler_and_a_scaled_loss() -> None:
    example = EXAMPLES["gpt_tied"]
    batch = example.rows(ROWS, 0)
    expected, _ = outputs_alone(example, [batch])
    options = adaptra.Options(inner="aot_eager")
    with compiled(example, batch, stages=2, microbatches=MICROBATCHES, options=options) as pipe:
        (x, y), _ = call(batch)
        pipe.grad_scaler(init_scale=2.0**10)
        loss, outputs = pipe.step(x, y, outputs=True)
        gradients = {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}
        for one in pipe.parameters():
            one.grad = None
        assert torch.equal(loss, pipe.step(x, y)) and torch.equal(outputs, expected[0])
        assert all(torch.equal(one.grad, gradients[name]) for name, one in pipe.named_parameters() if one.grad is not None)


def train_on_ranks(rank: int) -> tuple[list[float], list[Any]]:
    """Two replicas of two stages; of each only the rank of the last stage asks, and not in each step."""
    torch.distributed.init_process_group("gloo")
    example = EXAMPLES["gpt_tied"]
    losses, outputs = [], []
    with compiled(example, example.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for step in range(3):
            (x, y), _ = call(example.rows(ROWS, 2 * step + pipe.replica))
            if rank == (3 if step == 0 else 1):
                loss, found = pipe.step(x, y, outputs=True)
                outputs.append(found)
            else:
                loss = pipe.step(x, y)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        (x, y), _ = call(example.rows(ROWS, pipe.replica))
        loss, found = pipe.step(x, y, outputs=True)
        outputs.append(found)
        loss, found = pipe.eval_step(x, y, outputs=True)
        outputs.append(found)
        assert loss.isfinite()
        outputs += [pipe.step(x, y, outputs="all")[1], pipe.eval_step(x, y, outputs="all")[1], pipe.eval_step(x, outputs="all")]
        with pytest.raises(AdaptraError) as caught:
            for _ in range(2):
                pipe.step(x, y, outputs="all" if rank == 1 else False)
        # Rank 1 differs from both of its neighbours, and either of them may be the first to see it.
        said = ("rank 0 called step, rank 1 step(outputs='all')", "rank 1 called step(outputs='all'), rank 2 step")
        assert rank > 1 or any(one in str(caught.value) for one in said), str(caught.value)
    return losses, [one if one is None else one.tolist() for one in outputs]


@pytest.mark.processes
def test_a_rank_asks_while_others_do_not() -> None:
    example = EXAMPLES["gpt_tied"]
    found = run_processes(train_on_ranks, 4)
    model, seen = example.make(), list[Any]()
    model.register_forward_hook(lambda _, __, returned: seen.append(returned.detach()))
    rows = [[example.rows(ROWS, 2 * step + one) for one in range(2)] for step in range(3)]
    batches = [((torch.cat([x for (x,), _, _ in both]),), {}, torch.cat([y for _, _, y in both])) for both in rows]
    alone = train_alone(example, batches, 2 * MICROBATCHES, model=model)
    for losses, _ in found:
        assert losses == pytest.approx([step.losses.mean().item() for step in alone])
    for first, last in ((0, 1), (2, 3)):
        alone_at, _, *of_all = found[first][1]
        assert alone_at is None and found[first][1][1] is None, "ranks without the last stage"
        assert of_all[0] == found[last][1][-5] and of_all == found[last][1][-3:], "the same for all ranks of a replica"
        assert of_all[1] == of_all[2] == found[last][1][-4]
    assert found[0][1][-1] != found[2][1][-1], "each replica has its own rows"
    (first, _), (second, third) = found[3][1][:2], found[1][1][:2]
    expected = torch.cat(seen[MICROBATCHES : 2 * MICROBATCHES])
    assert torch.equal(torch.tensor(first), expected), "replica 1's rows of the first step, before any sum over replicas"
    for number, one in ((1, second), (2, third)):
        of_replica = seen[2 * MICROBATCHES * number :][:MICROBATCHES]
        torch.testing.assert_close(torch.tensor(one), torch.cat(of_replica), msg="replica 0's rows")


HOME, OTHER = (0,), (1,)
PATHS = [[OTHER, HOME, HOME, HOME], [OTHER, HOME, OTHER, HOME]]
"""The path of each replica's microbatches: both compute some of the other one's."""


def train_under(rank: int, program: Program | str) -> list[Any]:
    """Outputs of steps for which both replicas ask, each in its own way, for which one asks, and of an evaluation."""
    batches = [BESIDE.rows(ROWS, seed) for seed in range(4)]
    options = adaptra.Options(schedule=program, adapt=False)
    with compiled(BESIDE, batches[0], stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        (first, y_first), (second, y_second) = (call(batches[2 * step + rank])[0] for step in range(2))
        outputs = [pipe.step(first, y_first, outputs="all")[1], pipe.step(second, y_second, outputs=True)[1]]
        for asking in (0, 1):
            found: Any = pipe.step(first, y_first, outputs=rank == asking)
            outputs.append(found[1] if isinstance(found, tuple) else None)
        outputs.append(pipe.eval_step(second, y_second, outputs="all")[1])
    return pytree.tree_map_only(Tensor, Tensor.tolist, outputs)


def train_with_and_without_routes(rank: int, program: Program) -> tuple[list[Any], list[Any]]:
    torch.distributed.init_process_group("gloo")
    return train_under(rank, "1f1b"), train_under(rank, program)


@pytest.mark.processes
def test_outputs_come_home_from_other_replicas() -> None:
    case = Case(CostModel.uniform(1, 1.0, 1.0, 1.0), MICROBATCHES, (0,)).of_replicas(2)
    program = plan_job(case, routing=Routing.of_paths((HOME, OTHER), PATHS))
    found = run_processes(train_with_and_without_routes, 2, program)
    for rank, (at_home, routed) in enumerate(found):
        assert routed == at_home
        assert [one is None for one in routed] == [False, False, rank == 1, rank == 0, False]
    assert found[0][0][0] != found[1][0][0], "each replica has its own rows"
