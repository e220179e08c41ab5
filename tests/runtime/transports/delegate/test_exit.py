"""What a process that used the delegate leaves when it ends: nothing, also where nobody closed the pipeline."""

import os
import subprocess
import sys

import pytest
from commands import lines_of
from patience import HUNG
from processes import free_port

pytestmark = pytest.mark.processes

TRAIN = """
import sys
import torch
import torch.distributed as dist
import adaptra

torch.set_num_threads(1)
dist.init_process_group("gloo")
rows = torch.ones(8, 8)
pipe = adaptra.compile(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)),
    stages=2,
    microbatches=4,
    example_inputs=(rows, rows),
    loss=torch.nn.functional.mse_loss,
    transport=sys.argv[1],
    options=adaptra.Options(delegate=[(0, 1)] if sys.argv[1] == "c10d" else False),
)
for _ in range(2):
    pipe.step(rows, rows)
pipe.eval_step(rows)
if sys.argv[2] == "closed":
    pipe.close()
"""


@pytest.mark.parametrize(("transport", "how"), [("delegate", "left open"), ("c10d", "closed")])
def test_nothing_is_left_of_the_engine_when_the_interpreter_ends(transport: str, how: str) -> None:
    """A reference that outlives the interpreter is told on stderr, object by object."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, transport, how],
            env={**os.environ, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=HUNG)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [line for errors in told for line in lines_of(errors)] == []
    assert [rank.returncode for rank in ranks] == [0, 0]
