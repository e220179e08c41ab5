"""Models that run under autocast train as they do in one process, bit for bit, and can be cut within it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from errors_table import check_documented
from models import Example, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import compiled, differences, train, train_alone

import adaptra
from adaptra.errors import AdaptraError

DOCUMENTED = {
    "compile": "adaptra.compile under torch.autocast: expected it in the model's forward and in loss=, where it is compiled",
    "step": "a pipeline's step under torch.autocast: expected it in the model's forward and in loss=, where it is compiled",
}

MICROBATCHES = 4


class Autocast(nn.Module):
    """All that autocast does in one forward pass: casts, a cast used twice, regions within it and what it leaves alone."""

    def __init__(self, dtype: torch.dtype, width: int = 8) -> None:
        super().__init__()
        self.dtype = dtype
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        first, twice, unseen, exact, again, last = self.layers
        with torch.autocast("cpu", dtype=self.dtype):
            x = torch.tanh(first(x))
            x = twice(torch.tanh(twice(x))) + x
            with torch.no_grad():
                scale = unseen(x).abs().mean() + 1
            x = F.dropout(x / scale, 0.2, self.training)
            with torch.autocast("cpu", enabled=False):
                x = exact(x.float())
            x = self.norm(x)
            x = checkpoint(nn.Sequential(again, nn.Tanh()), x, use_reentrant=False)
            return last(x)


def autocast_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (outputs @ targets.t()).float().square().mean()


def example(dtype: torch.dtype = torch.bfloat16) -> Example:
    return Example(f"autocast {dtype}", lambda: Autocast(dtype), vectors(8), autocast_loss)


def autocast_steps(dtype: torch.dtype, split: Sequence[str]) -> tuple[list[str], set[torch.dtype]]:
    """What differs from plain torch, and what stages send each other."""
    one = example(dtype)
    batches = [one.rows(4 * MICROBATCHES, step) for step in range(3)]
    with compiled(one, batches[0], stages=len(split) + 1, microbatches=MICROBATCHES, split=split) as pipe:
        built: Any = pipe._session
        sent = {spec.dtype for stage in built.compiled.train[:-1] for spec in stage.outputs}
        return differences(train(pipe, batches), train_alone(one, batches, MICROBATCHES), whole=False), sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [(), ("layers.5",), ("layers.3", "layers.4", "layers.5")])
def test_autocast_in_a_model_is_bitwise_that_of_one_process(dtype: torch.dtype, split: Sequence[str], one_thread: None) -> None:
    found, sent = autocast_steps(dtype, split)
    assert found == []
    assert (dtype in sent) == bool(split)


class Tied(nn.Module):
    """A weight under autocast at both ends."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.ends = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.ends(torch.tanh(self.middle(torch.tanh(self.ends(x)))))


def test_each_stage_casts_a_weight_that_several_use(one_thread: None) -> None:
    """One process adds the gradients of the one cast, rounded to its precision; stages cast each and add in float32."""
    one = Example("tied under autocast", Tied, vectors(8), autocast_loss)
    batch = one.rows(4 * MICROBATCHES, 0)
    (expected,) = train_alone(one, [batch], MICROBATCHES)
    with compiled(one, batch, stages=2, microbatches=MICROBATCHES, split=["middle"]) as pipe:
        (step,) = train(pipe, [batch])
    assert torch.equal(step.losses, expected.losses)
    wanted = dict(expected.gradients)
    for name, gradient in step.gradients:
        assert gradient is not None
        torch.testing.assert_close(gradient, wanted[name], rtol=2**-7, atol=1e-4)


class Forked(nn.Module):
    """Several layers of a stage cast the activation that it receives, as attention's projections do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.ways = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.before(x)).float()
            first, second, third = (way(x) for way in self.ways)
            return first * second + third


def test_gradients_of_a_received_activation_are_added_in_its_own_precision(one_thread: None) -> None:
    """Autocast keeps the one cast of a weight. A stage's input is none, although it is a leaf there."""
    one = Example("forked under autocast", Forked, vectors(8), autocast_loss)
    batches = [one.rows(4 * MICROBATCHES, step) for step in range(2)]
    with compiled(one, batches[0], stages=2, microbatches=MICROBATCHES, split=["ways.0"]) as pipe:
        assert differences(train(pipe, batches), train_alone(one, batches, MICROBATCHES), whole=False) == []
        assert pipe.session.compiled.difference is None


def autocast_on_a_rank(_rank: int) -> tuple[list[str], set[torch.dtype]]:
    torch.distributed.init_process_group("gloo")
    return autocast_steps(torch.bfloat16, ["layers.5"])


@pytest.mark.processes
def test_what_autocast_made_travels_between_processes() -> None:
    results = run_processes(autocast_on_a_rank, 2)
    assert [found for found, _ in results] == [[], []]
    assert all(torch.bfloat16 in sent for _, sent in results)


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(AdaptraError) as caught, torch.autocast("cpu", dtype=torch.bfloat16):
        call()
    return type(caught.value).__name__, str(caught.value)


def test_autocast_around_a_pipeline_is_refused() -> None:
    one = example()
    batch = one.rows(2 * MICROBATCHES, 0)

    def compile_it() -> object:
        with compiled(one, batch, stages=2, microbatches=MICROBATCHES) as made:
            return made

    check_documented(*refusal(compile_it), DOCUMENTED["compile"])
    (inputs,), _, targets = batch
    with compiled(one, batch, stages=2, microbatches=MICROBATCHES) as pipe:
        check_documented(*refusal(lambda: pipe.step(inputs, targets)), DOCUMENTED["step"])
        check_documented(*refusal(lambda: pipe.eval_step(inputs, targets)), DOCUMENTED["step"])
        pipe.step(inputs, targets)


class CastTwice(nn.Module):
    """Two stages use a weight under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.ones(4, 4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (self.layers((x @ self.shared).relu()) @ self.shared).float()


def test_a_parameter_that_several_stages_cast_is_named() -> None:
    x = torch.randn(4, 4)
    with adaptra.compile(CastTwice(), stages=2, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss) as pipe:
        assert (
            "other ops than eager torch: the gradient of shared, which stages 0 and 1 each cast for themselves: eager torch "
            "runs aten.add.Tensor(bfloat16[4, 4], bfloat16[4, 4], alpha=1)"
        ) in pipe.explain()
    with adaptra.compile(CastTwice(), stages=1, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss) as pipe:
        assert "other ops" not in pipe.explain()
