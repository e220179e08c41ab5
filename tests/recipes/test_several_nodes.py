"""The recipe for several nodes, on hosts of their own network namespaces, and the restarts that it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from linked_hosts import LinkedHosts
from paths import TESTS
from recipes import environment, outputs_of, run_recipe, write_recipe

pytestmark = pytest.mark.root
DYING = TESTS / "support" / "dying.py"


def on_each_host(hosts: LinkedHosts, script: str, *arguments: str, folder: Path, interface: str = "wan0") -> list[str]:
    """Run a script of the recipe on both hosts, and return what each printed."""
    started: list[subprocess.Popen[Any]] = []
    for host in range(2):
        variables = {"FIRST": hosts.address(0), "ADDRESS": hosts.address(host), "NODE": str(host), "INTERFACE": interface}
        command = ["sh", script, *arguments]
        output = subprocess.PIPE
        started.append(
            hosts.start(host, command, cwd=folder, env=environment(**variables), stdout=output, stderr=output, text=True)
        )
    return outputs_of(started)


def test_two_nodes_print_the_loss_of_one_process(linked_hosts: type[LinkedHosts], tmp_path: Path) -> None:
    write_recipe("torchrun", tmp_path)
    alone = run_recipe([sys.executable, "train.py"], tmp_path)
    with linked_hosts(2) as hosts:
        printed = on_each_host(hosts, "launch.sh", folder=tmp_path)
    assert re.fullmatch(r"rank 0: loss [\d.]+\n", alone)
    assert printed == [alone, alone.replace("rank 0", "rank 1")]


def test_two_nodes_go_on_after_a_rank_is_killed(linked_hosts: type[LinkedHosts], tmp_path: Path) -> None:
    """With the checkpoints of the other recipe, written beside training."""
    write_recipe("torchrun", tmp_path)
    write_recipe("restarts", tmp_path)
    train, saving = (tmp_path / "train.py").read_text(), (tmp_path / "asynchronous.py").read_text()
    begin, end = saving.split("# after the last step\n")
    changed = train.replace("first = 0\n", f"{begin}\nfirst = 0\n").replace("whole = ", f"{end}whole = ")
    changed = re.sub(r"checkpoints\.save\(state.*\n", "save(step + 1)\n", changed)
    assert changed.count("save(step") == 2
    undisturbed = run_recipe([sys.executable, "train.py", "alone"], tmp_path).splitlines()
    (tmp_path / "train.py").write_text(changed)
    launch = (tmp_path / "launch-c10d.sh").read_text()
    (tmp_path / "launch-c10d.sh").write_text(launch.replace(" train.py ", f" {DYING} 10 train.py "))
    with linked_hosts(2) as hosts:
        printed = on_each_host(hosts, "launch-c10d.sh", "checkpoints", folder=tmp_path)
    lines = "".join(printed).splitlines()  # torchrun decides on which node rank 0 is, in each attempt
    goes_on = len(lines) - 12
    assert goes_on in {2, 6, 10}, "the save of step 8 may have been cut short, or all of it"
    assert sorted(lines) == sorted([*undisturbed, *undisturbed[10 - goes_on : 10]])
    alone, restarted = (torch.load(tmp_path / run / "model.pt") for run in ("alone", "checkpoints"))
    assert all(torch.equal(alone[name], restarted[name]) for name in alone)
