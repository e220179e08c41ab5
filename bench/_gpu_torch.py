"""torch.distributed.pipelining's schedules over NCCL, with the times of ops on their GPU and of messages that arrive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _gpu_gaps import Arrival, OpTimes
from _held_sends import HeldSends
from _torch_schedules import CHUNKS, stages_of
from gpt import GPT
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import get_schedule_class

from adaptra.runtime.devices.device_clock import Mark, OpClock

_POLL_SECONDS = 1e-4


class Part(nn.Module):
    """Some of a GPT's blocks, with what is before the first and behind the last."""

    def __init__(self, model: GPT, begin: int, end: int) -> None:
        super().__init__()
        self.is_first, self.is_last = begin == 0, end == len(model.blocks)
        self.blocks = model.blocks[begin:end]
        self.tokens, self.positions = (model.tokens, model.positions) if self.is_first else (None, None)
        self.norm, self.head = (model.norm, model.head) if self.is_last else (None, None)

    def forward(self, given: Tensor) -> Tensor:
        """Tokens or activations in, activations or logits out."""
        if self.tokens is not None and self.positions is not None:
            given = self.tokens(given) + self.positions
        result = self.blocks(given)
        return result if self.norm is None or self.head is None else self.head(self.norm(result))


class Watch:
    """Times of the ops and arrivals of one step, once it is asked to watch.

    Args:
        device: The GPU.
        held: Holds messages over slow links, or None.
        slow: The ranks on both sides of each of them.
    """

    def __init__(self, device: torch.device, held: HeldSends | None, slow: Sequence[Sequence[int]]) -> None:
        self.is_watching = False
        self.labels: dict[int, tuple[str, int, int]] = {}
        self._clock = OpClock(device)
        self._marks: list[tuple[int, str, int, Mark, Mark]] = []
        self._arrivals: list[Arrival] = []
        self._under_way: queue.SimpleQueue[tuple[tuple[str, int, int], Any]] = queue.SimpleQueue()
        self._held, self._slow = held, [{*link} for link in slow]
        self._device = device
        threading.Thread(target=self._poll, name="arrivals", daemon=True).start()

    def timed(self, stage: int, kind: str, microbatch: int, op: Callable[[], Any]) -> Any:
        """Run an op."""
        if not self.is_watching:
            return op()
        begin = self._clock.mark()
        result = op()
        self._marks.append((stage, kind, microbatch, begin, self._clock.mark()))
        return result

    def batch(self, p2p_ops: list[Any], *more: Any, **named: Any) -> list[Any]:
        """See torch's ``_batch_p2p``, in whose place this is."""
        is_slow = any(op.op is dist.isend and {op.peer, dist.get_rank()} in self._slow for op in p2p_ops)
        with self._held.holding() if self._held is not None and is_slow else nullcontext():
            works = _BATCH_P2P(p2p_ops, *more, **named)
        for index, op in enumerate(p2p_ops):
            if op.op is dist.irecv and (label := self.labels.pop(id(op), None)) is not None and self.is_watching:
                self._under_way.put((label, works[min(index, len(works) - 1)]))
        return works

    def read(self) -> tuple[list[OpTimes], list[Arrival]]:
        """Return the times since the last call, once all is done; stops watching."""
        torch.cuda.synchronize(self._device)
        self.is_watching = False
        while not self._under_way.empty():
            time.sleep(_POLL_SECONDS)
        times = self._clock.read([mark for each in self._marks for mark in each[3:]])
        rank = dist.get_rank()
        ops = [
            (rank, stage, kind, microbatch, times[2 * index], times[2 * index + 1])
            for index, (stage, kind, microbatch, _, _) in enumerate(self._marks)
        ]
        arrivals, self._arrivals, self._marks = self._arrivals, [], []
        return ops, arrivals

    def _poll(self) -> None:
        """Note the time at which each message is there. The host asks, as another stream that waits would be in the way."""
        torch.cuda.set_device(self._device)
        left: list[tuple[tuple[str, int, int], Any]] = []
        while True:
            while not left or not self._under_way.empty():
                left.append(self._under_way.get())
            done = [each for each in left if each[1].is_completed()]
            self._arrivals += [(*label, time.monotonic()) for label, _ in done]
            left = [each for each in left if each not in done]
            time.sleep(_POLL_SECONDS)


