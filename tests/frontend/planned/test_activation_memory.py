"""Memory for activations in bytes: what is predicted is what tensors take, and a plan stays within what is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from models import EXAMPLES
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import adaptra
from adaptra.errors import OptionError
from adaptra.frontend.planned.activation_memory import predicted_peaks, size_text
from adaptra.graph.stages.stage_graphs import StageGraphs
from adaptra.runtime.transports.base import Identity, Pending
from adaptra.runtime.transports.local import LocalTransport
from adaptra.sizes import MemoryLimit, MemoryUnit

ROWS, MICROBATCHES, STAGES = 16, 8, 3


class Tracker(TorchDispatchMode):
    """The most bytes of storages that ops have seen alive at a time, apart from those of somebody else."""

    def __init__(self, foreign: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._foreign = {_reference(one) for one in foreign}
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.see((args, kwargs, results))
        return results

    def see(self, values: Any) -> None:
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, Tensor) and (reference := _reference(leaf)) not in self._foreign:
                self._alive[reference] = leaf.untyped_storage().nbytes()
        self._alive = {one: size for one, size in self._alive.items() if not one.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def compiled(name: str, **arguments: Any) -> tuple[adaptra.Pipeline, Any]:
    example = EXAMPLES[name]
    args, kwargs, targets = batch = example.rows(ROWS, seed=0)
    given: dict[str, Any] = {"example_inputs": (args, targets), "example_kwargs": kwargs, "loss": example.loss} | arguments
    return adaptra.compile(example.make(), stages=STAGES, microbatches=MICROBATCHES, **given), batch


@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "gpt_dropout", "resnet"])
def test_predicted_is_what_tensors_take_within_a_twentieth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers: dict[int, Tracker] = {}
    send = LocalTransport.send

    def sent_as_copy(transport: LocalTransport, to: int, what: Identity, tensors: Sequence[Tensor], **given: Any) -> Pending:
        """As between processes. Here both ranks have the same tensor, and each would count it as long as the other keeps it."""
        return send(transport, to, what, [one.clone() for one in tensors], **given)

    def tracked(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: StageGraphs, *given: Any) -> Any:
            if (tracker := trackers.get(stage.index)) is None:
                return method(stage, *given)
            with tracker:
                tracker.see(given)
                return method(stage, *given)

        return run

    for each in ("run_forward", "run_input_grad", "run_weight_grad"):
        monkeypatch.setattr(StageGraphs, each, tracked(getattr(StageGraphs, each)))
    monkeypatch.setattr(LocalTransport, "send", sent_as_copy)
    pipe, (args, kwargs, targets) = compiled(name, options=adaptra.Options(schedule="zb_h1"))
    with pipe:
        pipe.step(args, targets, **kwargs)
        built = pipe._session
        assert built is not None
        for worker in built.workers:
            state = list(worker.state.values())
            gradients = [one.grad for one in state if one.grad is not None]
            trackers[worker.rank] = Tracker([*state, *gradients, *pytree.tree_leaves((args, kwargs, targets))])
        pipe.step(args, targets, **kwargs)
        predicted = predicted_peaks(pipe.plan.program, built.compiled.train)
        # Two messages may be under way in each direction. Between threads each arrives at once.
        under_way = [2 * (stage.output_bytes + stage.grad_input_bytes) for stage in built.compiled.train]
        measured = [trackers[worker.rank].peak + under_way[worker.rank] for worker in built.workers]
    assert predicted == pytest.approx(measured, rel=0.05)


@cache
def least_and_most() -> tuple[int, ...]:
    """The peak of one microbatch at a time, and of all."""
    ways: tuple[dict[str, Any], ...] = ({"memory": 1}, {"options": adaptra.Options(schedule="gpipe")})
    peaks: list[int] = []
    for arguments in ways:
        with compiled("gpt", **arguments)[0] as pipe:
            peaks.append(max(peaks_of(pipe)))
    return tuple(peaks)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_plan_holds_no_more_than_it_may(share: float) -> None:
    """Between one microbatch at a time and all: the smaller the memory, the fewer are in flight."""
    least, most = least_and_most()
    allowed = int(least + share * (most - least))
    with compiled("gpt", memory=f"{allowed} B")[0] as pipe:
        assert least <= max(peaks_of(pipe)) <= allowed
        (row,) = [line for line in pipe.report().splitlines() if line.startswith("│     0 ")]
        number, unit = row.split("│")[-2].split()
        assert float(number) * {"kB": 1e3, "MB": 1e6}[unit] == pytest.approx(peaks_of(pipe)[0], rel=0.01)


def peaks_of(pipe: adaptra.Pipeline) -> tuple[int, ...]:
    built = pipe._session
    assert built is not None
    return predicted_peaks(pipe.plan.program, built.compiled.train)


def test_a_list_of_modules_may_be_given_bytes() -> None:
    modules = [torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)) for _ in range(STAGES)]
    x, y = torch.randn(ROWS, 16), torch.randn(ROWS, 16)
    pipe = adaptra.compile(
        modules,
        stages=STAGES,
        microbatches=MICROBATCHES,
        example_inputs=(x, y),
        loss=torch.nn.functional.mse_loss,
        memory="64 KiB",
    )
    with pipe:
        assert max(peaks_of(pipe)) <= 64 << 10
        assert pipe.step(x, y).isfinite()


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("1.5 MB", 1_500_000), (" 3 KiB ", 3 << 10), ("7 B", 7), ("0.5TB", 5 * 10**11)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    found = MemoryLimit.given(text, 2)
    assert found.by_rank == (size, size) and found.unit is MemoryUnit.BYTES


@pytest.mark.parametrize("text", ["2", "GiB", "-1 GiB", "2 gib", "0.1 B", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="expected a size such as"):
        MemoryLimit.given(text, 2)


def test_sizes_are_told_in_the_largest_unit_that_they_fill() -> None:
    assert [size_text(size) for size in (12, 2048, 3 << 19, 5 << 30)] == ["12 B", "2.0 KiB", "1.5 MiB", "5.0 GiB"]
