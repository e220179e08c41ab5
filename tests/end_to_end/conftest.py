"""What several tests of this folder compare with."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from filelock import FileLock
from processes import run_processes
from test_hosting import Undisturbed, Values, train_cases


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Each case is trained once, for all processes of pytest."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def trained(replicas: int, names: Sequence[str]) -> list[dict[str, Values]]:
        paths = {name: folder / f"undisturbed {name} of {replicas}" for name in names}
        with FileLock(folder / f"undisturbed {replicas}"):
            new = [name for name, path in paths.items() if not path.exists()]
            ranks = run_processes(train_cases, replicas * 2, replicas, 2, new) if new else []
            for name in new:
                paths[name].write_bytes(pickle.dumps([one[name] for one in ranks]))
        by_name: dict[str, list[Any]] = {name: pickle.loads(path.read_bytes()) for name, path in paths.items()}
        return [{name: by_name[name][rank] for name in names} for rank in range(replicas * 2)]

    return trained
