"""Local steps: sites update by themselves and exchange what they have learnt, with the bits of a plain program for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from training import call, compiled, loss_of, microbatches_of

import adaptra

pytestmark = pytest.mark.processes

WIDTH, ROWS, MICROBATCHES, STEPS = 8, 4, 2, 11
LATE, LONGEST = 3, 1
"""The site that comes late to exchanges, and one that makes more steps than others where a quorum suffices."""


class Tied(nn.Module):
    """Layers of which the first and the last have one weight, with dropout behind each if it is not 0."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.dropout:
                x = functional.dropout(x, self.dropout, self.training)
        return x


TIED = Example("tied", Tied, vectors(WIDTH), square_loss)
SUMMED = Example("summed", Tied, vectors(WIDTH), lambda y, t: ((y - t) ** 2).sum())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def train(
    pipe: adaptra.Pipeline, steps: Sequence[int], inner: torch.optim.Optimizer | None = None, late: bool = False
) -> list[bytes]:
    """The bits of this rank's parameters after each step."""
    inner, bits = optimizer(pipe.parameters()) if inner is None else inner, []
    for step in steps:
        if late and step in (4, 5, 8):
            time.sleep(0.8)
        args, kwargs = call(TIED.rows(ROWS, 100 * pipe.replica + step))
        pipe.step(*args, **kwargs)
        inner.step()
        inner.zero_grad()
        bits.append(bits_of(dict(pipe.named_parameters())))
    return bits


def bits_of(parameters: Mapping[str, Tensor]) -> bytes:
    return b"".join(parameters[name].detach().cpu().numpy().tobytes() for name in sorted(parameters))


def run(local: adaptra.Local, stages: int, late: bool = False, log: Sequence[Any] = (), steps: int = STEPS) -> dict[str, Any]:
    """What a rank has after each step, after an exchange of all, and its log."""
    events: list[adaptra.ControlEvent] = []
    options = adaptra.Options(synchrony=local, on_event=events.append)
    with compiled(TIED, TIED.rows(ROWS, 0), stages=stages, microbatches=MICROBATCHES, options=options) as pipe:
        if log:
            pipe.replay(log)
        bits = train(pipe, range(steps), late=late)
        names = [name for name, _ in pipe.named_parameters()]
        pipe.exchange()
        log, explained = [*pipe.exchange_log], pipe.explain()
        after = [name for one in pipe.outer_state_dict()["stages"].values() for name in one["after"]]
        replica = pipe.replica
        equal = bits_of(dict(pipe.named_parameters()))
    told = [one.text for one in events if one.kind.value == "exchanged"]
    return {
        "bits": bits,
        "names": names,
        "equal": equal,
        "log": log,
        "told": told,
        "replica": replica,
        "explained": explained,
        "after": after,
    }


def go_on(local: adaptra.Local, stages: int) -> list[bytes]:
    """The same in two runs, of which the second one goes on from what the first one has saved."""
    bits: list[bytes] = []
    half, saved = STEPS // 2, None
    for steps in (range(half), range(half, STEPS)):
        options = adaptra.Options(synchrony=local)
        with compiled(TIED, TIED.rows(ROWS, 0), stages=stages, microbatches=MICROBATCHES, options=options) as pipe:
            inner = optimizer(pipe.parameters())
            if saved is not None:
                pipe.load_state_dict(saved[0], strict=False)
                inner.load_state_dict(saved[1])
                with pytest.raises(adaptra.errors.StateError, match="outer state: "):
                    pipe.load_outer_state_dict({**saved[2], "stages": {}})
                pipe.load_outer_state_dict(saved[2])
            bits += train(pipe, steps, inner)
            of_pipe = {name: one.clone() for name, one in pipe.state_dict().items()}
            saved = pytree.tree_map_only(Tensor, torch.clone, (of_pipe, inner.state_dict(), pipe.outer_state_dict()))
    return bits


def weights_of_sites() -> list[list[float]]:
    """The weight of each site in each exchange, where the first replica of four has twice as many rows as each other one."""
    options = adaptra.Options(synchrony=adaptra.Local(2, sites=2))
    summed: dict[str, Any] = {"stages": 1, "microbatches": MICROBATCHES, "reduction": "sum"}
    with compiled(SUMMED, SUMMED.rows(ROWS, 0), options=options, **summed) as pipe:
        inner = torch.optim.SGD(pipe.parameters(), lr=0.001)
        args, kwargs = call(SUMMED.rows(ROWS if pipe.replica else 2 * ROWS, pipe.replica))
        for _ in range(3):
            pipe.step(*args, **kwargs)
            inner.step()
            inner.zero_grad()
        return [[vote["weight"] for vote in one["votes"]] for one in pipe.exchange_log]


