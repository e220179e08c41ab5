"""Workers of a DataLoader, forked while a rank is connected: they don't keep it alive in the eyes of the others."""

import os
import signal
import subprocess
import sys

import pytest
from patience import HUNG
from processes import free_port

pytestmark = pytest.mark.processes

TRAIN = """
import multiprocessing
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader

import adaptra.errors

begun = multiprocessing.get_context("fork").Event()

class Slow:
    def __len__(self):
        return 4
    def __getitem__(self, k):
        begun.set()
        time.sleep(200)

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rows = torch.ones(8, 8)
pipe = adaptra.compile(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)),
    stages=2,
    microbatches=4,
    example_inputs=(rows, rows),
    loss=torch.nn.functional.mse_loss,
    transport=sys.argv[1],
)
for _ in range(2):
    pipe.step(rows, rows)
if os.environ["RANK"] == "0":
    loader = iter(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
    print(loader._workers[0].pid, flush=True)
    begun.wait()  # a worker that has got nothing to do yet ends with its parent
    os.kill(os.getpid(), signal.SIGKILL)
try:
    pipe.step(rows, rows)
except adaptra.errors.AdaptraError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("transport", ["c10d", "delegate"])
def test_who_waits_for_a_killed_rank_learns_of_it_while_its_worker_lives(transport: str) -> None:
    """By the end of its connections, also to the store that it had: not by its silence."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, transport],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        worker = int(ranks[0].stdout.readline())
        told = ranks[1].communicate(timeout=HUNG)[0]
        os.kill(worker, signal.SIGKILL)  # it lived
        assert "rank 0" in told or "store" in told
        assert "no sign of life" not in told
        assert "no path to" not in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
