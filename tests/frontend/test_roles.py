"""Ranks that change places: whoever holds a stage, the numbers are those of a run in which nobody moved."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from errors_table import check_documented
from linked_hosts import CONTROL, LinkedHosts, change_links
from processes import run_processes
from torch import Tensor, nn
from training import MIXED, compiled

import adaptra
from adaptra.errors import OptionError, StateError
from adaptra.program.roles import Roles, moved
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.exchange.state_transfer import gather_state, give_optimizer, take_over
from adaptra.runtime.reconfigure.consent import Consent
from adaptra.runtime.transports.link_probe import partners

Trained = tuple[list[float], tuple[int, int], dict[str, str], str | None]

ROWS, STEPS = 16, 8

DOCUMENTED = {
    "roles": "roles … for … stages: expected each rank of the job once, in whole replicas",
    "alone": "roles: this job has one replica: expected several, whose ranks can change places",
    "early": "no step has run yet: roles are settled by what steps took",
    "silent": "rank … gave no sign of life for … s…",
    "other": "roles of … ranks and … stages: expected … and …",
    "state": "optimizer …: its state … of … is a …: expected tensors and numbers alone, which can move to another rank",
}


def test_roles_say_who_talks_to_whom() -> None:
    roles = Roles.initial(6, 3)
    assert roles.replicas == 2 and roles.of(4) == (1, 1)
    assert roles.pipeline(1) == (3, 4, 5) and roles.column(1) == (1, 4)
    swapped = roles.swapped(1, 3)
    assert swapped.pipeline(0) == (0, 3, 2) and swapped.column(0) == (0, 1)
    assert moved(roles, swapped) == [1, 3] and moved(roles, roles) == []
    assert roles.successor(1, swapped) == 3 and swapped.successor(1, roles) == 3 and roles.successor(0, swapped) == 0


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 4)])
def test_every_rank_has_one_role(ranks: tuple[int, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        Roles(2, ranks)
    check_documented(
        "OptionError", str(caught.value), "roles … for … stages: expected each rank of the job once, in whole replicas"
    )


@pytest.mark.parametrize("ranks", range(2, 10))
def test_ranks_that_probe_each_other_meet_every_peer_once_and_never_wait_in_a_circle(ranks: int) -> None:
    left = {rank: [one for one in partners(rank, ranks) if one is not None] for rank in range(ranks)}
    assert all(sorted([rank, *met]) == list(range(ranks)) for rank, met in left.items())
    while any(left.values()):
        pairs = [(rank, met[0]) for rank, met in left.items() if met and left[met[0]][0] == rank]
        assert pairs, left
        for rank, _ in pairs:
            left[rank].pop(0)


def optimizer_of(pipe: adaptra.Pipeline) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.StepLR]:
    """AdamW with two groups, and a schedule that goes on whoever holds a parameter."""
    decayed = [one for name, one in pipe.named_parameters() if name.endswith("weight")]
    others = [one for name, one in pipe.named_parameters() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(
    rank: int, changes: Mapping[int, tuple[int, int]] | None = None, links: Sequence[str] = (), placement: str = "straight"
) -> Trained:
    """Losses of every step, this rank's role in the end and its state, and what settling told: 2 replicas of 2 ranks.

    Args:
        rank: This rank.
        changes: Which two ranks swap roles before which step.
        links: Changes of the links between hosts before step 3, and roles are settled before step 5.
        placement: One stage on each rank, or two.
    """
    import torch.distributed as dist

    import adaptra

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    losses, told = [], None
    with adaptra.compile(
        MIXED.make(), stages=2 if placement == "straight" else 4, microbatches=4, example_inputs=(inputs, targets),
        loss=MIXED.loss, options=adaptra.Options(adapt=False), placement=placement,
    ) as pipe:  # fmt: skip
        optimizer, schedule = optimizer_of(pipe)
        for step in range(STEPS):
            if changes and step in changes:
                assert pipe.roles is not None
                pipe.take_roles(pipe.roles.swapped(*changes[step]), optimizer)
            if links and step == 3:
                dist.barrier()
                for change in links if rank == 0 else ():
                    change_links(os.environ[CONTROL], change)
                dist.barrier()
            if links and step == 5:
                told = str(pipe.settle_roles(optimizer))
                assert [event.text for event in pipe.events if event.kind is EventKind.ROLES] == [told]
            (inputs,), _, targets = MIXED.rows(2 * ROWS, seed=step)
            half = slice(pipe.replica * ROWS, (pipe.replica + 1) * ROWS)
            losses.append(pipe.step(inputs[half], targets[half]).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        state = {name: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest() for name, value in pipe.state_dict().items()}
        dist.barrier()
        assert pipe.roles is not None
        return losses, pipe.roles.of(rank), state, told


def by_role(results: Sequence[Trained]) -> dict[tuple[int, int], tuple[list[float], dict[str, str]]]:
    # Hosts return JSON, which has lists for tuples.
    return {(role[0], role[1]): (losses, state) for losses, role, state, _ in results}


def train_twice(
    rank: int, changes: Mapping[int, tuple[int, int]] | None = None, links: Sequence[str] = (), placement: str = "straight"
) -> tuple[Trained, Trained]:
    """A run in which nobody moves, and one that something happens to."""
    return train(rank, placement=placement), train(rank, changes, links, placement)


@pytest.mark.processes
@pytest.mark.parametrize("placement", ["straight", "v"])
def test_a_run_whose_ranks_change_places_is_bitwise_the_undisturbed_one(placement: str) -> None:
    """Data-parallel links become pipeline links, then ranks of one pipeline swap stages: buffers, AdamW and all move."""
    results = run_processes(train_twice, 4, {3: (1, 2), 5: (0, 2), 6: (3, 1)}, (), placement)
    undisturbed, moved = zip(*results, strict=True)
    assert [role for _, role, *_ in undisturbed] == [(0, 0), (0, 1), (1, 0), (1, 1)] != [role for _, role, *_ in moved]
    assert by_role(moved) == by_role(undisturbed)
    losses, *_ = moved[0]
    assert len(set(losses)) == len(losses) == STEPS


def mistakes(rank: int) -> tuple[list[tuple[str, str]], float]:
    import torch.distributed as dist

    import adaptra

    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    found = []
    with adaptra.compile(
        MIXED.make(), stages=1, microbatches=4, example_inputs=(inputs, targets), loss=MIXED.loss
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters())
        for run in (lambda: pipe.take_roles(Roles.initial(2, 2), optimizer), lambda: pipe.settle_roles(optimizer)):
            try:
                run()
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        (inputs,) = inputs
        return found, float(pipe.step(inputs, targets))


@pytest.mark.processes
def test_roles_that_do_not_fit_change_nothing() -> None:
    for found, loss in run_processes(mistakes, 2):
        check_documented(found[0][0], found[0][1], DOCUMENTED["other"])
        check_documented(found[1][0], found[1][1], DOCUMENTED["early"])
        assert loss > 0


def lose_a_rank(rank: int, meets: bool) -> tuple[str, str] | None:
    """What rank 0 raises when rank 1 ends before they meet, or afterwards."""
    import torch.distributed as dist

    import adaptra

    dist.init_process_group("gloo")
    inputs, _, targets = MIXED.rows(ROWS, seed=0)
    with adaptra.compile(
        MIXED.make(), stages=1, microbatches=4, example_inputs=(inputs, targets), loss=MIXED.loss,
        options=adaptra.Options(timeout=60.0),
    ) as pipe:  # fmt: skip
        pipe.step(inputs[0], targets)
        if rank == 1:
            if meets:
                assert pipe._session is not None
                pipe._session.launched.meet(30.0, text=Consent().encode())
            os._exit(1)
        try:
            pipe.settle_roles(torch.optim.SGD(pipe.parameters()))
        except Exception as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.processes
@pytest.mark.parametrize("meets", [False, True], ids=["before", "after"])
def test_a_rank_that_is_lost_ends_the_others(meets: bool) -> None:
    kind, message = run_processes(lose_a_rank, 2, meets, may_die=(1,))[0]
    check_documented(kind, message, DOCUMENTED["silent"])
    assert message.startswith("rank 1 ")


def test_a_job_of_one_replica_has_no_roles_to_change() -> None:
    with compiled(MIXED, MIXED.rows(ROWS, seed=0), stages=2, microbatches=4) as pipe:
        assert pipe.roles is None and pipe.replica == 0
        with pytest.raises(OptionError) as caught:
            pipe.take_roles(Roles.initial(2, 2), torch.optim.SGD(pipe.parameters()))
        check_documented("OptionError", str(caught.value), DOCUMENTED["alone"])


def held(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """A parameter, a buffer, and an optimizer that has stepped the one."""
    state = {"weight": nn.Parameter(torch.ones(2, 3)), "mean": torch.zeros(3)}
    optimizer = optimizer_class([{"params": []}, {"params": [state["weight"]]}], **options)
    state["weight"].grad = torch.full((2, 3), 0.5)
    optimizer.step()
    return state, optimizer


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizer_goes_on_with_what_was_handed_over(optimizer_class: type[torch.optim.Optimizer]) -> None:
    (state, optimizer), (_, other) = held(optimizer_class, lr=0.1), held(optimizer_class, lr=0.1)
    arrived = gather_state(state, optimizer)
    arrived.tensors = {key: tensor.clone() for key, tensor in arrived.tensors.items()}
    taken = take_over(arrived, frozenset({"weight"}), frozenset({"weight"}))
    give_optimizer(other, arrived, taken)
    assert other.param_groups[1]["params"] == [taken["weight"]] and not isinstance(taken["mean"], nn.Parameter)
    optimizer.step()
    other.step()
    gradient, before = taken["weight"].grad, state["weight"].grad
    assert gradient is not None and before is not None
    assert torch.equal(taken["weight"], state["weight"]) and torch.equal(gradient, before)


def test_what_can_not_move_is_refused() -> None:
    state, optimizer = held()
    optimizer.state[state["weight"]]["history"] = [1, 2]
    with pytest.raises(StateError) as caught:
        gather_state(state, optimizer)
    check_documented("StateError", str(caught.value), DOCUMENTED["state"])


@pytest.mark.root
def test_slow_links_between_replicas_join_stages_once_roles_are_settled(linked_hosts: type[LinkedHosts]) -> None:
    """The simulator is told what was measured, moves the ranks, and nobody's numbers change."""
    slow = [f"{link} delay=30ms" for link in ("0-2", "0-3", "1-2", "1-3")]
    with linked_hosts(4) as hosts:
        undisturbed, settled = zip(*hosts.call(train_twice, None, slow), strict=True)
    assert len({told for *_, told in settled}) == 1 and "ms a step instead of" in settled[0][3]
    columns = [{rank for rank, (_, role, *_) in enumerate(settled) if role[1] == stage} for stage in range(2)]
    assert {0, 1} in columns and {2, 3} in columns
    assert by_role(settled) == by_role(undisturbed)
