"""Changes of what an update of a running job waits for, between two steps: of all ranks, or of none.

What sites have learnt is exchanged before, and all go on with the optimizer's state of the first one. So all replicas are equal
to the last bit where the next mode begins, and no gradient is lost or counted twice.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from adaptra.errors import OptionError, StateError
from adaptra.frontend.arguments.arguments import check_synchronised, refuse_scaler
from adaptra.frontend.planned.open_tails import check_within_step, require_tail_memory
from adaptra.frontend.planned.site_memory import require_site_memory
from adaptra.frontend.planned.stage_planning import PipelineSpec, PlannedPipeline
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.running.next_workers import NextWorkers
from adaptra.graph.ops.autocast import refuse_autocast
from adaptra.planning.synchrony.modes import Apart, Local, WithinStep
from adaptra.planning.synchrony.regime import Regime
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.control_store.digest_tree import children_of, parent_of
from adaptra.runtime.exchange.optimizer_settings import settings_of
from adaptra.runtime.exchange.state_transfer import (
    STATE,
    Handover,
    check_movable,
    gather_state,
    receive,
    require_all_stepped,
    send,
    set_state,
)
from adaptra.runtime.launch.agreement import agree_here
from adaptra.runtime.launch.first_world import sites_of
from adaptra.runtime.options.stage_options import Synchrony, check_synchrony
from adaptra.runtime.reconfigure.consent import Consent
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.worker.worker import Worker
from adaptra.runtime.world.world import WorkerId, World

_BRANCHES: Final = 2
"""To how many sites one hands the optimizer's state on."""


