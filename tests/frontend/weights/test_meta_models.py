"""A model on the meta device gets its stages' values: those that one process would draw, or those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_table import check_documented
from models import EXAMPLES, GPT, tokens
from models import token_loss as loss
from processes import run_processes
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.distributed import checkpoint
from training import adam
from transformers import LlamaConfig, LlamaForCausalLM

import adaptra
from adaptra.errors import AdaptraError
from adaptra.frontend.weights import fresh_values, safetensors_files

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, max_position_embeddings=64
)


class Net(nn.Module):
    """Modules of several kinds, a tied weight, buffers, and values of less than a block of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(16), nn.PReLU(), nn.LayerNorm(24)) for _ in range(4)
        )
        self.small = nn.Linear(24, 24, dtype=torch.float64)
        self.head = nn.Linear(24, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.small(x.double()).float())


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def drawn(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What one process does with a model on the meta device."""
    model = on_meta(build)
    tied = dict(model.named_parameters(remove_duplicate=False))
    firsts = {id(one): name for name, one in reversed(tied.items())}
    model.to_empty(device=torch.empty(0).device)
    for name, one in tied.items():  # to_empty unties them
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, model.get_parameter(firsts[id(one)]))
    torch.manual_seed(seed)
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def compiled(model: nn.Module, batch: Any, stages: int = 2, **options: Any) -> adaptra.Pipeline:
    (inputs,), _, targets = batch
    return adaptra.compile(model, stages=stages, microbatches=2, example_inputs=(inputs, targets), loss=loss, **options)


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value.cpu())] == []


def test_values_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_values, "PIECE", 64)
    batch = tokens(4, 0)
    expected = drawn(Net, 7)
    after = torch.rand(3)
    torch.manual_seed(7)
    with compiled(on_meta(Net), batch) as pipe:
        assert torch.equal(torch.rand(3), after)
        check_equal(pipe.full_state_dict(), expected.state_dict())
        (inputs,), _, targets = batch
        found = pipe.step(inputs, targets)
    with compiled(expected, batch) as plain:
        assert plain.step(inputs, targets) == found


@pytest.mark.parametrize("op", ["normal_", "uniform_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pieces_draw_as_much_as_the_whole(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_values, "PIECE", 64)
    for elements in (*range(200), 1000, 1031):
        sizes = fresh_values.pieces(elements)
        assert sum(sizes) == elements
        torch.manual_seed(0)
        getattr(torch.empty(elements, dtype=dtype), op)()
        expected = torch.get_rng_state()
        torch.manual_seed(0)
        for size in sizes:
            getattr(torch.empty(size, dtype=dtype), op)()
        assert torch.equal(torch.get_rng_state(), expected), (elements, sizes)


@pytest.mark.parametrize("piece_bytes", [2**26, 512])
def test_weights_come_from_safetensors(piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", piece_bytes)
    model = drawn(Net, 1)
    save_model(model, str(tmp_path / "model.safetensors"))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with compiled(on_meta(Net), tokens(4, 0), weights=str(path)) as pipe:
            check_equal(pipe.full_state_dict(), dict(model.state_dict()))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


UNTIED = (
    "weights=…: … and … have different values, and are one tied tensor in the model: expected equal ones, or one of the two "
    "names; build the model with two tensors, or remove the name that it shall not have"
)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "in pieces", "checkpoint"])
def test_two_values_for_a_tied_tensor_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "in pieces":
        monkeypatch.setattr(safetensors_files, "PIECE_BYTES", 16)
    state = {name: one.clone() for name, one in tied().state_dict().items()}
    state["2.weight"][-1, -1] += 1
    if kind == "checkpoint":
        checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        save_file(state, tmp_path / "model.safetensors")
    x = torch.randn(4, 4)
    with pytest.raises(AdaptraError) as caught:
        adaptra.compile(
            on_meta(tied), stages=2, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss, weights=tmp_path
        )
    check_documented(type(caught.value).__name__, str(caught.value), UNTIED)


@pytest.mark.parametrize("piece_bytes", [2**26, 8])
def test_equal_values_for_both_names_of_a_tied_tensor_are_taken(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also values that are not numbers, and values that the model's dtype rounds."""
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", piece_bytes)
    state = {name: one.double() for name, one in tied().state_dict().items()}
    state["0.weight"][1, 1] = torch.nan
    state["0.weight"][2, 2] = 1 / 3
    state["2.weight"] = state["0.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    x = torch.randn(4, 4)
    with adaptra.compile(
        on_meta(tied), stages=2, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss, weights=tmp_path
    ) as pipe:
        found = pipe.full_state_dict()
    for name, one in state.items():
        torch.testing.assert_close(found[name], one.float().cpu(), rtol=0, atol=0, equal_nan=True)


def test_weights_come_from_the_shards_of_transformers(tmp_path: Path) -> None:
    """The rotary frequencies are in no checkpoint: transformers' own method computes them."""
    model = LlamaForCausalLM(LLAMA)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = torch.randint(0, 64, (4, 8))
    losses: list[Tensor] = []
    state = torch.get_rng_state()
    for one, weights in ((on_meta(lambda: LlamaForCausalLM(LLAMA)), tmp_path), (model, None)):
        given: dict[str, Any] = {"input_ids": ids, "labels": ids}
        with adaptra.compile(one, stages=2, microbatches=2, example_kwargs=given, weights=weights) as pipe:
            check_equal(pipe.full_state_dict(), dict(model.state_dict()))
            losses.append(pipe.step(**given))
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_come_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    batch = tokens(4, 0)
    (inputs,), _, targets = batch
    with compiled(drawn(Net, 2), batch, stages=1) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.step(inputs, targets)
        optimizer.step()
        expected = pipe.full_state_dict()
        checkpoint.save({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=tmp_path / "training", no_dist=True)
        checkpoint.save(expected, checkpoint_id=tmp_path / "plain", no_dist=True)
    for folder in ("training", "plain"):
        with compiled(on_meta(Net), batch, weights=tmp_path / folder) as pipe:
            check_equal(pipe.full_state_dict(), expected)


def test_a_models_dtype_counts_and_rounding_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    empty = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16())
    with adaptra.compile(
        empty, stages=2, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss, weights=tmp_path
    ) as pipe:
        check_equal(pipe.full_state_dict(), {name: one.bfloat16() for name, one in model.state_dict().items()})
    assert "rounded to the model's dtype: 0.weight, 0.bias, 1.weight and 1 more" in caplog.text


def train(model: nn.Module, batch: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    (inputs,), _, targets = batch
    with compiled(model, batch, **options) as pipe:
        optimizer = adam(pipe.parameters())
        losses: list[float] = []
        for _ in range(2):
            losses.append(pipe.step(inputs, targets).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, pipe.full_state_dict()


def train_rank(rank: int, options: dict[str, Any], batch: Any) -> tuple[list[float], dict[str, Any], int]:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(5)
    model = on_meta(GPT)
    losses, state = train(model, batch, **options)
    return losses, {name: one.tolist() for name, one in state.items()}, sum(not one.is_meta for one in model.parameters())


@pytest.mark.processes
def test_each_rank_holds_its_stage_only(tmp_path: Path, one_thread: None) -> None:
    batch = tokens(4, 0)
    model = drawn(GPT, 5)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    losses, state = train(drawn(GPT, 5), batch)
    for ranks, options in ((2, {}), (4, {"weights": str(tmp_path)})):
        found = run_processes(train_rank, ranks, options, batch)
        assert [one[0] for one in found] == [losses] * ranks
        assert found[0][1] == {name: one.tolist() for name, one in state.items()}
        # Two stages, and with four ranks two replicas of each.
        assert sum(one[2] for one in found) == len(list(model.parameters())) * ranks // 2


class Unwritten(nn.Module):
    def __init__(self, **buffer: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4), **buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.table


class Copies(nn.Linear):
    other: nn.Linear

    def reset_parameters(self) -> None:
        if hasattr(self, "other"):
            with torch.no_grad():
                self.weight.copy_(self.other.weight)
        else:
            super().reset_parameters()


def copying() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), Copies(4, 4, bias=False))
    # Not a submodule: a reference alone.
    object.__setattr__(model[1], "other", model[0])
    return model


MISSING = "weights=…: …: not in the files: expected every parameter and persistent buffer by its name in the model's state_dict"
REFUSED = {
    "missing": MISSING,
    "shape": "weights=…: … has shape …: expected …",
    "no file": "weights=…: no such file: expected a .safetensors file or a folder with such files",
    "empty folder": "weights=…: no weights in it: expected .safetensors files, or a checkpoint of torch.distributed.checkpoint",
    "dtype": "weights=…: … is of …: expected …, as a checkpoint is read without conversion; build the model in the "
    "checkpoint's dtype",
    "missing in checkpoint": MISSING,
    "parameter": "weights: …: no reset_parameters writes it: expected one in … (…), or weights= with a checkpoint",
    "buffer": "weights: …: a buffer on the meta device that checkpoints don't have: expected … to compute it in "
    "reset_parameters, or a buffer with values: build it under torch.device('cpu')",
    "stages": "weights: the model is a list of stages on the meta device, which can't run without values: expected one model, "
    "or stages with values",
    "values": "weights=…: the model has values already, or the example has none: expected a model built within "
    "torch.device('meta'), and an example with values",
    "kind": "weights=…: expected the path of a file or folder, or None",
}


def linears(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, width) for width in widths))


