"""Agreeing on roles: four ranks on threads over gloo measure links, one of them slower by sleeping, and all do the same."""

import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import MIXED

from adaptra.collectives.seconds import DIRECT
from adaptra.graph import compile_stages
from adaptra.graph.estimated_cost import estimated_cost
from adaptra.planning.layouts.layout_change import RoleChange
from adaptra.program.placement import stages_of
from adaptra.program.roles import Roles, moved
from adaptra.runtime.exchange.state_transfer import gather_state
from adaptra.runtime.exchange.store_exchange import exchange
from adaptra.runtime.measuring.measurement import StageMeasurement
from adaptra.runtime.reconfigure.agreement import agree_on_roles
from adaptra.simulation.case import Case

RANKS, ROWS = 4, 4

HORIZON = 4
"""Steps that must repay a change, over a second and a half. Narrow links cost that in three steps, busy threads not in four."""


class Slow:
    """A process group whose messages between some ranks leave later."""

    def __init__(self, group: Any, pairs: Collection[set[int]]) -> None:
        self._group, self._pairs = group, pairs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        if {self._group.rank(), destination} in self._pairs:
            time.sleep(0.01 + 5e-8 * tensors[0].nbytes)
        return self._group.send(tensors, destination, tag)


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0), (0, 1, 0)], ids=["straight", "v", "uneven"])
@pytest.mark.parametrize("pairs", [[], [{0, 2}, {0, 3}, {1, 2}, {1, 3}]], ids=["equal", "slow between replicas"])
def test_all_ranks_make_the_change_that_wins(pairs: Collection[set[int]], placement: tuple[int, ...]) -> None:
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    compiled = compile_stages(MIXED.make(), inputs, {}, stages=len(placement), loss=MIXED.loss, targets=targets)
    case = Case(estimated_cost(compiled, placement), 4, placement)
    store = dist.HashStore()

    def agree(rank: int) -> RoleChange | None:
        group: Any = Slow(dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=30)), pairs)
        told = count()

        def tell(text: str) -> list[str]:
            return exchange(store, f"told/{next(told)}", rank, text, range(RANKS), 30.0)

        # A narrow link costs their sum over half a second.
        state = {f"weight {number}": nn.Parameter(torch.ones(512, 512)) for number in range(12)}
        held = gather_state(state, torch.optim.SGD(state.values()))
        measured = [StageMeasurement(stage, 0.02, 0.02, 0.02, None) for stage in stages_of(rank % 2, placement)]
        return agree_on_roles(tell, group, Roles.initial(RANKS, 2), compiled.train, case, measured, held, HORIZON, DIRECT)

    with ThreadPoolExecutor(RANKS) as threads:
        changes = list(threads.map(agree, range(RANKS)))
    assert changes == [changes[0]] * RANKS
    if not pairs:
        assert changes[0] is None
    else:
        change = changes[0]
        assert change is not None
        assert {frozenset(change.after.column(stage)) for stage in range(2)} == {frozenset({0, 1}), frozenset({2, 3})}
        assert change.seconds_after < change.seconds_before
        held = {0: "stage 0", 1: "stage 1"} if len(placement) == 2 else {1: "stage 1", 0: "stages 0 and 2"}
        if len(placement) == 4:
            held = {0: "stages 0 and 3", 1: "stages 1 and 2"}
        for rank in moved(change.before, change.after):
            (old, was), (new, now) = change.before.of(rank), change.after.of(rank)
            assert f"rank {rank} from {held[was]} of replica {old} to {held[now]} of {new}" in str(change)
