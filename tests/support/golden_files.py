"""Golden files: what a pass, a generator or a report printed when a person last looked at it and agreed.

A test asks for the fixture ``golden`` and calls it with a file name and the text at hand::

    def test_one_f_one_b_is_what_it_was(golden):
        golden("1f1b.sched", str(one_f_one_b(2, 3)))

The text is compared with ``tests/golden/1f1b.sched``. A difference fails the test and shows what changed, line by line and
marked within the line. When the new text is right, accept it and commit the changed file with the change that caused it::

    pytest --accept-golden tests/program/test_schedules.py
    git diff tests/golden
"""

from __future__ import annotations

import difflib
from pathlib import Path

from paths import GOLDEN


def check_golden(name: str, text: str, accept: bool, folder: Path = GOLDEN) -> None:
    """Compare ``text`` with the golden file ``name``, or write it there.

    Args:
        name: The file's name within ``tests/golden``, with its ending.
        text: What the code under test printed; it ends in a newline.
        accept: Write the file instead of comparing: the value of ``--accept-golden``.
        folder: Where golden files lie; only this helper's own tests change it.

    Raises:
        AssertionError: The file is missing or differs; says what differs and how to accept it.
    """
    assert text.endswith("\n"), f"golden {name}: the text must end in a newline, got {text[-20:]!r}"
    path = folder / name
    if accept:
        path.write_text(text)
        return
    how = f"if the new text is right: pytest --accept-golden, and commit tests/golden/{name}"
    if not path.exists():
        raise AssertionError(f"golden file tests/golden/{name} does not exist; {how}\n{text}")
    expected = path.read_text()
    if text != expected:
        difference = "\n".join(line.rstrip("\n") for line in difflib.ndiff(expected.splitlines(), text.splitlines()))
        raise AssertionError(f"tests/golden/{name} differs (- golden, + now); {how}\n{difference}")
