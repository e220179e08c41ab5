"""The page of the first week: what it says is called so here exists, and it leads to every pair of scripts."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest
from paths import DOCS
from script_pairs import PAIRS

import adaptra

TEXT = (DOCS / "first-week.md").read_text()
ROWS = re.findall(
    r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", TEXT.partition("## What it is called")[2].partition("\n## ")[0], re.MULTILINE
)
NAMES = [name for row in ROWS[1:] for name in re.findall(r"`([^`]+)`", row)]


def exists(name: str) -> bool:
    """Whether a name of the table's last column is one of adaptra's."""
    if name.endswith("="):
        options = {field.name for field in dataclasses.fields(adaptra.Options)}
        return name[:-1] in options | inspect.signature(adaptra.compile).parameters.keys()
    owner, _, attribute = name.partition(".")
    return hasattr({"pipe": adaptra.Pipeline, "adaptra": adaptra}[owner], attribute)


OWN = sorted({name for name in NAMES if name.startswith(("pipe.", "adaptra.")) or name.endswith("=")})


def test_the_table_has_names() -> None:
    assert len(OWN) > 15


@pytest.mark.parametrize("name", [name for name in OWN if name not in ("adaptra.integrations.transformers", "state_dict=")])
def test_a_name_is_there(name: str) -> None:
    assert exists(name)


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert not exists("pipe.train_batch") and not exists("num_stages=")


def test_the_trainer_is_there() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert hasattr(importlib.import_module("adaptra.integrations.transformers"), "PipelineTrainer")


@pytest.mark.parametrize("pair", PAIRS)
def test_it_leads_to_every_pair(pair: str) -> None:
    assert f"](first-week/{pair}.md)" in TEXT
