"""A checkpoint is the model: the whole model's state on rank 0, from whatever ranks, replicas and stages there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name all of torch uses
from architectures import ARCHITECTURES
from errors_table import check_documented
from models import Example, square_loss, vectors
from processes import run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from training import adam, compiled, run_step, train_alone

import adaptra
from adaptra.errors import ControlError
from adaptra.runtime.exchange.state_stream import MESSAGE_BYTES, SPEC, UNDER_WAY, StateStream
from adaptra.runtime.transports.local import LocalHub

NO_MODULE = (
    "Pipeline.…: a pipeline is no torch.nn.Module, of which each rank has its stages only: expected pipe.full_state_dict() "
    "for the whole model's state, pipe.state_dict() for this rank's, adaptra.TrainingState for torch.distributed.checkpoint, "
    "or the model itself before adaptra.compile"
)


class Everything(nn.Module):
    """A tied weight, statistics, a buffer of several dtypes, one that is not saved, a frozen parameter, and dropout."""

    scratch: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(3, dtype=torch.int16))
        self.register_buffer("scratch", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(torch.tanh(self.first(x))), 0.2, self.training) * self.scratch
        return self.last(torch.tanh(self.middle(x)))


EVERYTHING = Example("everything", Everything, vectors(8), square_loss)
MICROBATCHES = 4
BATCHES = [EVERYTHING.rows(2 * MICROBATCHES, seed) for seed in range(3)]
SPLIT = ("middle",)


def check(full: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What is wrong with a whole state."""
    plain = Everything()
    plain.load_state_dict(full, strict=True)
    found = [f"{name} is {one.dtype} on {one.device}" for name, one in full.items() if one.dtype != expected[name].dtype]
    found += [name for name, one in full.items() if one.device.type != "cpu" or one.requires_grad]
    found += [name for name, one in plain.state_dict().items() if not torch.equal(one, expected[name])]
    if full["first.weight"].data_ptr() != full["last.weight"].data_ptr():
        found.append("tied parameters are two tensors")
    return found


def test_without_a_launcher_it_is_a_copy_of_the_whole_model(one_thread: None) -> None:
    expected = train_alone(EVERYTHING, BATCHES[:1], MICROBATCHES)[-1].state
    with compiled(EVERYTHING, BATCHES[0], stages=2, split=SPLIT, microbatches=MICROBATCHES) as pipe:
        run_step(pipe, optimizer := adam(pipe.parameters()), BATCHES[0])
        full = pipe.full_state_dict()
        run_step(pipe, optimizer, BATCHES[1])
        assert check(full, expected) == []
        assert not torch.equal(pipe.full_state_dict()["first.weight"], full["first.weight"])


def collect(rank: int, folder: str) -> tuple[list[str], list[str]]:
    torch.distributed.init_process_group("gloo")
    expected = train_alone(EVERYTHING, BATCHES, MICROBATCHES)
    with compiled(EVERYTHING, BATCHES[0], stages=2, split=SPLIT, microbatches=MICROBATCHES) as pipe:
        before = pipe.full_state_dict()
        optimizer = adam(pipe.parameters())
        found: list[str] = []
        full = before
        for batch, one in zip(BATCHES, expected, strict=True):
            run_step(pipe, optimizer, batch)
            full = pipe.full_state_dict()
            assert pipe.full_state_dict().keys() == full.keys() == before.keys()
            found += check(full, one.state) if rank == 0 else sorted(full)
        if rank == 0:
            torch.save(full, Path(folder) / "model.pt")
    return found, sorted(before)


@pytest.mark.processes
def test_rank_0_gets_the_whole_model_and_no_other_rank_anything(tmp_path: Path) -> None:
    (first, names), (second, nothing) = run_processes(collect, 2, str(tmp_path))
    assert (first, second, nothing) == ([], [], [])
    assert names == sorted(Everything().state_dict())
    Everything().load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)


