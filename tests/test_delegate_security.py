"""Strangers at the delegate's door: all are turned away and counted, and messages of the job don't notice."""

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time

import pytest
from delegate_lab import CALM, QUICK, SECRET, Pair, pattern

from adaptra import _C
from adaptra.runtime.transports.refusals import Refusals

SIZE = 100_000
STRANGER = "127.0.0.77"
FRAME = struct.Struct("<HBBIIIQQQI16x")


@pytest.fixture
def pair():
    with Pair(1, CALM) as made:
        made.receiver.reserve(0, SIZE, 2)
        yield made
        check_traffic(made)


def check_traffic(pair):
    """The job's own messages travel as if nobody else were there."""
    request, sent = pair.receive(SIZE), pair.send(3, SIZE)
    assert pair.take(request) == pattern(3, SIZE)
    assert sent.wait(5) and sent.error is None
    assert all(counters["path_failures"] == 0 for counters in pair.counters())


def call(pair, host=STRANGER):
    """A connection to rank 0 from an address of a stranger."""
    return socket.create_connection(pair.targets[0], timeout=5, source_address=(host, 0))


def refusals(pair, at_least=1):
    deadline = time.monotonic() + 5
    while sum(count for _, _, count in pair.sender.refusals()) < at_least:
        assert time.monotonic() < deadline, pair.sender.refusals()
        let_others_run()
    return {address: (reason, count) for address, reason, count in pair.sender.refusals()}


def let_others_run():
    """Leave the processor to the engine's thread for a moment."""
    os.sched_yield()


def is_ended(connection):
    """Whether the other side ended the connection, without having said anything more than a challenge."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            told += data
    return len(told) <= 32


def hello(path=0, source=0, destination=1, index=5, nonce=None):
    return struct.pack("<4sBBxxIIII", b"adhs", 1, 0, source, destination, path, index) + (nonce or os.urandom(32))


def prove(connection, greeting, secret=SECRET):
    """The opener's side of the handshake, with Python's own HMAC; the confirmation that came, or nothing."""
    connection.sendall(greeting)
    challenge = read(connection, 32)
    connection.sendall(hmac.digest(secret, b"opens" + greeting + challenge, hashlib.sha256))
    confirmation = read(connection, 32)
    if confirmation:
        assert confirmation == hmac.digest(secret, b"accepts" + greeting + challenge, hashlib.sha256)
    return confirmation


def read(connection, size):
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
    return data if len(data) == size else b""


def frame(kind, slot=0, generation=0, length=0, sequence=0, offset=0, total=0, checksum=0):
    header = FRAME.pack(0xAD47, 1, kind, slot, generation, length, sequence, offset, total, checksum)
    return header + struct.pack("<I", _C.crc32c(header))


def test_a_port_scanner_learns_nothing(pair):
    for _ in range(5):
        call(pair).close()
    with call(pair) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: a scanner with a long name\r\n\r\n")
        assert is_ended(connection)
    reason, count = refusals(pair, 6)[STRANGER]
    assert reason == "ended the connection before it proved anything" and count == 6


def test_a_scanner_that_comes_a_hundred_times_is_one_line_of_the_log(pair, caplog):
    log = Refusals(pair.sender, rank=0)
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
        "rank 0: turned away 127.0.0.78, once: sent bytes that are no greeting of version 1",
    ]


def test_a_scanner_that_never_rests_is_told_of_while_it_goes_on(pair, caplog):
    log = Refusals(pair.sender, rank=0)
    for number in range(15):
        call(pair).close()
        refusals(pair, number + 1)
        log.look(0.9 * number)
    (record,) = caplog.records
    assert "13 times" in record.getMessage()


def test_a_wrong_secret_is_refused(pair):
    with call(pair) as connection:
        assert prove(connection, hello(), b"x" * 32) == b""
    assert refusals(pair)[STRANGER] == ("does not know this job's secret", 1)


def test_a_job_with_another_secret_never_connects():
    with Pair(1, secret=b"x" * 32) as pair:
        pair.receiver.reserve(0, SIZE, 1)
        request = pair.receive(SIZE)
        assert request.wait(10)
        assert "no path to rank 0 is left" in request.error
        assert pair.sender.refusals()[0][1] == "does not know this job's secret"


def test_a_replayed_handshake_is_refused():
    greeting = hello()
    with Pair(1) as pair, call(pair) as first:
        first.sendall(greeting)
        challenge = read(first, 32)
        proof = hmac.digest(SECRET, b"opens" + greeting + challenge, hashlib.sha256)
        first.sendall(proof)
        assert read(first, 32)
        # What was recorded is sent again, in one go.
        with call(pair) as second:
            second.sendall(greeting + proof)
            assert is_ended(second)
        assert refusals(pair)[STRANGER] == ("does not know this job's secret", 1)


def test_a_recorded_session_is_worthless_to_the_next_engine():
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


@pytest.mark.parametrize("greeting", [hello(source=1, destination=1), hello(destination=7), hello(path=3), hello(index=16)])
def test_who_knows_the_secret_gets_only_what_this_rank_has_a_use_for(pair, greeting):
    with call(pair) as connection:
        prove(connection, greeting)
        assert is_ended(connection)
    assert "has no use for" in refusals(pair)[STRANGER][0]


def test_a_rank_that_asks_whether_another_is_there_learns_that_and_no_more(pair):
    """A source opens no paths of its own."""
    with call(pair) as connection:
        assert prove(connection, hello(source=1, destination=0))
        assert is_ended(connection)


def test_slow_callers_are_turned_away_and_hold_up_nobody(pair):
    started = time.monotonic()
    callers = [call(pair) for _ in range(150)]
    for caller in callers:
        caller.sendall(b"a")
    check_traffic(pair)
    assert all(map(is_ended, callers))
    assert time.monotonic() - started < 5 * QUICK["handshake"]
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
def test_a_frame_that_no_honest_rank_sends_ends_its_connection(name):
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


def test_a_truncated_frame_changes_nothing():
    with Pair(1) as pair:
        pair.receiver.reserve(0, SIZE, 2)
        with call(pair) as connection:
            assert prove(connection, hello())
            connection.sendall(frame(5)[:30])
        assert pair.take((pair.receive(SIZE), pair.send(2, SIZE))[0]) == pattern(2, SIZE)
