"""The golden file helper itself."""

from pathlib import Path

import pytest
from golden_files import check_golden


def test_an_accepted_text_is_equal_afterwards(tmp_path: Path) -> None:
    check_golden("x.sched", "a b\nc\n", accept=True, folder=tmp_path)
    check_golden("x.sched", "a b\nc\n", accept=False, folder=tmp_path)


def test_a_difference_shows_both_lines_and_how_to_accept(tmp_path: Path) -> None:
    check_golden("x.sched", "0: 0F0 0F1\n1: 1F0\n", accept=True, folder=tmp_path)
    with pytest.raises(AssertionError) as failure:
        check_golden("x.sched", "0: 0F0 0I1\n1: 1F0\n", accept=False, folder=tmp_path)
    message = str(failure.value)
    assert "- 0: 0F0 0F1\n" in message
    assert "+ 0: 0F0 0I1\n" in message
    assert "  1: 1F0" in message
    assert "--accept-golden" in message


def test_a_missing_file_is_a_failure_not_a_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"x\.sched does not exist"):
        check_golden("x.sched", "a\n", accept=False, folder=tmp_path)
