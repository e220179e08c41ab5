"""A connection that breaks or a process that dies costs the call under way, which is done again: no number changes.

The store is in the test's own process, as that of ``adaptra run`` is in its supervisor's.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes
from test_hosting import Undisturbed, Values, compare, train_cases

pytestmark = pytest.mark.processes

Faults = Mapping[str, Sequence[str]]
"""The faults of each case."""


def train_broken(rank: int, port: int, replicas: int, faults: Faults, of_function: bool) -> dict[str, Values]:
    """Train all cases, and check that clients of the store are opened beforehand alone, or beside training."""
    from adaptra.runtime.control_store import spare_clients, stores

    join_by(port)
    if rank == 2 and "changes" not in faults:  # a change of roles is not made again
        refuse_a_group()
    cloned, openers = stores.cloned, set[str]()  # what a job opens at its start is not counted: it is opened by that module

    def open_client(client: Any) -> Any:
        openers.add(sys._getframe(1).f_code.co_name)
        return cloned(client)

    spare_clients.cloned = open_client
    values = train_cases(rank, replicas, 2, [*faults], faults, of_function, survive=True)
    assert openers <= {"_pool_of_job", "fill"}, openers
    return values


def refuse_a_group() -> None:
    """Have the first group of a later epoch fail in torch, as where a process ends meanwhile, and nobody has told it yet."""
    from adaptra.runtime.launch import job

    make, refused = job.new_group, set[str]()

    def refuse(members: Any, *how: Any) -> Any:
        if "/0/" not in members.name and not refused:
            refused.add(members.name)
            raise RuntimeError("Gloo connectFullMesh failed with Connection refused")
        return make(members, *how)

    job.new_group = refuse


def join_by(port: int) -> None:
    """Have this process find the job's store where its launcher has it."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run_with_store(function: Any, count: int, *args: Any, **how: Any) -> list[Any]:
    """The results of a function in processes whose store does not end with any of them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(function, count, store.port, *args, **how)


def survive(
    undisturbed: Undisturbed, replicas: int, faults: Faults, dead: tuple[int, ...] = (), *, of_function: bool = False
) -> None:
    """Check that a training with faults has all numbers of one without."""
    told = run_with_store(train_broken, replicas * 2, replicas, faults, of_function, may_die=dead)
    left = [one for rank, one in enumerate(told) if rank not in dead]
    assert all(one is not None for one in left)
    compare(undisturbed(replicas, [*faults]), left)


def test_broken_calls_are_done_again(undisturbed: Undisturbed) -> None:
    """In ops, sums, norms and the certificate, with all that a step may have."""
    survive(
        undisturbed,
        2,
        {
            "gpt_dropout": ["break 0.0 @1:0W1", "break 1.1 @1:clip", "break 1.0 @3:certificate"],
            "resnet": ["break 1.1 @0:1F2", "break 0.1 @2:REDUCE", "break 0.0 @3:certificate"],
            "buffers of their own": ["break 0.1 @2:1F3", "break 1.0 @3"],
            "shapes": ["break 1.0 @1:0F1", "break 0.1 @2:certificate", "break 0.0 @3:optimizer"],
            "v": ["break 0.0 @1:3B0", "break 1.1 @2:REDUCE"],
        },
    )


@pytest.mark.parametrize(
    ("case", "faults", "dead"),
    [
        ("resnet", ["kill 0.0 @1:0F3"], (0,)),
        ("buffers of their own", ["kill 1.1 @2:certificate"], (3,)),
        ("gpt_dropout", ["kill 0.1 @1:clip", "kill 1.0 @3:REDUCE"], (1, 2)),
        ("changes", ["break 0.0 @1:0B1", "kill 1.1 @3:1F2"], (1,)),
    ],
    ids=["the first rank", "at the certificate", "one after the other", "after changes of roles and cut"],
)
def test_training_goes_on_without_lost_processes(
    case: str, faults: list[str], dead: tuple[int, ...], undisturbed: Undisturbed
) -> None:
    survive(undisturbed, 2, {case: faults}, dead)


def test_two_of_three_replicas_lose_a_process_at_once(undisturbed: Undisturbed) -> None:
    """Of the same stage, so the third replica's process hosts all workers of that."""
    survive(undisturbed, 3, {"gpt_dropout": ["kill 1.0 @1:0B1", "kill 2.0 @1"]}, (2, 4))


