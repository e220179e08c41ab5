"""Training over the delegate while its paths fail every few steps: no bit changes, no message is lost or repeated."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import linked_delegate
import pytest
from delegate_model import MICROBATCHES, ROWS, example, sum_over_ranks
from linked_hosts import LinkedHosts
from processes import run_processes

import adaptra
from adaptra.runtime.transports.base import ChannelClass

Trained = tuple[list[str], dict[str, int], list[tuple[Any, ...]], int]

pytestmark = [pytest.mark.processes, pytest.mark.alone]

FAILURES, MOST_STEPS = 200, 2000
FORWARD, BACKWARD, SUMS = ChannelClass.FORWARD, ChannelClass.BACKWARD, ChannelClass.SUMS


def train_on_a_host(rank: int, folder: str) -> Trained:
    """As :func:`train_while_links_fail`, where rank 0 disturbs the network and rank 1 itself and what it sends."""
    import torch

    torch.set_num_threads(1)
    linked_delegate.HOSTS = tuple(f"10.77.{rail}.{rank + 1}" for rail in (1, 2))
    if rank == 0:
        return train_while_links_fail(rank, 2, folder, linked_delegate.NetworkDisturber)
    # What lasts until it is noticed could leave no path, together with what rank 0 does.
    return train_while_links_fail(
        rank, 2, folder, lambda transport: linked_delegate.Disturber(transport, kinds=("corruption", "stop", "reset"))
    )


def train_while_links_fail(
    rank: int, stages: int, folder: str, make_disturber: Callable[[linked_delegate.Linked], linked_delegate.Disturber]
) -> Trained:
    """What differs from c10d, how often each kind of failure happened, what each channel counted in training, and the steps."""
    import torch.distributed as dist
    from training import adam, compiled, differences, run_step, train

    linked_delegate.find_in(folder)
    dist.init_process_group("gloo")
    model = example(stages)
    batches = [model.rows(ROWS, seed + 8 * (rank // stages)) for seed in range(8)]
    given: dict[str, Any] = {
        "stages": stages,
        "microbatches": MICROBATCHES,
        "split": [str(stage) for stage in range(1, stages)],
        "options": adaptra.Options(share=False),
    }
    with compiled(model, batches[0], transport="linked", **given) as pipe:
        assert pipe._session is not None
        transport: Any = pipe._session.workers[0]._context.job
        before = by_channel(transport)
        disturber = make_disturber(transport)
        optimizer, found, made = adam(pipe.parameters()), [], 0
        while made < FAILURES:
            disturber.disturb()
            found.append(run_step(pipe, optimizer, batches[len(found) % len(batches)]))
            # All ranks stop at the same step.
            made = sum_over_ranks(sum(disturber.counts.values()))
            assert len(found) < MOST_STEPS, f"only {made} failures"
        disturber.end()
        settle(transport)
        dist.barrier()
        counted = [
            (*channel, {name: value - before.get(channel, {}).get(name, 0) for name, value in counters.items()})
            for channel, counters in by_channel(transport).items()
        ]
        dist.barrier()
    for link in transport.links:
        link.close()
    with compiled(model, batches[0], transport="c10d", **given) as pipe:
        expected = train(pipe, [batches[step % len(batches)] for step in range(len(found))])
    return differences(found, expected), disturber.counts, counted, len(found)


def by_channel(transport: linked_delegate.Linked) -> dict[tuple[int, int, int, bool], dict[str, int]]:
    return {(at, to, channel, sends): counters for at, to, channel, sends, counters in transport.statistics()}


def settle(transport: linked_delegate.Linked) -> None:
    """Wait until the last acknowledgements have come."""
    deadline = time.monotonic() + 100
    while any(sent["posted"] != sent["acknowledged"] for (*_, is_sender), sent in by_channel(transport).items() if is_sender):
        assert time.monotonic() < deadline, "messages are not acknowledged"
        os.sched_yield()


@pytest.mark.parametrize("stages", [2, 4])
def test_two_hundred_failures_change_no_bit_and_lose_or_repeat_no_message(tmp_path: Path, stages: int) -> None:
    linked_delegate.install(tmp_path)
    results = run_processes(train_while_links_fail, stages, stages, str(tmp_path), linked_delegate.Disturber)
    check(results, messages_of(stages, results[0][-1]))


def test_two_hundred_failures_change_no_bit_of_a_sum_over_replicas(tmp_path: Path) -> None:
    linked_delegate.install(tmp_path)
    results = run_processes(train_while_links_fail, 2, 1, str(tmp_path), linked_delegate.Disturber)
    steps = results[0][-1]
    # A term and a result each way, of the only bucket.
    check(results, dict.fromkeys(((0, 1, SUMS), (1, 0, SUMS)), 2 * steps))


@pytest.mark.root
def test_two_hundred_failures_between_hosts_change_no_bit_and_lose_or_repeat_no_message(
    tmp_path: Path, linked_hosts: type[LinkedHosts]
) -> None:
    linked_delegate.install(tmp_path)
    with linked_hosts(2, "all delay=500us", rails=3) as hosts:
        results = hosts.call(train_on_a_host, str(tmp_path))
        check(results, messages_of(2, results[0][-1]))


def messages_of(stages: int, steps: int) -> dict[tuple[int, int, int], int]:
    """How many messages the ranks of a pipeline send, by channel."""
    expected: dict[tuple[int, int, int], int] = dict.fromkeys(
        ((stage, stage + 1, FORWARD) for stage in range(stages - 1)), steps * MICROBATCHES
    )
    expected |= dict.fromkeys(((stage + 1, stage, BACKWARD) for stage in range(stages - 1)), steps * MICROBATCHES)
    # The last stage tells the losses of each step, and neighbours probe each other's edge.
    expected |= dict.fromkeys(((stages - 1, stage, FORWARD) for stage in range(stages - 1)), steps)
    for stage in range(stages - 1):
        for probe in ((stage, stage + 1, BACKWARD), (stage + 1, stage, FORWARD)):
            expected[probe] = expected.get(probe, 0) + steps
    return expected


def check(results: list[Any], expected: dict[tuple[int, int, int], int]) -> None:
    assert [found for found, *_ in results] == [[]] * len(results)
    made = {kind: sum(counts.get(kind, 0) for _, counts, _, _ in results) for kind in linked_delegate.KINDS}
    assert sum(made.values()) >= FAILURES and min(made.values()) >= 10, made
    sent, received = ({}, {})
    for _, _, counted, _ in results:
        for *channel, is_sender, counters in counted:
            (sent if is_sender else received)[tuple(channel)] = counters
    assert sum(counters["path_failures"] for counters in sent.values()) >= FAILURES
    assert sum(counters["corrupted"] for counters in received.values()) > 0
    for name in ("posted", "acknowledged"):
        assert {channel: counters[name] for channel, counters in sent.items() if counters[name]} == expected
    assert {channel: got["acknowledged"] for channel, got in received.items() if got["acknowledged"]} == expected
    assert all(sent[channel]["bytes"] == received[channel]["bytes"] for channel in expected)
