"""What ranks compare of a user's function: the same everywhere, and different where the function is."""

from __future__ import annotations

import subprocess
import sys

from loss_functions import GIVEN, Smooth, scaled
from paths import SUPPORT
from torch import nn

from adaptra.frontend.arguments.fingerprints import describe_function, describe_model

SCRIPT = """
import sys
import torch.nn.functional as F
from torch import nn
sys.path.insert(0, sys.argv[1])
from loss_functions import GIVEN
from adaptra.frontend.arguments.fingerprints import describe_function
print([describe_function(one) for one in GIVEN])
"""


def test_functions_that_compute_something_else_are_described_otherwise_and_the_same_in_every_process() -> None:
    described = [describe_function(one) for one in GIVEN]
    assert len(set(described)) == len(described)
    assert [describe_function(one) for one in (scaled(1.0), nn.CrossEntropyLoss(ignore_index=0), Smooth(2.0))] == [
        described[GIVEN.index(GIVEN[9])],
        described[6],
        described[16],
    ]
    again = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(SUPPORT)], capture_output=True, text=True, check=True, timeout=150
    )
    assert again.stdout.strip() == str(described)


def test_a_model_is_described_by_its_class_and_size() -> None:
    assert describe_model(nn.Linear(2, 3)) == "Linear (9 parameters)"
    assert describe_model([nn.Linear(40, 50), nn.Tanh()]) == "Linear, Tanh (2,050 parameters)"
