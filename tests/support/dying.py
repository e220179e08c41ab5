"""Run a script whose rank 1 is killed before a step of the first attempt: ``python dying.py STEP script.py ARGUMENT …``.

The signal is the one that the system sends when memory is full. It comes from the rank itself, so that it comes at that step.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

import adaptra


def main() -> None:
    """Run the script."""
    dies_at, *sys.argv = sys.argv[1:]
    step, taken = adaptra.Pipeline.step, 0

    def dying(pipe: adaptra.Pipeline, *args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], taken) == ("0", "1", int(dies_at)):
            os.kill(os.getpid(), signal.SIGKILL)
        taken += 1
        return step(pipe, *args, **kwargs)

    adaptra.Pipeline.step = dying
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
