"""Where what tests read lies, wherever the test that reads it is."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
CASES = TESTS / "cases"
GOLDEN = TESTS / "golden"
LINKS = TESTS / "links"
RXE = TESTS / "rxe"
FAKE_CUDA = TESTS / "fake_cuda"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
