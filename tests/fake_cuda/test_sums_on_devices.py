"""Sums over replicas of gradients on devices: the CPU's bits, no race, begun behind a bucket's W, awaited by one thread."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_processes

RANKS = 3
BUCKET = 512
SIZES = {"float32": [40, 300, 3, 128, 1, 60, 128, 128, 128, 100], "bfloat16": [7, 500, 33]}
SOON = 60.0


def sum_on(rank: int, device: str) -> tuple[list[str], list[str], bool]:
    """Return the sums as text, what the stand-in reports, and whether a bucket had its sum while a later W was held back."""
    import time

    import torch
    import torch.distributed as dist

    from adaptra.collectives.rounds import ALGORITHMS, direct
    from adaptra.program.roles import Roles
    from adaptra.runtime.data_parallel.accumulators import Accumulators
    from adaptra.runtime.data_parallel.gradient_averaging import Replicas
    from adaptra.runtime.data_parallel.gradient_sum import GradientSum
    from adaptra.runtime.devices.device_clock import OpClock
    from adaptra.runtime.world.world import WorkerId, World

    dist.init_process_group("gloo")
    own = torch.device(device, rank % 2) if device == "cuda" else torch.device(device)
    machine: Any = None
    if device == "cuda":
        torch.cuda.set_device(own)
        from fake_cuda.machine import the_machine

        machine = the_machine()
    replicas = Replicas(World.of_roles(Roles.initial(RANKS, 1)), WorkerId(rank), "test", own)
    shown: list[str] = []
    has_early_sum = True
    for dtype, sizes in SIZES.items():
        parameters = {f"layer {n}": torch.zeros(size, dtype=getattr(torch, dtype), device=own) for n, size in enumerate(sizes)}
        names = [*parameters][::-1]
        for algorithm in ALGORITHMS.values():
            replicas.add_by(algorithm, limit=BUCKET, dtype=None)
            sums = Accumulators(parameters)
            summed = GradientSum(replicas, sums, (), BUCKET, True, OpClock(own).mark)
            assert summed.overlaps
            for step in range(2):
                made = torch.Generator().manual_seed(10 * step + rank)
                values = {name: torch.randn(one.shape, generator=made).to(one.dtype) for name, one in parameters.items()}
                before = torch.stack([values[names[0]].double().sum(), values[names[1]].double().sum()])
                there = {name: one.to(own) for name, one in values.items()}
                sums.begin_step()
                summed.begin_step()
                gate = None
                for number, name in enumerate(names[:-1]):  # the last one has no gradient on any replica but the first
                    if machine is not None and algorithm is direct and number == 4:  # after four buckets
                        gate = machine.hold()
                    sums.put(name, there[name])
                    summed.complete(name)
                if rank == 0:
                    sums.put(names[-1], there[names[-1]])
                summed.complete(names[-1])
                if machine is not None and gate is not None:
                    on_host = machine.extension.on_host
                    early = [on_host(sums.total(name)) for name in names[:2]]
                    deadline = time.monotonic() + 10
                    while any(torch.equal(one.double().sum(), own_sum) for one, own_sum in zip(early, before, strict=True)):
                        if time.monotonic() > deadline:
                            has_early_sum = False
                            break
                        time.sleep(0.001)
                    gate.release()
                summed.end_step()
                shown += [str(sums.total(name).cpu().tolist()) for name in names]
            summed.close()
    reports: list[str] = []
    if machine is not None:
        reports += map(str, machine.detector.reports)
        reports += [one for one in machine.syncs if "gradient_sum" in one and "adaptra-gradient-sum" not in one]
    replicas.end()
    dist.destroy_process_group()
    return shown, reports, has_early_sum


@pytest.mark.processes
def test_devices_sum_to_the_bits_of_the_cpu_bucket_by_bucket() -> None:
    on_cpu, on_cuda = (run_processes(sum_on, RANKS, device, timeout=SOON) for device in ("cpu", "cuda"))
    assert [shown for shown, _, _ in on_cuda] == [shown for shown, _, _ in on_cpu]
    assert not [one for _, reports, _ in on_cuda for one in reports]
    assert all(has_early_sum for _, _, has_early_sum in on_cuda)


def lose_over_nccl(rank: int) -> tuple[list[str], int | str | None, list[str]]:
    """Return a sum over NCCL, whom the end of a wait for a lost replica names, and what the stand-in reports before that."""
    import threading

    import torch
    import torch.distributed as dist
    from fake_cuda.machine import the_machine
    from fake_cuda.nccl import ProcessGroupNCCL

    from adaptra.errors import PeerLostError
    from adaptra.program.roles import Roles
    from adaptra.runtime.data_parallel import gradient_averaging
    from adaptra.runtime.world.world import WorkerId, World

    dist.init_process_group("gloo")
    torch.cuda.set_device(rank)
    store = dist.distributed_c10d._get_default_store()

    def new_group(members: Any, _backend: str | None) -> Any:
        return ProcessGroupNCCL(dist.PrefixStore(members.name, store), members.rank, members.size)

    gradient_averaging.new_group = new_group
    replicas = gradient_averaging.Replicas(
        World.of_roles(Roles.initial(2, 1)), WorkerId(rank), "test", torch.device("cuda", rank)
    )
    mine = [torch.full((size,), rank + 0.1, device="cuda") for size in (5, 1000, 1)]
    replicas.combine_gradients(mine, mine.__getitem__)
    shown, reports = [str(one.tolist()) for one in mine], [*map(str, the_machine().detector.reports)]
    if rank == 1:
        replicas.abort()
        store.set("lost", "")
        store.wait(["named"])
        return shown, "left", reports

    def learn_of_the_loss() -> None:
        store.wait(["lost"])
        replicas.abort()

    threading.Thread(target=learn_of_the_loss, daemon=True).start()
    with pytest.raises(PeerLostError) as lost:
        replicas.combine_gradients(mine, mine.__getitem__)
    store.set("named", "")
    return shown, lost.value.rank, reports


@pytest.mark.processes
def test_over_nccl_a_lost_replica_ends_the_wait_of_the_other_which_names_it() -> None:
    (shown, named, reports), other = run_processes(lose_over_nccl, 2, timeout=SOON)
    expected = str([1.2000000476837158 / 2])
    assert shown == other[0] and shown[2] == expected, shown
    assert (named, other[1]) == (1, "left") and not reports and not other[2]
