"""A process that a launcher has started as one of several never trains alone."""

from __future__ import annotations

import pytest
from errors_table import check_documented

from adaptra.errors import LaunchError
from adaptra.runtime.launch.environment import is_told_of_others
from adaptra.runtime.launch.launch import is_launched, launch

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
PART = (
    "the environment has … and no …: expected all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them; or "
    "unset RANK and WORLD_SIZE, or give transport='local', to train in this process alone"
)
OTHER = (
    "the environment has … and no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: this is one of … processes that can't find each "
    "other: set RANK from …, WORLD_SIZE=…, and MASTER_ADDR and MASTER_PORT of rank 0's host, or start each host's by torchrun; "
    "transport='local' trains in each process alone"
)
WRONG = "the environment has …: expected a …"


def without(*names: str) -> dict[str, str]:
    return {name: text for name, text in TOLD.items() if name not in names}


def test_all_four_variables_make_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_told_of_others(TOLD)
    for name, text in TOLD.items():
        monkeypatch.setenv(name, text)
    assert is_launched()


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_lone_process_is_none_also_in_an_allocation(told: dict[str, str]) -> None:
    assert not is_told_of_others(told)


@pytest.mark.parametrize("missing", [("RANK",), ("WORLD_SIZE",), ("MASTER_ADDR",), ("MASTER_PORT",), ("RANK", "MASTER_ADDR")])
def test_what_is_missing_of_a_part_is_named(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are still there for who asks for them."""
    for name, text in without(*missing).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(LaunchError) as error:
        launch(2, None, {}, 5)
    check_documented("LaunchError", str(error.value), PART)
    assert f"and no {', '.join(missing)}:" in str(error.value)
    assert len(launch(2, "local", {}, 5).transports) == 2


@pytest.mark.parametrize(
    "told",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2"},
    ],
)
def test_processes_of_other_launchers_are_told_what_to_set(told: dict[str, str]) -> None:
    with pytest.raises(LaunchError) as error:
        is_told_of_others(told)
    check_documented("LaunchError", str(error.value), OTHER)


@pytest.mark.parametrize("wrong", [{"WORLD_SIZE": "two"}, {"RANK": "-1"}, {"RANK": "2"}])
def test_numbers_that_are_none_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(LaunchError) as error:
        is_told_of_others(TOLD | wrong)
    check_documented("LaunchError", str(error.value), WRONG)
