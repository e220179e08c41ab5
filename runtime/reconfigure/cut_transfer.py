"""State transfer of a cut change: from the stages that had the state to those that need it, with the optimizer updated.

State that several stages have, such as a tied parameter, comes from the first of them, and a stage keeps what it has. The
copies of a tied parameter have the same value, gradient and optimizer state, so any of them may continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from adaptra.graph.stages.stages import TrainStage
from adaptra.runtime.reconfigure.state_transfer import Handover, receive, send, set_state, take_over

Transfers = Mapping[tuple[int, int], tuple[str, ...]]
"""The names of the tensors that move, by the stage that hands them over and the one that takes them."""


def transfers(before: Sequence[TrainStage], after: Sequence[TrainStage]) -> Transfers:
    """Return the transfers between two ways of cutting the same model."""
    first: dict[str, int] = {}
    for stage in reversed(before):
        first |= dict.fromkeys(stage.state_names, stage.index)
    found: dict[tuple[int, int], list[str]] = {}
    for stage in after:
        had = set(before[stage.index].state_names)
        for name in stage.state_names:
            if name not in had:
                found.setdefault((first[name], stage.index), []).append(name)
    return {pair: tuple(names) for pair, names in found.items()}


def leaving(held: Handover, stage: int, moving: Transfers, ranks: Sequence[int]) -> dict[int, Handover]:
    """Return the state that leaves a stage, by the rank that takes it."""
    return {ranks[to]: held.part(names) for (source, to), names in moving.items() if source == stage}


def exchange_parts(held: Handover, stage: int, moving: Transfers, ranks: Sequence[int], group: ProcessGroup) -> Handover:
    """Send the state that leaves this rank's stage, and receive the state that comes to it. The ranks of a pipeline call it
    together.

    Args:
        held: The state of the stage.
        stage: The stage of this rank.
        moving: The transfers.
        ranks: The rank of every stage in the group.
        group: The process group that carries them.

    Raises:
        ControlError: What arrived is not a handover.
        RuntimeError: A rank is lost.
    """
    waits = [send(part, rank, group) for rank, part in leaving(held, stage, moving, ranks).items()]
    arrived = Handover()
    for source, to in moving:
        if to == stage:
            arrived.add(receive(ranks[source], group))
    for wait in waits:
        wait()
    return arrived


def move_within(
    held: Sequence[Handover], states: Sequence[Mapping[str, Tensor]], after: Sequence[TrainStage], moving: Transfers
) -> tuple[list[Mapping[str, Tensor]], list[Handover]]:
    """Move state between the stages of one process.

    A tensor that its stage gives away stays the same object, so that references to it still see it trained. It is copied only
    for further stages that need it.

    Returns:
        Per stage the tensors that it has or is given, and copies for it of other stages' tensors.
    """
    given = [dict(state) for state in states]
    copies = [Handover() for _ in states]
    taken: set[str] = set()
    for (source, to), names in moving.items():
        whole = [name for name in names if name not in after[source].state_names and name not in taken]
        taken |= set(whole)
        given[to] |= {name: states[source][name] for name in whole}
        copies[to].add(held[source].part([name for name in names if name not in whole]).copy())
    return list(given), copies


def new_state(stage: TrainStage, given: Mapping[str, Tensor], arrived: Handover) -> dict[str, Tensor]:
    """Return the state of a stage: the tensors that it is given, and new ones for the state that has arrived."""
    made = take_over(arrived, frozenset(stage.trainable), frozenset(stage.parameters))
    return {name: given[name] if name in given else made[name] for name in stage.state_names}


def regroup(
    optimizer: torch.optim.Optimizer,
    before: Iterable[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    arrived: Sequence[Handover],
) -> None:
    """Let the optimizer step this process's present parameters, and continue those that arrived from where they stopped.

    Args:
        optimizer: Steps the process's parameters.
        before: The tensors of the process's stages before the change.
        states: The tensors of its stages now.
        arrived: The handover that each stage received.
    """
    group_of = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    for state, handover in zip(states, arrived, strict=True):
        group_of |= {id(state[name]): index for name, index in handover.groups.items()}
    now = list({id(one): one for state in states for one in state.values()}.values())
    old = {id(one): one for one in before}
    for index, group in enumerate(optimizer.param_groups):
        others = [one for one in group["params"] if id(one) not in old]
        group["params"] = [one for one in now if group_of.get(id(one)) == index] + others
    for gone in old.keys() - {id(one) for one in now}:
        optimizer.state.pop(old[gone], None)
    for state, handover in zip(states, arrived, strict=True):
        set_state(optimizer, handover, state)
