"""Gives each process that a test starts the stand-in for CUDA too: Python imports this module by itself."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from fake_cuda.loading import DEVICES, enable

enable(int(os.environ[DEVICES]))
