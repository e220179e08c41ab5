"""Strangers at the delegate's door: all are turned away and counted, and messages of the job don't notice."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Generator, Iterator

import pytest
import torch.distributed as dist
from delegate_lab import CALM, QUICK, SECRET, Pair, pattern
from stranger import STRANGER, frame, hello, proof, prove, read

from adaptra import _C
from adaptra.runtime.control_store.secret import derive
from adaptra.runtime.transports.base import ChannelClass
from adaptra.runtime.transports.delegate.endpoints import share_secret
from adaptra.runtime.transports.delegate.rejected import RejectedConnections

SIZE = 100_000


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(1, CALM) as made:
        made.receiver.reserve(0, SIZE, 2)
        yield made
        check_traffic(made)


def check_traffic(pair: Pair) -> None:
    """The job's own messages travel as if nobody else were there."""
    request, sent = pair.receive(SIZE), pair.send(3, SIZE)
    assert pair.take(request) == pattern(3, SIZE)
    assert sent.wait(100) and sent.error is None
    assert all(counters["path_failures"] == 0 for counters in pair.counters())


def call(pair: Pair, host: str = STRANGER) -> socket.socket:
    """A connection to rank 0 from an address of a stranger."""
    return socket.create_connection(pair.targets[0], timeout=60, source_address=(host, 0))


def refusals(pair: Pair, at_least: int = 1) -> dict[str, tuple[str, int]]:
    deadline = time.monotonic() + 100
    while sum(count for _, _, count in pair.sender.refusals()) < at_least:
        assert time.monotonic() < deadline, pair.sender.refusals()
        let_others_run()
    return {address: (reason, count) for address, reason, count in pair.sender.refusals()}


def let_others_run() -> None:
    """Leave the processor to the engine's thread for a moment."""
    os.sched_yield()


