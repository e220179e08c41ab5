"""Deadlines: what is late comes first in the next step, with the bits of a plain program that takes in the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from models import Example, vectors
from processes import run_processes
from test_local_steps import Tied
from torch import Tensor, nn
from training import MIXED, call, compiled, loss_of, microbatches_of

import adaptra
from adaptra.graph.ops.random_state import RandomKey, reference_randomness

pytestmark = [pytest.mark.processes, pytest.mark.timed]

STEPS, WIDTH = 5, 8
ADDED = 1
"""The step whose gradients the next one adds to."""


def weighted(outputs: Tensor, targets: Tensor) -> Any:
    """A sum and its weight, which differs from microbatch to microbatch."""
    counted = (targets[:, :1] > 0).to(outputs.dtype)
    return ((outputs - targets).square() * counted).sum(), counted.sum() + 1


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum() / 100


EXAMPLES = {
    "mean": MIXED,
    "weighted": Example("weighted", lambda: Tied(WIDTH, dropout=0.2), vectors(WIDTH), weighted),
    "sum": Example("summed", lambda: Tied(WIDTH, dropout=0.2), vectors(WIDTH), summed),
}
QUORUM, STAGES, MICROBATCHES = {"mean": 0.7, "weighted": 0.6, "sum": 0.8}, {"mean": 2, "weighted": 1, "sum": 1}, 6
OUTPUTS = 3
"""A step that returns the model's outputs, and so defers nothing, in the job of the weighted loss."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def bits_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    return {name: one.detach().numpy().tobytes() for name, one in tensors}


def rows_of(kind: str, replica: int, step: int) -> Any:
    return EXAMPLES[kind].rows(2 * MICROBATCHES, 100 * replica + step)


def run(kind: str, synchrony: Any, slow: str | None = None, log: Sequence[Any] = (), *, shards: bool = False) -> dict[str, Any]:
    """What a rank has after each step, and its log."""
    events: list[adaptra.ControlEvent] = []
    options = adaptra.Options(
        synchrony=synchrony,
        share=False,
        faults=() if slow is None else (f"slow {slow} 40ms @0..3",),
        emulate=adaptra.EmulatedDevice(0.002, 0.002, 0.002),
        on_event=events.append,
    )
    bits, losses = list[dict[str, bytes]](), list[float]()
    how: dict[str, Any] = {"stages": STAGES[kind], "microbatches": MICROBATCHES, "reduction": kind, "options": options}
    if STAGES[kind] > 1 and not shards:  # by the log it runs over c10d
        how["transport"] = "delegate"
    with compiled(EXAMPLES[kind], rows_of(kind, 0, 0), **how) as pipe:
        if log:
            pipe.replay(log)
        inner: Any = pipe.shard(torch.optim.SGD, lr=0.05, momentum=0.5) if shards else sgd(pipe.parameters())
        for step in range(STEPS):
            args, kwargs = call(rows_of(kind, pipe.replica, step))
            if step == STEPS - 1 and synchrony != "exact":
                pipe.defer_nothing()
            asks = kind == "weighted" and step == OUTPUTS
            found: Any = pipe.step(*args, **kwargs, outputs=asks)
            losses.append((found[0] if asks else found).item())
            if step != ADDED:
                inner.step()
                inner.zero_grad()
            bits.append(bits_of(pipe.state_dict().items()))
        args, kwargs = call(rows_of(kind, pipe.replica, STEPS))
        evaluated: Any = pipe.eval_step(*args, **kwargs)
        logged = [*pipe.exchange_log] if synchrony != "exact" else []
        explained, replica = pipe.explain(), pipe.replica
    told = [one.text for one in events if one.kind.value == "deferred"]
    return {
        "bits": bits,
        "losses": losses,
        "log": logged,
        "evaluated": evaluated.item(),
        "told": told,
        "explained": explained,
        "replica": replica,
    }