def replicas(rank: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Two replicas of two ranks, whose statistics are of other rows; then rank 0 becomes a rank of the second one."""
    torch.distributed.init_process_group("gloo")
    with compiled(EVERYTHING, BATCHES[0], stages=2, split=SPLIT, microbatches=MICROBATCHES) as pipe:
        optimizer = adam(pipe.parameters())
        run_step(pipe, optimizer, BATCHES[pipe.replica])
        with torch.no_grad():  # whatever becomes of them, they differ now
            for name, tensor in pipe.held_tensors():
                if name == "norm.running_mean":
                    tensor += pipe.replica
        own = {name: one.tolist() for name, one in pipe.state_dict().items()}
        saved = adaptra.TrainingState(pipe, optimizer).state_dict()["model"]
        found = [{name: one.tolist() for name, one in state.items()} for state in (saved, pipe.full_state_dict())]
        assert pipe.roles is not None
        pipe.take_roles(pipe.roles.swapped(0, 3), optimizer)
        found.append({name: one.tolist() for name, one in pipe.full_state_dict().items()})
    return own, found


@pytest.mark.processes
def test_of_replicas_the_first_ones_buffers_are_kept() -> None:
    results = run_processes(replicas, 4)
    own = [held for held, _ in results]
    whole = {**own[0], **own[1]}
    assert own[0]["norm.running_mean"] != own[2]["norm.running_mean"], "replicas differ"
    for rank, (_, (saved, full, moved)) in enumerate(results):
        assert saved == own[rank % 2], "every replica saves the first one's"
        assert full == moved == (whole if rank == 0 else {}), rank


def test_it_is_what_save_pretrained_takes(tmp_path: Path, one_thread: None) -> None:
    example = ARCHITECTURES["GPT-2"]
    batch = example.rows(8, 0)
    model: Any = example.make()
    with compiled(example, batch, stages=2, microbatches=4, model=model) as pipe:
        run_step(pipe, adam(pipe.parameters()), batch)
        full = pipe.full_state_dict()
        wrong: Any = example.make(seed=1)
        wrong.save_pretrained(tmp_path, state_dict=dict(full))  # which it empties
        loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert full.keys() == loaded.keys()
    assert [name for name, one in loaded.items() if not torch.equal(one.cpu(), full[name])] == []


@pytest.mark.parametrize("bytes_of_state", [0, 1, MESSAGE_BYTES, 11 * MESSAGE_BYTES + 7])
def test_a_stream_has_few_messages_under_way(bytes_of_state: int) -> None:
    """However large the state is, and whatever lies in it."""
    state = {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
        "turned": torch.randn(3, 4).T,
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "large": torch.randint(0, 256, (bytes_of_state,), dtype=torch.uint8),
    }
    hub = LocalHub(2)
    sender, receiver = hub.transport(1), hub.transport(0)
    StateStream(sender, 3, 5.0).send(0, state, 5.0)
    receiver.reserve({(1, SPEC): UNDER_WAY})  # more at a time are refused
    arrived = StateStream(receiver, 3, 5.0).receive(1)
    assert arrived.keys() == state.keys()
    for name, one in state.items():
        assert (arrived[name].dtype, arrived[name].stride()) == (one.dtype, one.stride()), name
        assert torch.equal(arrived[name], one.cpu()), name


@pytest.mark.parametrize(
    "head",
    [
        b"{}",
        b'{"tensors": [["a", ["cpu", "float32", [-1], [1]]]]}',
        b'{"tensors": [["a", ["cpu", "object", [1], [1]]]]}',
        b'{"tensors": [["a", ["meta", "float32", [1], [1]]]]}',
        b'{"tensors": [["a", ["cpu", "float32", [2, 2], [1, 1]]]]}',
        b'{"tensors": [["a", ["cpu", "float32", [2, 2], [1]]]]}',
        b"[",
        b'{"tensors": [[]]}',
    ],
)
def test_what_is_no_stream_is_refused(head: bytes) -> None:
    hub = LocalHub(2)
    stream = StateStream(hub.transport(0), 0, 5.0)
    hub_sender = hub.transport(1)
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    content = len(head).to_bytes(8, "little") + head
    message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    hub_sender.send(0, stream._identity(1, 0, 0), (message,))
    stream._transport.reserve({(1, SPEC): UNDER_WAY})
    with pytest.raises(ControlError, match="state of rank 1"):
        stream.receive(1)


def test_torch_says_what_to_call_in_place_of_its_own() -> None:
    with compiled(EVERYTHING, BATCHES[0], stages=2, split=SPLIT, microbatches=MICROBATCHES) as pipe:
        taken: Any = pipe
        for call in (get_model_state_dict, lambda pipe: pipe.half(), lambda pipe: pipe.apply(print)):
            with pytest.raises(AttributeError) as error:
                call(taken)
            check_documented("AttributeError", str(error.value), NO_MODULE)
        with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'stepp'"):
            _ = taken.stepp
