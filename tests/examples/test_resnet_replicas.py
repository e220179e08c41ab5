"""A ResNet with BatchNorm on two replicas of two stages has the losses of one process that trains the same parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_pairs import losses_of_pipeline, losses_of_plain

PAIR = "resnet_replicas"


@pytest.mark.processes
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Up to rounding: one process adds all parts in one chain, and not replica by replica."""
    expected = losses_of_plain(PAIR, tmp_path, "--steps", "6")
    assert losses_of_pipeline(PAIR, tmp_path, 4, "--steps", "6") == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 6 and expected[-1] < expected[0]
