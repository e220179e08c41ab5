"""Ranks train over NCCL, each on a device of its own, to the bits of the same ranks on the CPU."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from processes import run_processes

SOON = 150.0


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_cuda.loading import DEVICES

    monkeypatch.setenv(DEVICES, "4")


def model_and_batch() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    hidden = [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)] * 1
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), *hidden, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    return model, torch.randn(16, 8), torch.randint(0, 5, (16,))


def train(rank: int, device: str, transport: str, stages: int, backend: str, placement: str) -> dict[str, Any]:
    """Return the losses and weights of three steps as text, what the stand-in reports, and what was made and waited for."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import adaptra

    model, inputs, targets = model_and_batch()
    if device == "cuda":
        from fake_cuda import nccl_backends

        nccl_backends.use(backend)
        torch.cuda.set_device(rank)
        model.cuda()
    pipe = adaptra.compile(
        model,
        stages=stages,
        microbatches=4,
        example_inputs=(inputs, targets),
        loss=nn.functional.cross_entropy,
        transport=transport,
        placement=placement,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    shown: list[str] = []
    made = communicators()
    for step in range(3):
        optimizer.zero_grad()
        loss = pipe.step(inputs, targets)
        assert loss.device.type == device
        shown.append(float(loss).hex())
        shown.append(float(pipe.clip_grad_norm_(1.0)).hex())
        optimizer.step()
        assert communicators() == made, f"step {step} has made one"
    shown += [str(value.cpu().tolist()) for value in pipe.full_state_dict().values()]
    shown.append(float(pipe.eval_step(inputs, targets)).hex())
    pipe.close()
    dist.destroy_process_group()
    return {"shown": shown, "reports": reports(), "made": made}


def communicators() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    from fake_cuda.machine import the_machine

    return sum(count for what, count in the_machine().syncs.items() if "communicator" in what)


def reports() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    from fake_cuda.machine import the_machine

    return [*map(str, the_machine().detector.reports)]


@pytest.mark.parametrize(
    ("ranks", "stages", "backend", "placement", "made"),
    [
        (2, 2, "older", "straight", [2, 2]),
        (2, 2, "newer", "straight", [2, 2]),
        (4, 4, "newer", "straight", [2, 4, 4, 2]),
        (4, 2, "older", "straight", [2, 2, 2, 2]),
        (2, 4, "newer", "interleaved", [4, 4]),
    ],
    ids=["two ranks, 2.13's backend", "two ranks, 2.15's", "four ranks", "two replicas", "two stages on each rank"],
)
def test_ranks_train_to_the_bits_of_the_cpu(
    ranks: int, stages: int, backend: str, placement: str, made: list[int], four_devices: None
) -> None:
    on_cpu = run_processes(train, ranks, "cpu", "c10d", stages, backend, placement, timeout=SOON)
    on_cuda = run_processes(train, ranks, "cuda", "nccl", stages, backend, placement, timeout=SOON, is_fresh=True)
    assert [one["shown"] for one in on_cuda] == [one["shown"] for one in on_cpu]
    assert not [report for one in on_cuda for report in one["reports"]]
    assert [one["made"] for one in on_cuda] == made, "one for each directed edge that ends here"


def train_until_an_edge_has_moved(rank: int) -> dict[str, Any]:
    """A link turns slow; train until three steps have run under a plan that takes its edges off NCCL.

    Returns:
        The versions of the plans by step, the switches, and the edges that moved. Also what NCCL carried by step, what differs
        from plain torch on the CPU, and what the stand-in reports.
    """
    import torch
    from torch import nn

    import adaptra
    from adaptra.runtime.transports.base import Identity
    from adaptra.runtime.transports.nccl.nccl import NcclTransport

    model, inputs, targets = model_and_batch()
    alone, _, _ = model_and_batch()
    torch.cuda.set_device(rank)
    carried: dict[int, set[tuple[int, int]]] = {}
    send = NcclTransport.send

    def recorded(self: Any, to: int, identity: Identity, tensors: Any, **options: Any) -> Any:
        carried.setdefault(identity.step, set()).add(identity.edge)
        return send(self, to, identity, tensors, **options)

    NcclTransport.send = recorded  # type: ignore[method-assign]
    loss = nn.functional.cross_entropy
    options = adaptra.Options(
        schedule="1f1b",
        faults=["delay 1-2 300ms @16"],
        emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004),
        delegate=True,
    )
    pipe = adaptra.compile(
        model.cuda(),
        stages=4,
        microbatches=8,
        example_inputs=(inputs, targets),
        loss=loss,
        transport="nccl",
        options=options,
    )
    optimizer, plain = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (pipe, alone))
    plans: list[Any] = []
    differs: list[str] = []
    after = 0
    # All ranks run every step under one plan, so all stop at the same step.
    while after < 3 and len(plans) < 80:
        for one in (optimizer, plain):
            one.zero_grad()
        found = pipe.step(inputs, targets)
        losses = [loss(alone(part), wanted) for part, wanted in zip(inputs.chunk(8), targets.chunk(8), strict=True)]
        for one in losses:
            (one / 8).backward()
        for one in (optimizer, plain):
            one.step()
        plans.append(pipe.plan)
        after += not {(1, 2), (2, 1)}.isdisjoint(pipe.plan.delegated)  # others may be late too on a busy machine
        pipe.eval_step(inputs, targets)
        if not torch.equal(found.cpu(), torch.stack(losses).mean()):
            differs.append(f"loss of step {len(plans)}: {found} instead of {torch.stack(losses).mean()}")
    differs += [
        name for name, value in pipe.full_state_dict().items() if not torch.equal(value.cpu(), alone.state_dict()[name])
    ]
    switches = [(event.step, event.version) for event in pipe.events if event.kind.value == "switched"]
    pipe.close()
    return {
        "versions": [plan.version for plan in plans],
        "switches": switches,
        "moved": [plan.delegated for plan in plans],
        "carried": {step: sorted(edges) for step, edges in carried.items() if step >= 0},
        "differs": differs,
        "reports": reports(),
    }


