"""The state of a rank beside its optimizer: which update it is after, and whether the user's loop has made the last one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.utils.hooks import RemovableHandle

from adaptra.errors import PipelineError
from adaptra.runtime.control_store.signed_store import under
from adaptra.runtime.control_store.stores import Connection
from adaptra.runtime.data_parallel.sites import Sites
from adaptra.runtime.exchange.optimizer_settings import settings_of
from adaptra.runtime.exchange.state_transfer import Handover, require_all_stepped
from adaptra.runtime.synchrony.served_state import ServedState
from adaptra.runtime.synchrony.update_reports import Update


class UpdatedState:
    """One rank's parameters and their optimizer, which makes each update once. The thread that runs the steps uses it.

    Args:
        parameters: The trainable parameters of this rank's stages by name.
        sites: The ranks with the same stages in other replicas.
        store: Keys of these ranks alone.
    """

    def __init__(self, parameters: Mapping[str, Tensor], sites: Sites, store: Store) -> None:
        self._parameters = parameters
        self._sites = sites
        self._store = store
        self._settings = Connection(store)
        self._check: Callable[[], None] | None = None
        self._rounds = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[RemovableHandle] = []
        self._served: ServedState | None = None
        self._due: Update | None = None
        self._compared = 0
        self._last = 0  # the number of the last update, which may be due

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the steps of an optimizer, in place of the one before.

        Raises:
            StateError: It lacks parameters. Replicas would differ in these, if another optimizer steps them.
            PipelineError: Another one has made updates.
        """
        if optimizer is self._optimizer:
            return
        require_all_stepped("attach", self._parameters, optimizer)
        if self._last:
            raise PipelineError(
                "attach: another optimizer has made updates, and replicas are at different ones: expected one optimizer for "
                "all, or pipe.load_state_dict() on all ranks before"
            )
        self._remove_hooks()
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._begin()

    def restart(self, check: Callable[[], None]) -> None:
        """Begin again at update 1."""
        self._rounds += 1
        self._check, self._due, self._last, self._compared = check, None, 0, 0
        self._begin()

    def require_step(self, call: str) -> None:
        """Refuse a call before the optimizer has made the last update. Replicas that lack the state are given it from now on.

        Raises:
            PipelineError: It has not, or there is none.
        """
        if self._optimizer is None:
            raise PipelineError(f"{call}: no optimizer: expected pipe.attach(optimizer) before the first step")
        if self._due is not None:
            raise PipelineError(
                f"{call}: the optimizer has not made update {self._due.number}: expected one optimizer.step() after each "
                "pipe.step(), as other replicas make it"
            )
        self.hand_over()

    def hand_over(self) -> None:
        """Give the state to replicas that lack it from now on, unless the optimizer is to make an update before."""
        if self._served is not None and self._due is None:
            self._served.keep()

    def take(self, source: int, update: int) -> Handover:
        """Return the state of another replica after an update; raises as :meth:`.served_state.ServedState.take`."""
        assert self._served is not None, "an optimizer is attached"
        return self._served.take(source, update)

    def expect(self, update: Update, taken: Handover | None) -> None:
        """Begin the change to the state after an update, from that of another replica if one was taken."""
        assert self._served is not None, "an optimizer is attached"
        self._served.change(update.number)
        if taken is not None:
            self._served.replace_by(taken)
        self._due, self._last = update, update.number

    def keep(self) -> None:
        """Record that the update is made. The user's loop may change the state until :meth:`require_step`."""
        self._due = None

    def close(self) -> None:
        """Follow no more steps. The optimizer can be used without the pipeline then."""
        self._remove_hooks()
        if self._served is not None:
            self._served.close()
        self._settings.close()

    def _begin(self) -> None:
        if self._optimizer is None or self._check is None:
            return
        if self._served is not None:
            self._served.close()
        store = under(f"round {self._rounds}", self._store)
        self._served = ServedState(self._parameters, self._optimizer, self._sites, store, self._check)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compare the optimizer's settings with those of the other replicas in the update.

        Raises:
            PipelineError: They differ, or there is no update to make.
        """
        update = self._due
        if update is None:
            raise PipelineError(
                "optimizer.step(): there is no update to make: expected one after each pipe.step(), as other replicas make it"
            )
        if self._compared == update.number:  # torch calls hooks of a step that calls that of its base class for both
            return
        settings, self._compared = json.dumps(settings_of(optimizer)), update.number
        key = f"settings/{self._rounds}/{update.number}"
        others = self._settings.compare_set(key, "", settings).decode()
        if others != settings:
            own, other = json.loads(settings), json.loads(others)
            differing = (
                f"group {index}: {name}={one.get(name)} here, {two.get(name)} there"
                for index, (one, two) in enumerate(zip(own, other, strict=False))
                for name in one | two
                if one.get(name) != two.get(name)
            )
            differ = next(differing, f"{len(own)} groups here, {len(other)} there")
            raise PipelineError(
                f"optimizer.step(): update {update.number} has other settings on another replica: {differ}: expected the same "
                "on all; what follows a schedule follows pipe.updates, which is the same on all"
            )
        if self._settings.add(f"{key}/seen", 1) == len(update.ballot.votes):
            self._settings.delete_key(key)
            self._settings.delete_key(f"{key}/seen")

    def _after_step(self, *_: Any) -> None:
        """Record that the update is made.

        Raises:
            StateError: It was the first one, and the optimizer now has a state that can't be handed over.
        """
        assert self._served is not None, "an optimizer is attached"
        self.keep()
        if self._last == 1:  # so that it is known before a replica needs it
            self._served.require_movable()
