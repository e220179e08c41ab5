"""Training over a lossy path: injected, and on a link that really loses packets; found, named, and not one bit changes."""

from __future__ import annotations

import re
from itertools import count

import pytest
from linked_hosts import LinkedHosts
from training import MIXED, adam, compiled, differences, run_step, train_alone

import adaptra
from adaptra.runtime.control.plans.events import ControlEvent, EventKind

LOSSY_LINK = "0-1 loss=0.1"
HEALTHY_STEPS = 6
LOSSY_STEPS = 40
MICROBATCHES = 8


def lossy_edges(told: list[ControlEvent]) -> set[tuple[int, int]]:
    """Those that were said to be lossy."""
    texts = [event.text for event in told if event.kind is EventKind.DETECTED]
    return {(int(source), int(to)) for text in texts for source, to in re.findall(r"edge (\d+)→(\d+) lossy", text)}


@pytest.mark.timed
def test_an_injected_loss_is_found_heals_and_changes_no_bit() -> None:
    """Until the events say that it has healed; the last lossy step is the one before step 22."""
    told: list[ControlEvent] = []
    device = adaptra.EmulatedDevice(0.002, 0.002, 0.002)
    options = adaptra.Options(faults=["lossy 1>2 20% 150ms @6..22"], emulate=device, on_event=told.append)
    batches = [MIXED.rows(16, step) for step in range(400)]
    with compiled(MIXED, batches[0], stages=3, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        ran = []
        for batch in batches:
            ran.append(run_step(pipe, optimizer, batch))
            if any(event.text.startswith("edge 1→2 healed: no message is held up") for event in pipe.events):
                break
        switches = [event for event in pipe.events if event.kind is EventKind.SWITCHED]
    assert lossy_edges(told) == {(1, 2)}
    assert 22 < len(ran) < len(batches), "healed after it was lossy, and in time"
    assert [event.text for event in switches if "lossy" in event.text], "more microbatches in flight hide a part of it"
    assert differences(ran, train_alone(MIXED, batches[: len(ran)], MICROBATCHES)) == []


def train_over_loss(rank: int, control: str) -> list[list[int]]:
    """On a host of its own: the link loses packets after some steps; the edges that rank 0 was told to be lossy."""
    import torch
    import torch.distributed as dist
    from linked_hosts import change_links

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = MIXED.rows(16, 0)
    options = adaptra.Options(emulate=adaptra.EmulatedDevice(0.005, 0.005, 0.005))
    with compiled(MIXED, batch, stages=3, microbatches=MICROBATCHES, options=options) as pipe:
        optimizer = adam(pipe.parameters())
        for step in count():
            run_step(pipe, optimizer, batch)
            if step == HEALTHY_STEPS and rank == 0:
                change_links(control, LOSSY_LINK)
            ends = torch.tensor(float(bool(lossy_edges(list(pipe.events))) or step == HEALTHY_STEPS + LOSSY_STEPS))
            dist.broadcast(ends, 0)
            if ends:
                break
        if rank == 0:
            change_links(control, "all loss=0")
        found = lossy_edges(list(pipe.events))
    dist.destroy_process_group()
    return [list(edge) for edge in sorted(found)]


@pytest.mark.root
def test_a_link_that_loses_packets_is_found(linked_hosts: type[LinkedHosts]) -> None:
    """Real TCP, which sends again after its timeout, on one link of two. Which direction is found first is chance."""
    with linked_hosts(3) as hosts:
        found, *_ = hosts.call(train_over_loss, hosts.control)
    assert found and found in ([[0, 1]], [[1, 0]], [[0, 1], [1, 0]])
