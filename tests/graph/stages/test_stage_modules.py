"""A model given as a list of modules, one per stage: they run as they are, what can't be captured too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from architectures import ARCHITECTURES
from errors_table import check_documented
from models import Example, token_loss, tokens
from processes import run_processes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import compiled, differences, train, train_alone

import adaptra
from adaptra.errors import AdaptraError, CaptureError
from adaptra.graph import RandomKey
from adaptra.graph.ops.random_state import default_generator_seeded

MICROBATCHES, ROWS, STEPS = 3, 6, 6
pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENTED = {
    "no model": "model: a …: expected a torch.nn.Module, or a list of them, one for every stage",
    "too few": (
        "model: a list of … modules with stages=…: expected one for every stage; torch.nn.Sequential joins several to one"
    ),
    "split": "split=…: expected None, as the model is a list of stages already",
    "fails": (
        "stage …: its module failed with the example: …: expected modules of which each takes what the one before returns, a "
        "tuple as its arguments"
    ),
    "returns": (
        "stage …: returns a …: expected tensors, or tuples, lists or dicts of tensors and None, which can travel to the next "
        "stage"
    ),
    "buffer": "…: stages … share this buffer: expected each buffer in one stage, which alone may change it",
    "structure": (
        "a stage returned … with this batch and … with the example: expected one structure for all batches, with tensors in "
        "the same places"
    ),
    "gradient": (
        "stage …: output … has a gradient with this batch and had none with the example: expected an example that takes a way "
        "with a gradient"
    ),
}


class Doubled(torch.autograd.Function):
    """Twice the value, thrice the gradient: no graph of ops has this backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 3 * grad_outputs[0]


class Begin(nn.Module):
    """Returns a tuple: activations, integers that no gradient flows through, and nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, None]:
        return self.tokens(tokens), tokens % 2, None


class Middle(nn.Module):
    """Depends on values, changes its input in place, counts in a buffer that it replaces, and has statistics."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, parity: Tensor, nothing: None) -> dict[str, Tensor]:
        assert nothing is None
        x.relu_()
        parity += 1
        self.seen = self.seen + 1
        x = x + (self.first(x) if x.sum().item() > 40 else self.second(x))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return {"x": Doubled.apply(x), "parity": parity}


