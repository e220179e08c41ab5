"""Readers of JSON refuse a file of brackets without end as they refuse one that is no JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra.errors import CaseError, ReportError
from adaptra.json_files import read_json
from adaptra.report.run_records import load_run

BRACKETS = "[" * 100_000


def test_a_file_of_brackets_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(BRACKETS)
    with pytest.raises(CaseError, match=r"case.json: not JSON: maximum recursion"):
        read_json(path, CaseError)


def test_telemetry_of_brackets_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text(BRACKETS)
    with pytest.raises(ReportError, match=r"rank-0.jsonl:1: not JSON"):
        load_run(tmp_path)
