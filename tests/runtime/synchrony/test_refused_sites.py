"""What sites that update by themselves can't have is refused, by one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_table import check_documented, error_of
from models import Example, square_loss, vectors
from processes import run_processes
from test_local_steps import ROWS, TIED, WIDTH
from torch import nn
from training import call, compiled

import adaptra
from adaptra.errors import OptionError
from adaptra.planning.routes.joined_programs import join
from adaptra.planning.synchrony.modes import check_mode
from adaptra.program.roles import Roles
from adaptra.program.schedules import generate
from adaptra.runtime.launch import free_memory


def of_compile(**options: Any) -> Callable[[], object]:
    def make() -> None:
        with compiled(TIED, TIED.rows(ROWS, 0), stages=2, microbatches=2, options=adaptra.Options(**options)):
            pass

    return make


def wrong(*given: Any) -> tuple[Any, ...]:
    """Values that no type allows."""
    return given


REFUSED: list[tuple[str, Callable[[], object]]] = [
    (
        "synchrony=…: expected 'exact', adaptra.Stealing(...), Deadline(...), Local(...) or XOrder(...)",
        lambda: adaptra.Options(synchrony="local"),  # type: ignore[arg-type]
    ),
    *(
        ("Local: every=…: expected a whole number of at least 1", lambda every=every: adaptra.Local(every))
        for every in wrong(0, 1.5, None, True)
    ),
    *(
        ("Local: …=…: expected a whole number of at least …, or None", lambda given=given: adaptra.Local(**given))
        for given in wrong({"sites": 1}, {"sites": "2"}, {"quorum": 0}, {"quorum": 1.5})
    ),
    *(
        ("Local: grace=…: expected seconds, a number of at least 0", lambda grace=grace: adaptra.Local(grace=grace))
        for grace in wrong(-1, float("nan"), float("inf"), None)
    ),
    ("Local: outer=…: expected adaptra.Outer(...)", lambda: adaptra.Local(outer=torch.optim.SGD)),  # type: ignore[arg-type]
    *(("Outer: lr=…: expected a number above 0", lambda lr=lr: adaptra.Outer(lr=lr)) for lr in wrong(0, -1, float("nan"), "1")),
    *(
        ("Outer: momentum=…: expected a number of at least 0, and below 1", lambda one=one: adaptra.Outer(momentum=one))
        for one in wrong(-0.1, 1, float("nan"))
    ),
    *(
        ("XOrder: …=…: expected a whole number of at least …, or None", lambda given=given: adaptra.XOrder(**given))
        for given in wrong({"x": 0}, {"x": 1.5}, {"x": "2"}, {"x": 2, "staleness": -1})
    ),
    *(
        ("XOrder: x=…, groups=…: expected one of them", lambda given=given: adaptra.XOrder(**given))
        for given in wrong({}, {"x": 2, "groups": "auto"}, {"staleness": 3})
    ),
    *(
        (
            "XOrder: groups=…: expected 'auto', or the replicas of each group, as ((0, 1), (2, 3))",
            lambda groups=groups: adaptra.XOrder(groups=groups),
        )
        for groups in wrong("speed", True, [(0, 1)], (0, 1), ((0, "1"),), ((),))
    ),
    *(
        (
            "Auto: allow=…: expected a list of adaptra.Stealing(...), Deadline(...), Local(...) or XOrder(...)",
            lambda allow=allow: adaptra.Auto(allow),
        )
        for allow in wrong((), [], "exact", ["exact"], adaptra.Local(2), None)
    ),
    ("mode x-order=…: expected 1 to … replicas in an update", of_compile(synchrony=adaptra.Auto((adaptra.XOrder(3),)))),
    ("XOrder: divide=…: expected 'present' or 'all'", lambda: adaptra.XOrder(2, divide="some")),  # type: ignore[arg-type]
    ("mode x-order=…: expected 1 to … replicas in an update", of_compile(synchrony=adaptra.XOrder(3))),
    (
        "groups …: expected each replica of 0..… in one group",
        lambda: check_mode(adaptra.XOrder(groups=((0, 1), (1,))), 3),
    ),
    (
        "Outer: nesterov=True, momentum=0: expected momentum above 0, or nesterov=False",
        lambda: adaptra.Outer(momentum=0),
    ),
    (
        "mode local=…: expected at least 2 replicas, which exchange",
        of_compile(synchrony=adaptra.Local()),
    ),
    (
        "noise_scale=True with one replica, or one in each site: expected several, as the noise scale is known by how their "
        "gradients differ",
        of_compile(noise_scale=True),
    ),
    (
        "Local(sites=…) with … replicas: expected sites of equally many replicas",
        lambda: check_mode(adaptra.Local(sites=2), 3),
    ),
    *(
        (
            "Local(quorum=…) with … sites: expected … to …, more than half of them",
            lambda quorum=quorum: check_mode(adaptra.Local(quorum=quorum), 4),
        )
        for quorum in (1, 2, 5)
    ),
    (
        "synchrony=local=… with survive=True: expected a job without it, as a lost site takes along what it has learnt",
        of_compile(synchrony=adaptra.Local(), survive=True),
    ),
    (
        "synchrony=local=… with a schedule of several replicas: expected one of a single pipeline, as sites compute nothing "
        "for each other",
        of_compile(synchrony=adaptra.Local(), schedule=join([generate("1f1b", 2, 2)] * 2)),
    ),
]


@pytest.mark.parametrize(("row", "call"), REFUSED, ids=[row[:40] for row, _ in REFUSED])
def test_it_is_refused(row: str, call: Callable[[], object]) -> None:
    kind, text = error_of(call)
    check_documented(kind, text, row)


def test_options_name_what_an_outer_optimizer_has() -> None:
    with pytest.raises(OptionError, match="expected lr"):
        adaptra.Outer(learning_rate=0.7)  # type: ignore[call-arg]


PLAIN = Example("plain", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(WIDTH), square_loss)


def refused_by_a_job(rank: int) -> dict[str, tuple[str, str]]:
    """What a job of two sites refuses, and one that is no such job."""
    found: dict[str, tuple[str, str]] = {}
    of_plain: Any = {"stages": 1, "microbatches": 2}
    batch = PLAIN.rows(ROWS, 0)
    with compiled(PLAIN, batch, options=adaptra.Options(synchrony=adaptra.Local(2)), **of_plain) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        args, kwargs = call(batch)
        pipe.step(*args, **kwargs)
        found["shard"] = error_of(lambda: pipe.shard(torch.optim.SGD, lr=0.1))
        found["training state"] = error_of(adaptra.TrainingState(pipe, optimizer).state_dict)
        found["outer state"] = error_of(lambda: pipe.load_outer_state_dict({"steps": 1}))
        wrong = pipe.outer_state_dict()
        wrong["stages"] = {0: {**wrong["stages"][0], "momentum": {"0.weight": torch.zeros(1)}}}
        found["shape"] = error_of(lambda: pipe.load_outer_state_dict(wrong))
        found["roles"] = error_of(lambda: pipe.take_roles(Roles(1, (1, 0)), optimizer))
        next(iter(pipe.parameters())).requires_grad_(False)
    with compiled(PLAIN, batch, options=adaptra.Options(synchrony=adaptra.Local(2)), **of_plain) as pipe:
        pipe.replay([])
        pipe.step(*args, **kwargs)
        found["replay"] = error_of(pipe.exchange)
    with compiled(PLAIN, batch, **of_plain) as pipe:
        for name, act in (("exchange", pipe.exchange), ("replay of none", lambda: pipe.replay([]))):
            found[name] = error_of(act)
    if rank == 1:
        free_memory.free_on = lambda device: 1 << 10  # type: ignore[assignment]

    def make() -> None:
        with compiled(PLAIN, batch, options=adaptra.Options(synchrony=adaptra.Local(2)), memory=1 << 30, **of_plain):
            pass

    found["memory"] = error_of(make)
    return found


def refused_hosts(_rank: int) -> tuple[str, str]:
    def make() -> None:
        options = adaptra.Options(synchrony=adaptra.Local())
        with compiled(PLAIN, PLAIN.rows(ROWS, 0), stages=2, microbatches=2, replicas=2, transport="delegate", options=options):
            pass

    return error_of(make)


@pytest.mark.processes
def test_a_job_refuses_what_sites_can_not_have() -> None:
    rows = {
        "shard": "shard: sites update by themselves under Options(synchrony=...): expected a job of one site",
        "training state": (
            "training state: sites differ under Options(synchrony=...): expected that each rank saves "
            "pipe.state_dict(), optimizer.state_dict() and pipe.outer_state_dict() in a file of its own"
        ),
        "outer state": "outer state: …: expected that of this rank's pipe.outer_state_dict(), of stages …",
        "shape": "outer state: … of …: of shape …: expected …",
        "roles": (
            "…: sites update by themselves under Options(synchrony=...), and what they have learnt since their "
            "last exchange does not move: expected the model, roles and cut points of the first step"
        ),
        "replay": "exchange() after … steps: the log that is replayed has none there",
        "exchange": "…: all replicas are one site: expected Options(synchrony=adaptra.Local(...)), or XOrder",
        "replay of none": "…: all replicas are one site: expected Options(synchrony=adaptra.Local(...)), or XOrder",
        "memory": ("synchrony=local=…: it needs … of memory on the host of rank …, where … are free: expected that it fits"),
    }
    for found in run_processes(refused_by_a_job, 2):
        assert found.keys() == rows.keys()
        for name, row in rows.items():
            check_documented(found[name][0], found[name][1], row)
    hosts = (
        "Local(…) with … ranks for … workers: expected a rank for each worker, as the workers of a rank have the same "
        "parameters, and those of sites differ"
    )
    for one in run_processes(refused_hosts, 3):
        check_documented(one[0], one[1], hosts)
