"""``adaptra run`` starts a job's processes each by itself: one that fails ends no other, and its end is told at once."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import lines_of
from errors_table import check_documented
from processes import free_port

from adaptra.cli import main

pytestmark = pytest.mark.processes

MEETS = """
    import os, signal, sys, time
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (rank, int(os.environ["LOCAL_RANK"])))
    sys.stdout.write(f"rank {rank} of {seen} with {sys.argv[1:]}\\n")  # with the end of the line in one write
    sys.stdout.flush()
    if "--die" in sys.argv and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(sys.argv[-1]) if "--sleep" in sys.argv else 0)
    if "--die" in sys.argv:
        dist.group.WORLD.get_group_store().set("late", "the store outlives rank 0")
        print("lives", flush=True)
        os._exit(0)
    dist.destroy_process_group()  # else gloo's thread may drop a tensor while Python ends, which aborts the process
"""

TRAINS = """
    import os, signal, sys, torch, adaptra
    from torch import nn

    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batch = torch.randn(8, 8), torch.randn(8, 8)
    pipe = adaptra.compile(
        model, stages=2, microbatches=4, example_inputs=batch, loss=nn.functional.mse_loss,
        options=adaptra.Options(emulate=adaptra.EmulatedDevice(0.01, 0.01, 0.01)),
    )
    for step in range(40):
        if step == 3 and pipe.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.step(*batch)
"""


OUTLIVES = """
    import os, signal, sys, time
    from queue import SimpleQueue
    import torch.distributed as dist
    from adaptra.runtime.survival.ends import Ends

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    told = SimpleQueue()
    ends = Ends(dist.group.WORLD.get_group_store(), lambda *end: told.put((time.time(), end)))
    dist.barrier()
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    at, end = told.get(timeout=60)
    with open(sys.argv[1]) as file:
        print(end, at - float(file.read()), flush=True)
    if "--outlive" in sys.argv:
        ends.tell_outlived([0])
        time.sleep(1)  # the store has to outlive the first host's processes
        dist.group.WORLD.get_group_store().set("late", "the store is there")
    ends.close()
    os._exit(0)
"""

ENDS_SLOWLY = """
    import signal, sys, time

    def end(*_):
        time.sleep(4)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    print("runs", flush=True)
    time.sleep(100)
"""


def script(folder: Path, text: str = MEETS) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command, with what it prints in pipes."""
    command = [sys.executable, "-m", "adaptra.cli", "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(*commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """Status, standard output and standard error of commands that run at once."""
    started = [start(*arguments) for arguments in commands]
    return [(one.wait(120), *one.communicate()) for one in started]


def test_processes_meet_and_get_the_scripts_arguments(tmp_path: Path) -> None:
    ((status, printed, _),) = done(["-n", "3", script(tmp_path), "--lr", "0.1", "-n", "7"])
    assert status == 0
    seen = [(rank, rank) for rank in range(3)]
    assert sorted(printed.splitlines()) == [f"rank {rank} of {seen} with ['--lr', '0.1', '-n', '7']" for rank in range(3)]


def test_a_process_that_dies_is_told_at_once_and_ends_no_other(tmp_path: Path) -> None:
    """It is rank 0, and the store is still there."""
    ((status, printed, told),) = done(["-n", "2", "--json", script(tmp_path), "--die", "--sleep", "1.5"])
    assert status == 128 + signal.SIGKILL
    assert "lives" in printed
    (line,) = lines_of(told)
    assert line.startswith("adaptra run: rank 0 was ended by SIGKILL after ")
    first, last = json.loads(printed.splitlines()[-1])["processes"]
    assert (first["rank"], first["code"], last["rank"], last["code"]) == (0, -signal.SIGKILL, 1, 0)
    assert last["seconds"] - first["seconds"] > 1


def seconds_until_told(printed: str) -> float:
    """From the end of rank 0 to the moment at which another one has heard of it."""
    told = printed.splitlines()[0]
    assert told.startswith("(0, 'was ended by SIGKILL') ")
    return float(told.split()[-1])


def test_the_others_are_told_of_an_end_and_it_is_no_failure_if_the_job_goes_on(tmp_path: Path) -> None:
    goes_on, ends = done(
        ["-n", "2", "--json", script(tmp_path, OUTLIVES), str(tmp_path / "first"), "--outlive"],
        ["-n", "2", script(tmp_path, OUTLIVES), str(tmp_path / "second")],
    )
    assert (goes_on[0], ends[0]) == (0, 128 + signal.SIGKILL)
    assert "rank 0 was ended by SIGKILL after " in goes_on[2]
    rows = json.loads(goes_on[1].splitlines()[-1])["processes"]
    assert [(row["rank"], row["outlived"]) for row in rows] == [(0, True), (1, False)]
    assert max(seconds_until_told(printed) for _, printed, _ in (goes_on, ends)) < 1


def test_the_store_outlives_the_first_hosts_processes(tmp_path: Path) -> None:
    """The job goes on at the other host."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 1\nlocalhost 1\n")
    common = ["--hosts", str(hosts), "--port", str(free_port())]
    training = [script(tmp_path, OUTLIVES), str(tmp_path / "time"), "--outlive"]
    ends = done(*([*common, "--host", name, *training] for name in ("127.0.0.1", "localhost")))
    assert [status for status, *_ in ends] == [0, 0]
    assert seconds_until_told(ends[1][1]) < 1


