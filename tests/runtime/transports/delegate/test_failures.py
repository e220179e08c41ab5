"""What fails between two engines: nothing is lost, nothing comes twice, and what can't be helped is said exactly."""

import random
import time
from collections.abc import Callable

import pytest
from delegate_lab import CALM, QUICK, Pair, pattern

SIZE = 600_000
WINDOW = 6


def exchange(pair: Pair, count: int, disturb: Callable[[int], object] = lambda number: None, first: int = 0) -> None:
    """Send ``count`` messages with a few in flight; each must arrive once, in order, as it was sent."""
    pair.receiver.reserve(0, SIZE, WINDOW)
    last = first + count
    ahead = min(first + WINDOW, last)
    receives = [pair.receive(SIZE) for _ in range(first, ahead)]
    sends = [pair.send(number, SIZE) for number in range(first, ahead)]
    for number in range(first, last):
        disturb(number)
        assert pair.take(receives.pop(0)) == pattern(number, SIZE)
        if ahead < last:
            sends.append(pair.send(ahead, SIZE))
            receives.append(pair.receive(SIZE))
            ahead += 1
    for send in sends:
        assert send.wait(100) and send.error is None, send.error


def test_messages_cross_two_links_in_order() -> None:
    with Pair(timing=CALM) as pair:
        exchange(pair, 12)
        sent, received = pair.counters()
        assert sent["posted"] == sent["sent"] == sent["acknowledged"] == received["acknowledged"] == 12
        assert sent["bytes"] == received["bytes"] == 12 * SIZE
        assert sent["retries"] == sent["in_flight"] == received["corrupted"] == 0
        assert 1 <= sent["most_in_flight"] <= WINDOW
        assert sent["flight_ns"] > 0


@pytest.mark.parametrize("how", ["reset", "corrupt", "is_silent"])
def test_the_next_link_takes_over_and_the_first_comes_back(how: str) -> None:
    with Pair() as pair:

        def disturb(number: int) -> None:
            if number == first + 1 and how == "is_silent":
                pair.links[0].is_silent = True
            elif number == first + 1:
                getattr(pair.links[0], how)()

        next_number = 0
        # On a busy machine the other link may be down just then, too; messages wait for the first one to come back.
        for attempt in range(1, 6):
            first = use_first_link(pair, next_number)
            next_number = first + 20
            before = pair.counters()[0]
            exchange(pair, 20, disturb, first=first)
            sent, received = pair.counters()
            pair.links[0].is_silent = False
            assert sent["path_failures"] > before["path_failures"]
            assert received["corrupted"] == (attempt if how == "corrupt" else 0)
            assert sent["acknowledged"] == received["acknowledged"] == next_number
            if sent["path_changes"] > before["path_changes"]:
                break
        else:
            pytest.fail("the other link never took over")
        use_first_link(pair, next_number)


def use_first_link(pair: Pair, number: int) -> int:
    """Exchange messages from ``number`` on until they cross the best link, which is so once it has been up for a while.

    Beside them the other link carries signs of life: it is up as well.
    """
    deadline = time.monotonic() + 100
    beside = pair.links[1].carried
    while True:
        before = pair.links[0].carried
        exchange(pair, 1, first=number)
        number += 1
        if pair.links[0].carried - before < SIZE:
            beside = pair.links[1].carried
        elif pair.links[1].carried > beside:
            return number
        assert time.monotonic() < deadline, "messages don't return to the better link"


def test_many_failures_lose_and_repeat_nothing() -> None:
    """Every few messages a link is reset or corrupts a chunk, until more than two hundred paths in use have failed."""
    dice = random.Random(1)
    number = 0

    def disturb(number: int) -> None:
        if number % 3 == 2:
            link = pair.links[dice.randrange(2)]
            dice.choice([link.reset, link.corrupt])()

    with Pair() as pair:
        sent, received = dict[str, int](), dict[str, int]()
        # Some links are down already when they are reset.
        while sent.get("path_failures", 0) < 200:
            exchange(pair, 90, disturb, first=number)
            number += 90
            sent, received = pair.counters()
            assert number < 6000, "the links don't fail"
        assert sent["acknowledged"] == received["acknowledged"] == number
        assert sent["bytes"] == received["bytes"] == number * SIZE