def is_ended(connection: socket.socket) -> bool:
    """Whether the other side ended the connection, without having said anything more than a challenge."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            told += data
    return len(told) <= 32


def test_a_port_scanner_learns_nothing(pair: Pair) -> None:
    for _ in range(5):
        call(pair).close()
    with call(pair) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: a scanner with a long name\r\n\r\n")
        assert is_ended(connection)
    reason, count = refusals(pair, 6)[STRANGER]
    assert reason == "ended the connection before it proved anything" and count == 6


def test_a_scanner_that_comes_a_hundred_times_is_one_line_of_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    log = RejectedConnections(pair.sender, rank=0)
    for number in range(100):
        call(pair).close()
        refusals(pair, number + 1)
        log.look(0.01 * number)
    assert not caplog.records
    log.look(3.0)
    call(pair).close()
    refusals(pair, 101)
    for moment in (4.0, 8.0, 99.0):
        log.look(moment)
    with call(pair, "127.0.0.78") as other:
        other.sendall(b"x" * 56)
        assert is_ended(other)
    log.close()
    reason = "ended the connection before it proved anything"
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0: turned away {STRANGER}, 100 times: {reason}",
        "rank 0: turned away 127.0.0.78, once: sent bytes that are no greeting of version 3",
    ]


def test_a_scanner_that_never_rests_is_told_of_while_it_goes_on(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    log = RejectedConnections(pair.sender, rank=0)
    for number in range(15):
        call(pair).close()
        refusals(pair, number + 1)
        log.look(0.9 * number)
    (record,) = caplog.records
    assert "13 times" in record.getMessage()


def test_a_wrong_secret_is_refused(pair: Pair) -> None:
    with call(pair) as connection:
        assert prove(connection, hello(), b"x" * 32) == b""
    assert refusals(pair)[STRANGER] == ("does not know this job's secret", 1)


def test_a_job_with_another_secret_never_connects() -> None:
    with Pair(1, secret=b"x" * 32) as pair:
        pair.receiver.reserve(0, SIZE, 1)
        request = pair.receive(SIZE)
        assert request.wait(100)
        assert request.error is not None and "no path to rank 0 is left" in request.error
        assert pair.sender.refusals()[0][1] == "does not know this job's secret"


def test_a_replayed_handshake_is_refused() -> None:
    greeting = hello()
    with Pair(1) as pair, call(pair) as first:
        first.sendall(greeting)
        challenge = read(first, 32)
        proven = proof("opener", greeting, challenge)
        first.sendall(proven)
        assert read(first, 32)
        # What was recorded is sent again, in one go.
        with call(pair) as second:
            second.sendall(greeting + proven)
            assert is_ended(second)
        assert refusals(pair)[STRANGER] == ("does not know this job's secret", 1)


def test_a_recorded_session_is_worthless_to_the_next_engine() -> None:
    """All that one rank told another, handshake and messages, told again to an engine with the same secret."""
    with Pair(1, CALM) as pair:
        pair.links[0].recording = recording = bytearray()
        pair.receiver.reserve(0, SIZE, 2)
        assert pair.take((pair.receive(SIZE), pair.send(1, SIZE))[0]) == pattern(1, SIZE)
    # The greeting, the proof, and frames behind them: the session was a real one.
    assert recording[:4] == b"adhs" and len(recording) > 56 + 32 + 64
    with Pair(1, CALM) as later:
        later.receiver.reserve(0, SIZE, 2)
        with call(later) as connection:
            connection.sendall(recording)
            assert is_ended(connection)
        assert refusals(later)[STRANGER] == ("does not know this job's secret", 1)
        check_traffic(later)


@pytest.mark.parametrize(
    "greeting", [hello(destination=7, opener=7), hello(path=3), hello(index=16)], ids=["rank", "path", "index"]
)
def test_who_knows_the_secret_gets_only_what_this_rank_has_a_use_for(pair: Pair, greeting: bytes) -> None:
    with call(pair) as connection:
        prove(connection, greeting)
        assert is_ended(connection)
    assert "has no use for" in refusals(pair)[STRANGER][0]


@pytest.mark.parametrize(
    "greeting", [hello(source=1, destination=1), hello(opener=0), hello(source=7)], ids=["itself", "opener", "source"]
)
def test_a_greeting_to_another_rank_gets_no_challenge(pair: Pair, greeting: bytes) -> None:
    """A challenge is what a listener in between would pass on to have somebody's proof of it."""
    with call(pair) as connection:
        connection.sendall(greeting)
        assert not read(connection, 32)
    assert refusals(pair)[STRANGER][0].endswith(": this is rank 0")


@pytest.mark.parametrize("channel", [4, 255])
def test_a_class_that_there_is_not_gets_no_challenge(pair: Pair, channel: int) -> None:
    with call(pair) as connection:
        connection.sendall(hello(channel=channel))
        assert not read(connection, 32)
    assert refusals(pair)[STRANGER][0] == "sent bytes that are no greeting of version 3"


def test_a_rank_that_asks_whether_another_is_there_learns_that_and_no_more(pair: Pair) -> None:
    """A source opens no paths of its own."""
    with call(pair) as connection:
        assert prove(connection, hello(source=1, destination=0))
        assert is_ended(connection)


def test_slow_callers_are_turned_away_and_hold_up_nobody(pair: Pair) -> None:
    callers = [call(pair) for _ in range(150)]
    for caller in callers:
        caller.sendall(b"a")
    check_traffic(pair)
    assert all(map(is_ended, callers))
    for caller in callers:
        caller.close()
    _, count = refusals(pair, 150)[STRANGER]
    assert count == 150


