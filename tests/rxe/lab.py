"""A laboratory with real RDMA on a machine that has none: hosts with soft-RoCE devices under a throw-away kernel.

The kernel is User-mode Linux, an ordinary process: it boots within two seconds, sees this machine's files, and programs run in
it at native speed. It has the verbs that this machine's kernel lacks, and every cable can be pulled or disturbed. See
``hosts.sh`` for the topology and ``build_kernel.sh`` for the kernel.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHED_KERNEL = Path.home() / ".cache" / "adaptra" / "lab-linux"
"""Where ``build_kernel.sh`` leaves what it built."""

TOOLS = ("ip", "rdma", "tc", "ibv_devices")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended in the lab: its exit status, and all it wrote."""

    status: int
    output: str


def missing(kernel: Path | None) -> str | None:
    """Why there can be no lab here, or None."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.defpath}:/usr/sbin:/sbin") is None]
    if absent:
        return f"{', '.join(absent)}: not installed (Debian packages iproute2, ibverbs-utils)"
    if kernel is None or not os.access(kernel, os.X_OK):
        where = kernel or CACHED_KERNEL
        return f"no kernel with soft-RoCE at {where}: tests/rxe/build_kernel.sh builds one, --lab-kernel names one"
    return None


def run(
    kernel: Path, command: Sequence[str], folder: Path, *, hosts: int = 2, rails: int = 2, timeout: float = 500.0
) -> Finished:
    """Boot a lab, run a command in it as root, outside of all hosts, and end the lab.

    Args:
        kernel: The kernel's file.
        command: A program and its arguments.
        folder: The working directory; like all files, it can be read but not changed.
        hosts: How many hosts.
        rails: How many RDMA devices each host has.
        timeout: Seconds for all of it.

    Raises:
        AssertionError: The lab did not come up, or the time was not enough; shows what was written until then.
    """
    with tempfile.TemporaryDirectory(prefix="lab.") as name:
        exchange = Path(name)
        shutil.copy(HERE / "hosts.sh", exchange)
        payload = f"export PYTHONDONTWRITEBYTECODE=1\ncd {shlex.quote(str(folder))} && exec {shlex.join(command)}\n"
        (exchange / "payload").write_text(payload)
        with (exchange / "console").open("wb") as console:
            process = subprocess.Popen(
                [
                    kernel.resolve(), "mem=3G", "ncpus=1", "seccomp=on", f"umid={exchange.name}", f"uml_dir={exchange}/",
                    "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={HERE / 'init.sh'}", "panic=-1",
                    "con=null", "con0=null,fd:1", f"lab_exchange={exchange}", f"lab_hosts={hosts}", f"lab_rails={rails}",
                ],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
            guard = _guard(process, exchange)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
                guard.communicate(b"ended\n")
        status = _read(exchange / "status")
        output = _read(exchange / "output")
        if not status:
            told = "\n".join(_read(exchange / part)[-2000:] for part in ("console", "hosts.log"))
            raise AssertionError(f"the lab did not end by itself within {timeout} s\n{output}\n{told}")
        if not (exchange / "output").exists():
            raise AssertionError(f"the lab's hosts did not come up: {_read(exchange / 'hosts.log')}")
        return Finished(int(status), output)


def _guard(process: subprocess.Popen[bytes], exchange: Path) -> subprocess.Popen[bytes]:
    """A process that ends the kernel, should this one be killed before it can: then the pipe between them breaks."""
    script = 'read -r _ || { kill -9 "-$0"; rm -rf "$1"; }'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, str(process.pid), exchange], stdin=subprocess.PIPE, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the kernel with all its processes, which are processes of this machine in a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
