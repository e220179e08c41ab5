"""The hub of mail: every kind goes to its handler, on one thread, and requests from other threads come between."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import distributed as dist

from adaptra.runtime.control.mail.hub import KINDS, Handlers, MailHub
from adaptra.runtime.control.mail.mail import Failed, Mail, Ran, Reports, Wake


class Seen:
    """What the handlers of a hub have seen, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.has_failed = threading.Event()

    def note(self, what: str) -> Callable[[], None]:
        return lambda: self.told.append(what)

    def fail(self, error: Exception) -> None:
        self.told.append(error)
        self.has_failed.set()

    def handlers(self) -> Handlers:
        of = dict.fromkeys(KINDS, self.told.append)
        return Handlers(self.note("begin"), self.note("before"), of, self.note("after"), self.note("rejoin"), self.fail)


def test_a_kind_without_a_handler_is_found_before_any_mail_comes() -> None:
    handlers = Seen().handlers()
    assert {Failed, Wake, Ran, Reports} < handlers.of.keys()
    with pytest.raises(AssertionError, match="Failed"):
        replace(handlers, of={kind: one for kind, one in handlers.of.items() if kind is not Failed})


def test_mail_and_requests_are_handled_in_order_and_an_error_ends_the_thread() -> None:
    seen, hub = Seen(), MailHub(dist.HashStore(), 0)

    def handle_wake(wake: Wake) -> None:
        hub.run_requests()
        seen.told.append(wake)

    def refuse(mail: Failed) -> None:
        raise ValueError(mail.error)

    handlers = seen.handlers()
    mail: Mail = Failed(1, "no more")
    hub.request(seen.note("request"))
    hub.mailbox.hand(Wake())
    hub.mailbox.send(0, mail)
    while hub.mailbox._arrived.qsize() < 3:
        pass
    hub.start(replace(handlers, of={**handlers.of, Wake: handle_wake, Failed: refuse}))
    assert seen.has_failed.wait(60)
    *before, error = seen.told
    assert before == ["begin", "before", "request", Wake(), "after", "before", Wake(), "after", "before"]
    assert str(error) == "no more"
    assert hub.stop() and hub.is_closing and not hub.stop()
    hub.close(10.0)
