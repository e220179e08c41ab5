"""State transfer of a role: the parameters, buffers and gradients of a rank's stage, and their optimizer state.

A handover is one JSON object that describes the tensors, followed by the bytes of all tensors in that order. The object is
checked field by field and nothing in it is executed; numbers of the optimizer state travel in it. Settings per group, such as
the learning rate, do not move: every rank runs the same lines on its own groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from adaptra.errors import StateError
from adaptra.graph.ops.specs import tensor_bytes
from adaptra.runtime.control_store.schema import decode
from adaptra.runtime.exchange.tensor_memory import TensorForm, copied, why_not_movable

GRADIENT: Final = "gradient"
VALUE: Final = "value"
STATE: Final = "state/"

_NAMED: Final = 3
"""How many parameters an error names."""

_NOT_FINITE: Final = ("inf", "-inf", "nan")  # JSON has no numbers for these


@dataclass(slots=True)
class Handover:
    """The state of a stage on one rank.

    Attributes:
        tensors: Tensors by the name of the parameter or buffer and their kind: its value, its gradient or an entry of its
            optimizer state.
        numbers: The entries of the optimizer state that are not tensors.
        groups: The index of the optimizer's group, per parameter that it steps.
        owners: The replica that steps it, per parameter of a sharded optimizer.
    """

    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], Tensor])
    numbers: dict[tuple[str, str], float | bool | None] = field(default_factory=dict[tuple[str, str], float | bool | None])
    groups: dict[str, int] = field(default_factory=dict[str, int])
    owners: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(map(tensor_bytes, self.tensors.values()))

    def part(self, names: Collection[str]) -> Handover:
        """Return the state of these parameters and buffers."""
        return Handover(
            {key: tensor for key, tensor in self.tensors.items() if key[0] in names},
            {key: number for key, number in self.numbers.items() if key[0] in names},
            {name: index for name, index in self.groups.items() if name in names},
            {name: owner for name, owner in self.owners.items() if name in names},
        )

    def copy(self) -> Handover:
        """Return a copy with tensors of its own."""
        tensors = {key: copied(tensor) for key, tensor in self.tensors.items()}
        return Handover(tensors, dict(self.numbers), dict(self.groups), dict(self.owners))

    def add(self, other: Handover) -> None:
        """Add the state of other names."""
        self.tensors |= other.tensors
        self.numbers |= other.numbers
        self.groups |= other.groups
        self.owners |= other.owners


def gather_state(
    state: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    owners: Mapping[str, int] | None = None,
    *,
    gradients: bool = True,
) -> Handover:
    """Return the state that a rank has to hand over.

    Args:
        state: Its stage's parameters and buffers by name.
        optimizer: Steps the parameters, of a sharded one those that this rank owns.
        owners: The replica that owns each parameter of a sharded one, by name.
        gradients: Whether to hand over gradients, too.

    Raises:
        StateError: The optimizer state of a parameter has an entry that is neither a tensor nor a number; names both.
    """
    handover = Handover(owners=dict(owners or {}))
    groups = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    for name, value in state.items():
        handover.tensors[name, VALUE] = value.detach()
        if gradients and value.grad is not None:
            handover.tensors[name, GRADIENT] = value.grad
        if id(value) in groups:
            handover.groups[name] = groups[id(value)]
        for key, entry in optimizer.state.get(value, {}).items():
            if isinstance(entry, Tensor) and isinstance(key, str):
                handover.tensors[name, STATE + key] = entry
            elif isinstance(key, str) and (entry is None or isinstance(entry, bool | int | float)):
                handover.numbers[name, STATE + key] = entry
            else:
                raise StateError(
                    f"optimizer {type(optimizer).__name__}: its state {key!r} of {name} is a {type(entry).__name__}: expected "
                    "tensors and numbers alone, which can move to another rank"
                )
    return handover


def check_movable(held: Handover) -> None:
    """Refuse tensors that can't be rebuilt on another rank, before anything moves.

    Raises:
        StateError: Names the tensor, its parameter, and the reason.
    """
    for (name, what), tensor in held.tensors.items():
        reason = why_not_movable(tensor)
        if reason is not None:
            part = f"the optimizer's {what.removeprefix(STATE)!r}" if what.startswith(STATE) else f"the {what}"
            raise StateError(
                f"{part} of {name} can't move to another rank: {reason}: expected a plain dense tensor on a CPU or a GPU whose "
                "elements are whole bytes, each in a place of its own"
            )


def require_all_stepped(call: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of some of the parameters, where other replicas go on with the state of one.

    Raises:
        StateError: It lacks some; names the first ones.
    """
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    lacking = [name for name, one in parameters.items() if id(one) not in stepped]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise StateError(
            f"{call}: the optimizer lacks {', '.join(lacking[:_NAMED])}{more}: expected a single one of all trainable "
            "parameters, as other replicas go on with its state"
        )


