"""Five ways in which a path of RDMA fails, and training that goes on through all of them.

:func:`train_twice` and :func:`wait_in_vain` run on the hosts of the lab, all else outside of them, where cables are pulled.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import inside
import rdma_bodies
from cable import Packet, Tap, change_a_bit, change_the_key

STOP = Path("/tmp/stop")
RAILS = 3
MICROBATCHES = 2
SILENCE = 0.8
"""After which a path without a sign of life has failed; the transport's own setting."""
BETWEEN = 1
"""Steps from one failure to the next."""

Breakage = Callable[[inside.Process, int, int], contextlib.AbstractContextManager[bool]]
"""Called with a process, its host and a rail; breaks the host's path over that rail while its context lasts, if it says so."""


@contextlib.contextmanager
def _between(spoil: str, mend: str) -> Generator[bool, None, None]:
    inside.shell(spoil)
    try:
        yield True
    finally:
        inside.shell(mend)


def own_port_down(_process: inside.Process, host: int, rail: int) -> contextlib.AbstractContextManager[bool]:
    """The host's own interface is switched off: its device says so."""
    return _between(f"ip -n n{host} link set rail{rail} down", f"ip -n n{host} link set rail{rail} up")


def cable_pulled(_process: inside.Process, host: int, rail: int) -> contextlib.AbstractContextManager[bool]:
    """The switch's end of the cable is switched off."""
    return _between(f"ip link set p{host}_{rail} down", f"ip link set p{host}_{rail} up")


def all_packets_lost(_process: inside.Process, host: int, rail: int) -> contextlib.AbstractContextManager[bool]:
    """Nothing reaches the host, and nobody says so."""
    plug = f"p{host}_{rail}"
    return _between(f"tc qdisc add dev {plug} root netem loss 100%", f"tc qdisc del dev {plug} root")


@contextlib.contextmanager
def _tapped(change: Callable[[Packet], bool], host: int, rail: int) -> Generator[bool, None, None]:
    with Tap(host, rail, change) as tap:
        # A rail that carries no messages now has nothing to change.
        yield tap.has_changed.wait(0.5)


def queue_pairs_reset(_process: inside.Process, host: int, rail: int) -> contextlib.AbstractContextManager[bool]:
    """A request that the peer must refuse: the queue pairs at both its ends go to their error state."""
    return _tapped(change_the_key, host, rail)


def a_bit_changed(_process: inside.Process, host: int, rail: int) -> contextlib.AbstractContextManager[bool]:
    """One bit of a message is another when it lies in its slot."""
    return _tapped(change_a_bit, host, rail)


@contextlib.contextmanager
def process_stopped(process: inside.Process, _host: int, _rail: int) -> Generator[bool, None, None]:
    """The process gets no processor for longer than silence is borne; its devices answer all the same."""
    process.stop()
    try:
        # How long it is stopped; nothing is waited for.
        time.sleep(SILENCE + 0.3)
    finally:
        process.go_on()
    yield True


KINDS: dict[str, tuple[Breakage, ...]] = {
    "link down": (own_port_down, cable_pulled),
    "all packets lost": (all_packets_lost,),
    "reset": (queue_pairs_reset,),
    "corruption": (a_bit_changed,),
    "a receiver that stops": (process_stopped,),
}


def train_through(hosts: int, count: int, reference: str) -> dict[str, Any]:
    """Break paths of training hosts until so many have failed, one every few steps, each kind in its turn.

    Returns:
        How many paths failed by kind, and what each host found, see :func:`train_twice`.
    """
    failed = dict.fromkeys(KINDS, 0)
    with inside.on_hosts(hosts, train_twice, hosts, reference) as processes:
        for process in processes:
            process.wait_for("training", 200)
        for number in itertools.count():
            kind = min(KINDS, key=failed.__getitem__)
            host = number % hosts
            process, breakages = processes[host], KINDS[kind]
            rail, before = _rail_in_use(process, host)
            with breakages[number % len(breakages)](process, host, rail) as is_broken:
                if is_broken and process.wait_until(lambda line, before=before: _failures(line) > before, 3.0):
                    failed[kind] += 1
            if sum(failed.values()) == count:
                break
            assert number < 2 * count, f"paths don't fail: {failed}"
        STOP.touch()
        return {"failed": failed, "hosts": [process.result(200) for process in processes]}


