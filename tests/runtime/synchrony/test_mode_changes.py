"""Changes between exact updates and local steps in a running job: the bits of a plain program that does the same by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from processes import run_processes
from test_local_steps import MICROBATCHES, ROWS, TIED, Plain, bits_of, names_of
from torch import Tensor
from training import call, compiled, loss_of, microbatches_of

import adaptra
from adaptra.runtime.launch import free_memory

pytestmark = pytest.mark.processes

LOCAL, SHORT = adaptra.Local(3), adaptra.Local(2, outer=adaptra.Outer(lr=0.5, momentum=0.0, nesterov=False))
SITES = adaptra.Local(2, sites=2)
QUORUM = adaptra.Local(2, quorum=2, grace=0.02)
Change = tuple[int, Any]
"""Before which step, and to which mode."""
PLANNED: Sequence[Change] = ((2, LOCAL), (7, "exact"), (9, SHORT), (12, "exact"))
STEPS = 14


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def drawn(seed: int) -> list[Change]:
    """Twenty changes at random steps."""
    chance = random.Random(seed)
    modes: list[Any] = ["exact"]
    steps = sorted(chance.sample(range(1, 45), 20))
    for _ in steps:
        modes.append(chance.choice([one for one in ("exact", LOCAL, SHORT, adaptra.Local(4)) if one != modes[-1]]))
    return list(zip(steps, modes[1:], strict=True))


def run(
    changes: Sequence[Change], steps: int, stages: int = 2, begins_with: Any = "exact", replays: Sequence[Any] = ()
) -> dict[str, Any]:
    """The bits of a rank's parameters and of its optimizer's state after each step, and what it was told."""
    events: list[adaptra.ControlEvent] = []
    options = adaptra.Options(synchrony=begins_with, on_event=events.append)
    bits, inner, logs, at = [], [], [], dict(changes)
    with compiled(TIED, TIED.rows(ROWS, 0), stages=stages, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.attach(optimizer)
        kept = [*pipe.parameters()]
        for step in range(steps):
            if step in at:
                pipe.take_synchrony(at[step])
                assert pipe.synchrony == at[step]
                if at[step] == "exact":
                    logs.append([*pipe.exchange_log])
                elif replays:
                    pipe.replay(replays[len(logs)])
            if step + 1 in at and isinstance(pipe.synchrony, adaptra.Deadline):
                pipe.defer_nothing()
            args, kwargs = call(TIED.rows(ROWS, 100 * pipe.replica + step))
            pipe.step(*args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
            parameters = dict(pipe.named_parameters())
            bits.append(bits_of(parameters))
            inner.append(bits_of({name: optimizer.state[one]["exp_avg"] for name, one in parameters.items()}))
        assert all(one is other for one, other in zip(kept, pipe.parameters(), strict=True)), "the same tensors"
        names, explained, replica = [name for name, _ in pipe.named_parameters()], pipe.explain(), pipe.replica
    told = [one.text for one in events if one.kind.value == "mode"]
    return {
        "bits": bits,
        "inner": inner,
        "names": names,
        "told": told,
        "explained": explained,
        "replica": replica,
        "logs": logs,
    }


def refused(rank: int) -> dict[str, tuple[str, str]]:
    """What a change is refused for, on each rank. The same pipeline goes on."""
    found: dict[str, tuple[str, str]] = {}
    with compiled(TIED, TIED.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES) as pipe:
        optimizer = adam(pipe.parameters())
        found["no optimizer"] = error_of(lambda: pipe.take_synchrony(LOCAL))
        pipe.attach(optimizer)
        args, kwargs = call(TIED.rows(ROWS, 100 * pipe.replica))
        pipe.step(*args, **kwargs)
        found["gradient"] = error_of(lambda: pipe.take_synchrony(LOCAL))
        if rank != 1:
            optimizer.zero_grad()
        found["of rank 1"] = error_of(lambda: pipe.take_synchrony(LOCAL))
        optimizer.zero_grad(set_to_none=False)
        found["mode"] = error_of(lambda: pipe.take_synchrony("local"))  # type: ignore[arg-type]
        found["other"] = error_of(lambda: pipe.take_synchrony(LOCAL if rank else SHORT))
        found["of one"] = error_of(lambda: pipe.take_synchrony("exact" if rank == 3 else SHORT))
        found["sites"] = error_of(lambda: pipe.take_synchrony(adaptra.Local(2, sites=3)))
        found["part"] = error_of(lambda: pipe.take_synchrony(LOCAL, adam([*pipe.parameters()][:1])))
        free_on, free_memory.free_on = free_memory.free_on, lambda device: 1 << 10  # type: ignore[assignment]
        found["memory"] = error_of(lambda: pipe.take_synchrony(LOCAL))
        free_memory.free_on = free_on
        assert pipe.synchrony == "exact"
        pipe.step(*args, **kwargs)
        optimizer.zero_grad()
        pipe.take_synchrony(LOCAL)
        pipe.take_synchrony("exact")
        pipe.shard(torch.optim.SGD, lr=0.1)
        found["sharded"] = error_of(lambda: pipe.take_synchrony(LOCAL))
    return found


def body(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"planned": run(PLANNED, STEPS)}
    found["drawn"] = run(drawn(1), 46)
    found["from local"] = run([(4, "exact")], 8, stages=1, begins_with=SITES)
    found["quorum"] = run([(1, QUORUM), (6, "exact"), (7, QUORUM), (10, "exact")], 12)
    found["replayed"] = run([(1, QUORUM), (6, "exact"), (7, QUORUM), (10, "exact")], 12, replays=found["quorum"]["logs"])
    stolen, full = adaptra.Stealing(most=1), adaptra.Deadline(1.0)
    found["within steps"] = run([(1, stolen), (3, full), (6, "exact")], 8, stages=1)
    found["exact before and after"] = run([], 8, stages=1)
    found["refused"] = refused(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_processes(body, 4)


class ByHand(Plain):
    """A plain program that changes between both."""

    def __init__(self, sites: int, fragments: Sequence[Sequence[str]]) -> None:
        super().__init__(LOCAL, sites, fragments)
        self.inner = [adam(one.parameters()) for one in self.models]
        self.mode: Any = "exact"
        self.since = 0

    def exact(self, replicas: int, step: int) -> None:
        """One update of all replicas' gradients, in each model."""
        sums: list[list[Tensor]] = []
        model = self.models[0]
        for replica in range(replicas):
            for part in microbatches_of(TIED.rows(ROWS, 100 * replica + step), MICROBATCHES):
                (loss_of(TIED, model, part) / MICROBATCHES).backward()
            sums.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
            model.zero_grad()
        for model, optimizer in zip(self.models, self.inner, strict=True):
            for number, parameter in enumerate(model.parameters()):
                total = sums[0][number]
                for other in sums[1:]:
                    total = total + other[number]
                parameter.grad = total / replicas
            optimizer.step()
            model.zero_grad()

    def take(self, mode: Any) -> None:
        """Exchange all and take the first site's optimizer, if sites have updated by themselves. Then begin a mode."""
        if self.mode != "exact":
            for fragment in range(len(self.fragments)):
                self.exchange(fragment, range(len(self.models)))
            self.take_first_optimizer()
        self.mode, self.since = mode, 0
        self.local = self.local if mode == "exact" else mode
        self.after = [{name: one.detach().clone() for name, one in model.named_parameters()} for model in self.models]
        self.momentum = [{} for _ in self.models]
        self.updates = [[0] * len(self.fragments) for _ in self.models]
        self.weights = [[0.0] * len(self.fragments) for _ in self.models]

    def take_first_optimizer(self) -> None:
        first = self.inner[0]
        for optimizer in self.inner[1:]:
            for one, other in zip(optimizer.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
                optimizer.state[one] = {key: value.clone() for key, value in first.state[other].items()}

    def update(self, size: int, step: int) -> None:
        """One step of all sites, each of ``size`` replicas."""
        sites = range(len(self.models))
        if self.mode == "exact":
            self.exact(size * len(sites), step)
            return
        stages, every = len(self.fragments), self.local.every
        for stage in range(stages):
            if self.since and (self.since - stage * every // stages) % every == 0:
                self.exchange(stage, sites)
        for site in sites:
            self.step(site, range(site * size, (site + 1) * size), step)
        self.since += 1


def follow(
    ranks: Sequence[Mapping[str, Any]], changes: Sequence[Change], steps: int, stages: int, sites: int, mode: Any
) -> None:
    """Compare a run with the plain program."""
    size = (1 + max(rank["replica"] for rank in ranks)) // sites
    at, plain = dict(changes), ByHand(sites, names_of(ranks, stages))
    plain.take(mode)
    for step in range(steps):
        if step in at:
            plain.take(mode := at[step])
        plain.update(size, step)
        for rank in ranks:
            assert rank["bits"][step] == plain.bits(rank["replica"] // size, rank["names"]), f"step {step}, {mode}"
        for number, rank in enumerate(ranks) if mode == "exact" else ():
            first = ranks[number % stages]
            assert (rank["bits"][step], rank["inner"][step]) == (first["bits"][step], first["inner"][step])


def test_it_is_what_a_plain_program_does_by_hand(found: list[dict[str, Any]]) -> None:
    ranks = [one["planned"] for one in found]
    follow(ranks, PLANNED, STEPS, 2, 2, "exact")
    assert [text.split(" before")[0] for text in ranks[0]["told"]] == [
        "from exact to local=3",
        "from local=3 to exact",
        "from exact to local=2",
        "from local=2 to exact",
    ]
    assert "synchrony: from local=2 to exact before step 12, in " in ranks[3]["explained"]


def test_modes_with_the_bits_of_exact_keep_them_when_they_begin_and_end_in_a_running_job(found: list[dict[str, Any]]) -> None:
    for one in found:
        changed, exact = one["within steps"], one["exact before and after"]
        assert changed["bits"] == exact["bits"] and changed["inner"] == exact["inner"]
        assert "from deadline=1 to exact before step 6" in changed["explained"]
        (log,) = changed["logs"]
        firsts = [MICROBATCHES * step for step in range(3)]
        assert log == [
            {"number": number, "parts": [{"first": first, "count": MICROBATCHES}] * 4} for number, first in enumerate(firsts, 1)
        ]


def test_twenty_changes_at_random_lose_and_double_nothing(found: list[dict[str, Any]]) -> None:
    """Each row counts once, in order: another or a missing one would give other bits from then on."""
    changes = drawn(1)
    assert len(changes) == 20
    follow([one["drawn"] for one in found], changes, 46, 2, 2, "exact")


def test_a_job_that_begins_with_local_steps_becomes_exact(found: list[dict[str, Any]]) -> None:
    follow([one["from local"] for one in found], [(4, "exact")], 8, 1, 2, SITES)


def test_replicas_are_equal_after_exchanges_with_a_quorum_too_and_a_log_gives_the_bits(found: list[dict[str, Any]]) -> None:
    for rank, first in zip(found[2:], found[:2], strict=True):
        for step in (0, 6, 10, 11):
            assert rank["quorum"]["bits"][step] == first["quorum"]["bits"][step]
            assert rank["quorum"]["inner"][step] == first["quorum"]["inner"][step]
    for one in found:
        assert one["replayed"]["bits"] == one["quorum"]["bits"]
        assert all(one["quorum"]["logs"])


ON_ALL = {
    "no optimizer": ("…: no optimizer: expected pipe.attach(optimizer) before it, or the optimizer as an argument"),
    "gradient": (
        "…: … has a gradient: expected optimizer.step() and optimizer.zero_grad() before it, as a gradient of one mode is not "
        "added to one of another"
    ),
    "mode": "synchrony=…: expected 'exact', adaptra.Stealing(...), Deadline(...), Local(...) or XOrder(...)",
    "other": "…: nothing has moved, since the … of rank … is …, and that of rank 0 …: expected the same on every rank",
    "of one": "…: nothing has moved, since the … of rank … is …, and that of rank 0 …: expected the same on every rank",
    "sites": "Local(sites=…) with … replicas: expected sites of equally many replicas",
    "memory": "synchrony=local=…: it needs … of memory on the host of rank …, where … are free: expected that it fits",
    "sharded": (
        "…: this pipeline has a sharded optimizer, of which sites would lack a part: expected one that has all parameters of "
        "its rank"
    ),
    "part": (
        "…: the optimizer lacks …: expected a single one of all trainable parameters, as other replicas go on with its state"
    ),
}
"""What a change is refused by, with … for whatever differs."""


@pytest.mark.parametrize("what", ON_ALL)
def test_a_change_is_refused_on_all_ranks(found: list[dict[str, Any]], what: str) -> None:
    for one in found:
        kind, text = one["refused"][what]
        check_documented(kind, text, ON_ALL[what])
    of_others = [one["refused"]["of rank 1"] for one in found if one is not found[1]]
    for kind, text in of_others:
        check_documented(kind, text, "…: nothing has moved, since rank … can't: …")
        assert text.startswith("take_synchrony: nothing has moved, since rank 1 can't: StateError: take_synchrony: ")
    other = found[1]["refused"]["other"][1]
    assert other.startswith("take_synchrony: nothing has moved, since the mode of rank 1 is Local(every=3"), other


def test_one_replica_has_no_other_mode() -> None:
    with compiled(TIED, TIED.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.take_synchrony("exact", optimizer)
        kind, text = error_of(lambda: pipe.take_synchrony(LOCAL, optimizer))
    check_documented(kind, text, "mode local=…: expected at least 2 replicas, which exchange")
