"""Several devices: each thread has its own current one, and what lies on one is not used on another."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fake_cuda.machine import Machine

HERE = Path(__file__).resolve().parent


def test_threads_begin_on_device_0_and_change_their_own_alone(machine: Machine) -> None:
    import torch

    seen: list[int] = []

    def look() -> None:
        seen.append(torch.cuda.current_device())
        torch.cuda.set_device(1)
        seen.append(torch.ones(1, device="cuda").device.index)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [0, 1] and torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == 1
    with torch.cuda.stream(torch.cuda.Stream(1)):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused(machine: Machine, other: str) -> None:
    import torch

    here, there = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device=other)
    for op in (torch.add, torch.mm):
        with pytest.raises(RuntimeError, match="same device"):
            op(here, there)
    assert (here + torch.tensor(1.0)).tolist() == [[2.0] * 2] * 2, "a CPU tensor without dimensions stands for a number"
    with pytest.raises(RuntimeError, match="same device"):
        torch.ops.aten.nll_loss_backward(
            torch.tensor(1.0), here, torch.zeros(2, dtype=torch.long, device="cuda"), None, 1, -100, torch.tensor(2.0)
        )


def test_a_copy_between_devices_waits_for_both(machine: Machine) -> None:
    import torch

    ones = torch.ones(4, device="cuda:0")
    gate = machine.hold()
    doubled = ones * 2
    there = doubled.to("cuda:1", non_blocking=True)
    with torch.cuda.device(1):
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
    gate.release()
    assert there.tolist() == [2.0] * 4 and not machine.detector.reports


def test_an_event_stays_on_its_device(machine: Machine) -> None:
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(0))
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        event.record(torch.cuda.Stream(1))


WRONG = """
import sys, threading
sys.path.insert(0, {folder!r})
from fake_cuda.loading import enable
enable()
import torch
from fake_cuda.machine import the_machine

torch.cuda.set_device(1)
torch.ones(4, device="cuda").sum().item()

def help():
    if {is_right}:
        torch.cuda.set_device(1)
    {body}

thread = threading.Thread(target=help)
thread.start()
thread.join()
print(*the_machine().detector.reports, sep="\\n")
"""


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("torch.cuda.cudart().cudaHostRegister(1 << 20, 16, 0)", "cudaHostRegister on device 0"),
        ("torch.ones(4, device='cuda')", "makes a context on device 0"),
        ("exec('with torch.cuda.stream(torch.cuda.Stream(1)): pass')", "makes a context on device 0"),
    ],
    ids=["register", "allocate", "stream"],
)
def test_a_thread_that_forgets_its_device_is_reported(machine: Machine, body: str, said: str, is_right: bool) -> None:
    script = WRONG.format(folder=str(HERE), is_right=is_right, body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reported = done.stdout.strip()
    assert (reported == "") if is_right else (reported.startswith("wrong device") and said in reported)
