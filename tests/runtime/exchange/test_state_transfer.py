"""What moves with a role or a cut arrives as it was, or is refused on every rank before anything moves."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors_table import check_documented
from processes import run_processes
from torch import Tensor, nn

import adaptra
from adaptra.errors import ControlError, StateError
from adaptra.runtime.exchange.state_transfer import Handover, check_movable, receive, send
from adaptra.runtime.exchange.tensor_memory import MOVABLE, copied

DOCUMENTED = {
    "movable": (
        "the … of … can't move to another rank: …: expected a plain dense tensor on a CPU or a GPU whose elements are whole "
        "bytes, each in a place of its own"
    ),
    "refused": "…: nothing has moved, since rank … can't: …",
    "groups": (
        "…: nothing has moved, since rank …'s optimizer has … parameter groups, and rank … has parameters for it in …: "
        "expected the same groups on every rank, empty ones too"
    ),
}

FORMS = {
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(3, 5).T,
    "with gaps": lambda: torch.randn(4, 6)[::2, 1:4],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "conjugated": lambda: torch.randn(3, 2, dtype=torch.complex64).conj().T,
}


def handed_over(held: Handover) -> Handover:
    """What arrives of a handover on another rank."""
    store = dist.HashStore()

    def run(rank: int) -> Handover | None:
        group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=300))
        if rank == 1:
            return receive(0, group)
        send(held, 1, group)()
        return None

    with ThreadPoolExecutor(2) as threads:
        arrived = list(threads.map(run, range(2)))[1]
    assert arrived is not None
    return arrived


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert as_bytes(one) == as_bytes(other)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_form_and_dtype_arrives_as_it_was_and_copies_are_alike() -> None:
    tensors = {(name, "value"): make() for name, make in FORMS.items()}
    for name, dtype in MOVABLE.items():
        some = torch.randint(0, 2, (3, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        tensors[name, "state/one"] = some.t()
    for tensor in tensors.values():
        same(copied(tensor), tensor)
    check_movable(Handover(tensors))
    arrived = handed_over(Handover(tensors))
    assert arrived.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        same(arrived.tensors[key], tensor)


def test_numbers_that_are_not_finite_arrive() -> None:
    numbers = {"best": float("inf"), "worst": -float("inf"), "none": None, "unknown": float("nan"), "count": 2**70, "on": True}
    arrived = handed_over(Handover(numbers={("weight", f"state/{key}"): one for key, one in numbers.items()}))
    assert {key.removeprefix("state/"): repr(one) for (_, key), one in arrived.numbers.items()} == {
        key: repr(one) for key, one in numbers.items()
    }


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "its layout is sparse_coo"),
        # Torch's stubs lack this dtype.
        (torch.empty(3, dtype=torch.int4), "its dtype is int4"),  # pyright: ignore[reportAttributeAccessIssue]
        (torch.empty(3, device="meta"), "it is on device meta"),
        (torch.arange(6.0).as_strided((4, 3), (1, 1)), "several of its elements lie in one place"),
    ],
)
def test_what_can_not_be_rebuilt_is_refused_before_it_moves(tensor: Tensor, reason: str) -> None:
    for what in ("value", "gradient", "state/average"):
        with pytest.raises(StateError, match=reason) as caught:
            check_movable(Handover({("weight", what): tensor}))
        check_documented("StateError", str(caught.value), DOCUMENTED["movable"])


def test_a_handover_that_is_not_one_is_refused() -> None:
    numbers: dict[Any, Any] = {("weight", "state/step"): "many"}
    held = Handover({("weight", "value"): torch.ones(2)}, numbers)
    with pytest.raises(ControlError, match="expected a name, a key and a number"):
        handed_over(held)


class Convolutions(nn.Module):
    """Four convolutions whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
        # Torch's stubs lack this overload.
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def forms(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[int, ...]]]:
    """By parameter the strides of the value, the gradient and what the optimizer keeps."""

    def kept(one: nn.Parameter) -> list[Tensor]:
        assert one.grad is not None
        return [one, one.grad, *(optimizer.state[one][key] for key in ("exp_avg", "exp_avg_sq"))]

    return {name: [value.stride() for value in kept(one)] for name, one in pipe.named_parameters()}


def moving(rank: int, changes: Any) -> tuple[Any, ...]:
    """Strides before and after cuts and roles move, what was refused, and the losses: 2 replicas of 2 stages."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    inputs, targets = torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4)
    found, refused, losses = {}, [], []

    def attempt(run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as error:
            refused.append((type(error).__name__, str(error)))

    with adaptra.compile(
        Convolutions(), stages=2, microbatches=2, example_inputs=(inputs, targets), loss=square, split=["layers.2"],
        options=adaptra.Options(adapt=False),
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}, {"params": []}], lr=0.01)
        kept, roles = next(iter(pipe.parameters())), pipe.roles
        assert roles is not None
        assert roles.ranks == (0, 1, 2, 3)
        swapped = roles.swapped(0, 3)
        for step in range(5):
            losses.append(pipe.step(inputs, targets).item())
            optimizer.step()
            found |= forms(pipe, optimizer)
            if changes and step == 0:
                if rank == 1:
                    optimizer.state[kept]["history"] = [1, 2]
                attempt(lambda: pipe.take_split(["layers.1"], optimizer))
                attempt(lambda: pipe.take_roles(swapped, optimizer))
                attempt(lambda: pipe.settle_split(optimizer))
                attempt(lambda: pipe.settle_roles(optimizer))
                optimizer.state[kept].pop("history", None)
                others = [[[], list(pipe.parameters())], [list(pipe.parameters())]]
                other = torch.optim.AdamW([{"params": some} for some in others[rank == 3]])
                attempt(partial(pipe.take_roles, swapped, other))
                assert pipe.split == ("layers.2",) and pipe.roles == roles
            if changes and step == 1:
                optimizer.state[kept]["best"] = float("inf")
                pipe.take_split(["layers.1"], optimizer)
            if changes and step == 2:
                pipe.take_roles(swapped, optimizer)
            if changes and step >= 1:
                for name, one in forms(pipe, optimizer).items():
                    assert one == found.get(name, one), name
            optimizer.zero_grad()
        dist.barrier()
        weights = {name: as_bytes(one.detach()) for name, one in pipe.named_parameters()}
        laid = [name for name, one in pipe.named_parameters() if one.dim() == 4 and one.is_contiguous()]
    return losses, refused, weights, laid


@pytest.mark.processes
def test_what_one_rank_can_not_move_no_rank_moves_and_what_moves_keeps_its_form() -> None:
    undisturbed = run_processes(moving, 4, False)
    moved = run_processes(moving, 4, True)
    assert [losses for losses, *_ in moved] == [undisturbed[0][0]] * 4
    assert {name: one for *_, weights, _ in moved for name, one in weights.items()} == {
        name: one for *_, weights, _ in undisturbed for name, one in weights.items()
    }
    assert [laid for *_, laid in moved] == [[]] * 4
    for rank, (_, refused, *_) in enumerate(moved):
        assert len(refused) == 5, refused
        for kind, message in refused[:4]:
            if rank == 1:
                assert kind == "StateError" and "'history'" in message
            else:
                check_documented(kind, message, DOCUMENTED["refused"])
        check_documented(refused[4][0], refused[4][1], DOCUMENTED["groups"])
