"""A pulled link: the links of one host fall silent in a step of a job that survives, and come back after a while."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Final, TypedDict

from linked_hosts import CONTROL, LinkedHosts, change_links

HOSTS: Final = 4
"""Two replicas of two stages, each rank on a host of its own. Host 0 has the store."""
CUT_OFF: Final = 3
STEPS, BLINK, PULL = 24, 3, 9
"""The steps of a training, and those in which the links fall silent: for a second first, and then for longer."""
OP_SECONDS: Final = 0.01


class Trained(TypedDict):
    """What one rank saw of a training.

    Attributes:
        digest: Of all losses, norms and parameters; empty if it ended by an error.
        epochs: How many there were before the last one.
        error: The class and the text of the error that ended it.
        first_ops: When the first op of each step began, in the attempt that counts.
        moments: When the links fell silent, and when they were back, both times; rank 0 knows.
        ended: When the pipeline was closed.
    """

    digest: str
    epochs: int
    error: str
    first_ops: list[float]
    moments: list[float]
    ended: float


def trainings(hosts: LinkedHosts, silence: float) -> list[tuple[Trained, ...]]:
    """Return what the ranks saw of an undisturbed training, and of one with both silences, the second in seconds."""
    return [*zip(*hosts.call(_train, silence), strict=True)]


def goes_on(ranks: Sequence[Trained], moment: float) -> float:
    """When the first op began of the first step that began after a moment."""
    return next(first for first in map(min, zip(*(one["first_ops"] for one in ranks), strict=True)) if first > moment)


def _train(rank: int, silence: float) -> list[Trained]:
    import torch
    import torch.distributed as dist

    from adaptra.runtime.transports.process_groups import job_store

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = [_trained(rank, pulls) for pulls in ({}, {BLINK: 1.0, PULL: silence})]
    # Rank 0 has the store, by which the one that was cut off learns what has become of it.
    job_store().set(f"over/{rank}", "")
    if rank == 0:
        job_store().wait([f"over/{other}" for other in range(HOSTS)])
    return trained


def _trained(rank: int, pulls: dict[int, float]) -> Trained:
    import torch
    from training import MIXED, adam, compiled

    import adaptra
    from adaptra.errors import PeerLostError

    inputs, _, targets = batch = MIXED.rows(12, seed=0)
    device = adaptra.EmulatedDevice(OP_SECONDS, OP_SECONDS, OP_SECONDS)
    seen = Trained(digest="", epochs=0, error="", first_ops=[], moments=[], ended=0.0)
    values: list[torch.Tensor] = []
    pullers: list[threading.Thread] = []
    try:
        with compiled(MIXED, batch, stages=2, microbatches=4, options=adaptra.Options(survive=True, emulate=device)) as pipe:
            optimizer = adam(pipe.parameters())
            for step in range(STEPS):
                if rank == 0 and step in pulls:
                    pullers.append(threading.Thread(target=_pull, args=(pulls[step], seen["moments"])))
                    pullers[-1].start()
                values += [pipe.step(inputs[0], targets), pipe.clip_grad_norm_(1.0)]
                seen["first_ops"].append(min(op.start for one in pipe.session.workers for op in one.monitor.kept[-1].ops))
                optimizer.step()
                optimizer.zero_grad()
            digest = hashlib.sha256()
            for tensor in (*values, *pipe.parameters()):
                digest.update(tensor.detach().numpy().tobytes())
            seen["digest"], seen["epochs"] = digest.hexdigest(), pipe.session.launched.world.epoch
    except PeerLostError as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["ended"] = time.monotonic()
    for puller in pullers:
        puller.join()
    return seen


def _pull(seconds: float, moments: list[float]) -> None:
    time.sleep(2 * OP_SECONDS)
    for change in ("down", "up"):
        for other in range(HOSTS):
            if other != CUT_OFF:
                change_links(os.environ[CONTROL], f"{CUT_OFF}-{other} {change}")
        moments.append(time.monotonic())
        if change == "down":
            time.sleep(seconds)
