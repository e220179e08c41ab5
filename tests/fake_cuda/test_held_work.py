"""Work that a test holds back is not done: events say so, the host waits, and what comes too early finds other values."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

FREED_BYTE = 0xDB


def test_an_event_is_done_once_the_gate_before_it_is_released(machine: Machine) -> None:
    import torch

    before, after = torch.cuda.Event(), torch.cuda.Event()
    before.record()
    gate = machine.hold()
    doubled = torch.ones(4, device="cuda") * 2
    after.record()
    assert before.query() and not after.query()
    threading.Timer(0.05, gate.release).start()
    after.synchronize()
    assert after.query() and doubled.tolist() == [2.0] * 4


def test_streams_wait_for_each_other_and_not_for_those_beside_them(machine: Machine) -> None:
    import torch

    held, waiting, free = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    gate = machine.hold(held)
    waiting.wait_stream(held)
    points = [stream.record_event() for stream in (held, waiting, free)]
    assert [point.query() for point in points] == [False, False, True]
    assert [stream.query() for stream in (held, waiting, free)] == [False, False, True]
    gate.release()
    torch.cuda.synchronize()
    assert all(point.query() for point in points)


def test_the_host_waits_for_what_it_reads(machine: Machine) -> None:
    import torch

    machine.hold_for(0.1)
    made = torch.full((4,), 3.0, device="cuda").sum()
    begun = time.monotonic()
    assert made.item() == 12.0 and time.monotonic() - begun > 0.05
    assert any(name.startswith(".item() at test_held_work.py") for name in machine.syncs), machine.syncs


def test_a_layer_norm_of_bfloat16_behind_held_work_gives_the_bits_of_one_at_once(machine: Machine) -> None:
    import torch

    gradients: list[list[list[float]]] = []
    for is_held in (False, True):
        values = torch.arange(8, dtype=torch.bfloat16, device="cuda").view(2, 4).requires_grad_()
        gate = machine.hold() if is_held else None
        torch.nn.functional.layer_norm(values, (4,), torch.ones_like(values[0])).pow(2).sum().backward()
        if gate is not None:
            gate.release()
        assert values.grad is not None
        gradients.append(values.grad.tolist())
    assert gradients[0] == gradients[1]


def test_a_use_without_a_wait_finds_other_values(machine: Machine) -> None:
    import torch

    ones, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    gate = machine.hold()
    ones.fill_(1)
    with torch.cuda.stream(side):
        early = ones + 0
        assert early.tolist() == [0.0] * 4
    gate.release()
    torch.cuda.synchronize()
    assert ones.tolist() == [1.0] * 4 and len(machine.detector.reports) == 1


def test_memory_freed_too_early_is_filled_before_it_is_read(machine: Machine) -> None:
    import torch

    side, host = torch.cuda.Stream(), torch.zeros(4, dtype=torch.uint8, pin_memory=True)
    tensor = torch.ones(4, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    gate = machine.hold(side)
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    del tensor
    gate.release()
    torch.cuda.synchronize()
    assert host.tolist() == [FREED_BYTE] * 4


def test_recorded_memory_is_kept_until_its_reader_is_done(machine: Machine) -> None:
    import torch

    side, host = torch.cuda.Stream(), torch.zeros(4, dtype=torch.uint8, pin_memory=True)
    tensor = torch.ones(4, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    gate = machine.hold(side)
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)
    del tensor
    assert torch.empty(4, dtype=torch.uint8, device="cuda").data_ptr() != address
    gate.release()
    torch.cuda.synchronize()
    assert host.tolist() == [1] * 4 and not machine.detector.reports


def test_freed_memory_is_allocated_again_on_its_stream_alone(machine: Machine) -> None:
    import torch

    tensor = torch.empty(999, device="cuda")
    address, allocated = tensor.data_ptr(), torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.memory_allocated() < allocated
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.empty(999, device="cuda").data_ptr() != address
    assert torch.empty(999, device="cuda").data_ptr() == address


def test_copies_from_pinned_memory_read_it_when_their_turn_comes(machine: Machine) -> None:
    import torch

    pinned, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    gate = machine.hold()
    late = pinned.to("cuda", non_blocking=True)
    pinned.fill_(2)
    gate.release()
    assert late.tolist() == [2.0] * 4 and len(machine.detector.reports) == 1
    threading.Timer(0.05, machine.hold().release).start()
    staged = pageable.to("cuda", non_blocking=True)
    pageable.fill_(2)
    assert staged.tolist() == [1.0] * 4


def test_held_back_training_gives_the_bits_of_training_at_once(machine: Machine) -> None:
    import torch
    from torch import nn

    def losses(is_held: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        inputs, targets = torch.randn(8, 8).cuda(), torch.randint(0, 5, (8,)).cuda()
        found: list[torch.Tensor] = []
        for _ in range(3):
            gate = machine.hold() if is_held else None
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
            if gate is not None:
                gate.release()
        return [loss.item() for loss in found]

    assert losses(is_held=False) == losses(is_held=True)


def test_held_draws_of_the_device_and_draws_of_the_host_leave_each_other_alone(machine: Machine) -> None:
    import torch

    def draws(is_held: bool) -> list[float]:
        torch.manual_seed(0)
        ones = torch.ones(64, 64).cuda()
        drawn: list[torch.Tensor] = []
        for _ in range(100):
            gate = machine.hold() if is_held else None
            drawn.append(torch.nn.functional.dropout(ones, 0.3).sum())
            if gate is not None:
                gate.release()
            drawn.append(torch.randn(4).sum())
        return [value.item() for value in drawn]

    assert draws(is_held=False) == draws(is_held=True)


def test_elapsed_times_are_those_of_the_device(machine: Machine) -> None:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(30_000_000)
    end.record()
    with pytest.raises(RuntimeError, match="device not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert 29.0 < begin.elapsed_time(end) < 1000.0


def test_a_kernel_that_fails_late_is_reported_at_the_next_wait(machine: Machine) -> None:
    import torch

    beyond, table = torch.tensor([7], device="cuda"), torch.ones(2, 2, device="cuda")
    gate = machine.hold()
    torch.nn.functional.embedding(beyond, table)
    gate.release()
    with pytest.raises(RuntimeError, match=r"CUDA error in a kernel launched before: .*index out of range"):
        torch.cuda.synchronize()


def test_values_that_are_read_later_are_those_of_their_time_and_nobody_waits_for_them(machine: Machine) -> None:
    import torch

    from adaptra.runtime.devices.read_later import ReadLater

    counted = torch.zeros(4, device="cuda")
    gate = machine.hold()
    counted += 1
    read = ReadLater(counted)
    counted += 1
    assert not read.is_there and not machine.syncs
    gate.release()
    assert read.wait().tolist() == [1.0] * 4 and read.is_there
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]