class SynchronyChanges:
    """Changes the mode of synchronisation of this process's workers.

    Args:
        spec: Plans the pipeline.
        local: The workers of this process.
        next_workers: Begins those in their place.

    Attributes:
        last: The last change, for people; None before it.
        regime: What was slow when modes were tried last; None before.
        log: The updates of the last stretch of steps, where the clock has decided on them; None if it has not.
    """

    def __init__(self, spec: PipelineSpec, local: LocalWorkers, next_workers: NextWorkers) -> None:
        self._spec = spec
        self._local = local
        self._next_workers = next_workers
        self.last: str | None = None
        self.regime: Regime | None = None
        self.log: list[dict[str, Any]] | None = None

    def take(self, mode: Synchrony, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, call: str) -> None:
        """Let updates wait for something else: see :meth:`adaptra.frontend.api.Pipeline.take_synchrony`.

        Args:
            mode: The mode.
            optimizer: Steps this process's parameters.
            scaler: Scales their gradients; None if none does.
            call: The method of the pipeline that the user has called.
        """
        local, launched = self._local, self._local.launched
        local.require_running()
        if self._stays_exact:
            self.following(mode)
            return
        before = local.synchrony
        local.meet_sites(call)

        def ready() -> tuple[tuple[World, PlannedPipeline], Consent]:
            refuse_autocast(call)
            wanted = self.planned(mode, scaler, call)
            self._check(call, optimizer)
            return wanted, Consent(alike=self._alike(mode, optimizer, scaler))

        following, planned = local.agreed(call, call, ready, self._spec.options.timeout)
        if mode == before:
            return
        if isinstance(mode, Apart) and following.sites > 1:
            sizes = [one.element_size() for worker in local.workers for one in worker.trainable.values()]
            smallest = min(sizes, default=4)
            require_site_memory(mode, planned, launched, following, smallest, self._spec.options.timeout)
        if isinstance(mode, WithinStep):
            (worker,) = local.workers
            require_tail_memory(mode, planned, launched, worker.state, self._spec.options.timeout)
        began = time.monotonic()
        if launched.world.sites > 1:
            local.on_every_rank(Worker.exchange, call)
            with local.called(call), local.changing(call):
                self._take_first_state(optimizer, scaler)
        with local.called(call), local.changing(call), self._next_workers.joined(following) as (joined, opened):
            agree_here(joined, planned.facts(), self._spec.options.timeout, local.check)
            states, logged = [worker.state for worker in local.home], local.workers[0].updates.logged
            self.log = None if logged is None else logged.log
            local.end()
            self._next_workers.begin(planned, joined, states, opened)
        local.workers[0].updates.attach(optimizer)
        local.on_every_rank(lambda worker: worker.updates.restart(), call)
        step = local.workers[0].numbers.training_step
        self.last = f"from {mode_text(before)} to {mode_text(mode)} before step {step}, in {time.monotonic() - began:.2f} s"
        local.workers[0].controller.recorder.emit_now(EventKind.MODE, self.last)

    def planned(self, mode: Synchrony, scaler: torch.amp.GradScaler | None, call: str) -> tuple[World, PlannedPipeline]:
        """Return the world of a mode, and what runs in it. Arguments are those of :meth:`take`.

        Raises:
            OptionError, PlanError: The job can't have it; says why.
        """
        following = self.following(mode, scaler, call)
        planned = self._spec.under(mode).within(following).planned(self._local.compiled)
        if isinstance(mode, WithinStep):
            check_within_step(mode, planned, following, in_order=self._local.launched.in_order)
        return following, planned

    def require(self, mode: Synchrony, scaler: torch.amp.GradScaler | None, call: str) -> None:
        """Refuse a mode that this job can't have, before anything changes. Arguments are those of :meth:`take`.

        Raises:
            OptionError, PlanError: Says why.
        """
        if self._stays_exact:
            self.following(mode, scaler, call)
        else:
            self.planned(mode, scaler, call)

    @property
    def _stays_exact(self) -> bool:
        """Whether every mode is exact as long as the job runs."""
        launched = self._local.launched
        return launched.in_threads or launched.job.keeper is not None

    def replay(self, log: Sequence[Any], deferral: Deferral) -> None:
        """Replay a log of steps with a deadline, the same on all ranks: see :meth:`adaptra.frontend.api.Pipeline.replay`."""

        def ready() -> tuple[None, Consent]:
            counts = deferral.counts_of(log)
            digest = hashlib.sha256(repr(counts).encode()).hexdigest()[:16]
            return None, Consent(alike=(("log", f"one of {len(counts)} steps with the digest {digest}"),))

        self._local.agreed("replay", "replay", ready, self._spec.options.timeout, carries_deferred=True)
        deferral.replay(log)

    def following(self, mode: Synchrony, scaler: torch.amp.GradScaler | None = None, call: str = "") -> World:
        """Return the world of a mode.

        Args:
            mode: The mode.
            scaler: Scales gradients; None if none does.
            call: The method of the pipeline that the user has called.

        Raises:
            OptionError: The job can't have it; says why.
        """
        check_synchrony(mode)
        world = self._local.launched.world
        check_synchronised(mode, self._spec.options, with_loss=self._local.compiled.with_loss)
        sites = sites_of(world, mode if isinstance(mode, Apart) else None)
        if scaler is not None and scaler.is_enabled():
            refuse_scaler(call, mode, sites)
        return world.followed_by(sites=sites)

    def _check(self, call: str, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a change in this process's state.

        Raises:
            OptionError, StateError: The text says what stands in the way.
        """
        local = self._local
        if local.shards or any(worker.owners for worker in local.workers):
            raise OptionError(
                f"{call}: this pipeline has a sharded optimizer, of which sites would lack a part: expected one that has all "
                "parameters of its rank"
            )
        deferral = local.workers[0].updates.deferral
        if deferral is not None and deferral.to_replay:
            raise StateError(
                f"{call}: the log that is replayed has {deferral.to_replay} more steps: expected a change of mode after its "
                "last one"
            )
        for worker in local.workers:
            require_all_stepped(call, worker.trainable, optimizer)
            for name, parameter in worker.trainable.items():
                if parameter.grad is not None and bool(parameter.grad.count_nonzero()):
                    raise StateError(
                        f"{call}: {name} has a gradient: expected optimizer.step() and optimizer.zero_grad() before it, as a "
                        "gradient of one mode is not added to one of another"
                    )
            check_movable(_inner_state(worker, optimizer))

    def _alike(
        self, mode: Synchrony, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> tuple[tuple[str, str], ...]:
        """Return what has to be the same on all ranks."""
        numbers = self._local.workers[0].numbers
        return (
            ("mode", repr(mode)),
            ("number of steps", str(numbers.next_step)),
            ("number of the next step of the training", str(numbers.training_step)),
            ("optimizer", f"{type(optimizer).__name__} of {settings_of(optimizer)}"),
            ("grad_scaler", "there" if scaler is not None else "not there"),
        )

    def _take_first_state(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Replace the state of this site's optimizer and scaler by that of the first site's. Sites hand it on in a tree."""
        launched, (worker,) = self._local.launched, self._local.workers
        world = launched.world
        (own,) = world.hosted(launched.process)
        column = world.hosts_of(world.counterparts(WorkerId(own)))
        site = world.site(worker.replica)
        held = _inner_state(worker, optimizer)
        if site:
            held = receive(column[parent_of(site, _BRANCHES)], launched.everyone)
            for parameter in worker.trainable.values():
                optimizer.state.pop(parameter, None)
            set_state(optimizer, held, worker.trainable)
        waits = [send(held, column[child], launched.everyone) for child in children_of(site, len(column), _BRANCHES)]
        for wait in waits:
            wait()
        if scaler is not None:
            text = json.dumps(scaler.state_dict())
            told = launched.tell("change", text, self._spec.options.timeout, self._local.check)
            scaler.load_state_dict(json.loads(told[world.number(column[0])]))


def mode_text(mode: Synchrony) -> str:
    """Return a mode for people."""
    return str(mode) if not isinstance(mode, Local) or mode.sites is None else f"{mode} of {mode.sites} sites"


def _inner_state(worker: Worker, optimizer: torch.optim.Optimizer) -> Handover:
    """Return the state that an optimizer has of a worker's parameters, without these.

    Raises:
        StateError: It has an entry that can't move to another rank; names it.
    """
    held = gather_state(worker.trainable, optimizer)
    return Handover({key: one for key, one in held.tensors.items() if key[1].startswith(STATE)}, held.numbers)