@pytest.mark.parametrize(
    "faults", [["kill 0.0 @2", "kill 0.1 @2:1F2"], ["kill 0.1 @1:certificate", "kill 0.0 @3:0B1"]], ids=["at once", "in turn"]
)
def test_a_replica_goes_on_without_any_of_its_processes(faults: list[str], undisturbed: Undisturbed) -> None:
    """A function gives its batches, also that of an evaluation."""
    survive(undisturbed, 2, {"buffers of their own": faults}, (0, 1), of_function=True)


STAGE_LOST = (
    "all processes with the stages of place … are lost: rank … (…): training has completed … steps; start again with the last "
    "checkpoint"
)
DATA_LOST = (
    "all processes that are given the batch of replica … are lost (…): training has completed … steps; start again with the "
    "last checkpoint"
)


def train_on(rank: int, port: int, faults: Sequence[str], fails: bool) -> tuple[str, str, float]:
    """The kind and the text of the error that ends a training, and the seconds that its call took."""
    import torch.distributed as dist
    from training import MIXED, compiled

    import adaptra
    from adaptra.errors import AdaptraError, PipelineError

    join_by(port)
    dist.init_process_group("gloo")
    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    options = adaptra.Options(survive=True, faults=faults)
    with compiled(MIXED, batch, stages=2, microbatches=4, options=options) as pipe:
        began = time.monotonic()
        try:
            for step in range(60):
                began = time.monotonic()
                if fails and step == 2 and rank in (1, 3):
                    register_hook(pipe, fails=rank == 3)
                pipe.step(inputs[0], targets)
        except (AdaptraError, ZeroDivisionError) as error:
            seconds = time.monotonic() - began
            with pytest.raises(PipelineError, match="has failed"):
                pipe.step(inputs[0], targets)
            return type(error).__name__, str(error), seconds
    return "", "", 0.0


def register_hook(pipe: Any, *, fails: bool) -> None:
    """Have the next step fail by the user's own code, or not."""
    *_, (_, parameter) = pipe.named_parameters()
    parameter.register_hook(lambda gradient: 1 / 0 if fails else gradient)


