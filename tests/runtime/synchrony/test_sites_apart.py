"""Sites that are at different steps: what all ranks wait for together, and the number of updates meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Example, square_loss
from processes import run_processes
from test_x_order import MICROBATCHES, MODEL, adam, bits_of, rows_of
from torch import Tensor, nn
from training import call, compiled

import adaptra
from adaptra.errors import BatchError
from adaptra.runtime.options.stage_options import Synchrony

pytestmark = [pytest.mark.processes]


def job(mode: Synchrony, example: Example = MODEL, **arguments: Any) -> Any:
    options = adaptra.Options(synchrony=mode, timeout=20.0)
    return compiled(example, rows_of(0, 0), stages=1, microbatches=MICROBATCHES, options=options, **arguments)


def train(pipe: adaptra.Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> list[int]:
    """The number of updates after each step. The last replica is late: the others have made all steps when it makes another."""
    updates: list[int] = []
    for number in steps:
        if pipe.replica == pipe.replicas - 1 and number > steps[0]:
            time.sleep(0.5)
        args, kwargs = call(rows_of(pipe.replica, number))
        pipe.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        updates.append(pipe.updates)
    return updates


def meets(_rank: int) -> list[Any]:
    found: list[Any] = []
    for mode in (adaptra.XOrder(2), adaptra.Local(1, quorum=2, grace=0.0)):
        with job(mode) as pipe:
            optimizer = adam(pipe.parameters())
            pipe.attach(optimizer)
            updates = train(pipe, optimizer, range(3))
            pipe.load_state_dict({name: one.clone() for name, one in pipe.state_dict().items()})
            found.append(bits_of(pipe.named_parameters()))
            updates += train(pipe, optimizer, range(3, 6))
            batches = [args for args, _ in (call(rows_of(pipe.replica, 6)),)]
            trial = pipe.settle_synchrony(batches, allow=[adaptra.Local(1)], rounds=3)
            assert trial is not None
            assert updates == sorted({*updates}) and pipe.updates >= updates[-1]
            found.append((trial.chosen, pipe.updates, bits_of(pipe.named_parameters())))
    return found


def test_a_replica_that_is_behind_is_waited_for_before_a_state_is_loaded_or_modes_are_tried() -> None:
    """It needs the others for its updates until it comes to the same call."""
    one, *others = run_processes(meets, 3)
    assert all(one == other for other in others)


def of_labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over rows that have a label, and their number."""
    has_label = (targets[:, :1] > -50).float()
    return (((outputs - targets) ** 2).mean(1, keepdim=True) * has_label).sum(), has_label.sum()


LABELLED = replace(MODEL, loss=of_labels)


def labels(rank: int) -> list[list[Any]]:
    """What exact updates make of batches without labels, and updates of all replicas in x-order."""
    found: list[list[Any]] = []
    for mode in ("exact", adaptra.XOrder(1, staleness=0)):
        of_mode: list[Any] = []
        with job(mode, LABELLED, reduction="weighted") as pipe:
            optimizer = adam(pipe.parameters())
            pipe.attach(optimizer)
            for number, lacking in enumerate(((), (1,), (0, 1), (0,), ())):
                (inputs,), _, targets = rows_of(rank, number)
                try:
                    of_mode.append(pipe.step(inputs, torch.full_like(targets, -100) if rank in lacking else targets).item())
                except BatchError as error:
                    of_mode.append(str(error))
                else:
                    of_mode.append([one.grad.norm().item() for one in pipe.parameters() if one.grad is not None])
                    optimizer.step()
                    optimizer.zero_grad()
                of_mode.append((pipe.updates, bits_of(pipe.named_parameters())))
        found.append(of_mode)
    return found


def test_a_replica_without_labels_is_in_an_update_and_one_without_any_changes_nothing() -> None:
    (exact, in_order), (_, other) = run_processes(labels, 2)
    assert exact == in_order == other
    refused = [index for index, one in enumerate(exact) if isinstance(one, str)]
    assert [exact[index] for index in refused] == [exact[6]] and "add up to 0" in exact[6]
    assert exact[5][1] == exact[7][1] != exact[10][1]


def numbers(loss: Tensor, parameters: Iterable[nn.Parameter]) -> list[float]:
    gradients = [one.grad.flatten() for one in parameters if one.grad is not None]
    return torch.cat([loss.detach().reshape(1), *gradients]).tolist()


def uneven(rank: int) -> list[list[float]]:
    """The loss and gradients of an update whose replicas have five rows and two, and those of a plain program of all rows."""
    (inputs,), _, targets = MODEL.rows(7, 0)
    own = slice(0, 5) if rank == 0 else slice(5, 7)
    with job(adaptra.XOrder(1, staleness=0)) as pipe:
        pipe.attach(adam(pipe.parameters()))
        found = numbers(pipe.step(inputs[own], targets[own]), pipe.parameters())
    model = MODEL.make()
    of_all = square_loss(model(inputs), targets)
    of_all.backward()
    return [found, numbers(of_all, model.parameters())]


def test_a_mean_is_over_the_rows_of_all_replicas_in_an_update() -> None:
    (found, expected), (other, _) = run_processes(uneven, 2)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert other == found


DROPS = replace(MODEL, build=lambda: nn.Sequential(MODEL.build(), nn.Dropout(0.5)))


def saved_after(rank: int) -> list[Any]:
    """What six steps make, and three with three more of a new pipeline that goes on from a checkpoint."""
    found: list[Any] = []
    for stretches in ((range(6),), (range(3), range(3, 6))):
        saved: Any = None
        last: tuple[int, dict[str, bytes]] = 0, {}
        for steps in stretches:
            with job(adaptra.XOrder(1, staleness=0), DROPS) as pipe:
                optimizer = adam(pipe.parameters())
                pipe.attach(optimizer)
                if saved is not None:
                    pipe.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                    pipe.load_outer_state_dict(saved[2])
                    assert pipe.updates == steps[0]
                for number in steps:
                    args, kwargs = call(rows_of(rank, number))
                    pipe.step(*args, **kwargs)
                    optimizer.step()
                    optimizer.zero_grad()
                pipe.exchange()
                saved = pipe.state_dict(), optimizer.state_dict(), pipe.outer_state_dict()
                last = pipe.updates, bits_of(pipe.named_parameters())
        found.append((*last, saved[2]))
    return found


def test_a_training_in_x_order_goes_on_from_a_checkpoint_with_the_same_bits() -> None:
    (whole, resumed), (_, other) = run_processes(saved_after, 2)
    assert whole == resumed == other
    assert whole[0] == 6 and whole[2] == {"steps": 6, "updates": 6}
