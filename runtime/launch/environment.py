"""What a launcher has told this process in its environment: one of several, or alone.

Kubeflow's PyTorchJob, DeepSpeed's launcher and wrappers of mpirun give RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
torchrun does. A process that is told only a part of this would train alone, as rank 0 of 1. So it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from adaptra.errors import LaunchError

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHERS: Final = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    # An allocation has SLURM_NTASKS, in which a lone process may run; only srun's own tasks have this.
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
"""Variables by which other launchers tell the number of processes, and those with this one's."""


def is_told_of_others(environment: Mapping[str, str]) -> bool:
    """Return True if this process was started as one of several that can find each other.

    Raises:
        LaunchError: It is one of several, but was not told what it needs to find them; says what is missing.
    """
    size, rank = (_number(environment, name) for name in ("WORLD_SIZE", "RANK"))
    if size is None and rank is None:
        _check_other_launchers(environment)
        return False
    if size == 1 and not rank:
        return False
    if missing := [name for name in _NEEDED if not environment.get(name)]:
        told = ", ".join(f"{name}={environment[name]}" for name in ("RANK", "WORLD_SIZE") if environment.get(name))
        raise LaunchError(
            f"the environment has {told} and no {', '.join(missing)}: expected all of {', '.join(_NEEDED)}, as torchrun sets "
            "them; or unset RANK and WORLD_SIZE, or give transport='local', to train in this process alone"
        )
    assert size is not None and rank is not None, "both are there"
    if rank >= size:
        raise LaunchError(f"the environment has RANK={rank} and WORLD_SIZE={size}: expected a rank of 0..{size - 1}")
    return True


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise LaunchError(f"the environment has {name}={text!r}: expected a whole number")
    return int(text) if text else None


def _check_other_launchers(environment: Mapping[str, str]) -> None:
    for variable, own in _OTHERS.items():
        count = environment.get(variable, "")
        if count.isascii() and count.isdecimal() and int(count) > 1 and own in environment:
            raise LaunchError(
                f"the environment has {variable}={count} and no {', '.join(_NEEDED)}: this is one of {count} processes that "
                f"can't find each other: set RANK from {own}, WORLD_SIZE={count}, and MASTER_ADDR and MASTER_PORT of rank 0's "
                "host, or start each host's by torchrun; transport='local' trains in each process alone"
            )
