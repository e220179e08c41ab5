"""The parameters and optimizer state of a rank after an update, kept for replicas that have missed it until the next one.

A replica that was in an update is its source for those that were not. It may be in the midst of a step when they ask, so a
thread hands the state over. From the begin of a step to its optimizer's step nothing changes it. Between two steps the user's
loop may: it clamps weights, or swaps averaged ones in for an evaluation. No counter of changes would tell, as writes to
``parameter.data`` are not counted. A copy of each update would cost as much as the model. So who asks between two steps waits
for the next one to begin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Final

import torch
from torch import Tensor
from torch.distributed import DistError, Store

from adaptra.errors import AdaptraError, PipelineError, StateError
from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.devices.events import recorded
from adaptra.runtime.exchange.state_transfer import VALUE, Handover, check_movable, gather_state, receive, send, set_state

_ASK_SECONDS: Final = 0.005
"""Between two looks at whether a replica asks."""

_ANSWER: Final = "answer"
_HERE: Final = "here"
_LEFT: Final = "left"
_UNMOVABLE: Final = "unmovable: "
"""Begins an answer that says why the state can't be handed over."""


class ServedState:
    """One rank's state, as it is when a step begins. The thread that runs the steps uses it.

    It begins as the state before the first update.

    Args:
        parameters: The trainable parameters of this rank's stages by name.
        optimizer: Steps them.
        sites: The ranks with the same stages in other replicas.
        store: Keys of these ranks alone.
        check: Raises the error that has ended this rank's waits, if there is one.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        sites: Sites,
        store: Store,
        check: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._sites = sites
        self._store = Connection(store)
        self._check = check
        self._changed = threading.Condition()
        self._update = 0
        self._is_there = False
        self._device = next((one.device for one in parameters.values()), torch.device("cpu"))
        self._computed: torch.cuda.Event | None = None
        self._asked: list[str] = []
        self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="adaptra-served-state", daemon=True)
        self._thread.start()

    def keep(self) -> None:
        """Hand the state over from now on. It stays what it is until :meth:`change`."""
        with self._changed:
            if self._device.type == "cuda":
                self._computed = recorded(torch.cuda.current_stream(self._device))
            self._is_there = True
            self._changed.notify()

    def require_movable(self) -> None:
        """Refuse a state that can't be handed over.

        Raises:
            StateError: Names what can't move, and why.
        """
        self._movable()

    def change(self, update: int) -> None:
        """Hand nothing over until :meth:`keep`, as the state is to become that after this update.

        All replicas that lack the state until now have it.

        Raises:
            Exception: The state could not be handed over.
        """
        with self._changed:  # which the thread holds while it hands over
            for slot in self._asked:
                self._store.delete_key(slot)
                self._store.delete_key(f"{slot}/{_ANSWER}")
            self._asked, self._is_there, self._update = [], False, update
        if self._error is not None:
            raise self._error

    def take(self, source: int, update: int) -> Handover:
        """Return the state of another replica after an update, for :meth:`replace_by`. It waits until that is there.

        Raises:
            PipelineError: That replica has left.
            StateError: Its state can't move; says why.
            PeerLostError: That replica is lost.
        """
        own, slot, told = str(self._sites.index), "", ""
        for place in count():
            slot = f"{source}/{update}/{place}"
            told = self._store.compare_set(slot, "", own).decode()
            if told in (own, _LEFT):  # else another replica asks there
                break
        answer = f"{slot}/{_ANSWER}"
        while told == own and not self._store.check([answer]):
            self._check()
            time.sleep(_ASK_SECONDS)
        answered = told if told == _LEFT else self._store.get(answer).decode()
        if answered == _LEFT:
            raise PipelineError(
                f"replica {source} has left with update {update}, which replica {own} lacks: expected pipe.exchange() on all "
                "ranks before the first of them closes its pipeline"
            )
        if answered != _HERE:
            raise StateError(f"replica {source} has update {update}, which replica {own} lacks: {answered}")
        return self._sites.everyone.aside(lambda group: receive(source, group))

    def replace_by(self, taken: Handover) -> None:
        """Replace parameters and optimizer state. Parameters stay the same tensors."""
        with torch.no_grad():
            for name, own in self._parameters.items():
                own.copy_(taken.tensors[name, VALUE])
                self._optimizer.state.pop(own, None)
        set_state(self._optimizer, taken, self._parameters)

    def close(self) -> None:
        """Hand over what has been asked for, and end the thread. Who asks from now on learns that this replica has left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._store.close()

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                with self._changed:
                    if not self._is_there or not self._store.check([self._slot]):
                        self._changed.wait(_ASK_SECONDS)
                    else:
                        self._answer(int(self._store.get(self._slot)))
            while (told := self._store.compare_set(self._slot, "", _LEFT).decode()) != _LEFT:
                self._answer(int(told))
        except (AdaptraError, DistError) as error:
            self._error = error

    def _answer(self, replica: int) -> None:
        """Hand the state over to the replica that has asked for it, or tell it that it will never be there."""
        self._asked.append(self._slot)
        answer, held = _LEFT, None
        if self._is_there:
            if self._computed is not None:
                self._computed.synchronize()
            try:
                answer, held = _HERE, self._movable()
            except StateError as error:  # which the other replica is to raise, as it would wait for ever
                answer = f"{_UNMOVABLE}{error}"
        self._store.set(f"{self._asked[-1]}/{_ANSWER}", answer)
        if held is not None:
            self._sites.everyone.aside(lambda group: send(held, replica, group)())

    def _movable(self) -> Handover:
        # Another thread must not look at ``grad``: the user's loop removes it meanwhile, which ends the process.
        held = gather_state(self._parameters, self._optimizer, gradients=False)
        check_movable(held)
        return held

    @property
    def _slot(self) -> str:
        """The key at which the next replica asks."""
        return f"{self._sites.index}/{self._update}/{len(self._asked)}"
