"""Start a program on hosts of this machine that are joined by links, or change the links from inside.

    launch.py --hosts 4 [--rails 2] [--link '1-2 delay=30ms rate=100MB'] … [--output FILE] -- COMMAND …
    launch.py --change '1-2 delay=60ms'

The first form starts COMMAND once per host with RANK, WORLD_SIZE, MASTER_ADDR and the like set. So torch.distributed's
``init_process_group("gloo")`` just works. It ends with the largest exit status of the hosts. The second form is for programs on
a host. ``link_changes.py`` says what links can be like.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from linked_hosts import CONTROL, LinkedHosts, change_links, missing


def main() -> int:
    """Start the hosts, or change their links."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rails", type=int, default=1, help="networks that join the hosts")
    parser.add_argument("--link", action="append", default=[], help="what links are like from the start; may be repeated")
    parser.add_argument("--output", help="write what rank r prints to OUTPUT.r")
    parser.add_argument("--change", help="change links of the hosts on which this runs")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.change is not None:
        if CONTROL not in os.environ:
            parser.error("--change: this is no host of launch.py")
        change_links(os.environ[CONTROL], given.change)
        return 0
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("expected a command behind --")
    if (reason := missing()) is not None:
        parser.error(reason)
    with contextlib.ExitStack() as files, LinkedHosts(given.hosts, *given.link, rails=given.rails) as linked:
        if given.output is None:
            statuses = linked.launch(command)
        else:
            statuses = linked.launch(
                command, output=lambda rank: files.enter_context(Path(f"{given.output}.{rank}").open("wb"))
            )
    return max(abs(status) for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