class End(nn.Module):
    """Shares its weight with the first stage."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.lstm = nn.LSTM(weight.shape[1], weight.shape[1], batch_first=True)

    def forward(self, both: dict[str, Tensor]) -> Tensor:
        x, _ = self.lstm(both["x"] * both["parity"][..., None])
        return F.linear(x, self.weight)


class Chain(nn.ModuleList):
    """The list as one model, whose parameters have the names that the pipeline gives them."""

    def forward(self, *given: Any) -> Any:
        returned: Any = None
        for module in self:
            returned = module(*given)
            given = returned if isinstance(returned, tuple) else (returned,)
        return returned


def unruly(width: int = 8) -> nn.Module:
    begin = Begin(width)
    weight = begin.get_parameter("tokens.weight")
    return Chain([begin, Middle(width), End(weight)])


UNRULY = Example("unruly", unruly, tokens, token_loss)


def by_modules(example: Example, **arguments: Any) -> Any:
    whole = example.make()
    assert isinstance(whole, nn.ModuleList)
    model: Any = list(whole)
    given: dict[str, Any] = {"stages": len(whole), "microbatches": MICROBATCHES} | arguments
    return compiled(example, example.rows(ROWS, 0), model=model, **given)


def test_what_can_not_be_captured_trains_bitwise_as_in_one_process() -> None:
    """Losses, gradients (one of a shared parameter), weights and buffers; an evaluation in between is that of eager torch."""
    steps = [UNRULY.rows(ROWS, seed) for seed in range(STEPS)]
    whole = UNRULY.make()
    expected = train_alone(UNRULY, steps, MICROBATCHES, model=whole)
    with pytest.raises(CaptureError), compiled(UNRULY, steps[0], stages=3, microbatches=MICROBATCHES):
        pass
    with by_modules(UNRULY) as pipe:
        assert differences(train(pipe, steps), expected) == []
        (inputs,), _, targets = steps[0]
        whole.eval()
        with torch.no_grad():
            outputs = [whole(one) for one in inputs.chunk(MICROBATCHES)]
        losses = [token_loss(output, target) for output, target in zip(outputs, targets.chunk(MICROBATCHES), strict=True)]
        assert torch.equal(pipe.eval_step(inputs, targets), torch.stack(losses).mean())
        assert torch.equal(pipe.eval_step(inputs), torch.cat(outputs))


@pytest.mark.parametrize("stages", [2, 4])
def test_a_sequential_in_parts_trains_bitwise_as_in_one_process(stages: int) -> None:
    """The architecture of docs/models.md, as many steps as its others."""
    architecture = ARCHITECTURES["nn.Sequential"]

    def in_parts() -> nn.Module:
        layers = list(architecture.build().children())
        cuts = [len(layers) * stage // stages for stage in range(stages + 1)]
        return Chain([nn.Sequential(*layers[begin:end]) for begin, end in pairwise(cuts)])

    example = replace(architecture, build=in_parts)
    steps = [example.rows(ROWS, seed) for seed in range(20)]
    with by_modules(example) as pipe:
        assert differences(train(pipe, steps), train_alone(example, steps, MICROBATCHES)) == []


def test_every_plan_gives_the_same_numbers() -> None:
    steps = [UNRULY.rows(ROWS, seed) for seed in range(STEPS)]
    with by_modules(UNRULY) as pipe:
        expected = train(pipe, steps)
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        with by_modules(UNRULY, options=adaptra.Options(schedule=schedule, adapt=False)) as pipe:
            assert differences(train(pipe, steps), expected) == []


def train_over_processes(rank: int) -> list[str]:
    torch.distributed.init_process_group("gloo")
    steps = [UNRULY.rows(ROWS, seed) for seed in range(STEPS)]
    with by_modules(UNRULY) as pipe:
        return differences(train(pipe, steps), train_alone(UNRULY, steps, MICROBATCHES), whole=False)


@pytest.mark.processes
def test_they_train_over_processes() -> None:
    assert run_processes(train_over_processes, 3) == [[]] * 3


class Dropped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + checkpoint(lambda one: F.dropout(self.linear(one).tanh(), 0.5), x, use_reentrant=True)


def test_random_numbers_are_those_of_stage_and_microbatch_also_where_a_checkpoint_computes_again() -> None:
    torch.manual_seed(0)
    stages = [Dropped(4), Dropped(4)]
    whole, rows, targets = Chain(stages), torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    before = torch.get_rng_state()
    with adaptra.compile(
        stages,
        stages=2,
        microbatches=MICROBATCHES,
        example_inputs=(rows, targets),
        loss=F.mse_loss,
        options=adaptra.Options(seed=7),
    ) as pipe:
        pipe.step(rows, targets)
        found = {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}
        assert torch.equal(torch.get_rng_state(), before)
    whole.zero_grad()
    for k, (x, target) in enumerate(zip(rows.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)):
        for index, module in enumerate(whole):
            with default_generator_seeded(x.device, RandomKey(7, 0, k).of_op(index)):
                x = module(x)
        (F.mse_loss(x, target) / MICROBATCHES).backward()
    expected = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    assert found.keys() == expected.keys() and len(found) == 8
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_frozen_stages_hand_gradients_on_or_end_them() -> None:
    def build(frozen: int) -> nn.Module:
        chain = Chain([nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Linear(4, 2)])
        chain[frozen].requires_grad_(False)
        return chain

    def rows(count: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(count, 4, generator=generator),), {}, torch.randn(count, 2, generator=generator)

    for frozen in (0, 1):
        example = Example("frozen", lambda frozen=frozen: build(frozen), rows, F.mse_loss)
        steps = [example.rows(ROWS, seed) for seed in range(3)]
        with by_modules(example) as pipe:
            assert differences(train(pipe, steps), train_alone(example, steps, MICROBATCHES)) == []


def test_the_report_counts_what_modules_do_and_keep() -> None:
    chain = [nn.Linear(16, 32), nn.Linear(32, 4)]
    rows = torch.randn(8, 16), torch.randn(8, 4)
    with adaptra.compile(chain, stages=2, microbatches=2, example_inputs=rows, loss=F.mse_loss) as pipe:
        first, second = pipe._require().compiled.train
        assert (first.flops.forward, second.flops.forward) == (2 * 4 * 16 * 32, 2 * 4 * 32 * 4)
        # The weight's gradient on both, the input's on the second.
        assert (first.flops.input_grad, second.flops.input_grad) == (2 * 4 * 16 * 32, 2 * (2 * 4 * 32 * 4))
        assert first.kept_after_forward == 2 * 4 * 4 * 16  # what arrived, and the copy that autograd keeps
        assert first.kept_after_input_grad == first.parameter_bytes == 4 * (16 * 32 + 32)
        assert "stage" in pipe.report()


class Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return (x, self.what)


class Chooses(nn.Module):
    """Takes another layer than the frozen one, or returns a list, where a batch says so."""

    def __init__(self, structure: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.layers[0].requires_grad_(False)
        self.structure = structure

    def forward(self, x: Tensor) -> Any:
        other = bool((x > 5).any())
        y = self.layers[int(other and not self.structure)](x)
        return [y] if other and self.structure else y


def test_mistakes_are_named() -> None:
    rows = torch.randn(4, 2), torch.randn(4, 2)

    def error_of(model: Any, batch: Any = None, **arguments: Any) -> tuple[str, str]:
        given: dict[str, Any] = {"stages": 2, "microbatches": 2, "example_inputs": rows, "loss": F.mse_loss} | arguments
        with pytest.raises(AdaptraError) as caught, adaptra.compile(model, **given) as pipe:
            pipe.step(*batch)
        return type(caught.value).__name__, str(caught.value)

    shared = nn.BatchNorm1d(2)
    large = torch.full((4, 2), 9.0), rows[1]
    found = {
        "no model": error_of([nn.Linear(2, 2), "a string"]),
        "too few": error_of([nn.Linear(2, 2)]),
        "split": error_of([nn.Linear(2, 2)] * 2, split=["1"]),
        "fails": error_of([nn.Linear(2, 2), nn.Linear(3, 2)]),
        "returns": error_of([Returns("text"), nn.Linear(2, 2)]),
        "buffer": error_of([nn.Sequential(nn.Linear(2, 2), shared), shared]),
        "structure": error_of([Chooses(True), nn.Linear(2, 2)], large),
        "gradient": error_of([Chooses(False), nn.Linear(2, 2)], large),
    }
    for how, (kind, message) in found.items():
        check_documented(kind, message, DOCUMENTED[how])
