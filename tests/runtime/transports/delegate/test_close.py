"""An engine that is closed: sends end at once, any thread may close it again, and no wait is too long to be waited."""

import math
import threading

import pytest
from delegate_lab import CALM, Pair, pattern

SIZE = 1_000_000


@pytest.mark.parametrize("size", [100, SIZE])
def test_a_send_after_the_end_fails_at_once(size: int) -> None:
    with Pair(1, CALM) as pair:
        pair.sender.close("the test is over", 0.0)
        sent = pair.send(1, size)
        assert sent.wait(100), "nobody tells its end"
        assert sent.error == "the engine is closed"


def test_threads_may_close_it_together() -> None:
    for _ in range(20):
        with Pair(1, CALM) as pair:
            together, failed = threading.Barrier(4), []

            def close(pair: Pair = pair, together: threading.Barrier = together, failed: list[RuntimeError] = failed) -> None:
                together.wait(100)
                try:
                    pair.sender.close("the test is over", 0.0)
                except RuntimeError as error:
                    failed.append(error)

            threads = [threading.Thread(target=close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert not failed and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_a_wait_without_end_ends_with_the_message(timeout: float) -> None:
    with Pair(1, CALM) as pair:
        pair.receiver.reserve(0, SIZE, 1)
        received = pair.receive(SIZE)
        timer = threading.Timer(0.2, lambda: pair.send(1, SIZE))
        timer.start()
        assert received.wait(timeout)
        assert pair.take(received) == pattern(1, SIZE)
        timer.join()


def test_a_wait_that_is_no_number_is_refused() -> None:
    with Pair(1, CALM) as pair:
        pair.receiver.reserve(0, SIZE, 1)
        with pytest.raises(ValueError, match="got nan: expected a number of seconds"):
            pair.receive(SIZE).wait(math.nan)
