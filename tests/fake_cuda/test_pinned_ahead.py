"""What the first messages of a program need is there before its first step: pinned memory, and the kernel that packs them."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_processes

SOON = 200.0
SMALL = 4096
"""Bytes of a message without large tensors, such as a loss or a probe."""


def train_over(rank: int, transport: str) -> tuple[list[tuple[int, str, str]], bool]:
    """Train, over gloo until an edge has moved to the delegate.

    Returns:
        What was pinned or packed for the first time: the step, the thread, and what it was. Also whether an edge moved.
    """
    import threading

    import torch
    from torch import nn

    import adaptra
    from adaptra.runtime.devices import pack
    from adaptra.runtime.transports.message_format import views_of
    from adaptra.runtime.transports.staging.staging import Staging

    done: list[tuple[int, str, str]] = []
    pin, step = Staging.pin, -1

    def note(what: str) -> None:
        if what not in {known for *_, known in done}:
            done.append((step, threading.current_thread().name, what))

    def noted_pin(self: Any, memory: Any) -> None:
        if len(memory) > SMALL:
            note(f"pin {memory.address}")
        pin(self, memory)

    def noted_pack(flat: Any, tensors: Any, specs: Any) -> None:
        note(f"pack {specs}")
        for view, tensor in zip(views_of(flat, specs), tensors, strict=True):
            view.copy_(tensor)

    Staging.pin = noted_pin  # type: ignore[method-assign]
    pack.why_not = lambda _: None  # type: ignore[assignment]
    pack.pack = noted_pack

    class Two(nn.Module):
        """Messages between its halves have two tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 5)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            return self.last(hidden.tanh()) + hidden.sin()[:, :5]

    torch.manual_seed(0)
    torch.cuda.set_device(rank)
    moves = transport == "c10d"
    inputs, targets = torch.randn(64, 8, device="cuda"), torch.randint(0, 5, (64,), device="cuda")
    options = adaptra.Options(
        schedule="1f1b",
        delegate=moves,
        faults=["delay 0-1 300ms @8"] if moves else [],
        emulate=adaptra.EmulatedDevice(0.004, 0.004, 0.004),
    )
    pipe = adaptra.compile(
        Two().cuda(),
        stages=2,
        microbatches=4,
        example_inputs=(inputs, targets),
        loss=nn.functional.cross_entropy,
        transport=transport,
        options=options,
    )
    after = 0
    while step < 40 and after < 3:
        step += 1
        pipe.step(inputs, targets)
        after += bool(pipe.plan.delegated) or (not moves and step >= 3)
    has_moved = bool(pipe.plan.delegated)
    pipe.close()
    return done, has_moved


@pytest.mark.timed
@pytest.mark.parametrize("transport", ["delegate", "c10d"])
def test_memory_is_pinned_and_the_kernel_compiled_before_the_step_that_needs_them(transport: str) -> None:
    for done, has_moved in run_processes(train_over, 2, transport, timeout=SOON):
        assert has_moved == (transport == "c10d")
        assert {what.split()[0] for *_, what in done} == {"pin", "pack"}
        late = [(step, thread, what) for step, thread, what in done if step >= 0 and not thread.startswith("adaptra-prepare")]
        assert not late