def try_it(case: str, path: Path) -> None:
    x = torch.randn(4, 4)

    def compiling(model: Any, weights: Any = None) -> None:
        adaptra.compile(
            model, stages=2, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss, weights=weights
        ).close()

    empty = on_meta(lambda: linears(4, 4))
    file = path / "model.safetensors"
    match case:
        case "missing":
            save_file(linears(4).state_dict(), file)
            compiling(empty, path)
        case "shape":
            save_file(linears(5, 4).state_dict(), file)
            compiling(empty, path)
        case "no file":
            compiling(empty, path / "none")
        case "empty folder":
            compiling(empty, path)
        case "dtype":
            checkpoint.save(linears(4, 4).double().state_dict(), checkpoint_id=path, no_dist=True)
            compiling(empty, path)
        case "missing in checkpoint":
            checkpoint.save(linears(4).state_dict(), checkpoint_id=path, no_dist=True)
            compiling(empty, path)
        case "parameter":
            compiling(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Unwritten())))
        case "buffer":
            made = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Unwritten(persistent=False)))
            save_file(nn.Sequential(nn.Linear(4, 4), Unwritten(persistent=False)).state_dict(), file)
            compiling(made, path)
        case "stages":
            compiling(list(empty.children()))
        case "values":
            compiling(linears(4, 4), path)
        case "kind":
            compiling(empty, {"weight": x})
        case _:
            raise AssertionError(case)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(AdaptraError) as caught:
        try_it(case, tmp_path)
    check_documented(type(caught.value).__name__, str(caught.value), REFUSED[case])


READS = (
    "weights: … (…) can't compute its values without those of other stages: …; expected a reset_parameters that reads no other "
    "module's values, or weights= with a checkpoint"
)


def read_elsewhere(rank: int) -> tuple[str, str]:
    torch.distributed.init_process_group("gloo")
    x = torch.randn(4, 4)
    with pytest.raises(AdaptraError) as caught:
        adaptra.compile(on_meta(copying), stages=2, microbatches=2, example_inputs=(x, x), loss=nn.functional.mse_loss)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.processes
def test_a_module_that_reads_another_stage_is_refused_on_all_ranks() -> None:
    first, (kind, text) = run_processes(read_elsewhere, 2)
    check_documented(kind, text, READS)
    assert "can't compute its values" in first[1]


def test_all_examples_with_reset_parameters_are_drawn_alike() -> None:
    example = EXAMPLES["gpt"]
    torch.manual_seed(3)
    with compiled(on_meta(example.build), example.rows(4, 0)) as pipe:
        check_equal(pipe.full_state_dict(), dict(drawn(example.build, 3).state_dict()))
