"""The end of a pipeline's parts in this process."""

import gc
import weakref
from collections.abc import Generator

import pytest
import torch
from models import Batch
from training import MIXED, compiled, run_step


@pytest.fixture
def without_collector() -> Generator[None]:
    """Turn the garbage collector off, which frees cycles alone."""
    gc.disable()
    yield
    gc.enable()


def batch(rows: int) -> Batch:
    return MIXED.rows(rows, seed=rows)


def parts_of_a_closed_one(*, moves: bool) -> dict[str, weakref.ref[object]]:
    """References to a pipeline's parts, which has run steps of two shapes of batch and perhaps moved its cut."""
    with compiled(MIXED, batch(16), stages=2, microbatches=4, split=["middle.1"]) as pipe:
        gc.collect()  # what capturing the model has left, such as frames of tracebacks
        optimizer = torch.optim.AdamW(pipe.parameters())
        run_step(pipe, optimizer, batch(16))
        run_step(pipe, optimizer, batch(12))
        if moves:
            pipe.take_split(["middle.4"], optimizer)
            gc.collect()
            run_step(pipe, optimizer, batch(16))
        gc.collect()
        session = pipe._session
        assert session is not None
        parts: dict[str, object] = {
            "pipeline": pipe,
            "session": session,
            "batches": session.batches,
            "shapes": session.batches.shapes,
            "worker": session.workers[0],
            "parameter": next(iter(pipe.parameters())),
            "state": next(iter(optimizer.state.values()))["exp_avg"],
        }
        return {name: weakref.ref(one) for name, one in parts.items()}


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.usefixtures("without_collector")
def test_a_closed_and_dropped_pipeline_is_freed_at_once(moves: bool) -> None:
    parts = parts_of_a_closed_one(moves=moves)
    assert [name for name, one in parts.items() if one() is not None] == []
