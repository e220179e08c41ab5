"""JSON files that users give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adaptra.errors import AdaptraError


def read_json(path: str | Path, refused: type[AdaptraError]) -> Any:
    """Return what a JSON file holds.

    Raises:
        AdaptraError: The file can't be read or is not JSON: an error of the class ``refused``, which names the file.
    """
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise refused(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refused(f"{path}: not JSON: {error}") from error
