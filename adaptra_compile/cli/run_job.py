"""The command ``run``: starts a job's processes on this host, and says how each ends."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Final

from adaptra.cli.output import as_json
from adaptra.errors import LaunchError

_PORT: Final = 29500
"""The port of the store between hosts, as torchrun's."""


def run_job(options: Namespace) -> int:
    """Run the command ``run``, and return its exit status: that of the first process that failed, of a signal, or 0.

    The end of a process that the job has gone on without is no failure.

    Raises:
        LaunchError: Wrong input.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from adaptra.runtime.launch.host_file import HostLine, own_index, read_hosts
    from adaptra.runtime.launch.supervisor import SIGNAL_BASE, ProcessEnd, Supervisor, command_of

    if (options.processes is None) == (options.hosts is None):
        raise LaunchError("run: expected -n with the number of processes on this host, or --hosts with a file")
    command = command_of(options.script, is_module=options.module)
    hosts = [HostLine("127.0.0.1", options.processes)] if options.hosts is None else read_hosts(Path(options.hosts))
    index = 0 if options.hosts is None else own_index(hosts, options.host)
    port = options.port or (0 if options.hosts is None else _PORT)
    supervisor = Supervisor(hosts, index, port, command, None if options.logs is None else Path(options.logs))

    def on_end(end: ProcessEnd) -> None:
        if end.code:
            sys.stderr.write(f"adaptra run: {end}\n")
            sys.stderr.flush()

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it knows each process as its rank 0
    try:
        ends = supervisor.run(on_end, options.grace)
    except SignalException as error:  # torch's launcher turns signals into it
        return SIGNAL_BASE + error.sigval
    outlived = supervisor.outlived
    if options.json:
        rows = [{"rank": end.rank, "code": end.code, "seconds": end.seconds, "outlived": end.rank in outlived} for end in ends]
        sys.stdout.write(as_json({"processes": rows}))
    return next((end.status for end in ends if end.code and end.rank not in outlived), 0)
