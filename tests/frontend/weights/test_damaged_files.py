"""Files that are cut, damaged, missing or elsewhere are refused by their names, before the model changes."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors_table import check_documented
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint

import adaptra
from adaptra.errors import StateError
from adaptra.frontend.weights.materialise import materialise
from adaptra.progress import log_progress

INDEX = "model.safetensors.index.json"
STATE = {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.ones(4)}


def read(path: Path) -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    names = {name: name for name in STATE}
    try:
        materialise(model, names, names, names, path, torch.device("cpu"), log_progress)
    finally:
        if model.weight.is_meta:
            assert model.bias.is_meta, "half of it was set"
    return model


def sharded(folder: Path) -> dict[str, Any]:
    files = {name: f"{name}.safetensors" for name in STATE}
    for name, file in files.items():
        save_file({name: STATE[name]}, folder / file)
    return {"metadata": {}, "weight_map": files}


def save_checkpoint(folder: Path) -> list[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.save(dict(STATE), checkpoint_id=folder, no_dist=True)
    return sorted(folder.glob("*.distcp"))


UNREADABLE = "weights=…: it can't be read: …: expected …"
ELSEWHERE = "weights=…: it names the file …: expected one in its own folder"
NO_SHARD = "weights=…: no such file, which … names: expected all files of it"
CUT = "weights=…: it has … bytes: expected at least …; it was cut"
TWICE = "weights=…: … is in … and in …: expected each tensor once, or …; give one of the files"
WHOLE_NUMBERS = "weights=…: … is of …: expected …, or a dtype of its kind, as whole numbers stand for others in quantized files"


def damaged_file(damage: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        save_file(STATE, folder / "model.safetensors")
        (folder / "model.safetensors").write_bytes(damage((folder / "model.safetensors").read_bytes()))
        return "model.safetensors"

    return make


def damaged_index(change: Callable[[dict[str, Any]], Any], named: str = INDEX) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        index = sharded(folder)
        changed = change(index)
        (folder / INDEX).write_text(changed if isinstance(changed, str) else json.dumps(index))
        return named

    return make


def mapped(file: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["weight_map"].update(bias=file)


def torch_file(folder: Path) -> str:
    torch.save(STATE, folder / "model.pt")
    return "model.pt"


def two_files(folder: Path) -> str:
    save_file(STATE, folder / "a.safetensors")
    save_file({"bias": STATE["bias"]}, folder / "b.safetensors")
    return "b.safetensors"


def quantized(folder: Path) -> str:
    save_file({**STATE, "weight": STATE["weight"].to(torch.int8)}, folder / "model.safetensors")
    return "model.safetensors"


def missing_shard(folder: Path) -> str:
    (folder / INDEX).write_text(json.dumps(sharded(folder)))
    (folder / "bias.safetensors").unlink()
    return "bias.safetensors"


def outside(folder: Path) -> str:
    """With a file that is there and would be read."""
    save_file({"bias": STATE["bias"]}, folder.parent / "outside.safetensors")
    return damaged_index(mapped("../outside.safetensors"))(folder)


def absolute(folder: Path) -> str:
    save_file({"bias": STATE["bias"]}, folder.parent / "outside.safetensors")
    return damaged_index(mapped(str(folder.parent / "outside.safetensors")))(folder)


def cut_checkpoint(folder: Path) -> str:
    (file, *_) = save_checkpoint(folder)
    file.write_bytes(file.read_bytes()[:-200])
    return file.name


def checkpoint_without_file(folder: Path) -> str:
    (file, *_) = save_checkpoint(folder)
    file.unlink()
    return file.name


def garbled_checkpoint(folder: Path) -> str:
    (file, *_) = save_checkpoint(folder)
    file.write_bytes(bytes(file.stat().st_size))
    return folder.name


def damaged_metadata(damage: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        save_checkpoint(folder)
        (folder / ".metadata").write_bytes(damage((folder / ".metadata").read_bytes()))
        return ".metadata"

    return make


def checkpoint_elsewhere(folder: Path) -> str:
    (file, *_) = save_checkpoint(folder)
    file.rename(folder.parent / file.name)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{file.name}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


CASES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "cut": (UNREADABLE, damaged_file(lambda data: data[:-8])),
    "cut in its header": (UNREADABLE, damaged_file(lambda data: data[:20])),
    "empty": (UNREADABLE, damaged_file(lambda data: b"")),
    "damaged header": (UNREADABLE, damaged_file(lambda data: data[:8] + b"\xff" * 30 + data[38:])),
    "of torch.save": (UNREADABLE, torch_file),
    "quantized": (WHOLE_NUMBERS, quantized),
    "in two files": (TWICE, two_files),
    "index cut": (UNREADABLE, damaged_index(lambda index: json.dumps(index)[:-10])),
    "index empty": (UNREADABLE, damaged_index(lambda index: " ")),
    "index of nested lists": (UNREADABLE, damaged_index(lambda index: "[" * 100_000)),
    "index is a list": (UNREADABLE, damaged_index(lambda index: "[]")),
    "index without a map": (UNREADABLE, damaged_index(lambda index: index.pop("weight_map"))),
    "map is a list": (UNREADABLE, damaged_index(lambda index: index.update(weight_map=["bias"]))),
    "wrong file in the index": (UNREADABLE, damaged_index(mapped("weight.safetensors"), "weight.safetensors")),
    "a number in the index": (ELSEWHERE, damaged_index(mapped(3))),
    "a list in the index": (ELSEWHERE, damaged_index(mapped(["bias.safetensors"]))),
    "no name in the index": (ELSEWHERE, damaged_index(mapped(""))),
    "outside of the folder": (ELSEWHERE, outside),
    "an absolute path": (ELSEWHERE, absolute),
    "a folder in the index": (NO_SHARD, damaged_index(mapped("."), ".")),
    "no shard": (NO_SHARD, missing_shard),
    "checkpoint cut": (CUT, cut_checkpoint),
    "checkpoint without a file": (NO_SHARD, checkpoint_without_file),
    "checkpoint garbled": (UNREADABLE, garbled_checkpoint),
    "checkpoint elsewhere": (ELSEWHERE, checkpoint_elsewhere),
    "metadata cut": (UNREADABLE, damaged_metadata(lambda data: data[:100])),
    "metadata empty": (UNREADABLE, damaged_metadata(lambda data: b"")),
    "metadata of another kind": (UNREADABLE, damaged_metadata(lambda data: pickle.dumps([1]))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_named(case: str, tmp_path: Path) -> None:
    row, make = CASES[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    named = make(folder)
    path = folder / named if named.endswith(".pt") else folder
    with pytest.raises(StateError) as caught:
        read(path)
    text = str(caught.value)
    check_documented("StateError", text, row)
    assert named in text and "\n" not in text


def test_whole_files_are_read(tmp_path: Path) -> None:
    """Also by links, as in the cache of Hugging Face's hub, and from a folder in the folder."""
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    (folder / "part").mkdir(parents=True)
    blobs.mkdir()
    save_file({"bias": STATE["bias"]}, blobs / "3f9a")
    (folder / "part" / "bias.safetensors").symlink_to(blobs / "3f9a")
    save_file({"weight": STATE["weight"]}, folder / "weight.safetensors")
    files = {"weight": "weight.safetensors", "bias": "part/bias.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    save_checkpoint(tmp_path / "checkpoint")
    for path in (folder, tmp_path / "checkpoint"):
        model = read(path)
        assert torch.equal(model.state_dict()["weight"], STATE["weight"].cpu())


def test_compile_says_it(tmp_path: Path) -> None:
    named = torch_file(tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with pytest.raises(StateError, match=r"model\.pt.*it can't be read"):
        adaptra.compile(
            model,
            stages=2,
            microbatches=2,
            example_inputs=(x, x),
            loss=nn.functional.mse_loss,
            weights=tmp_path / named,
        )
