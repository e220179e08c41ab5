"""Ranks train over NCCL, each on a device of its own, to the bits of the same ranks on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_processes

SOON = 150.0


def take_four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give four devices to processes that start from now on. They import torch anew, which is slow."""
    from fake_cuda.loading import DEVICES

    monkeypatch.setenv(DEVICES, "4")


def train_over(rank: int, backend: str, training: Any) -> Any:
    """Train over one of torch's two backends for NCCL."""
    from cuda_training import train
    from fake_cuda import nccl_backends

    nccl_backends.use(backend)
    return train(rank, training)


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
    ranks: int, stages: int, backend: str, placement: str, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_training import Size, Training, train

    on_cpu = run_processes(train, ranks, Training(Size(), "cpu", stages, "c10d", placement), timeout=SOON)
    training = Training(Size(), "cuda", stages, "nccl", placement)
    if ranks > 2:
        take_four_devices(monkeypatch)
    on_cuda = run_processes(train_over, ranks, backend, training, timeout=SOON)
    for (expected,), (trained,), count in zip(on_cpu, on_cuda, made, strict=True):
        assert trained.is_bitwise(expected)
        assert not trained.reports
        assert {*trained.communicators} == {count}, "one for each directed edge that ends here, made before the first step"


def train_until_an_edge_has_moved(rank: int) -> dict[str, Any]:
    """A link turns slow; train until three steps have run under a plan that takes its edges off NCCL.

    Returns:
        The versions of the plans by step, the switches, and the edges that moved. Also what NCCL carried by step, what differs
        from plain torch on the CPU, and what the stand-in reports.
    """
    import torch
    from cuda_training import Training, reports
    from torch import nn

    import adaptra
    from adaptra.runtime.transports.base import Identity
    from adaptra.runtime.transports.nccl.nccl import NcclTransport

    torch.cuda.set_device(rank)
    model, inputs, targets = Training().model_and_batch()
    alone, _, _ = Training(device="cpu").model_and_batch()
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
        model,
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
def test_a_slow_edge_moves_alone_at_one_step_on_all_ranks_and_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules 1, 3 and 4: bitwise equal before, during and after; a slow edge leaves NCCL and the others stay."""
    take_four_devices(monkeypatch)
    ranks = run_processes(train_until_an_edge_has_moved, 4, timeout=SOON)
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


def test_a_killed_neighbour_is_named_and_nothing_waits_for_it() -> None:
    from cuda_training import Training, lose_rank_1

    training = Training(transport="nccl")
    (rank, text, seconds), _ = run_processes(lose_rank_1, 2, training, timeout=SOON, may_die=(1,))
    assert rank == 1 and "rank 1" in text
    assert seconds < 60, "it waited for the message's own limit"