def exchange(leaving: Mapping[int, Handover], senders: Sequence[int], group: ProcessGroup) -> Handover:
    """Send the state that leaves this rank, and receive the state that comes to it. All ranks that do either call it.

    Args:
        leaving: The state that leaves, by the rank that takes it.
        senders: The ranks that send state to this one.
        group: All ranks of the job, by rank.

    Returns:
        The state received from all of them.

    Raises:
        ControlError: What arrived is not a handover.
        RuntimeError: A rank is lost.
    """
    waits = [send(part, rank, group) for rank, part in leaving.items()]
    arrived = Handover()
    for sender in senders:
        arrived.add(receive(sender, group))
    for wait in waits:
        wait()
    return arrived


def send(held: Handover, to: int, group: ProcessGroup) -> Callable[[], None]:
    """Send a handover to a rank of the group.

    Returns:
        A function that waits until it has been sent.
    """
    head = torch.frombuffer(bytearray(_describe(held)), dtype=torch.uint8)
    body = torch.cat([torch.empty(0, dtype=torch.uint8), *(TensorForm.of(one).pack(one) for one in held.tensors.values())])
    parts = [torch.tensor([head.numel(), body.numel()]), head, body]
    works = [group.send([part], to, tag) for tag, part in enumerate(parts)]

    def wait() -> None:
        for work, _ in zip(works, parts, strict=True):  # parts stay referenced until they are sent
            work.wait()

    return wait


def receive(source: int, group: ProcessGroup) -> Handover:
    """Receive the handover that a rank of the group sends.

    Raises:
        ControlError: What arrived is not a handover.
        RuntimeError: The rank is lost.
    """
    arriving = torch.empty(2, dtype=torch.int64)
    group.recv([arriving], source, 0).wait()
    head_size, body_size = map(int, arriving.tolist())
    head, body = torch.empty(head_size, dtype=torch.uint8), torch.empty(body_size, dtype=torch.uint8)
    group.recv([head], source, 1).wait()
    group.recv([body], source, 2).wait()
    return _read(bytes(head.tolist()), body, f"handover of rank {source}")


def take_over(arrived: Handover, trainable: frozenset[str], parameters: frozenset[str]) -> dict[str, Tensor]:
    """Return the state of a stage as tensors of this rank.

    Args:
        arrived: The handover received.
        trainable: The parameters that take gradients.
        parameters: The names that are parameters; all others are buffers.
    """
    state: dict[str, Tensor] = {}
    for (name, what), tensor in arrived.tensors.items():
        if what == VALUE:
            state[name] = nn.Parameter(tensor, requires_grad=name in trainable) if name in parameters else tensor
    for (name, what), tensor in arrived.tensors.items():
        if what == GRADIENT:
            state[name].grad = tensor
    return state


def give_optimizer(optimizer: torch.optim.Optimizer, arrived: Handover, state: Mapping[str, Tensor]) -> None:
    """Let the optimizer step the parameters of the new stage, from where the previous rank stopped."""
    optimizer.state.clear()
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [state[name] for name, of in arrived.groups.items() if of == index]
    set_state(optimizer, arrived, state)


def set_state(optimizer: torch.optim.Optimizer, arrived: Handover, state: Mapping[str, Tensor]) -> None:
    """Give the optimizer its state of parameters that have arrived."""
    for (name, what), entry in (*arrived.tensors.items(), *arrived.numbers.items()):
        if what.startswith(STATE):
            optimizer.state[state[name]][what.removeprefix(STATE)] = entry


def _describe(held: Handover) -> bytes:
    return json.dumps(
        {
            "tensors": [[name, what, TensorForm.of(one).told()] for (name, what), one in held.tensors.items()],
            "numbers": [[name, what, _as_json(value)] for (name, what), value in held.numbers.items()],
            "groups": [[name, index] for name, index in held.groups.items()],
            "owners": [[name, owner] for name, owner in held.owners.items()],
        },
        allow_nan=False,
    ).encode()


def _as_json(value: float | bool | None) -> float | bool | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(head: bytes, body: Tensor, where: str) -> Handover:
    fields = decode(head, where)
    arrived, begin = Handover(), 0
    for item in fields.items("tensors"):
        match item:
            case [str(name), str(what), told]:
                form = TensorForm.read(fields, "tensors", told)
            case _:
                raise fields.refuse("tensors", "a name, what of it, and a form", item)
        end = begin + form.nbytes
        if end > body.numel():
            raise fields.refuse("tensors", f"{body.numel()} bytes in all", item)
        arrived.tensors[name, what] = form.unpack(body[begin:end].clone())  # of its own, as the bytes may begin anywhere
        begin = end
    for item in fields.items("numbers"):
        match item:
            case [str(name), str(what), (None | bool() | int() | float()) as value]:
                arrived.numbers[name, what] = value
            case [str(name), str(what), str(text)] if text in _NOT_FINITE:
                arrived.numbers[name, what] = float(text)
            case _:
                raise fields.refuse("numbers", "a name, a key and a number", item)
    for numbered, key in ((arrived.groups, "groups"), (arrived.owners, "owners")):
        for item in fields.items(key):
            match item:
                case [str(name), int(index)] if index >= 0:
                    numbered[name] = index
                case _:
                    raise fields.refuse(key, "a name and an index", item)
    fields.end()
    return arrived
