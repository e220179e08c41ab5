"""Hosts joined by links: what is stated of a link is what programs see. No bound is one that a busy machine breaks."""

import signal
import subprocess
import sys
from pathlib import Path

import link_changes
import pytest
from link_bodies import changed_midway, how_it_sends, one_way, spread, stream, unheard
from linked_hosts import STEADY, LinkedHosts
from paths import LINKS

LAUNCH = [sys.executable, str(LINKS / "launch.py")]


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("0-1 delay=30ms rate=100MB", ["0 1 0 delay 0.03", "0 1 0 rate 100000000", "1 0 0 delay 0.03", "1 0 0 rate 100000000"]),
        ("2>0 loss=0.01", ["2 0 0 loss 0.01", "2 0 1 loss 0.01"]),
        ("all/1 down", ["0 1 1 up 0", "1 0 1 up 0"]),
        ("0-1/1 reset up", ["0 1 1 reset 1", "0 1 1 up 1", "1 0 1 reset 1", "1 0 1 up 1"]),
        ("1>0/0 delay=200us queue=16MB", ["1 0 0 delay 0.0002", "1 0 0 queue 16000000"]),
        ("0 rate=1MB", ["0 * 0 rate 1000000", "* 0 0 rate 1000000"]),
        ("1>/1 queue=1KB", ["1 * 1 queue 1000"]),
        (">1/0 queue=1KB", ["* 1 0 queue 1000"]),
    ],
)
def test_changes_are_read(text: str, commands: list[str]) -> None:
    hosts = 3 if text.startswith("2") else 2
    assert link_changes.parse(text, hosts, 1 if "rate" in text else 2) == commands


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-1", "expected links and what becomes of them"),
        ("0+1 up", "expected links, such as '0-1'"),
        ("- up", "expected links, such as '0-1'"),
        (">0> rate=1MB", "expected links, such as '0-1'"),
        ("0-1/ up", "expected links, such as '0-1'"),
        ("2 rate=1MB", "expected two of the hosts 0..1"),
        ("0 delay=1ms", "expected rate= or queue= of a port"),
        ("0-2 up", "expected two of the hosts 0..1"),
        ("1-1 up", "expected two of the hosts 0..1"),
        ("0-1/1 up", "one of the rails 0..0"),
        ("0-1 delay=30min", "expected a number with us, ms, s"),
        ("0-1 loss=1%", "expected a number$"),
        ("0-1 slow", "expected delay=, rate=, loss=, queue=, up, down or reset"),
        ("0-1 down=1", "expected delay=, rate=, loss=, queue=, up, down or reset"),
    ],
)
def test_other_changes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        link_changes.parse(text, 2, 1)


@pytest.mark.root
def test_each_direction_has_its_delay(linked_hosts: type[LinkedHosts]) -> None:
    with linked_hosts(2, "0>1 delay=400ms", "1>0 delay=5ms") as hosts:
        backward, forward = hosts.call(one_way, hosts.address(0), 5)
    assert forward >= 0.4
    assert 0.005 <= backward < 0.4


@pytest.mark.root
def test_hosts_send_as_asked_whatever_the_machine_prefers(linked_hosts: type[LinkedHosts]) -> None:
    before = how_it_sends(0)
    with linked_hosts(2) as as_it_is, linked_hosts(2, tcp=STEADY) as steady:
        assert [control for control, _ in as_it_is.call(how_it_sends)] == [before[0]] * 2
        assert steady.call(how_it_sends) == [["reno", "0"], ["reno", "0"]]
    assert how_it_sends(0) == before


@pytest.mark.root
def test_what_a_kernel_does_not_know_is_refused(linked_hosts: type[LinkedHosts]) -> None:
    with pytest.raises(OSError, match="can't be set up"):
        linked_hosts(2, tcp={"tcp_congestion_control": "none of that name"})


@pytest.mark.root
def test_a_rate_is_not_exceeded_and_nothing_is_changed_on_the_way(linked_hosts: type[LinkedHosts]) -> None:
    size = 4 << 20
    with linked_hosts(2, "0>1 rate=20MB delay=1ms") as hosts:
        _, took = hosts.call(stream, hosts.address(0), size)
    assert took >= 0.9 * size / 20e6


@pytest.mark.root
@pytest.mark.parametrize("port", ["0>", ">0"])
def test_all_links_of_a_host_share_its_port(port: str, linked_hosts: type[LinkedHosts]) -> None:
    size = 2 << 20
    with linked_hosts(3, f"{port} rate=20MB") as hosts:
        took = hosts.call(spread, hosts.address(0), size, port == ">0")
    assert max(took) >= 0.9 * 2 * size / 20e6


@pytest.mark.root
def test_what_is_lost_is_sent_again(linked_hosts: type[LinkedHosts]) -> None:
    with linked_hosts(2, "all loss=0.05") as hosts:
        _, took = hosts.call(stream, hosts.address(0), 1 << 20)
    assert took > 0


@pytest.mark.root
def test_links_change_while_a_connection_lives(linked_hosts: type[LinkedHosts]) -> None:
    changes = ["0-1 delay=60ms", "0-1 delay=0ms", "0-1 reset", "0>1 delay=30ms"]
    with linked_hosts(2) as hosts:
        found, ended = hosts.call(changed_midway, hosts.address(0), changes, hosts.control)
    before, slow, _, reset, half = found
    assert before >= 0
    assert slow >= 0.12
    assert reset == "ConnectionResetError"
    assert half >= 0.03
    assert ended == ["ConnectionResetError"]


@pytest.mark.root
def test_one_rail_goes_down_alone(linked_hosts: type[LinkedHosts]) -> None:
    with linked_hosts(2, rails=2) as hosts:
        _, heard = hosts.call(unheard, hosts.address(1, 1), hosts.control)
    assert heard == ["before", "after"]


@pytest.mark.root
def test_a_launcher_sets_ranks_and_reports_the_worst_status(needs_linked_hosts: None, tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(3 * int(os.environ['RANK']))"
    command = [*LAUNCH, "--hosts", "3", "--output", str(tmp_path / "out"), "--", sys.executable, "-c", script]
    assert subprocess.run(command, check=False).returncode == 6
    assert [(tmp_path / f"out.{rank}").read_text() for rank in range(3)] == ["0 3\n", "1 3\n", "2 3\n"]


@pytest.mark.root
def test_hosts_end_with_whoever_made_them(needs_linked_hosts: None) -> None:
    # Processes of processes, which no signal to the launcher reaches: the pipe ends with the last of them.
    line = "setsid sleep 1000 & echo started; wait"
    with subprocess.Popen([*LAUNCH, "--hosts", "2", "--", "sh", "-c", line], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        launcher.send_signal(signal.SIGKILL)
        assert launcher.stdout.read() == ""
