"""Two replicas of two stages whose model changes at epochs 1, 2 and 3: bitwise plain torch. One that changes alone is named."""

from __future__ import annotations

from typing import Any

import pytest
from errors_table import check_documented
from processes import run_processes

pytestmark = pytest.mark.processes

STEPS = 2


def halved(_: Any, __: Any, output: Any) -> Any:
    return output * 0.5


def train_changing(rank: int, replicas: int) -> tuple[list[str], str]:
    import copy

    import torch
    import torch.distributed as dist
    from changed import MICROBATCHES, Loss, batch, different, model, train_replicas

    import adaptra

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ours: Any = model()
    ours[0].requires_grad_(False)
    ours[1].drop.p = 1.0
    loss, other = Loss(), Loss()
    plain: Any = copy.deepcopy(ours)
    pipe = adaptra.compile(ours, stages=2, microbatches=MICROBATCHES, example_inputs=batch(), loss=loss)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (pipe, plain)]

    def change(epoch: int, of: Any, its_loss: Loss) -> None:
        match epoch:
            case 1:
                of[0].requires_grad_(True)
            case 2:
                of[1].drop.p = 0.0
                of[3].linear.requires_grad_(False)
            case 3:
                of[2].register_forward_hook(halved)
                its_loss.beta = 0.1
            case _:
                ours.best = rank  # what no forward reads may differ between ranks

    wrong: list[str] = []
    for epoch in range(4):
        change(epoch, ours, loss)
        change(epoch, plain, other)
        if rank == 0:
            ours.best_loss = epoch
        for step in range(STEPS):
            halves = [batch(10 * epoch + step + 100 * replica) for replica in range(replicas)]
            found = pipe.step(*halves[pipe.replica])
            if not torch.equal(found, train_replicas(plain, other, halves)):
                wrong.append(f"the loss of epoch {epoch}, step {step}")
            wrong += [f"{name} at epoch {epoch}, step {step}" for name in different(pipe, plain)]
            for one in optimizers:
                one.step()
                one.zero_grad()
    if rank == 1:
        ours[1].scale = 2.0
    text = "nothing"
    try:
        pipe.step(*batch())
    except adaptra.errors.AdaptraError as error:
        text = str(error)
    pipe.close()
    return wrong, text


@pytest.mark.usefixtures("one_thread")
def test_changes_are_followed_on_all_ranks_and_a_rank_that_changes_alone_is_named() -> None:
    results = run_processes(train_changing, 4, 2)
    assert [wrong for wrong, _ in results] == [[]] * 4
    texts = [text for _, text in results]
    assert all("a step after a change of its model: 1.scale: 1.0 → 2.0" in text for text in texts[:3]), texts
    check_documented(
        "PipelineError",
        texts[1],
        "rank … called …, rank … …: expected the same changes on every rank, between the same two steps; pipe.parameters() has "
        "this rank's stages alone, so call requires_grad_ of the model's parameters",
    )
    assert "rank" in texts[3]
