"""How a forked process ends after it has run what it was forked for: as an interpreter does after a script."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def end_after(run: Callable[[], object]) -> NoReturn:
    """Call a function, wait for threads, call the handlers of the interpreter's end, and end with an interpreter's code."""
    code = 0
    try:
        run()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads as an interpreter does
    atexit._run_exitfuncs()  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