def left_after(rank: int, port: int, epochs: int) -> list[tuple[int, int, int]]:
    """Threads, open files and keys of the store after each epoch that has broken. Files are counted without garbage."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store
    from training import MIXED, compiled

    import adaptra

    join_by(port)
    dist.init_process_group("gloo")
    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    faults = [f"break {epoch % 2}.1 @{epoch}:1F2" for epoch in range(1, epochs + 1)]
    counts: list[tuple[int, int, int]] = []
    with compiled(MIXED, batch, stages=2, microbatches=4, options=adaptra.Options(survive=True, faults=faults)) as pipe:
        for _ in range(epochs + 1):
            pipe.step(inputs[0], targets)
            while any(thread.name == "adaptra ends an epoch" for thread in threading.enumerate()):
                time.sleep(0.01)
            gc.collect()
            threads, files = (len([*Path("/proc/self", what).iterdir()]) for what in ("task", "fd"))
            counts.append((threads, files, _get_default_store().num_keys()))
    return counts


def test_epochs_that_have_broken_leave_nothing() -> None:
    """But for the keys by which a process that wakes late finds its way: the news of a break, and the record that followed."""
    for counts in run_with_store(left_after, 4, 10):
        # A question to another process is a file for a moment, so three epochs are compared with three later ones.
        earlier, later = zip(*counts[3:6], strict=True), zip(*counts[7:10], strict=True)
        for what, before, after in zip(("threads", "files"), earlier, later, strict=False):
            assert min(after) <= max(before), what
        assert counts[9][2] - counts[4][2] <= 50, "an epoch has about fifty keys"


@pytest.mark.timed
def test_a_frozen_process_is_left_behind_and_fenced() -> None:
    *lived, frozen = run_with_store(train_on, 4, ["freeze 1.1 @3 7s"], False)
    assert [kind for kind, _, _ in lived] == [""] * 3
    kind, text, _ = frozen
    check_documented(kind, text, "rank …: the others went on without it in epoch …")


@pytest.mark.timed
def test_the_last_process_of_a_stage_ends_the_job() -> None:
    told = run_with_store(train_on, 4, ["kill 0.1 @2", "kill 1.1 @3:1F2"], False, may_die=(1, 3))
    for kind, text, seconds in (told[0], told[2]):
        check_documented(kind, text, STAGE_LOST)
        assert "place 1 are lost: rank 3 (rank 3 has ended: " in text and " completed 3 steps" in text
        assert seconds < 10


def test_a_replica_without_a_process_that_has_its_batch_ends_the_job() -> None:
    told = run_with_store(train_on, 4, ["kill 1.0 @2", "kill 1.1 @3:1F2"], False, may_die=(2, 3))
    for kind, text, _ in told[:2]:
        check_documented(kind, text, DATA_LOST)
        assert "batch of replica 1 are lost" in text


def test_an_exception_of_a_process_ends_the_job() -> None:
    *others, failed = run_with_store(train_on, 4, [], True)
    assert failed[0] == "ZeroDivisionError"
    for kind, text, _ in others:
        check_documented(kind, text, "rank … failed: …")
        assert "rank 3 failed: ZeroDivisionError: division by zero" in text


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "survive=…: expected True or False": ("OptionError", {"survive": "yes"}, {}),
    "survive=True with lossy_bf16='slow', where each replica plans which messages round: expected True or False": (
        "OptionError",
        {"lossy_bf16": "slow"},
        {},
    ),
    "Options(survive=True) with transport …: expected several processes over 'delegate', whose connections begin anew without "
    "a lost rank": ("LaunchError", {}, {"transport": "c10d"}),
    "Options(survive=True) with … ranks for one replica of …: expected several replicas, as those of other replicas go on with "
    "a lost rank's stages": ("LaunchError", {}, {"stages": 4}),
}
NO_LOSS = (
    "survive=True: the function returns no loss, so forwards live on between two calls: expected a model whose loss "
    "adaptra.compile knows, as a step is done again as a whole"
)
OF_ONE = (
    "…: one replica's batch, in a job that may lose all processes of a replica: expected a function of the replica that "
    "returns its batch, as in pipe.eval_step(lambda replica: …)"
)
HALF = (
    "…: rank … was not given its replica's whole batch: expected inputs and targets on every rank, as Options(survive=True) "
    "has each go on for others"
)


def refused(rank: int, port: int) -> dict[str, tuple[str, str]]:
    import torch.distributed as dist
    from training import MIXED, compiled

    import adaptra
    from adaptra.errors import AdaptraError

    join_by(port)
    dist.init_process_group("gloo")
    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    texts: dict[str, tuple[str, str]] = {}
    for row, (_, options, arguments) in REFUSED.items():
        switches: dict[str, Any] = {"survive": True, **options}
        how: dict[str, Any] = {"stages": 2, "microbatches": 4, **arguments}
        try:
            compiled(MIXED, batch, options=adaptra.Options(**switches), **how).__enter__()
        except AdaptraError as error:
            texts[row] = type(error).__name__, str(error)
    given: Any = lambda _step, _replica: (inputs[0], targets)  # noqa: E731
    with compiled(MIXED, batch, stages=2, microbatches=4, batches=given, options=adaptra.Options(survive=True)) as pipe:
        try:
            pipe.eval_step(inputs[0], targets)
        except AdaptraError as error:
            texts[OF_ONE] = type(error).__name__, str(error)
    with compiled(MIXED, batch, stages=2, microbatches=4, options=adaptra.Options(survive=True)) as pipe:
        try:
            pipe.step(inputs[0], None if rank == 2 else targets)
        except AdaptraError as error:
            texts[HALF] = type(error).__name__, str(error)
    return texts


def test_what_can_not_survive_is_refused_in_words() -> None:
    for texts in run_with_store(refused, 4):
        for row in (*REFUSED, OF_ONE, HALF):
            kind, text = texts[row]
            expected = REFUSED[row][0] if row in REFUSED else "BatchError"
            check_documented(expected, text.partition(f"{expected}: ")[2] if kind == "PeerLostError" else text, row)


def test_a_function_without_a_loss_can_not_survive() -> None:
    from training import MIXED

    import adaptra
    from adaptra.errors import OptionError
    from adaptra.frontend.arguments.arguments import CompileArguments

    with pytest.raises(OptionError) as refusal:
        CompileArguments(MIXED.make(), 2, 4, None, None, None, None, None, adaptra.Options(survive=True), with_loss=False)
    check_documented("OptionError", str(refusal.value), NO_LOSS)