@pytest.mark.alone
def test_a_slow_edge_moves_alone_at_one_step_on_all_ranks_and_changes_no_number(four_devices: None) -> None:
    """Rules 1, 3 and 4: bitwise equal before, during and after; a slow edge leaves NCCL and the others stay."""
    ranks = run_processes(train_until_an_edge_has_moved, 4, timeout=SOON, is_fresh=True)
    first = ranks[0]
    versions, moved = first["versions"], first["moved"]
    assert moved[-1], f"no edge has moved in {len(versions)} steps"
    assert versions == sorted(versions) and versions[0] == 0
    assert first["switches"] == [(versions.index(version), version) for version in sorted(set(versions)) if version > 0]
    for one in ranks:
        assert (one["versions"], one["switches"], one["moved"]) == (versions, first["switches"], moved)
        assert one["differs"] == one["reports"] == []
    edges = {(stage, stage + 1) for stage in range(3)} | {(stage + 1, stage) for stage in range(3)}
    assert set(moved[-1]) & {(1, 2), (2, 1)}, "others may have been late too on a busy machine"
    for step, taken in enumerate(moved):
        assert {tuple(edge) for one in ranks for edge in one["carried"].get(step, ())} == edges - set(taken)


def lose_a_neighbour(rank: int) -> tuple[int | None, str, float]:
    """Train until rank 1 kills itself; return the lost rank of the error on rank 0, its text, and the seconds until it came."""
    import torch
    from torch import nn

    import adaptra
    from adaptra.errors import PeerLostError

    model, inputs, targets = model_and_batch()
    torch.cuda.set_device(rank)
    pipe = adaptra.compile(
        model.cuda(),
        stages=2,
        microbatches=4,
        example_inputs=(inputs, targets),
        loss=nn.functional.cross_entropy,
        transport="nccl",
    )
    for _ in range(2):
        pipe.step(inputs, targets)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        pipe.step(inputs, targets)
    pipe.close()
    return caught.value.rank, str(caught.value), time.monotonic() - began


def test_a_killed_neighbour_is_named_and_nothing_waits_for_it() -> None:
    (rank, text, seconds), _ = run_processes(lose_a_neighbour, 2, timeout=SOON, may_die=(1,), is_fresh=True)
    assert rank == 1 and "rank 1" in text
    assert seconds < 60, "it waited for the message's own limit"
