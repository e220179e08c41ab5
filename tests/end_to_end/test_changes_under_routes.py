"""Ranks change roles and cuts move while workers compute for other replicas: no number changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from processes import run_processes

from adaptra.planning.routes.job_planner import plan_job
from adaptra.program import Program
from adaptra.program.routing import Routing
from adaptra.simulation.case import Case
from adaptra.simulation.cost import CostModel

pytestmark = pytest.mark.processes

MICROBATCHES, ROWS = 4, 8
FIRST, SECOND = (0, 1), (2, 3)
PATHS: Mapping[str, Sequence[Sequence[tuple[int, ...]]]] = {
    "shares": [[FIRST, (2, 1), FIRST, FIRST], [SECOND, (2, 1), (2, 1), SECOND]],
    "exchanged paths": [[(0, 3)] * 4, [(2, 1)] * 4],
}
Change = tuple[int, int] | str
"""Two ranks that swap roles, or the module at which the second stage begins from then on."""

CHANGES: Mapping[int, Change] = {1: (1, 2), 2: "middle.4", 3: (0, 3), 5: "middle.1", 6: (2, 3)}
"""By step. Odd ones have gradients of the step before, which move as well."""

STEPS, MOST = 8, 30


class Trained(NamedTuple):
    """One rank: its replica, the losses of its steps, digests of its state by name, and whether routes left home by step."""

    replica: int
    losses: list[float]
    state: dict[str, str]
    routed: list[bool]


def routed(paths: Sequence[Sequence[tuple[int, ...]]]) -> Program:
    """The best order found for these paths of each replica's microbatches."""
    case = Case(CostModel.uniform(2, 1.0, 1.0, 1.0), MICROBATCHES, (0, 1)).of_replicas(2)
    return plan_job(case, routing=Routing.of_paths((FIRST, SECOND), paths))


class Training:
    """Training of one rank with dropout, tied weights, accumulation and clipping; what it has done so far."""

    def __init__(self, pipe: Any, example: Any) -> None:
        import torch

        self._pipe, self._example = pipe, example
        self._optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        self.losses: list[float] = []
        self.routed: list[bool] = []

    def step(self) -> None:
        """One step; the optimizer's every second time."""
        from training import call

        number = len(self.losses)
        args, kwargs = call(self._example.rows(ROWS, 2 * number + self._pipe.replica))
        self.losses.append(self._pipe.step(*args, **kwargs).item())
        self.routed.append(any(len({worker // 2 for worker in one.workers}) > 1 for one in self._pipe.routes))
        if number % 2:
            self._pipe.clip_grad_norm_(0.5)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def change(self, change: Change) -> None:
        """Swap two roles or move the cut."""
        if isinstance(change, str):
            self._pipe.take_split([change], self._optimizer)
        else:
            self._pipe.take_roles(self._pipe.roles.swapped(*change), self._optimizer)

    def until_routed(self) -> None:
        """Run steps until microbatches are away from home in one."""
        begun = len(self.losses)
        while len(self.losses) < begun + MOST and not (self.routed[begun:] or [False])[-1]:
            self.step()

    def settle(self) -> None:
        """Let the cut and the roles be chosen by what steps took, under routes."""
        assert self.routed[-1]
        self._pipe.settle_split(self._optimizer)
        self._pipe.settle_roles(self._optimizer)

    def result(self) -> Trained:
        """What is left."""
        import torch

        state = {
            name: hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
            for name, value in self._pipe.state_dict().items()
        }
        return Trained(self._pipe.replica, self.losses, state, self.routed)


def train(schedule: str | Program, changes: Mapping[int, Change]) -> Trained:
    """Steps under a given program, with changes before some of them; buffers of BatchNorm travel with microbatches."""
    from training import MIXED, compiled

    import adaptra

    options = adaptra.Options(schedule=schedule, adapt=False)
    with compiled(
        MIXED, MIXED.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES, split=["middle.3"], options=options
    ) as pipe:  # fmt: skip
        training = Training(pipe, MIXED)
        for step in range(STEPS):
            if step in changes:
                training.change(changes[step])
            training.step()
        return training.result()


def train_under(_rank: int, programs: Sequence[Program]) -> list[Trained]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [train("1f1b", {}), *(train(program, CHANGES) for program in programs)]


def of_replicas(results: Sequence[Trained]) -> dict[int, tuple[list[float], dict[str, str]]]:
    """Losses and the whole state by replica, whichever ranks have it."""
    found: dict[int, tuple[list[float], dict[str, str]]] = {}
    for one in results:
        losses, state = found.setdefault(one.replica, (one.losses, {}))
        assert one.losses == losses
        for name, digest in one.state.items():
            assert state.setdefault(name, digest) == digest, f"copies of {name} differ"
    return found


def test_roles_and_cuts_change_under_given_routes() -> None:
    results = run_processes(train_under, 4, [routed(paths) for paths in PATHS.values()])
    undisturbed, *changed = (of_replicas(one) for one in zip(*results, strict=True))
    assert len(undisturbed[0][1]) > 10
    for name, one in zip(PATHS, changed, strict=True):
        assert one == undisturbed, name
    assert all(not before.routed[0] and all(after.routed) for before, *later in results for after in later)


def train_shared(_rank: int) -> tuple[Trained, Trained]:
    """Change a role, then a cut, then a role again, each while a share that the controller made is running."""
    import torch.distributed as dist
    from models import EXAMPLES
    from training import compiled

    import adaptra

    dist.init_process_group("gloo")
    example = EXAMPLES["gpt_tied"]
    device = adaptra.EmulatedDevice(0.03, 0.03, 0.03)
    found: list[Trained] = []
    for slow in (True, False):
        options = adaptra.Options(
            schedule="1f1b", faults=["slow 1.1 3x"] if slow else [], emulate=device if slow else None, adapt=slow
        )
        arguments: dict[str, Any] = {"stages": 2, "microbatches": MICROBATCHES, "split": ["blocks.2"], "options": options}
        with compiled(example, example.rows(ROWS, 0), **arguments) as pipe:
            training = Training(pipe, example)
            for change in ((1, 2), "blocks.1", (0, 1)) if slow else ():
                training.until_routed()
                training.change(change)
            if slow:
                training.until_routed()
                training.settle()
            for _ in range(3 if slow else len(found[0].losses)):
                training.step()
            found.append(training.result())
    return found[0], found[1]


@pytest.mark.timed
def test_roles_and_cuts_change_while_a_share_of_the_controller_runs() -> None:
    """All ranks have the same routes in a step, so all of them make a change at the same one."""
    changed, undisturbed = zip(*run_processes(train_shared, 4), strict=True)
    assert len({tuple(one.routed) for one in changed}) == 1
    assert of_replicas(changed) == of_replicas(undisturbed)
    routes = changed[0].routed
    ends = [step for step in range(len(routes) - 1) if routes[step] and not routes[step + 1]]
    assert len(ends) >= 3, "a share was running before each change"