def body(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["stages"] = run(adaptra.Local(3), 2)
    found["stages again"] = run(adaptra.Local(3), 2, log=found["stages"]["log"])
    found["saved"] = go_on(adaptra.Local(3), 2)
    found["sites"] = run(adaptra.Local(2, sites=2, outer=adaptra.Outer(lr=0.5, momentum=0.0, nesterov=False)), 1)
    quorum = adaptra.Local(2, quorum=3, grace=0.02)
    steps = STEPS + 2 * (rank == LONGEST)
    found["quorum"] = run(quorum, 1, late=rank == LATE, steps=steps)
    found["crowded"] = run(adaptra.Local(3, sites=2, quorum=2, grace=0.02), 1, late=rank >= 2)
    found["turns"] = run(adaptra.Local(4, quorum=2, grace=0.02), 2, late=rank >= 2, steps=STEPS + (rank < 2))
    found["replayed"] = run(quorum, 1, log=found["quorum"]["log"], steps=steps)
    found["weights"] = weights_of_sites()
    return found


class Plain:
    """Sites in one process: each has a model, an optimizer, and its parameters after the last exchange it was in."""

    def __init__(self, local: adaptra.Local, sites: int, fragments: Sequence[Sequence[str]]) -> None:
        self.local, self.fragments = local, fragments
        self.models = [TIED.make() for _ in range(sites)]
        self.inner = [optimizer(one.parameters()) for one in self.models]
        self.after = [{name: one.detach().clone() for name, one in model.named_parameters()} for model in self.models]
        self.momentum: list[dict[str, Tensor]] = [{} for _ in self.models]
        self.updates = [[0] * len(fragments) for _ in self.models]
        self.weights = [[0.0] * len(fragments) for _ in self.models]

    def step(self, site: int, replicas: Sequence[int], step: int) -> None:
        model, sums = self.models[site], list[list[Tensor]]()
        for replica in replicas:
            for part in microbatches_of(TIED.rows(ROWS, 100 * replica + step), MICROBATCHES):
                (loss_of(TIED, model, part) / MICROBATCHES).backward()
            sums.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
            model.zero_grad()
        for number, parameter in enumerate(model.parameters()):
            total = sums[0][number]
            for other in sums[1:]:
                total = total + other[number]
            parameter.grad = total / len(replicas) if len(replicas) > 1 else total
        self.inner[site].step()
        model.zero_grad()
        self.weights[site] = [weight + ROWS * len(replicas) for weight in self.weights[site]]

    def exchange(self, fragment: int, sites: Sequence[int]) -> None:
        newest = max(self.updates[site][fragment] for site in sites)
        source = next(site for site in sites if self.updates[site][fragment] == newest)
        total = sum(self.weights[site][fragment] for site in sites)
        if not total:
            return
        outer = self.local.outer
        with torch.no_grad():
            for name in self.fragments[fragment]:
                own = [dict(self.models[site].named_parameters())[name] for site in sites]
                learnt = [
                    (self.after[site][name] - one) * (self.weights[site][fragment] / total)
                    for site, one in zip(sites, own, strict=True)
                ]
                gradient = learnt[0]
                for other in learnt[1:]:
                    gradient = gradient + other
                after, momentum = self.after[source][name].clone(), self.momentum[source].get(name)
                step = gradient
                if outer.momentum:
                    momentum = gradient if momentum is None else momentum.mul(outer.momentum).add(gradient)
                    step = gradient.add(momentum, alpha=outer.momentum)
                after.add_(step, alpha=-outer.lr)
                for site, one in zip(sites, own, strict=True):
                    self.after[site][name] = after.clone()
                    if momentum is not None:
                        self.momentum[site][name] = momentum.clone()
                    one.copy_(after)
        for site in sites:
            self.updates[site][fragment], self.weights[site][fragment] = newest + 1, 0.0

    def bits(self, site: int, names: Sequence[str]) -> bytes:
        parameters = dict(self.models[site].named_parameters())
        return bits_of({name: parameters[name] for name in names})


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_processes(body, 4)


def names_of(found: Sequence[Mapping[str, Any]], stages: int) -> list[list[str]]:
    """The names of each fragment: a tied parameter is in the first stage's."""
    by_stage = [found[stage]["names"] for stage in range(stages)]
    return [
        [name for name in names if all(name not in before for before in by_stage[:stage])]
        for stage, names in enumerate(by_stage)
    ]


def test_each_stage_exchanges_at_its_own_offset(found: list[dict[str, Any]]) -> None:
    ranks = [one["stages"] for one in found]
    plain = Plain(adaptra.Local(3), 2, names_of(ranks, 2))
    for step in range(STEPS):
        if step and step % 3 == 0:
            plain.exchange(0, [0, 1])
        if step and step % 3 == 1:
            plain.exchange(1, [0, 1])
        for site in range(2):
            plain.step(site, [site], step)
        for rank in ranks:
            assert rank["bits"][step] == plain.bits(rank["replica"], rank["names"]), f"step {step}"
    assert [one["stages"]["equal"] for one in found[:2]] == [one["stages"]["equal"] for one in found[2:]]
    assert [len(rank["log"]) for rank in ranks] == [4, 9, 4, 9], "the second stage has a part of the first one, too"
    assert [len(rank["told"]) for rank in ranks] == [4, 9, 4, 9]
    assert ranks[0]["told"][0].startswith("exchange 1 of stage 0: sites 0 (weight 12), 1 (weight 12); ")


def test_a_run_goes_on_from_what_each_rank_has_saved(found: list[dict[str, Any]]) -> None:
    assert [one["saved"] for one in found] == [one["stages"]["bits"] for one in found]


def test_replicas_of_a_site_stay_equal(found: list[dict[str, Any]]) -> None:
    ranks = [one["sites"] for one in found]
    local = adaptra.Local(2, sites=2, outer=adaptra.Outer(lr=0.5, momentum=0.0, nesterov=False))
    plain = Plain(local, 2, names_of(ranks, 1))
    for step in range(STEPS):
        if step and step % 2 == 0:
            plain.exchange(0, [0, 1])
        for site in range(2):
            plain.step(site, [2 * site, 2 * site + 1], step)
        for rank in ranks:
            assert rank["bits"][step] == plain.bits(rank["replica"] // 2, rank["names"]), f"step {step}"
    for first, second in (ranks[:2], ranks[2:]):
        assert not {*first["after"]} & {*second["after"]}, "each replica exchanges a part"
        assert {*first["after"], *second["after"]} == {*first["names"]}


def test_a_site_counts_the_rows_of_all_its_replicas(found: list[dict[str, Any]]) -> None:
    assert [one["weights"] for one in found] == [[[2.0 * 3 * ROWS, 2.0 * 2 * ROWS]]] * 4


def follow(ranks: Sequence[Mapping[str, Any]], plain: Plain, sites: int) -> list[dict[str, Any]]:
    """Compare sites' parameters with those of the plain program that exchanges as their logs say; return the exchanges."""
    replicas = 1 + max(rank["replica"] for rank in ranks)
    size = replicas // sites
    of_site = [[rank for rank in ranks if rank["replica"] // size == site] for site in range(sites)]
    done = [0] * sites
    ballots = {one["number"]: one for rank in ranks for one in rank["log"]}

    def go_to(site: int, until: int) -> None:
        for step in range(done[site], until):
            plain.step(site, range(site * size, (site + 1) * size), step)
            for rank in of_site[site]:
                assert rank["bits"][step] == plain.bits(site, rank["names"]), f"site {site}, step {step}"
        done[site] = until

    for number in sorted(ballots):
        stage, votes = ballots[number]["stage"], ballots[number]["votes"]
        for vote in votes:
            site = vote["site"]
            go_to(site, next(one["steps"] for one in of_site[site][0]["log"] if one["number"] == number))
            assert plain.weights[site][stage] == vote["weight"]
        plain.exchange(stage, [vote["site"] for vote in votes])
    for site in range(sites):
        go_to(site, len(of_site[site][0]["bits"]))
        assert all(rank["log"] == of_site[site][0]["log"] for rank in of_site[site]), "all ranks of a site are told the same"
        assert [rank["equal"] for rank in of_site[site]] == [rank["equal"] for rank in of_site[0]]
    return [ballots[number] for number in sorted(ballots)]


def test_a_late_site_misses_exchanges_and_what_it_has_learnt_is_in_a_later_one(found: list[dict[str, Any]]) -> None:
    ranks = [one["quorum"] for one in found]
    exchanges = follow(ranks, Plain(adaptra.Local(2, quorum=3), 4, names_of(ranks, 1)), 4)
    missed = [one for one in exchanges if len(one["votes"]) < 4]
    assert missed and LATE not in [vote["site"] for vote in missed[0]["votes"]]
    assert any("missed by site 3" in text for text in ranks[0]["told"])
    last = "site 0 of 4 updates by itself, and exchanges with at least 3 sites, 0.02 s after these are there every 2 steps"
    assert last in ranks[0]["explained"]


def test_stages_take_turns_where_a_quorum_suffices(found: list[dict[str, Any]]) -> None:
    ranks = [one["turns"] for one in found]
    exchanges = follow(ranks, Plain(adaptra.Local(4, quorum=2), 2, names_of(ranks, 2)), 2)
    assert [one["stage"] for one in exchanges] == [number % 2 for number in range(len(exchanges))]
    assert len(exchanges) >= 6


def test_the_replicas_of_a_site_exchange_together(found: list[dict[str, Any]]) -> None:
    ranks = [one["crowded"] for one in found]
    exchanges = follow(ranks, Plain(adaptra.Local(3, sites=2, quorum=2), 2, names_of(ranks, 1)), 2)
    assert len(exchanges) >= 4


def test_a_log_gives_the_same_bits_again(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["stages again"]["bits"] == rank["stages"]["bits"]
        assert rank["replayed"]["bits"] == rank["quorum"]["bits"]
        assert rank["replayed"]["log"] == rank["quorum"]["log"]
