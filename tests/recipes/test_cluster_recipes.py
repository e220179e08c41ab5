"""The recipes for Slurm and Kubernetes: two nodes of this machine run what the job's files say, bitwise as one process."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from paths import TESTS
from recipes import RECIPES, environment, outputs_of, run_recipe, warm_environment, write_recipe

DYING = TESTS / "support" / "dying.py"

# What stands in for Slurm: a job of two nodes, which are this machine.
SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames here[0-1]" ] && printf '127.0.0.1\\n127.0.0.2\\n'
"""
SRUN = """#!/bin/bash
[[ "$1" = --kill-on-bad-exit=* ]] && shift
for node in 0 1; do SLURM_NODEID=$node SLURMD_NODENAME=127.0.0.1 "$@" & nodes+=($!); done
for node in "${nodes[@]}"; do wait "$node" || exit 1; done
"""


def free_port(first: int, last: int) -> int:
    """A port that nobody listens on."""
    for port in range(first, last):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def same_weights(folder: Path, *runs: str) -> bool:
    alone, other = (torch.load(folder / run / "model.pt") for run in runs)
    return alone.keys() == other.keys() and all(torch.equal(alone[name], other[name]) for name in alone)


def job_of_two_nodes(folder: Path) -> dict[str, str]:
    """The variables of a job of Slurm, whose commands are in this folder."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{environment()['PATH']}",
        "SLURM_JOB_ID": str(70_000 + free_port(25_000, 29_000)),
        "SLURM_JOB_NODELIST": "here[0-1]",
        "SLURM_NNODES": "2",
    }


@pytest.mark.processes
def test_a_slurm_job_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    """After a restart; and by supervisors, which survival needs, it trains to the same numbers."""
    assert "sbatch train.sbatch" in write_recipe("slurm", tmp_path).page.files["submit.sh"]
    write_recipe("restarts", tmp_path)
    undisturbed = run_recipe(["python", "train.py", "alone"], tmp_path).splitlines()
    script = (RECIPES / "train.sbatch").read_text()
    assert script.count(" train.py ") == 1
    (tmp_path / "train.sbatch").write_text(script.replace(" train.py ", f" {DYING} 6 train.py "))
    variables = job_of_two_nodes(tmp_path)
    without = run_command(["bash", "train.sbatch"], tmp_path, environment(**variables))
    assert without.returncode != 0 and "name a network interface" in without.stderr
    printed = run_recipe(["bash", "train.sbatch"], tmp_path, **variables, INTERFACE="lo").splitlines()
    assert printed == [*undisturbed[:6], *undisturbed[4:]]
    assert same_weights(tmp_path, "alone", "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "srun").write_text(
        SRUN.replace("NAME=127.0.0.1", "NAME=127.0.0.$((node + 1))")
    )  # by which hosts are told apart
    printed = run_recipe(["bash", "survive.sbatch"], tmp_path, **variables, INTERFACE="lo").splitlines()
    assert [line for line in printed if line.startswith("step")] == undisturbed
    assert same_weights(tmp_path, "alone", "checkpoints")


def test_the_slurm_script_is_a_job_of_one_torchrun_for_each_node() -> None:
    script = (RECIPES / "train.sbatch").read_text()
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--ntasks-per-node=1", "--requeue"} <= set(options)
    assert script.index("#SBATCH") < script.index("set -eu"), "Slurm reads no options behind the first command"


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="the manifest is YAML")
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    return service, job


def test_the_parts_of_the_manifest_belong_together() -> None:
    service, job = manifest()
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (service["kind"], service["spec"]["clusterIP"], service["spec"]["selector"]) == (
        "Service",
        "None",
        {"job-name": name},
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["kind"], job["spec"]["completionMode"], pod["restartPolicy"]) == ("Job", "Indexed", "OnFailure")
    nodes = job["spec"]["completions"]
    (text,) = container["args"]
    assert job["spec"]["parallelism"] == nodes and f"--nnodes={nodes} " in text
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:" in text
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounted.keys() == {one["name"] for one in pod["volumes"]}
    assert f"{mounted['scripts']}/train.py {mounted['checkpoints']}\n" in text


@pytest.mark.processes
def test_the_pods_of_the_manifest_train_as_one_process(tmp_path: Path) -> None:
    """Each pod's command in a process of this machine, with the pod's name and interface those of this machine."""
    write_recipe("kubernetes", tmp_path)
    write_recipe("restarts", tmp_path)
    undisturbed = run_recipe(["python", "train.py", "alone"], tmp_path)
    _, job = manifest()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (text,) = container["args"]
    port = free_port(21_000, 25_000)
    for given, here in {
        "train-0.train:29500": f"127.0.0.1:{port}",
        "/scripts/": "",
        "/checkpoints": "checkpoints",
    }.items():
        assert text.count(given) == 1
        text = text.replace(given, here)
    fields = {"status.podIP": "127.0.0.1"}
    variables = {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    variables["GLOO_SOCKET_IFNAME"] = "lo"
    pods: list[subprocess.Popen[str]] = []
    for index in range(job["spec"]["completions"]):
        pods.append(
            subprocess.Popen(
                [shutil.which(container["command"][0]) or "sh", *container["command"][1:], text],
                cwd=tmp_path,
                env=warm_environment(tmp_path, **variables, JOB_COMPLETION_INDEX=str(index)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    assert len(pods) == 2
    assert "".join(outputs_of(pods)) == undisturbed
    assert same_weights(tmp_path, "alone", "checkpoints")
