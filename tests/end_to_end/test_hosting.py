"""Fewer ranks than workers: every number is that of as many ranks, whatever a process hosts and whatever users call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes

pytestmark = pytest.mark.processes

MICROBATCHES = 4
Values = dict[str, Any]
Undisturbed = Callable[[int, Sequence[str]], list[dict[str, Values]]]
"""By rank and case, all numbers of a training, given the number of replicas: see the fixture."""


def digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def trained(
    example: Any,
    replicas: int,
    stages: int,
    *,
    steps: int = 4,
    every: int = 1,
    clips: bool = False,
    scales: bool = False,
    hooks: bool = False,
    outputs: Any = False,
    rows: Callable[[int, int], int] = lambda step, replica: 8,
    checkpoint: str | None = None,
    before: Callable[[Any, Any, int], object] = lambda pipe, optimizer, step: None,
    of_function: bool = False,
    **arguments: Any,
) -> Values:
    """All numbers of a training: losses, norms, outputs, and digests of the state and gradients of every worker here."""
    import torch
    import torch.distributed.checkpoint as dcp
    from training import adam, call, compiled

    def batch(step: int, replica: int) -> Any:
        return example.rows(rows(step, replica), 7 * step + replica)

    def given(step: int, replica: int, *, evaluates: bool = False) -> tuple[Any, dict[str, Any]]:
        of_replica = [lambda replica: call(batch(step, replica))[0]] if evaluates else ()
        return (of_replica, {}) if of_function else call(batch(step, replica))

    arguments["batches"] = (lambda step, replica: call(batch(step, replica))[0]) if of_function else None
    found: Values = {}
    with compiled(
        example, example.rows(8, 0), stages=stages, microbatches=MICROBATCHES, replicas=replicas, **arguments
    ) as pipe:
        optimizer = adam(pipe.parameters())
        scaler = pipe.grad_scaler(init_scale=8.0) if scales else None
        if hooks:
            for _, parameter in sorted(pipe.named_parameters())[::2]:
                parameter.register_hook(lambda gradient: gradient * 1.5)
        begin = 0
        if checkpoint is not None and Path(checkpoint).exists():
            import adaptra

            state = {"training": adaptra.TrainingState(pipe, optimizer)}
            dcp.load(state, checkpoint_id=checkpoint)
            begin = 2
        for step in range(begin, steps):
            before(pipe, optimizer, step)
            args, kwargs = given(step, pipe.replica)
            answer = pipe.step(*args, outputs=outputs, **kwargs)
            loss = answer if not outputs else answer[0]
            found[f"loss {step}"] = loss.item()
            if outputs:
                found[f"outputs {step} of {pipe.replica}"] = digest(answer[1])
            if (step + 1) % every == 0:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if clips:
                    found[f"norm {step}"] = pipe.clip_grad_norm_(0.5).item()
                found |= {
                    f"gradient {step} of {name}": digest(one.grad)
                    for name, one in pipe.named_parameters()
                    if one.grad is not None
                }
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                    found[f"scale {step}"] = scaler.get_scale()
                optimizer.zero_grad()
            if checkpoint is not None and step == 1 and begin == 0:
                import adaptra

                dcp.save({"training": adaptra.TrainingState(pipe, optimizer)}, checkpoint_id=checkpoint)
        args, kwargs = given(0, pipe.replica, evaluates=True)
        found["evaluated"] = pipe.eval_step(*args, **kwargs).item()
        whole = pipe.full_state_dict()
        found |= {f"whole {name}": digest(value) for name, value in whole.items()}
        for worker in pipe.session.workers:
            found |= {f"worker {worker.replica}/{worker.rank} {name}": digest(value) for name, value in worker.state.items()}
        found["hosts"] = pipe.workers
        assert torch.is_grad_enabled()
    return found


def change(pipe: Any, optimizer: Any, step: int) -> None:
    """Change the roles before a step, and the cut before the next one."""
    if step == 1:
        pipe.take_roles(pipe.roles.swapped(1, 3), optimizer)
    if step == 2:
        pipe.take_split([pipe.session.compiled.cut_points.possible[0].module], optimizer)


CASES: dict[str, dict[str, Any]] = {
    "gpt_dropout": {"scales": True, "clips": True, "every": 2},
    "resnet": {"outputs": "all", "hooks": True},
    "delegate": {"example": "gpt_tied", "transport": "delegate", "every": 2, "clips": True},
    "buffers of their own": {"example": "resnet", "hooks": True, "every": 2},
    "shapes": {"example": "gpt", "rows": "several", "reduction": "weighted"},
    "v": {"example": "gpt_tied", "placement": "v"},
}
CHANGES: dict[str, dict[str, Any]] = {"changes": {"example": "resnet", "before": change, "clips": True}}
"""As many ranks as workers alone can change roles and cut points."""


def several_rows(step: int, replica: int) -> int:
    """Another number of rows in a step of each replica, and in one of all."""
    return 6 if step == 3 else 8 + 4 * (step == replica)


def train_cases(
    rank: int,
    replicas: int,
    stages: int,
    names: Sequence[str],
    faults: Mapping[str, Sequence[str]] = {},
    of_function: bool = False,
    **options: Any,
) -> dict[str, Values]:
    import torch
    import torch.distributed as dist
    from models import EXAMPLES

    import adaptra

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Values] = {}
    for name in names:
        given: dict[str, Any] = {"example": name, "of_function": of_function, **(CASES | CHANGES)[name]}
        example: Any = EXAMPLES[given.pop("example")]
        of_case: dict[str, Any] = {"reduce": adaptra.Reduce(bucket=4096), "faults": faults.get(name, ()), **options}
        if name == "buffers of their own":
            of_case["broadcast_buffers"] = False
        if given.get("rows") == "several":
            given["rows"] = several_rows
        if given.get("reduction") == "weighted":
            example = replace(example, loss=weighted_loss)
        count = stages * (2 if given.get("placement") == "v" else 1)
        found[name] = trained(example, replicas, count, options=adaptra.Options(**of_case), **given)
    return found


def weighted_loss(logits: Any, targets: Any) -> Any:
    """The sum over labels that are even, and their number."""
    from torch.nn.functional import cross_entropy

    counted = targets % 2 == 0
    losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * counted.flatten()).sum(), counted.sum()


def compare(full: list[dict[str, Values]], fewer: list[dict[str, Values]]) -> None:
    """Check that each number of the smaller job is that of the larger one, and that all of its workers were seen."""
    for name in full[0]:
        expected: Values = {}
        for one in full:
            expected |= {key: value for key, value in one[name].items() if key != "hosts"}
        seen: set[str] = set()
        for rank, one in enumerate(fewer):
            for key, value in one[name].items():
                if key != "hosts":
                    assert expected[key] == value, f"{name}: {key} on rank {rank}"
                    seen.add(key)
        assert {key for key in expected if not key.startswith("outputs")} <= seen, name
        assert len(set(fewer[0][name]["hosts"])) == len(fewer)


@pytest.mark.parametrize(("replicas", "ranks", "names"), [(3, 4, [*CASES][:3]), (2, 3, [*CASES][3:])], ids=["3", "2"])
def test_a_hosted_worker_changes_no_number(replicas: int, ranks: int, names: list[str], undisturbed: Undisturbed) -> None:
    """Three replicas among them, whose sums depend on their order."""
    compare(undisturbed(replicas, names), run_processes(train_cases, ranks, replicas, 2, names))


def save_and_go_on(rank: int, replicas: int, folder: str) -> Values:
    import torch
    import torch.distributed as dist
    from models import EXAMPLES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return trained(EXAMPLES["resnet"], replicas, 2, checkpoint=folder)


def test_a_checkpoint_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """As after a loss: the same batch on what is left, and the same numbers."""
    folder = str(tmp_path / "two steps")
    full = run_processes(save_and_go_on, 4, 2, folder)
    fewer = run_processes(save_and_go_on, 2, 2, folder)
    assert "loss 1" in full[0] and "loss 1" not in fewer[0] and "loss 2" in fewer[0]
    for one in fewer:
        for key, value in one.items():
            if key != "hosts":
                assert any(other.get(key) == value for other in full), key
    assert {key for one in full for key in one if key[:4] == "work"} == {
        key for one in fewer for key in one if key[:4] == "work"
    }


MISTAKES: dict[str, dict[str, Any]] = {"few": {"replicas": 4}, "none": {"replicas": 0}, "not given": {}}
DOCUMENTED = {
    "few": (
        "LaunchError",
        "… ranks for replicas=… of … ranks: expected … to …: each of its … workers needs one, which may host others of the "
        "same stages, and each replica one that is given its batch",
    ),
    "outputs": (
        "OptionError",
        "outputs: the last stage of replica … is a guest of rank …, which has the batch of another replica: expected "
        "outputs='all', or none",
    ),
    "split": (
        "OptionError",
        "…: … ranks host the … workers of this job: expected a rank for each worker, as what moves is a rank's whole state",
    ),
    "half a batch": (
        "BatchError",
        "…: rank … was not given the whole batch of replica …, some of whose workers rank … hosts: expected inputs and targets "
        "on rank …, which sends them",
    ),
    "another call": ("PipelineError", "rank … called …, rank … …: expected the same calls in the same order on all ranks"),
}


def refused(rank: int) -> dict[str, tuple[str, str]]:
    import torch.distributed as dist
    from models import EXAMPLES
    from training import adam, call, compiled

    from adaptra.errors import AdaptraError

    dist.init_process_group("gloo")
    example = EXAMPLES["skip_mlp"]
    texts: dict[str, tuple[str, str]] = {}

    def note(what: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except AdaptraError as error:
            texts[what] = type(error).__name__, str(error)

    batch: Any = example.rows(8, 0)
    arguments: dict[str, Any] = {"stages": 2, "microbatches": MICROBATCHES}
    for name, given in MISTAKES.items():
        note(name, lambda given=given: compiled(example, batch, **arguments, **given).__enter__())
    args, kwargs = call(batch)
    # What one rank does wrong in a call may reach another that is still at the end of the call before.
    with compiled(example, batch, replicas=2, **arguments) as pipe:
        note("outputs", lambda: (pipe.step(*args, **kwargs), pipe.step(*args, outputs=True, **kwargs)))
    with compiled(example, batch, replicas=2, **arguments) as pipe:
        optimizer = adam(pipe.parameters())
        pipe.step(*args, **kwargs)
        note("roles", lambda: pipe.settle_roles(optimizer))
        note("split", lambda: pipe.settle_split(optimizer))
        # Rank 2 is the only one at home in replica 1, and sends its batch to the host of its last stage.
        half = args if rank < 2 else args[:1]
        note("half a batch", lambda: (pipe.step(*args, **kwargs), pipe.step(*half, **kwargs)))
    with compiled(example, batch, replicas=2, **arguments) as pipe:
        note("another call", lambda: pipe.step(*args, **kwargs) if rank < 2 else pipe.eval_step(*args, **kwargs))
    return texts


def test_what_a_job_with_guests_can_not_do_is_refused_in_words() -> None:
    for texts in run_processes(refused, 3):
        assert "replicas=0" in texts["none"][1] and "or give replicas=" in texts["not given"][1]
        assert texts["roles"][1].startswith("roles: 3 ranks host the 4 workers")
        for name, (kind, row) in DOCUMENTED.items():
            # Who sees another's mistake says so, and has the mistake in its words.
            found, text = texts[name]
            check_documented(kind, text.partition(f"{kind}: ")[2] if found == "PeerLostError" else text, row)


def lose(rank: int, victim: int) -> tuple[str, int | None, str]:
    import os

    import torch.distributed as dist
    from models import EXAMPLES
    from training import call, compiled

    dist.init_process_group("gloo")
    example = EXAMPLES["skip_mlp"]
    batch: Any = example.rows(8, 0)
    args, kwargs = call(batch)
    with compiled(example, batch, stages=2, microbatches=MICROBATCHES, replicas=2) as pipe:
        try:
            for step in range(100):
                if (step, rank) == (3, victim):
                    os._exit(1)
                pipe.step(*args, **kwargs)
        except Exception as error:
            return type(error).__name__, getattr(error, "rank", None), str(error)
    raise AssertionError("the loss was not noticed")


@pytest.mark.parametrize("victim", [1, 2], ids=["host", "giver"])
def test_a_lost_rank_is_named_by_all(victim: int) -> None:
    """The host of a guest, and the rank that gives its batch: whoever waits for it knows who it waits for."""
    for rank, found in enumerate(run_processes(lose, 3, victim, may_die=(victim,))):
        if rank != victim:
            assert found[:2] == ("PeerLostError", victim), found


def begin_alone(rank: int, replicas: int) -> int:
    """The host of a guest calls its step once the rank that gives its batch has computed a microbatch."""
    from datetime import timedelta

    import torch.distributed as dist
    from models import EXAMPLES
    from training import call, compiled

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    example = EXAMPLES["skip_mlp"]
    args, kwargs = call(example.rows(8, 0))
    with compiled(example, example.rows(8, 0), stages=2, microbatches=MICROBATCHES, replicas=replicas) as pipe:
        pipe.step(*args, **kwargs)
        (monitor, *_) = [worker.monitor for worker in pipe.session.workers]
        record = monitor.op

        def tell(op: Any, start: Any, end: Any) -> None:
            record(op, start, end)
            store.set("computed", "")

        if rank == 2:
            monitor.op = tell
        elif rank == 1:
            store.wait(["computed"], timedelta(seconds=30))
        pipe.step(*args, **kwargs)
        return len(monitor.records(1).ops)


def test_a_rank_that_gives_its_batch_does_not_wait_for_those_that_take_it() -> None:
    """Else the first stage would begin each step no sooner than the last stage has ended the one before."""
    assert min(run_processes(begin_alone, 3, 2)) > 0
