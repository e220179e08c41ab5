"""News: all processes hear each text at once, in one order, whoever dies while telling."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest
from torch.distributed import Store, TCPStore

from adaptra.errors import ControlError
from adaptra.runtime.control_store.signed_store import signed
from adaptra.runtime.survival.news import News

PATIENCE = 10.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Heard:
    """A listener, with what it has heard."""

    def __init__(self, store: Store) -> None:
        self.texts: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self.news = News(store, lambda number, text: self.texts.put((number, text)))

    def next(self, count: int) -> list[tuple[int, str]]:
        return [self.texts.get(timeout=PATIENCE) for _ in range(count)]


def test_all_hear_the_same_in_one_order_also_who_comes_late(store: TCPStore) -> None:
    heard = [Heard(store) for _ in range(3)]
    tellers = [
        threading.Thread(target=lambda one=one, name=name: [one.news.tell(f"{name}{index}") for index in range(20)])
        for one, name in zip(heard, "abc", strict=True)
    ]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join(PATIENCE)
    heard.append(Heard(store))
    first, *others = [one.next(60) for one in heard]
    assert [number for number, _ in first] == [*range(1, 61)]
    assert [text for _, text in first if text.startswith("b")] == [f"b{index}" for index in range(20)]
    assert all(other == first for other in others)
    for one in heard:
        one.news.close()


def test_a_text_that_was_told_twice_is_heard_twice(store: TCPStore) -> None:
    heard = Heard(store)
    assert [heard.news.tell("again"), heard.news.tell("again")] == [1, 2]
    assert heard.next(2) == [(1, "again"), (2, "again")]
    heard.news.close()


def test_news_come_within_milliseconds(store: TCPStore) -> None:
    """The middle of twenty: a waiting thread is woken, and asks for nothing meanwhile."""
    heard, teller = Heard(store), Heard(store)
    seconds: list[float] = []
    for index in range(20):
        began = time.monotonic()
        teller.news.tell(str(index))
        heard.next(1)
        seconds.append(time.monotonic() - began)
    assert sorted(seconds)[10] < 0.1
    heard.news.close()
    teller.news.close()


def test_who_dies_while_telling_holds_nobody_up(store: TCPStore) -> None:
    """It has written its news, and woken nobody."""
    heard, teller = Heard(store), Heard(store)
    store.compare_set("news/1", "", "its last words")
    assert teller.news.tell("later") == 2
    assert heard.next(2) == [(1, "its last words"), (2, "later")]
    heard.news.close()
    teller.news.close()


def test_a_callback_that_fails_ends_no_news(store: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    texts: SimpleQueue[str] = SimpleQueue()

    def on_news(_number: int, text: str) -> None:
        texts.put(text)
        assert text != "bad"

    news = News(store, on_news)
    news.tell("bad")
    news.tell("good")
    assert [texts.get(timeout=PATIENCE), texts.get(timeout=PATIENCE)] == ["bad", "good"]
    news.close()
    assert "news 1: the callback failed" in caplog.text


def test_close_hears_what_was_told_before_and_ends_the_thread(store: TCPStore) -> None:
    heard = [Heard(store) for _ in range(2)]
    store.compare_set("news/1", "", "nobody was woken")
    before = time.monotonic()
    for one in heard:
        one.news.close()
        one.news.close()
    assert [one.texts.get_nowait() for one in heard] == [(1, "nobody was woken")] * 2
    assert time.monotonic() - before < PATIENCE
    assert not [thread for thread in threading.enumerate() if thread.name == "adaptra news"]


def test_the_thread_ends_with_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    news = News(store, lambda _number, _text: None)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "adaptra news"]
    del store
    thread.join(PATIENCE)
    assert not thread.is_alive()
    news.close()


def test_a_strangers_news_are_refused(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ADAPTRA_SECRET", "5b1f" * 16)
    heard = Heard(signed(store, "news", ["number"]))
    heard.news.tell("true")
    assert heard.next(1) == [(1, "true")]
    store.set("news/2", "false")
    assert store.get("news/2") == b"false"  # a set has no answer, and must come before what follows
    with pytest.raises(ControlError, match="record news/news/2: no rank of this job has signed it"):
        heard.news.tell("next")
    heard.news.close()
    assert heard.texts.empty() and "no more news are heard: " in caplog.text
