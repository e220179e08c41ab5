"""Each kind of fault in the order of streams, events and memory is reported, and the same program without it is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

Program = Callable[[bool], None]
"""A small program; it is given whether it has its fault."""

PROGRAMS: dict[str, tuple[Program, str, str]] = {}


def program(kind: str, said: str) -> Callable[[Program], Program]:
    """Enter a program in the table, with the kind of its fault and a part of what is reported."""

    def enter(body: Program) -> Program:
        PROGRAMS[body.__name__] = body, kind, said
        return body

    return enter


def torch_() -> Any:
    import torch

    return torch


@program("RACE", "reads what aten::fill_ at")
def use_before_the_producer_is_done(is_faulty: bool) -> None:
    torch = torch_()
    side = torch.cuda.Stream()
    made = torch.ones(4, device="cuda")
    if not is_faulty:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copied = made + 1
    torch.cuda.current_stream().wait_stream(side)
    copied.mul_(2)
    made.record_stream(side)
    copied.record_stream(torch.cuda.current_stream())


@program("RACE", "aten::copy_ at")
def use_of_what_arrived_before_its_copy(is_faulty: bool) -> None:
    torch = torch_()
    side = torch.cuda.Stream()
    host = torch.ones(4, pin_memory=True)
    with torch.cuda.stream(side):
        arrived = host.to("cuda", non_blocking=True)
        copied = side.record_event()
    if not is_faulty:
        torch.cuda.current_stream().wait_event(copied)
    arrived.record_stream(torch.cuda.current_stream())
    arrived.add(1)


@program("RACE", "overwrites what aten::copy_ at")
def overwriting_what_a_copy_still_reads(is_faulty: bool) -> None:
    torch = torch_()
    side = torch.cuda.Stream()
    tensor, host = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)
    if not is_faulty:
        torch.cuda.current_stream().wait_stream(side)
    tensor.zero_()
    side.synchronize()


@program("RACE", "on the host reads pinned memory")
def reading_pinned_memory_before_the_copy_to_it(is_faulty: bool) -> None:
    torch = torch_()
    host = torch.empty(4, pin_memory=True)
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if not is_faulty:
        torch.cuda.current_stream().synchronize()
    host.sum()
    torch.cuda.synchronize()


@program("RACE", "Tensor.numpy on the host reads pinned memory")
def looking_at_pinned_memory_before_the_copy_to_it(is_faulty: bool) -> None:
    torch = torch_()
    host = torch.empty(4, pin_memory=True)
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if not is_faulty:
        torch.cuda.current_stream().synchronize()
    host.numpy()
    torch.cuda.synchronize()


@program("RACE", "Tensor.tolist on the host reads pinned memory")
def listing_pinned_memory_before_the_copy_to_it(is_faulty: bool) -> None:
    torch = torch_()
    host = torch.empty(4, pin_memory=True)
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if not is_faulty:
        torch.cuda.current_stream().synchronize()
    host.tolist()
    torch.cuda.synchronize()


@program("RACE", "on the host writes pinned memory")
def refilling_pinned_memory_before_the_copy_from_it(is_faulty: bool) -> None:
    torch = torch_()
    host = torch.ones(4, pin_memory=True)
    host.to("cuda", non_blocking=True)
    if not is_faulty:
        torch.cuda.synchronize()
    host.zero_()
    torch.cuda.synchronize()


@program("RACE", "in thread_without_wait")
def use_by_another_thread_that_knows_nothing(is_faulty: bool) -> None:
    """A queue passes on that a thread has waited; work that another thread launched is ordered by events alone."""
    torch = torch_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.ones(4, device="cuda")
        done = side.record_event()

    def thread_without_wait() -> None:
        if not is_faulty:
            done.synchronize()
        made.add(1)

    made.record_stream(torch.cuda.current_stream())
    thread = threading.Thread(target=thread_without_wait)
    thread.start()
    thread.join()
    torch.cuda.synchronize()


@program("RACE", "aten::")
def a_wait_before_the_record(is_faulty: bool) -> None:
    """An event stands for what was launched before it was recorded, not for what comes later."""
    torch = torch_()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record(side)
    with torch.cuda.stream(side):
        made = torch.ones(4, device="cuda")
    if not is_faulty:
        event.record(side)
    torch.cuda.current_stream().wait_event(event)
    made.record_stream(torch.cuda.current_stream())
    made.add(1)
    torch.cuda.synchronize()


@program("EARLY_FREE", "no record_stream said so")
def freeing_what_another_stream_reads(is_faulty: bool) -> None:
    torch = torch_()
    side = torch.cuda.Stream()
    tensor, host = torch.ones(4, device="cuda"), torch.empty(4, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    if not is_faulty:
        tensor.record_stream(side)
    del tensor
    torch.cuda.synchronize()


@program("EARLY_FREE", "pinned memory is given back")
def unregistering_memory_that_is_being_copied(is_faulty: bool) -> None:
    torch = torch_()
    host, runtime = torch.ones(4), torch.cuda.cudart()
    assert runtime.cudaHostRegister(host.data_ptr(), 16, 0) == 0
    host.to("cuda", non_blocking=True)
    if not is_faulty:
        torch.cuda.synchronize()
    assert runtime.cudaHostUnregister(host.data_ptr()) == 0
    torch.cuda.synchronize()


@program("USE_AFTER_FREE", "written after it was freed")
def writing_by_an_address_after_the_free(is_faulty: bool) -> None:
    import ctypes

    torch = torch_()
    tensor = torch.ones(1234, device="cuda")
    address = tensor.data_ptr()
    if is_faulty:
        del tensor
    ctypes.memset(address, 0, 8)
    torch.empty(1234, device="cuda")


@program("UNRECORDED_EVENT", "a stream waits for an event that was never recorded")
def waiting_for_an_event_that_nobody_recorded(is_faulty: bool) -> None:
    torch = torch_()
    event = torch.cuda.Event()
    if not is_faulty:
        event.record()
    torch.cuda.Stream().wait_event(event)


@program("UNRECORDED_EVENT", "the host waits for an event that was never recorded")
def synchronizing_with_an_event_that_nobody_recorded(is_faulty: bool) -> None:
    torch = torch_()
    event = torch.cuda.Event()
    if not is_faulty:
        event.record()
    event.synchronize()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_faulty", [True, False], ids=["faulty", "right"])
def test_a_fault_is_reported_and_a_right_program_is_not(machine: Machine, name: str, is_faulty: bool) -> None:
    from fake_cuda.detector import Kind

    body, kind, said = PROGRAMS[name]
    body(is_faulty)
    reports = machine.detector.reports
    assert [report.kind for report in reports] == [Kind[kind]] * is_faulty, [*map(str, reports)]
    assert all(said in str(report) and f"in {name}" in str(report) for report in reports), [*map(str, reports)]


def test_a_backward_over_two_streams_is_ordered_by_autograd(machine: Machine) -> None:
    torch = torch_()
    side, weight = torch.cuda.Stream(), torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product = weight * 3
    torch.cuda.current_stream().wait_stream(side)
    product.record_stream(torch.cuda.current_stream())
    product.sum().backward()
    assert weight.grad.tolist() == [3.0] * 4
    assert not machine.detector.reports, [*map(str, machine.detector.reports)]


def test_tensors_without_elements_share_no_memory(machine: Machine) -> None:
    """torch makes these results empty first, and then gives them memory of their own."""
    torch = torch_()
    with torch.cuda.stream(torch.cuda.Stream()):
        first = torch.arange(4, device="cuda")
    second = torch.arange(4, device="cuda")
    assert not machine.detector.reports, [str(one) for one in machine.detector.reports]
    del first, second