_BATCH_P2P: Any = schedules._batch_p2p


class WatchedStage(PipelineStage):
    """A stage that tells a watch of its ops and receives."""

    watch: Watch

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """See torch's."""
        run = super().forward_one_chunk
        return self.watch.timed(self.stage_index, "F", fwd_chunk_id, lambda: run(fwd_chunk_id, *given, **named))

    def backward_one_chunk(self, bwd_chunk_id: int, *given: Any, full_backward: bool = True, **named: Any) -> Any:
        """See torch's."""
        run = super().backward_one_chunk
        return self.watch.timed(
            self.stage_index, "B" if full_backward else "I", bwd_chunk_id,
            lambda: run(bwd_chunk_id, *given, full_backward=full_backward, **named),
        )  # fmt: skip

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """See torch's."""
        run = super().backward_weight_one_chunk
        return self.watch.timed(self.stage_index, "W", bwd_chunk_id, lambda: run(bwd_chunk_id, *given, **named))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._labelled("F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._labelled("I", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _labelled(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.watch.labels |= {id(op): (kind, self.stage_index, microbatch) for op in ops}
        return ops


class Theirs:
    """One of torch's schedules on this rank."""

    def __init__(
        self, name: str, model: GPT, loss: Callable[..., Tensor], example: Tensor, microbatches: int,
        slow: Sequence[Sequence[int]], is_held: bool,
    ) -> None:  # fmt: skip
        rank, ranks, device = dist.get_rank(), dist.get_world_size(), next(model.parameters()).device
        group: Any = dist.new_group(backend="nccl")
        # In torch the first batch of a group has to be one of all its ranks, unless something was before.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._held = HeldSends(device) if is_held else None
        self.watch = Watch(device, self._held, slow)
        patched: Any = schedules
        patched._batch_p2p = self.watch.batch
        mine, count = stages_of(name, rank, ranks), ranks * CHUNKS[name]
        blocks, width = len(model.blocks), model.positions.shape[1]
        rows = len(example) // microbatches
        activation = torch.empty(rows, example.shape[1], width, dtype=model.positions.dtype, device=device, requires_grad=True)
        logits = torch.empty(*activation.shape[:2], model.head.out_features, dtype=activation.dtype, device=device)
        stages: list[WatchedStage] = []
        for index in mine:
            part = Part(model, index * blocks // count, (index + 1) * blocks // count)
            taken = example[:rows].to(device) if part.is_first else activation
            stage = WatchedStage(
                part, index, count, device, input_args=taken, output_args=logits if part.is_last else activation, group=group
            )
            stage.watch = self.watch
            stages.append(stage)
        made: Any = get_schedule_class(name)
        self._schedule = made(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=loss)
        self._is_first, self._is_last, self._device = 0 in mine, count - 1 in mine, device
        self.optimizer = torch.optim.AdamW([each for stage in stages for each in stage.submod.parameters()], lr=1e-4)

    def face(self, delay: float) -> None:
        """Hold messages over slow links for some seconds from now on, where nothing else does."""
        if self._held is not None:
            self._held.delay = delay

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One training step."""
        given = (inputs.to(self._device),) if self._is_first else ()
        self._schedule.step(*given, target=targets.to(self._device) if self._is_last else None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def times(self, inputs: Tensor, targets: Tensor) -> tuple[list[OpTimes], list[Arrival]]:
        """The times of ops and arrivals in one more step."""
        self.watch.is_watching = True
        self.step(inputs, targets)
        return self.watch.read()

    def told(self) -> dict[str, Any]:
        """What is known of plans: nothing."""
        return {}

    def close(self) -> None:
        """End it."""
        patched: Any = schedules
        patched._batch_p2p = _BATCH_P2P
