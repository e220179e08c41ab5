"""X-order: updates with the gradients of some replicas, with the bits of a plain program that makes the same updates."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from training import call, compiled, loss_of, microbatches_of

import adaptra

pytestmark = [pytest.mark.processes, pytest.mark.timed]

WIDTH, ROWS, MICROBATCHES, STEPS = 8, 4, 2, 6


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


MODEL = Example("some layers", make, vectors(WIDTH), square_loss)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def bits_of(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    return {name: one.detach().cpu().numpy().tobytes() for name, one in parameters}


def rows_of(replica: int, step: int) -> Any:
    return MODEL.rows(ROWS, 100 * replica + step)


def run(
    order: adaptra.XOrder, stages: int = 1, late: Sequence[int] = (), log: Sequence[Any] = (), steps: int = STEPS
) -> dict[str, Any]:
    """What a rank has after each of its steps, after an exchange of all, and its log."""
    events: list[adaptra.ControlEvent] = []
    options = adaptra.Options(synchrony=order, on_event=events.append)
    bits: list[tuple[int, dict[str, bytes]]] = []
    with compiled(MODEL, rows_of(0, 0), stages=stages, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        if log:
            pipe.replay(log)
        for step in range(steps):
            if pipe.replica in late and not log:
                time.sleep(0.2)
            args, kwargs = call(rows_of(pipe.replica, step))
            pipe.step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
            bits.append((pipe.updates, bits_of(pipe.named_parameters())))
        pipe.exchange()
        equal = bits_of(pipe.named_parameters())
        moments = [one["exp_avg"].numpy().tobytes() for one in optimizer.state.values()]
        explained = pipe.explain()
        log = [*pipe.exchange_log]
        replica = pipe.replica
    told = [one.text for one in events if one.kind.value == "updated"]
    return {
        "bits": bits,
        "equal": equal,
        "moments": moments,
        "log": log,
        "told": told,
        "replica": replica,
        "explained": explained,
    }


ORDERS: dict[str, tuple[adaptra.XOrder, int, Sequence[int]]] = {
    "three of four": (adaptra.XOrder(3), 1, (2,)),
    "asynchronous": (adaptra.XOrder(1), 1, (1, 3)),
    "one of two pipelines": (adaptra.XOrder(1), 2, (0,)),
    "groups": (adaptra.XOrder(groups=((0, 3), (1, 2)), divide="all"), 1, (1,)),
    "groups by speed, old by two at most": (adaptra.XOrder(groups="auto", staleness=2), 1, (3,)),
}
AGAIN = ("three of four", "one of two pipelines", "groups by speed, old by two at most")


def body(_rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (order, stages, late) in ORDERS.items():
        found[name] = run(order, stages, late)
        if name in AGAIN:
            found[f"{name} again"] = run(order, stages, log=found[name]["log"])
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_processes(body, 4)


def updates_of(found: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """The updates of all replicas by their number, which all that are in one tell alike."""
    updates: dict[int, Any] = {}
    for one in found:
        for update in one["log"]:
            assert updates.setdefault(update["number"], update["votes"]) == update["votes"]
            assert one["replica"] in [vote["site"] for vote in update["votes"]]
    assert sorted(updates) == [*range(1, len(updates) + 1)]
    return updates


def plain(updates: dict[int, Any], replicas: int, order: adaptra.XOrder) -> list[dict[str, bytes]]:
    """The parameters after each update, of one model with one optimizer that makes them."""
    torch.set_num_threads(1)
    model = MODEL.make()
    optimizer = adam(model.parameters())
    versions = [{name: one.detach().clone() for name, one in model.named_parameters()}]
    steps = [0] * replicas
    for number in sorted(updates):
        if updates[number][0]["is_last"]:
            versions.append(versions[-1])
            continue
        terms: list[list[Tensor]] = []
        for vote in updates[number]:
            other = MODEL.make()
            other.load_state_dict(versions[vote["updates"]])
            for part in microbatches_of(rows_of(vote["site"], steps[vote["site"]]), MICROBATCHES):
                (loss_of(MODEL, other, part) / MICROBATCHES).backward()
            steps[vote["site"]] += 1
            terms.append([one.grad for one in other.parameters() if one.grad is not None])
        for index, parameter in enumerate(model.parameters()):
            total = terms[0][index]
            for other_terms in terms[1:]:
                total = total + other_terms[index]
            total = total / len(terms)
            parameter.grad = total / (replicas / len(terms)) if order.divide == "all" else total
        optimizer.step()
        versions.append({name: one.detach().clone() for name, one in model.named_parameters()})
    return [bits_of(one.items()) for one in versions]


@pytest.mark.parametrize("name", ORDERS)
def test_each_replica_has_the_bits_of_a_plain_program_after_each_of_its_updates(ranks: list[dict[str, Any]], name: str) -> None:
    order, stages, _ = ORDERS[name]
    found = [one[name] for one in ranks]
    updates = updates_of(found)
    versions = plain(updates, len(ranks) // stages, order)
    for one in found:
        assert len(one["bits"]) == STEPS, "each step is in one update"
        for number, bits in one["bits"]:
            assert bits and all(versions[number][key] == value for key, value in bits.items()), (name, number)
        assert all(versions[-1][key] == value for key, value in one["equal"].items())
    for stage in {tuple(one["equal"]) for one in found}:
        assert len({tuple(one["moments"]) for one in found if tuple(one["equal"]) == stage}) == 1


@pytest.mark.parametrize("name", ORDERS)
def test_updates_are_those_of_the_mode(ranks: list[dict[str, Any]], name: str) -> None:
    order, stages, _ = ORDERS[name]
    found = [one[name] for one in ranks]
    replicas = len(ranks) // stages
    updates = updates_of(found)
    steps = [0] * replicas
    for number, votes in updates.items():
        if votes[0]["is_last"]:
            continue
        left = sum(count < STEPS for count in steps)
        for vote in votes:
            steps[vote["site"]] += 1
            if order.staleness is not None:
                assert number - 1 - vote["updates"] <= order.staleness
        if order.x is not None:
            assert len(votes) >= min(order.x, left)
        elif order.groups != "auto":
            here = {vote["site"] for vote in votes}
            assert any(here.issuperset(group) for group in order.groups or ()) or left < replicas
    ages = {number - 1 - vote["updates"] for number, votes in updates.items() for vote in votes if not vote["is_last"]}
    assert max(ages) > 0, "a late replica is late"
    assert len(updates[1]) == replicas
    one = found[0]
    assert len(one["told"]) == STEPS + 1 and f"update {len(updates)}: replicas" in one["told"][-1]
    assert f"updates in {order} of {replicas} replicas: this one has {STEPS + 1} of {len(updates)}" in one["explained"]


@pytest.mark.parametrize("name", AGAIN)
def test_a_log_gives_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    for one in ranks:
        first, again = one[name], one[f"{name} again"]
        assert first["bits"] == again["bits"]
        assert first["equal"] == again["equal"] and first["moments"] == again["moments"]
        assert first["log"] == again["log"]


def change_after_updates(rank: int, end: str) -> tuple[list[Any], dict[int, Any], dict[int, Any]]:
    """A log, and parameters at the begin and the end of updates, after which a loop changes them.

    It halves them after each, and swaps others in for a while. The late replica asks meanwhile. The other one calls next
    a step, or something in which all replicas meet.
    """
    begun: dict[int, Any] = {}
    ended: dict[int, Any] = {}
    options = adaptra.Options(synchrony=adaptra.XOrder(1))
    with compiled(MODEL, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        for step in range(3 if end == "step" and not rank else 2):
            time.sleep(1.0 if rank and step else 0.0)  # in which the other one is in the midst of the swap
            args, kwargs = call(rows_of(rank, step))
            pipe.step(*args, **kwargs)
            begun[pipe.updates] = bits_of(pipe.named_parameters())
            optimizer.step()
            optimizer.zero_grad()
            kept = [one.detach().clone() for one in pipe.parameters()]
            if not rank and step:
                for one in pipe.parameters():
                    one.data.zero_()  # which torch doesn't count as a change
                time.sleep(2.0)
            for one, value in zip(pipe.parameters(), kept, strict=True):
                one.data.copy_(value / 2)
            ended[pipe.updates] = bits_of(pipe.named_parameters())
        log = [*pipe.exchange_log]
        if end == "load":
            pipe.load_state_dict({name: one.clone() for name, one in pipe.state_dict().items()})
        else:
            pipe.exchange()
            begun[pipe.updates + 1] = bits_of(pipe.named_parameters())  # what the next update would begin with
    return log, begun, ended


def change_both_ways(rank: int) -> dict[str, Any]:
    return {end: change_after_updates(rank, end) for end in ("step", "load")}


def test_a_replica_takes_what_the_loop_of_its_source_has_made_of_the_parameters() -> None:
    ranks = run_processes(change_both_ways, 2)
    for end in ranks[0]:
        (log, *_), ended = ranks[1][end], ranks[0][end][2] | ranks[1][end][2]
        assert log[1]["source"] == 0 and log[1]["number"] == 3, "it has asked after update 2"
        for rank in ranks:
            assert all(bits == ended[number - 1] for number, bits in rank[end][1].items() if number > 1)