def body(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in EXAMPLES:
        found[kind] = run(kind, adaptra.Deadline(QUORUM[kind]), "1.0")
        found[f"{kind} again"] = run(kind, adaptra.Deadline(QUORUM[kind]), log=found[kind]["log"], shards=kind == "mean")
        found[f"{kind} exact"] = run(kind, "exact")
        found[f"{kind} of all"] = run(kind, adaptra.Deadline(1.0), "1.0")
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(body, 4)


def plain(kind: str, log: Sequence[Any]) -> tuple[list[dict[str, bytes]], list[float]]:
    """The first replica's state after each step, and the losses, of a program that takes in what a log says."""
    torch.set_num_threads(1)
    example, model = EXAMPLES[kind], EXAMPLES[kind].make()
    optimizer, states, losses = sgd(model.parameters()), list[dict[str, bytes]](), list[float]()
    for step, entry in enumerate(log):
        counts = [part["count"] for part in entry["parts"]]
        terms, values = list[list[Tensor]](), list[Tensor]()
        for replica, part in enumerate(entry["parts"]):
            other = copy.deepcopy(model)
            other.zero_grad()
            for number in range(part["first"], part["first"] + part["count"]):
                taken, microbatch = divmod(number, MICROBATCHES)
                batch = microbatches_of(rows_of(kind, replica, taken), MICROBATCHES)[microbatch]
                with reference_randomness(RandomKey(0, taken, replica * MICROBATCHES + microbatch)):
                    found: Any = loss_of(example, other, batch)
                first = found[0] if kind == "weighted" else found / MICROBATCHES if kind == "mean" else found
                first.backward()
                values.append(torch.stack(found).detach() if kind == "weighted" else found.detach())
            terms.append([one.grad for one in other.parameters() if one.grad is not None])
            if replica == 0:
                with torch.no_grad():
                    for one, new in zip(model.buffers(), other.buffers(), strict=True):
                        one.copy_(new)
        all_values = torch.stack(values).double()
        added = all_values.sum(0)
        loss = all_values.mean() if kind == "mean" else added if kind == "sum" else added[0] / added[1]
        losses.append(loss.item())
        for index, parameter in enumerate(model.parameters()):
            total = terms[0][index]
            for others in terms[1:]:
                total = total + others[index]
            if kind == "mean":
                total = total / len(terms)
                share = sum(counts) / (len(terms) * MICROBATCHES)
                total = total if share == 1 else total / share
            elif kind == "weighted":
                total = total / added[1].item()
            parameter.grad = total if parameter.grad is None else parameter.grad + total
        if step != ADDED:
            optimizer.step()
            optimizer.zero_grad()
        states.append(bits_of(model.state_dict().items()))
    return states, losses


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_step_has_the_bits_of_a_plain_program_that_takes_in_the_same(ranks: list[dict[str, Any]], kind: str) -> None:
    found = [one[kind] for one in ranks]
    log = found[0]["log"]
    assert all(one["log"] == log for one in found), "the set is the same on all ranks"
    states, losses = plain(kind, log)
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        for bits, state in zip(one["bits"], states, strict=True):
            # Before each step all replicas take the first one's statistics.
            compared = {name for name in bits if one["replica"] == 0 or "norms" not in name or name.endswith("weight")}
            assert compared and [name for name in compared if bits[name] != state[name]] == []


@pytest.mark.parametrize("kind", EXAMPLES)
def test_what_is_deferred_is_in_the_next_step_and_each_microbatch_in_one(ranks: list[dict[str, Any]], kind: str) -> None:
    found = [one[kind] for one in ranks]
    replicas = len(ranks) // STAGES[kind]
    done = [0] * replicas
    for step, entry in enumerate(found[0]["log"]):
        begun = (step + 1) * MICROBATCHES
        for replica, part in enumerate(entry["parts"]):
            assert part["first"] == done[replica]
            done[replica] += part["count"]
            assert begun - MICROBATCHES < done[replica] <= begun
        if kind == "weighted" and step == OUTPUTS:
            assert done == [begun] * replicas
    assert done == [STEPS * MICROBATCHES] * replicas
    counts = [part["count"] for part in found[0]["log"][0]["parts"]]
    assert sum(counts) == math.ceil(QUORUM[kind] * replicas * MICROBATCHES), "as many as are admitted, whoever was faster"
    for replica, count in enumerate(counts):
        told = [text for one in found if one["replica"] == replica for text in one["told"]]
        left = ", ".join(map(str, range(count, MICROBATCHES)))
        text = f"microbatches of replica {replica} that come first in the next step: {left}"
        assert told[:1] == [text] if left else text not in told
    assert all(f"Deferred to it are 0, of 0 of {replicas} replicas" in one["explained"] for one in found)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_log_gives_the_same_bits(ranks: list[dict[str, Any]], kind: str) -> None:
    for one in ranks:
        first, again = one[kind], one[f"{kind} again"]
        assert first["log"] == again["log"] and first["losses"] == again["losses"]
        assert first["bits"] == again["bits"]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_quorum_of_all_is_exact(ranks: list[dict[str, Any]], kind: str) -> None:
    for one in ranks:
        exact, of_all = one[f"{kind} exact"], one[f"{kind} of all"]
        assert of_all["losses"] == exact["losses"] and of_all["bits"] == exact["bits"]
        assert of_all["evaluated"] == exact["evaluated"]
        assert not of_all["told"]
