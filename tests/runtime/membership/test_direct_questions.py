"""Direct questions to processes: who is taken for busy, frozen or gone, and how few are asked."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import hmac
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from adaptra import _C
from adaptra.runtime.membership import direct_questions
from adaptra.runtime.membership.announcement import Announcement, announce, key_of_token, new_token
from adaptra.runtime.membership.direct_questions import AGAIN_SECONDS, UNKNOWN, DirectQuestions
from adaptra.runtime.membership.question import Question, Reply

HERE = "127.0.0.1"


class Desk:
    """Rank 0's questions, on a clock of the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.questions = DirectQuestions(HERE, lambda: self.now)

    def step_until(self, holds: Callable[[], bool], silent: tuple[int, ...] = ()) -> None:
        deadline = time.monotonic() + 100
        while not holds():
            assert time.monotonic() < deadline, "no answer"
            self.questions.step(silent)
            time.sleep(0.001)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.questions.close()


def reply_of(question: Question) -> Reply:
    """What comes of a question; it is closed then."""
    deadline = time.monotonic() + 100
    while (reply := question.look()) is Reply.OPEN:
        assert time.monotonic() < deadline, "no reply"
        time.sleep(0.001)
    question.close()
    return reply


def listening() -> tuple[_C.LivenessListener, Announcement]:
    token = new_token()
    made = _C.LivenessListener(HERE, key_of_token(token))
    return made, announce(HERE, made.port, token)


def refuse_descriptor(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


class PollDescriptor(ctypes.Structure):
    _fields_ = (("descriptor", ctypes.c_int), ("events", ctypes.c_short), ("found", ctypes.c_short))


def test_a_process_answers_while_its_python_does_not_run() -> None:
    """This thread holds the interpreter's lock all the time until the answer is there."""
    listener, announced = listening()
    with socket.create_connection((HERE, announced.port)) as asked:
        with_lock = ctypes.PyDLL(None)
        one = PollDescriptor(asked.fileno(), select.POLLIN, 0)
        with_lock.send(asked.fileno(), b"n" * 16, 16, 0)
        assert with_lock.poll(ctypes.byref(one), 1, 20_000) == 1
        assert asked.recv(64) == hmac.digest(announced.key, b"n" * 16, "sha256")
    listener.close()


def test_an_ended_listener_refuses_and_a_stranger_on_its_port_is_not_taken_for_it() -> None:
    listener, announced = listening()
    assert reply_of(Question(announced)) is Reply.ANSWERED
    assert reply_of(Question(dataclasses.replace(announced, token=new_token()))) is Reply.REFUSED
    listener.close()
    assert reply_of(Question(announced)) is Reply.REFUSED
    assert reply_of(Question(dataclasses.replace(announced, address="no address"))) is Reply.FAILED


def test_who_hangs_up_without_an_answer_tells_nothing() -> None:
    with socket.create_server((HERE, 0)) as server:
        question = Question(announce(HERE, server.getsockname()[1], new_token()))
        stranger, _ = server.accept()
        stranger.close()
        assert reply_of(question) is Reply.FAILED


def test_each_rank_is_asked_once_at_the_start_and_then_only_if_it_is_silent(desk: Desk) -> None:
    listener, announced = listening()
    desk.questions.know(1, announced)
    assert desk.questions.sign(1) == desk.questions.sign(2) == UNKNOWN
    desk.step_until(lambda: desk.questions.sign(1).is_reachable)
    desk.questions.step(())
    desk.now += 60
    assert not desk.questions.step(()), "it is asked again though it beats"
    assert desk.questions.sign(1).answered_at < 160.0
    desk.step_until(lambda: desk.questions.sign(1).answered_at == 160.0, silent=(1,))
    listener.close()
    desk.now += AGAIN_SECONDS
    desk.step_until(lambda: desk.questions.sign(1).is_gone, silent=(1,))
    desk.questions.step(())
    assert not desk.questions.sign(1).is_gone, "it beats again"


def test_a_process_that_accepts_and_does_not_answer_leaves_questions_unanswered(desk: Desk) -> None:
    """As the system accepts for a process that is stopped, also if that never answered anybody."""
    with socket.create_server((HERE, 0), backlog=32) as server:
        desk.questions.know(1, announce(HERE, server.getsockname()[1], new_token()))
        desk.questions.step((1,))
        counted: list[int] = []
        for _ in range(12):
            desk.step_until(lambda: desk.questions.sign(1).is_reachable, silent=(1,))
            desk.now += AGAIN_SECONDS
            counted.append(desk.questions.sign(1).unanswered)
            desk.questions.step((1,))
    assert counted == list(range(1, 13)), "also those that were given up count"
    assert desk.questions.sign(1).answered_at == 0.0
    desk.questions.step(())
    assert desk.questions.sign(1).unanswered == 0


def test_who_was_never_reached_is_never_known_to_be_gone(desk: Desk) -> None:
    """A firewall may refuse all questions: that tells nothing of the process."""
    listener, announced = listening()
    listener.close()
    desk.questions.know(1, announced)
    for _ in range(20):
        desk.questions.step(())
        desk.questions.step((1,))
        desk.now += AGAIN_SECONDS
    assert desk.questions.sign(1) == UNKNOWN
    desk.questions.know(2, dataclasses.replace(announced, address=""))
    assert not desk.questions.step((2,)) or desk.questions.sign(2) == UNKNOWN


def test_a_process_without_descriptors_blames_nobody(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, announced = listening()
    desk.questions.know(1, announced)
    desk.step_until(lambda: desk.questions.sign(1).answered_at > 0, silent=(1,))
    monkeypatch.setattr(socket, "socket", refuse_descriptor)
    for _ in range(8):
        desk.questions.step((1,))
        desk.now += AGAIN_SECONDS
    assert desk.questions.sign(1).unanswered == 0
    monkeypatch.undo()
    listener.close()


def test_what_lasts_less_than_the_questions_at_the_start_hides_no_rank(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, announced = listening()
    desk.questions.know(2, announced)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", refuse_descriptor)
        for _ in range(20):
            desk.questions.step(())
    desk.now += AGAIN_SECONDS
    desk.step_until(lambda: desk.questions.sign(2).is_reachable)
    listener.close()


def test_a_process_that_a_debugger_holds_counts_as_one_that_answers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, announced = listening()
    listener.close()
    desk.questions.know(1, announced)
    monkeypatch.setattr(direct_questions, "is_held_by_a_debugger", lambda asked: asked == announced)
    assert not desk.questions.step((1,))
    sign = desk.questions.sign(1)
    assert sign.is_reachable and sign.is_held and sign.answered_at == 100.0 and not sign.is_gone
    monkeypatch.undo()
    desk.now += AGAIN_SECONDS
    desk.questions.step((1,))
    assert not desk.questions.sign(1).is_held, "it was let go"


def test_questions_to_many_silent_ranks_take_few_descriptors(desk: Desk) -> None:
    with socket.create_server((HERE, 0), backlog=4096) as server:
        announced = announce(HERE, server.getsockname()[1], new_token())
        for rank in range(1, 400):
            desk.questions.know(rank, announced)
        for _ in range(4):
            desk.questions.step(range(1, 400))
            desk.now += AGAIN_SECONDS
        assert sum(len(peer.questions) for peer in desk.questions._peers.values()) == 128
