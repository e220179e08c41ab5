"""Sentences that a stranger understands at once: short ones, in the words of the field."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT
from prose import files, long_sentences, sentences

WRITTEN = """
    README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md
    docs adaptra_compile passes runtime csrc bench examples tests
""".split()
PLAINER = {
    r"\bwhat flaps\b": "a flapping edge or stage",
    r"\bhow manieth\b": "the number, counted from …",
    r"\bin so many\b|\bof so many\b|\bafter so many\b|\bfor so many\b": "say how many of what",
    r"\bis told of\b|\bare told of\b|\bwho is told\b|\btold by\b": "reports, sends, receives",
}
"""A pattern of words that only the house understands, and what to write instead."""


def sources() -> list[Path]:
    """Every file with prose once; the links that make three folders one package are passed over."""
    links = {ROOT / "adaptra_compile" / name for name in ("passes", "runtime")}
    return [
        path
        for path in files([ROOT / name for name in WRITTEN])
        if not links & set(path.parents) and "golden" not in path.parts
    ]


def offences_in(path: Path) -> list[str]:
    found = long_sentences(path)
    for sentence in sentences(path):
        found += [
            f"{path}:{sentence.line}: {sentence.text!r}: rather {plainer}"
            for pattern, plainer in PLAINER.items()
            if re.search(pattern, sentence.text)
        ]
    return found


def test_sentences_are_short_and_in_the_words_of_the_field() -> None:
    offences = [offence for path in sources() for offence in offences_in(path)]
    assert not offences, "\n".join(offences)