def _rail_in_use(process: inside.Process, host: int) -> tuple[int, int]:
    """The rail that carried most of a few steps' messages of this host, and how many of its paths had failed after them."""
    before, line = _sent(host), ""
    for _ in range(BETWEEN):
        line = process.wait_until(lambda line: _failures(line) >= 0, 30.0) or ""
        assert line, "training has stopped"
    carried = [after - earlier for after, earlier in zip(_sent(host), before, strict=True)]
    return carried.index(max(carried)), _failures(line)


def _sent(host: int) -> list[int]:
    """Bytes that the host has sent by each rail."""
    return [int(Path(f"/sys/class/net/p{host}_{rail}/statistics/rx_bytes").read_text()) for rail in range(RAILS)]


def _failures(line: str) -> int:
    """What a step's line tells of failures; -1 for any other line."""
    words = line.split()
    return int(words[3]) if words[:1] == ["step"] else -1


def train_twice(host: int, hosts: int, reference: str) -> dict[str, Any]:
    """Train over the delegate until told to stop, then as many steps without it: over c10d, or in one process.

    Returns:
        What differs between the two, and the number of steps. What the devices told as events of the pipeline, and how much of
        that the monitor has. The counters of the channels that this rank sends on and of those that it receives on.
    """
    from training import MIXED, differences, train_alone

    rdma_bodies.set_up(host, hosts)
    done, found = _train(hosts, "delegate", None)
    if reference == "c10d":
        expected, _ = _train(hosts, "c10d", len(done))
    else:
        expected = train_alone(MIXED, [MIXED.rows(24, number) for number in range(len(done))], MICROBATCHES)
    return {"differences": differences(done, expected, whole=False), "steps": len(done), **found}


def _train(hosts: int, transport: str, steps: int | None) -> tuple[list[Any], dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from training import MIXED, adam, compiled, run_step

    import adaptra

    done: list[Any] = []
    options = adaptra.Options(adapt=False)
    with compiled(
        MIXED, MIXED.rows(24, 0), stages=hosts, microbatches=MICROBATCHES, options=options, transport=transport
    ) as pipe:
        optimizer = adam(pipe.parameters())
        (worker,) = pipe._require().workers
        lanes: Any = worker._context.transport
        print("training", flush=True)
        while True:
            is_over = torch.tensor(int(STOP.exists() if steps is None else len(done) == steps))
            dist.broadcast(is_over, 0)
            if is_over:
                break
            done.append(run_step(pipe, optimizer, MIXED.rows(24, len(done))))
            if steps is None:
                failures = sum(counters["path_failures"] for *_, counters in lanes.statistics())
                print(f"step {len(done)} failures {failures}", flush=True)
        if steps is not None:
            return done, {}
        links = [event.text for event in pipe.events if event.kind.value == "link"]
        monitored = len(worker.monitor.links)
    # After the end, when all that was sent is acknowledged.
    channels = lanes.statistics()
    return done, {
        "links": links,
        "monitored": monitored,
        "sent": {f"{to} {backward}": one for _, to, backward, is_sender, one in channels if is_sender},
        "received": {f"{source} {backward}": one for source, _, backward, is_sender, one in channels if not is_sender},
    }


def cut_off() -> list[list[str]]:
    """Take both paths from two hosts, one as its device tells and one in silence; the error on each, as class and text."""
    with inside.on_hosts(2, wait_in_vain, 2) as processes:
        for process in processes:
            process.wait_for("waiting", 60)
        inside.shell("ip -n n0 link set rail0 down")
        inside.shell("tc qdisc add dev p0_1 root netem loss 100%")
        return [process.result(100) for process in processes]


def wait_in_vain(host: int, hosts: int) -> list[str]:
    """Wait for a message over two ports; the error, as class and text."""
    from transport_bodies import SMALL, backward, forward

    from adaptra.runtime.transports.registry import create_transport

    rdma_bodies.set_up(host, hosts)
    transport = create_transport("delegate", addresses=[f"rdma:rxe{host}_{rail}" for rail in range(2)])
    peer, identity = 1 - host, (backward if host == 0 else forward)(0)
    transport.reserve({(peer, SMALL): 1})
    pending = transport.receive(peer, identity)
    print("waiting", flush=True)
    try:
        pending.wait(100)
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    finally:
        transport.close()
    raise AssertionError("a message came that nobody sent")