def test_processes_that_end_slowly_are_ended_side_by_side(tmp_path: Path) -> None:
    running = start("-n", "4", script(tmp_path, ENDS_SLOWLY))
    assert running.stdout is not None
    for _ in range(4):
        running.stdout.readline()
    before = time.monotonic()
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - before < 12, "one after the other would take 16 s"


def test_a_grace_ends_the_others(tmp_path: Path) -> None:
    before = time.monotonic()
    ((status, _, told),) = done(["-n", "2", "--grace", "500ms", script(tmp_path), "--die", "--sleep", "100"])
    assert status == 128 + signal.SIGKILL and time.monotonic() - before < 60
    assert "rank 1 was ended by SIGTERM" in told


def test_a_training_whose_rank_0_is_lost_ends_by_naming_it(tmp_path: Path) -> None:
    """The job's store does not end with that rank."""
    ((status, _, told),) = done(["-n", "2", script(tmp_path, TRAINS)])
    assert status == 128 + signal.SIGKILL
    assert "PeerLostError: rank 0 is lost" in told


def test_two_hosts_join_one_job(tmp_path: Path) -> None:
    """Each has a supervisor. The first has the store, and output goes to folders."""
    hosts, logs = tmp_path / "hosts", tmp_path / "logs"
    hosts.write_text("127.0.0.1 2  # the store\nlocalhost 1\n")
    common = ["--hosts", str(hosts), "--port", str(free_port()), "--logs", str(logs)]
    ends = done(*([*common, "--host", name, script(tmp_path)] for name in ("127.0.0.1", "localhost")))
    assert [status for status, *_ in ends] == [0, 0]
    seen = [(0, 0), (1, 1), (2, 0)]
    for rank in range(3):
        (log,) = (logs / f"rank-{rank}").rglob("stdout.log")
        assert log.read_text() == f"rank {rank} of {seen} with []\n"


def test_a_supervisor_that_is_ended_ends_its_processes(tmp_path: Path) -> None:
    running = start("-n", "2", script(tmp_path), "--sleep", "100")
    assert running.stdout is not None
    for _ in range(2):  # both run
        running.stdout.readline()
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 128 + signal.SIGTERM
    assert len(children) == 2 and not [child for child in children if Path(f"/proc/{child}").exists()]


def test_mistakes_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, twice, empty = (tmp_path / name for name in ("lines", "twice", "empty"))
    lines.write_text("node1 0\n")
    twice.write_text("node1 1\nnode1 2\n")
    empty.write_text("# none\n")
    own = tmp_path / "own"
    own.write_text("node1 1\nnode2 1\n")
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            "run: expected -n with the number of processes on this host, or --hosts with a file": [script(tmp_path)],
            "run: expected a script behind the options, such as adaptra run -n 4 train.py": ["-n", "2"],
            "run: … is no file: expected a Python script, or a module behind -m": ["-n", "2", "nothing.py"],
            "run: port … of the store: …: expected a free one": ["-n", "2", "--port", port, script(tmp_path)],
            "hosts …: …: expected lines such as 'node1 8', a host's name or address and the number of its processes": [
                "--hosts",
                str(tmp_path / "nothing"),
                script(tmp_path),
            ],
            "hosts …, line …: …: expected lines such as 'node1 8', a host's name or address and the number of its processes": [
                "--hosts",
                str(lines),
                script(tmp_path),
            ],
            "hosts …: no host: expected lines such as 'node1 8', a host's name or address and the number of its processes": [
                "--hosts",
                str(empty),
                script(tmp_path),
            ],
            "hosts …: … stands there twice: expected each host once": ["--hosts", str(twice), script(tmp_path)],
            "hosts: this one is …: expected one of …, or --host with its name there": ["--hosts", str(own), script(tmp_path)],
        }
        for row, arguments in cases.items():
            assert main(["run", *arguments]) == 2
            check_documented("LaunchError", capsys.readouterr().err.removeprefix("adaptra: ").removesuffix("\n"), row)
