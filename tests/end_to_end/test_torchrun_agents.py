"""Three agents of torchrun, each as on a node of its own: one is killed with its processes, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from patience import HUNG
from processes import free_port

pytestmark = pytest.mark.processes

SCRIPT = """
    import json, os, signal, sys
    from hashlib import sha256

    import torch
    from torch import nn

    import adaptra

    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))))
    pipe = adaptra.compile(
        model, stages=3, microbatches=4, replicas=2, example_inputs=(torch.randn(8, 16), torch.randn(8, 16)),
        loss=nn.functional.mse_loss, options=adaptra.Options(survive=True),
    )
    optimizer = torch.optim.AdamW(pipe.parameters())

    def die():
        agent = os.getppid()
        with open(f"/proc/{agent}/task/{agent}/children") as file:
            others = {*map(int, file.read().split())} - {os.getpid()}
        for process in (agent, *others, os.getpid()):
            os.kill(process, signal.SIGKILL)

    numbers = []
    for step in range(8):
        generator = torch.Generator().manual_seed(2 * step + pipe.replica)
        batch = (torch.randn(8, 16, generator=generator) for _ in range(2))
        if step == 4 and sys.argv[1] == os.environ["RANK"]:
            pipe.session.workers[0].monitor.op = lambda *_: die()  # within the step
        numbers += [pipe.step(*batch).item(), pipe.clip_grad_norm_(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    whole = pipe.full_state_dict()
    numbers += [sha256(whole[name].numpy().tobytes()).hexdigest() for name in sorted(whole)]
    if whole:
        print(json.dumps(numbers), flush=True)
    pipe.close()
"""


def trained(folder: Path, victim: str) -> list[object]:
    """All numbers of a training, which the first node's agent prints."""
    script, port = folder / "train.py", free_port()
    script.write_text(textwrap.dedent(SCRIPT))
    agents: list[subprocess.Popen[str]] = []
    for node in range(3):
        options = ["--nnodes=3", f"--node-rank={node}", "--nproc-per-node=2", "--max-restarts=0", "--rdzv-backend=static"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--master-addr=127.0.0.1", f"--master-port={port}"]
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        agents.append(subprocess.Popen([*command, str(script), victim], env=os.environ | {"OMP_NUM_THREADS": "1"}, **how))
    try:
        assert agents[0].stdout is not None
        line = agents[0].stdout.readline()
        assert victim == "none" or agents[2].wait(60) == -signal.SIGKILL
        return json.loads(line)
    finally:
        # Agents that are left wait minutes for the lost one before they end by themselves.
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.communicate(timeout=HUNG)


def test_a_node_that_is_lost_costs_no_number(tmp_path: Path) -> None:
    """The agent of ranks 4 and 5, one place of each replica's, is killed within a step with both of them."""
    assert trained(tmp_path, "4") == trained(tmp_path, "none")
