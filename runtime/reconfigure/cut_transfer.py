"""State transfer of a cut change: the new tensors of each rank, with the optimizer updated.

The copies of a tied parameter have the same value, gradient and optimizer state, so any of them may continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from adaptra.graph.stages.stages import TrainStage
from adaptra.runtime.exchange.state_transfer import Handover, set_state, take_over
from adaptra.runtime.reconfigure.transfers import Transfer, sent_by


def move_within(
    held: Sequence[Handover],
    states: Sequence[Mapping[str, Tensor]],
    after: Sequence[Sequence[TrainStage]],
    moving: Sequence[Transfer[str]],
) -> tuple[list[Mapping[str, Tensor]], list[Handover]]:
    """Move state between the ranks of a pipeline that are all in this process.

    A tensor that its rank gives away stays the same object, so that references to it still see it trained. It is copied only
    for further ranks that need it.

    Args:
        held, states: What each rank has: the state that it would hand over, and its tensors by name.
        after: The stages that each rank has then.
        moving: The transfers between them.

    Returns:
        Per rank the tensors that it has or is given, and copies for it of other ranks' tensors.
    """
    states_after = [dict(state) for state in states]
    copied: list[list[Transfer[str]]] = [[] for _ in states]
    kept = [{name for stage in stages for name in stage.state_names} for stages in after]
    taken: set[str] = set()
    for transfer in moving:
        if transfer.item in kept[transfer.sender] or transfer.item in taken:
            copied[transfer.sender].append(transfer)
        else:
            taken.add(transfer.item)
            states_after[transfer.receiver][transfer.item] = states[transfer.sender][transfer.item]
    copies = [Handover() for _ in states]
    for sender, some in enumerate(copied):
        for receiver, names in sent_by(sender, some).items():
            copies[receiver].add(held[sender].part(names).copy())
    return list(states_after), copies


def new_state(stages: Sequence[TrainStage], own: Mapping[str, Tensor], arrived: Handover) -> dict[str, Tensor]:
    """Return the state of a rank's stages: the tensors that it is given, and new ones for the state that has arrived."""
    trainable = frozenset(name for one in stages for name in one.trainable)
    parameters = frozenset(name for one in stages for name in one.parameters)
    taken_over = take_over(arrived, trainable, parameters)
    return {name: own[name] if name in own else taken_over[name] for one in stages for name in one.state_names}


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
