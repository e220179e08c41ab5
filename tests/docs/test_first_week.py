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
from adaptra.runtime.detection.level_shift import DetectorOptions

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


def test_what_is_said_of_the_first_steps_is_what_the_detector_does() -> None:
    words = {1: "The first step is", 3: "the three after it calibrate", 4: "up to four times"}
    text = " ".join(TEXT.partition("## The first steps")[2].partition("\n## ")[0].split())
    options = DetectorOptions()
    assert all(words[number] in text for number in (options.warm_up, options.calibration, options.calibrations))