BAD_FRAMES = {
    "oversized chunk": frame(1, length=1 << 21, total=1 << 22),
    "oversized head": frame(2, length=1 << 20, total=1),
    "chunk outside its message": frame(1, length=10, offset=5, total=12),
    "empty chunk": frame(1, total=12),
    "unknown kind": frame(77),
    "wrong checksum": frame(6)[:-1] + b"\0",
    "no frame": b"\xff" * 64,
    "a chunk for the source": frame(1, length=4, total=4) + b"abcd",
    "a grant of a slot out of range": frame(4, slot=1 << 20, total=4),
    "an acknowledgement of nothing": frame(5, sequence=1 << 40),
    "a frame of the source": frame(3),
    "a frame of another wire": frame(9),
    "corrupted payload": frame(2, length=4, total=9, checksum=1) + b"abcd",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_that_no_honest_rank_sends_ends_its_connection(name: str) -> None:
    """Even from someone with the secret. The rank it claims to be connects again, and nothing is lost."""
    with Pair(1) as pair:
        pair.receiver.reserve(0, SIZE, 2)
        assert pair.take((pair.receive(SIZE), pair.send(1, SIZE))[0]) == pattern(1, SIZE)
        with call(pair) as connection:
            assert prove(connection, hello())
            connection.sendall(BAD_FRAMES[name])
            while connection.recv(4096):
                pass
        assert pair.take((pair.receive(SIZE), pair.send(2, SIZE))[0]) == pattern(2, SIZE)
        assert pair.counters()[0]["path_failures"] >= 1


def test_a_truncated_frame_changes_nothing() -> None:
    with Pair(1) as pair:
        pair.receiver.reserve(0, SIZE, 2)
        with call(pair) as connection:
            assert prove(connection, hello())
            connection.sendall(frame(5)[:30])
        assert pair.take((pair.receive(SIZE), pair.send(2, SIZE))[0]) == pattern(2, SIZE)


@contextlib.contextmanager
def where_rank_0_listened() -> Generator[tuple[socket.socket, bytes, _C.Engine, tuple[str, int]], None, None]:
    """Let rank 1 open its connections to a listener without the secret.

    Yields:
        The connection, rank 1's greeting, the engine, and the address where rank 1 listens.
    """
    engine = _C.Engine(1, 3, SECRET, **CALM)
    with socket.create_server(("127.0.0.2", 0)) as listener:
        listener.settimeout(10)
        door = ("127.0.0.2", engine.add_tcp_path("127.0.0.2"))
        engine.set_peer(0, [listener.getsockname()])
        engine.start()
        try:
            engine.reserve(0, SIZE, 1)
            receive = engine.receive(0, ChannelClass.FORWARD, SIZE)
            deceived, _ = listener.accept()
            with deceived:
                deceived.settimeout(10)
                yield deceived, read(deceived, 56), engine, door
            assert not receive.done or receive.error is not None
        finally:
            engine.close("the test is over", 0.0)


def is_believed(connection: socket.socket) -> bool:
    """Whether the other side says more than a handshake has: it then takes this one for a rank of its job."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        return bool(connection.recv(1))
    return False


def pass_on(deceived: socket.socket, greeting: bytes, door: tuple[str, int]) -> None:
    """Have whoever listens at ``door`` make the confirmation that the deceived rank waits for."""
    with socket.create_connection(door, timeout=10) as other:
        other.sendall(greeting)
        challenge = read(other, 32)
        if not challenge:
            return
        deceived.sendall(challenge)
        other.sendall(read(deceived, 32))
        deceived.sendall(read(other, 32))
        assert not is_believed(deceived)


def test_a_rank_does_not_prove_itself_to_itself() -> None:
    """What stands where rank 0 stood connects rank 1 with rank 1: each side would take the other for rank 0."""
    with where_rank_0_listened() as (deceived, greeting, engine, door):
        pass_on(deceived, greeting, door)
        ((_, reason, _),) = engine.refusals()
        assert reason == "greeted rank 0 as rank 1: this is rank 1"


def test_a_rank_does_not_answer_its_own_nonce() -> None:
    """Turned round, the greeting is one that rank 1 expects, but for its nonce."""
    with where_rank_0_listened() as (deceived, greeting, engine, door):
        turned = bytearray(greeting)
        turned[6] ^= 1
        pass_on(deceived, bytes(turned), door)
        ((_, reason, _),) = engine.refusals()
        assert reason == "sent this rank's own nonce back"


def test_the_challenge_is_not_the_nonce_that_was_told() -> None:
    with where_rank_0_listened() as (deceived, greeting, _, _):
        deceived.sendall(greeting[24:])
        assert not read(deceived, 32)


def test_a_proof_is_worth_nothing_to_who_sends_it_back() -> None:
    with where_rank_0_listened() as (deceived, _, _, _):
        deceived.sendall(os.urandom(32))
        proven = read(deceived, 32)
        assert proven
        deceived.sendall(proven)
        assert not is_believed(deceived)


def test_no_third_rank_proves_that_it_is_another() -> None:
    """A true rank of the job, 2, is asked for what would make the listener rank 0."""
    third = _C.Engine(2, 3, SECRET, **CALM)
    door = ("127.0.0.3", third.add_tcp_path("127.0.0.3"))
    third.start()
    try:
        with where_rank_0_listened() as (deceived, greeting, _, _):
            pass_on(deceived, greeting, door)
        ((_, reason, _),) = third.refusals()
        assert reason == "greeted rank 0 as rank 1: this is rank 2"
    finally:
        third.close("the test is over", 0.0)


def test_one_secret_of_two_sessions_joins_nobody() -> None:
    """A secret that is given from outside may serve many engines; their sessions tell them apart."""
    first, second = (_C.Engine(rank, 2, SECRET, **QUICK, session=bytes([rank])) for rank in range(2))
    ports = [engine.add_tcp_path("127.0.0.2") for engine in (first, second)]
    first.set_peer(1, [("127.0.0.2", ports[1])])
    second.set_peer(0, [("127.0.0.2", ports[0])])
    try:
        first.start()
        second.start()
        second.reserve(0, SIZE, 1)
        request = second.receive(0, False, SIZE)
        assert request.wait(100) and request.error is not None and "no path to rank 0 is left" in request.error
        assert first.refusals()[0][1] == "does not know this job's secret"
    finally:
        first.close("the test is over", 0.0)
        second.close("the test is over", 0.0)


def test_who_has_read_the_whole_store_does_not_know_a_secret_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is derived of it: not the salt itself, nor any key that he can derive without the secret."""
    monkeypatch.setenv("ADAPTRA_SECRET", "5b1f" * 16)
    store = dist.HashStore()
    engine = _C.Engine(0, 2, share_secret(store, 0), **CALM)
    door = ("127.0.0.2", engine.add_tcp_path("127.0.0.2"))
    engine.set_peer(1, [("127.0.0.9", 1)])
    salt = bytes.fromhex(json.loads(store.get("secret"))["value"])
    guesses = [salt, *(derive(known, "data links", salt) for known in (b"", salt, bytes(32), b"ADAPTRA_SECRET"))]
    try:
        engine.start()
        for guess in guesses:
            with socket.create_connection(door, timeout=5, source_address=(STRANGER, 0)) as connection:
                assert prove(connection, hello(), guess) == b""
        deadline = time.monotonic() + 100
        while sum(count for _, _, count in engine.refusals()) < len(guesses):
            assert time.monotonic() < deadline, engine.refusals()
            let_others_run()
        assert {reason for _, reason, _ in engine.refusals()} == {"does not know this job's secret"}
        # Whoever was given the secret gets in.
        with socket.create_connection(door, timeout=5, source_address=(STRANGER, 0)) as connection:
            assert prove(connection, hello(), derive(b"5b1f" * 16, "data links", salt)) != b""
    finally:
        engine.close("the test is over", 0.0)


def test_a_flood_from_one_address_takes_no_place_of_another() -> None:
    # The honest one has a minute, so that a busy machine can take its time with the flood.
    with Pair(1, {**CALM, "handshake": 60.0}) as pair, call(pair, "127.0.0.78") as honest:
        pair.receiver.reserve(0, SIZE, 2)
        greeting = hello(path=3)
        honest.sendall(greeting)
        challenge = read(honest, 32)
        callers = [call(pair) for _ in range(150)]
        refusals(pair, 80)
        honest.sendall(proof("opener", greeting, challenge))
        assert read(honest, 32) == proof("acceptor", greeting, challenge)
        for caller in callers:
            caller.close()
        check_traffic(pair)
