"""What training over the delegate sees of its paths: traffic returns to the better one, and which errors end a step."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import linked_delegate
import pytest
from delegate_lab import Link
from delegate_model import MICROBATCHES, ROWS, example, sum_over_ranks
from errors_table import check_documented
from processes import run_processes

import adaptra

Failed = tuple[str, str, tuple[int, int] | None, str | None]
"""An error's class, text, edge and op."""

pytestmark = [pytest.mark.processes, pytest.mark.alone]

DOCUMENTED = {
    "not mine": "addresses: can't listen on …: …: expected numeric addresses of this rank's host",
    "another number": (
        "rank … has paths over …, rank … over …: expected as many of the same kinds, since the paths of an edge join them in "
        "order"
    ),
    "no path": "rank … is lost: edge … failed at … of step …: no path to rank … is left: …",
    "gone": "rank … is lost: edge … failed at … of step …: rank … is gone: …",
}


def compiled_over(transport: str, **options: Any) -> contextlib.AbstractContextManager[adaptra.Pipeline]:
    from training import compiled

    import adaptra

    model = example(2)
    return compiled(
        model, model.rows(ROWS, 0), stages=2, microbatches=MICROBATCHES, split=["1"], transport=transport,
        options=adaptra.Options(**options),
    )  # fmt: skip


def links_of(pipe: adaptra.Pipeline) -> list[Link]:
    assert pipe._session is not None
    transport: Any = pipe._session.workers[0]._context.transport
    return transport.links


def step(pipe: adaptra.Pipeline) -> None:
    (inputs,), _, targets = example(2).rows(ROWS, 0)
    pipe.step(inputs, targets)


def error_of(run: Callable[[], object]) -> Failed | None:
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "edge", None), getattr(error, "op", None)
    return None


def go_back(rank: int, folder: str) -> tuple[list[Any], list[str]]:
    """The better link fails once while a stranger scans the ports; bytes of each link while it had the traffic."""
    import socket

    import torch.distributed as dist

    linked_delegate.find_in(folder)
    dist.init_process_group("gloo")
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("adaptra").addHandler(handler)
    with compiled_over("linked") as pipe:
        links = links_of(pipe)
        size = ROWS // MICROBATCHES * 64 * 4
        found = []
        for preferred in (0, 1, 0):
            if preferred == 1 and rank == 0:
                links[0].vanish()
                for _ in range(100):
                    socket.create_connection(links[1].target, source_address=("127.0.0.77", 0)).close()
            deadline = time.monotonic() + 100
            carried = 0
            # Until all that a step sends takes the link that it should: on rank 0, whose links these are.
            while not sum_over_ranks(rank == 0 and carried >= MICROBATCHES * size):
                assert time.monotonic() < deadline, f"messages don't take link {preferred}: {found}"
                before = links[preferred].carried
                step(pipe)
                carried = links[preferred].carried - before
            found.append(preferred)
            if preferred == 1 and rank == 0:
                links[0].come_back()
    return found, told


def test_training_returns_to_the_better_path_and_a_scanner_is_logged_once(tmp_path: Path) -> None:
    linked_delegate.install(tmp_path)
    (found, told), (_, _) = run_processes(go_back, 2, str(tmp_path))
    assert found == [0, 1, 0]
    (line,) = [line for line in told if "127.0.0.77" in line]
    # They come all at once, so a busy engine may turn away the first for the later ones' sake.
    assert line.startswith("rank 0: turned away 127.0.0.77, 100 times: ")


def run_out_of_paths(rank: int, folder: str) -> dict[str, Failed | None]:
    """Every way in which a step or a launch fails for its paths."""
    import torch.distributed as dist

    linked_delegate.find_in(folder)
    dist.init_process_group("gloo")
    linked_delegate.TIMING = dataclasses.replace(linked_delegate.TIMING, lost_after=2.0)
    found = {
        "not mine": error_of(lambda: compiled_over("delegate", addresses=["192.0.2.1"]).__enter__()),
        "another number": error_of(lambda: compiled_over("delegate", addresses=linked_delegate.HOSTS[: 1 + rank]).__enter__()),
    }
    for how in ("no path", "gone"):
        with compiled_over("linked") as pipe:
            step(pipe)
            # A step ends with a probe, which the other rank may still be waiting for.
            sum_over_ranks(True)
            for link in links_of(pipe):
                if rank == 0 and how == "gone":
                    link.vanish()
                elif rank == 0:
                    link.is_silent = True
            found[how] = error_of(lambda pipe=pipe: [step(pipe) for _ in range(3)])
    return found


def test_only_without_a_path_a_step_fails_and_the_error_names_edge_paths_and_reasons(tmp_path: Path) -> None:
    linked_delegate.install(tmp_path)
    for found in run_processes(run_out_of_paths, 2, str(tmp_path)):
        for how, error in found.items():
            assert error is not None, how
            check_documented(error[0], error[1], DOCUMENTED[how])
        for how in ("no path", "gone"):
            _, message, edge, op = found[how]
            assert edge in {(0, 1), (1, 0)} and op is not None
            reason = "nobody answered within 1000 ms" if how == "no path" else "Connection refused"
            assert all(f"tcp {host} ({reason})" in message for host in linked_delegate.HOSTS), message