def test_a_slow_link_is_not_a_silent_one() -> None:
    """The receiver sleeps until a chunk is there, here for longer than a connection may be silent, and still hears it come."""
    with Pair(1, timing={**QUICK, "silence": 1.0}) as pair:
        exchange(pair, 1)
        pair.links[0].rate = SIZE / 3.5
        started = time.monotonic()
        exchange(pair, 1, first=1)
        assert time.monotonic() - started > 3
        assert [found["path_failures"] for found in pair.counters()] == [0, 0]


def test_a_receiver_that_takes_nothing_holds_up_only_what_has_no_room() -> None:
    """Credits bound what is sent ahead; the rest waits at the sender, however long."""
    with Pair(1) as pair:
        pair.receiver.reserve(0, SIZE, 2)
        first = pair.receive(SIZE)
        sends = [pair.send(number, SIZE) for number in range(5)]
        assert pair.take(first) == pattern(0, SIZE)
        assert all(send.wait(100) for send in sends[:3])
        assert not sends[3].wait(3 * QUICK["silence"])
        for number in range(1, 5):
            assert pair.take(pair.receive(SIZE)) == pattern(number, SIZE)
        assert all(send.wait(100) and send.error is None for send in sends)


def test_without_a_path_the_error_names_each_and_its_reason() -> None:
    with Pair() as pair:
        exchange(pair, 2)
        pair.links[0].is_silent = pair.links[1].is_silent = True
        receive, send = pair.receive(SIZE), pair.send(2, SIZE)
        assert receive.wait(100) and send.wait(100)
        for error in (receive.error, send.error):
            assert (
                error is not None and "no path to rank" in error and "tcp 127.0.0.2 (" in error and "tcp 127.0.0.3 (" in error
            )
        assert receive.error is not None and "rank 0" in receive.error
        assert send.error is not None and "rank 1" in send.error


def test_a_peer_that_is_gone_is_told_from_a_path_that_is() -> None:
    with Pair() as pair:
        exchange(pair, 2)
        pair.receive(SIZE)
        for link in pair.links:
            link.vanish()
        receive = pair.receive(SIZE)
        assert receive.wait(100)
        assert receive.error is not None and receive.error.startswith("rank 0 is gone: tcp 127.0.0.2 (")


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_sender_calls_its_peer_gone_only_where_its_host_refuses_connections(is_gone: bool) -> None:
    """The paths end in the same way, as those of a process that has ended do."""
    with Pair() as pair:
        exchange(pair, 2)
        for link in [*pair.links, *(pair.doors if is_gone else [])]:
            link.vanish()
        send = pair.send(2, SIZE)
        assert send.wait(100)
        assert send.error is not None
        assert send.error.startswith("rank 1 is gone: " if is_gone else "no path to rank 1 is left: ")
        assert not pair.receiver.refusals()


def test_a_peer_that_closes_says_so() -> None:
    with Pair() as pair:
        exchange(pair, 2)
        receive = pair.receive(SIZE)
        pair.sender.close("done", 0.5)
        assert receive.wait(100)
        assert receive.error == "rank 0 closed its transport"


def test_a_message_of_another_size_shows_its_head() -> None:
    with Pair(1) as pair:
        pair.receiver.reserve(0, SIZE, 1)
        receive = pair.receive(SIZE)
        pair.send(7, 2 * SIZE)
        assert receive.wait(100)
        assert receive.other == pattern(7, 192)
        assert receive.memory is None and receive.error is None


@pytest.mark.parametrize("links", [1, 2])
def test_a_message_that_takes_longer_than_connections_last_goes_on_where_it_was_cut(links: int) -> None:
    size = 24 << 20
    with Pair(links, timing={**CALM, "lost_after": 60.0}) as pair:
        exchange(pair, 1)
        for link in pair.links:
            link.rate = 60e6
        pair.receiver.reserve(0, size, 1)
        receive, send = pair.receive(size), pair.send(1, size)
        begin = before = sum(link.carried for link in pair.links)
        resets = 0
        while not receive.wait(0.002):
            carried = sum(link.carried for link in pair.links)
            assert carried - begin < 3 * size, "it begins anew each time"
            if carried - before > size // 8:
                for link in pair.links:
                    link.reset()
                before, resets = carried, resets + 1
        assert pair.take(receive) == pattern(1, size)
        assert send.wait(100) and send.error is None
        assert resets >= 6
        assert sum(link.carried for link in pair.links) - begin < 1.3 * size
