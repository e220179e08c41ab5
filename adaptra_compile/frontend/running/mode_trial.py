"""A trial of modes of synchronisation: steps of each from the same state, after which the job is as if there had been none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import torch

from adaptra.errors import AdaptraError, PipelineError
from adaptra.frontend.running.kept_state import KeptState
from adaptra.frontend.running.local_workers import LocalWorkers
from adaptra.frontend.running.synchrony_changes import SynchronyChanges, mode_text
from adaptra.planning.synchrony.modes import BesideExact, Deadline, Local
from adaptra.planning.synchrony.regime import Regime, WorkerTimes, times_of
from adaptra.planning.synchrony.trial import Trial, TrialRound, TriedMode, choose
from adaptra.program import Kind
from adaptra.runtime.control.plans.events import EventKind
from adaptra.runtime.options.stage_options import EXACT, Synchrony
from adaptra.runtime.reconfigure.consent import Consent
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.worker.worker import Worker

_STEPS: Final = 16
"""Steps of a round without local steps. In x-order a replica that is a few times slower has some updates in them."""


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """What the user's own loop does, for a trial.

    Attributes:
        step: Runs one training step on a batch of this replica.
        update: Steps the optimizer, and clears its gradients.
        loss: Returns the loss of a batch in evaluation mode, that of this site's replicas.
        batches: The batches of this replica.
        optimizer: The optimizer.
        scaler: Scales gradients; None if none does.
        others: What else an update changes, each with ``state_dict()`` and ``load_state_dict()``.
    """

    step: Callable[[Any], object]
    update: Callable[[], None]
    loss: Callable[[Any], float]
    batches: Sequence[Any]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    others: Sequence[Any]

    def batches_of(self, number: int, steps: int) -> list[Any]:
        """Return the batches of a round, which begin again after the last one."""
        return [self.batches[(number * steps + step) % len(self.batches)] for step in range(steps)]


class ModeTrial:
    """Tries modes on the workers of this process, as all others do.

    Args:
        local: The workers of this process.
        changes: Changes the mode.
        reduction: How the losses of replicas are reduced.
        timeout: Seconds to wait for other ranks.
        call: The method of the pipeline that the user has called.
    """

    def __init__(self, local: LocalWorkers, changes: SynchronyChanges, reduction: Reduction, timeout: float, call: str) -> None:
        self._local = local
        self._changes = changes
        self._reduction = reduction
        self._timeout = timeout
        self._call = call

    def run(
        self, loop: TrainingLoop, allow: Sequence[BesideExact], rounds: int, check: Callable[[], None], *, where_due: bool
    ) -> Trial | None:
        """Try exact updates and the allowed modes, and go on with what takes off the most loss in a second.

        The pipeline is as it was before, but for the mode. All ranks call it with the same modes.

        Args:
            loop: What the user's loop does.
            allow: The modes beside exact.
            rounds: The number of rounds.
            check: Refuses what this process was given.
            where_due: Whether to try only where something is slow, in another way than in the last trial. None is returned
                otherwise.

        Raises:
            OptionError, PlanError, StateError: As :meth:`.synchrony_changes.SynchronyChanges.take`. Updates are exact then, and
                nothing else has changed.
            PipelineError: It is to be known whether anything is slow, and no step has run. Nothing has changed.
        """
        self._local.require_running()
        self._local.meet_sites(self._call)
        self._agree(loop, allow, rounds, check, where_due=where_due)
        regime = self._regime()
        if where_due:
            if regime is None:
                raise PipelineError(
                    f"{self._call}: no step has run in this mode: expected some, which show whether anything is slow"
                )
            if not regime.is_due(self._changes.regime):
                return None
        steps = max(one.every if isinstance(one, Local) else _STEPS for one in allow)
        self._take(EXACT, loop)
        self._changes.regime = regime or self._changes.regime  # what is refused before has tried nothing
        log = self._changes.log

        def keep() -> tuple[KeptState, Consent]:
            return KeptState(self._local, loop.optimizer, loop.scaler, loop.others), Consent()

        kept = self._local.agreed(self._call, self._call, keep, self._timeout)
        modes: tuple[Synchrony, ...] = (EXACT, *allow)
        try:
            tried = [self._tried(mode, loop, kept, rounds, steps) for mode in modes]
        except AdaptraError:
            if self._local.go_on:  # all ranks have refused a mode
                self._go_back(kept)
                self._take(EXACT, loop)
                self._changes.log = log
            raise
        # Each rank knows the same figures. The first one's decision holds, should another round a sum in another way.
        chosen = int(self._tell(str(choose(tried)))[0])
        self._take(EXACT, loop)  # so that the chosen mode begins at its own first step, also if it was the last one tried
        self._take(modes[chosen], loop)
        self._changes.log = log  # of the user's own steps
        trial = Trial(tuple(tried), steps, chosen, "" if regime is None else str(regime))
        self._local.workers[0].controller.recorder.emit_now(EventKind.TRIAL, str(trial))
        return trial

    def _agree(
        self, loop: TrainingLoop, allow: Sequence[BesideExact], rounds: int, check: Callable[[], None], *, where_due: bool
    ) -> None:
        """Refuse a trial of modes that the job can't have, or for which ranks have different arguments."""

        def ready() -> tuple[None, Consent]:
            check()
            for mode in allow:
                self._changes.require(mode, loop.scaler, self._call)
            source = "Options(synchrony=adaptra.Auto(...))" if where_due else "allow="
            alike = ("allow", repr([*allow])), ("number of rounds", str(rounds)), ("number of batches", str(len(loop.batches)))
            return None, Consent(alike=(("source of modes", source), *alike))

        self._local.agreed(self._call, self._call, ready, self._timeout)

    def _regime(self) -> Regime | None:
        """Return what is slow, the same on all ranks, as each knows the times of all; None if one has no step in this mode."""
        worker, launched = self._local.workers[0], self._local.launched
        steps: list[tuple[float, float, float | None]] = []
        for records in worker.monitor.kept:
            microbatches = sum(op.kind is Kind.F for op, _, _ in records.ops)
            if microbatches:
                busy = sum(end - start for _, start, end in records.ops) / microbatches
                exposed = None if records.reduce is None else records.reduce.exposed
                steps.append((busy, records.end - records.start, exposed))
        place = launched.world.seat(launched.world.hosted(launched.process)[0]).place
        told = self._tell(times_of(place, steps).encode() if steps else "")  # all tell, as others wait for it
        return Regime.of([WorkerTimes.decode(text) for text in told]) if all(told) else None

    def _take(self, mode: Synchrony, loop: TrainingLoop) -> None:
        self._changes.take(mode, loop.optimizer, loop.scaler, self._call)

    def _tried(self, mode: Synchrony, loop: TrainingLoop, kept: KeptState, rounds: int, steps: int) -> TriedMode:
        """Return the rounds of a mode. The state is the kept one before and after."""
        self._take(mode, loop)
        # The first step after a change takes longer, and a stage's exchanges come after a step: every so many have all of them.
        self._step(loop, loop.batches[0], is_last=True)
        self._go_back(kept)
        own = [self._round(loop, loop.batches_of(number, steps), kept) for number in range(rounds)]
        told = [json.loads(text) for text in self._tell(json.dumps(own))]
        # A sum over all replicas is that over all sites.
        factor = self._local.launched.world.sites if self._reduction is Reduction.SUM else 1
        of_rounds = [
            TrialRound(
                max(rank[number][0] for rank in told),
                factor * fmean(rank[number][1] for rank in told),
                factor * fmean(rank[number][2] for rank in told),
            )
            for number in range(rounds)
        ]
        return TriedMode(mode_text(mode), tuple(of_rounds))

    def _round(self, loop: TrainingLoop, batches: Sequence[Any], kept: KeptState) -> tuple[float, float, float]:
        """Return the seconds of this rank's steps, and the loss before and after them."""
        before = fmean(map(loop.loss, batches))
        self._tell("")  # so that all ranks begin together
        began = time.monotonic()
        for number, batch in enumerate(batches, 1):
            self._step(loop, batch, is_last=number == len(batches))
            with self._local.changing(self._call):
                loop.update()
        if self._local.launched.device.type == "cuda":
            torch.cuda.synchronize(self._local.launched.device)
        seconds = time.monotonic() - began
        if self._local.launched.world.sites > 1:
            self._local.on_every_rank(Worker.exchange, self._call)
        after = fmean(map(loop.loss, batches))
        self._go_back(kept)
        return seconds, before, after

    def _step(self, loop: TrainingLoop, batch: Any, *, is_last: bool) -> None:
        """Run a step. The last one of a round leaves nothing to a step that is not of the round."""
        if is_last and isinstance(self._local.synchrony, Deadline):
            self._local.defer_nothing()
        loop.step(batch)

    def _go_back(self, kept: KeptState) -> None:
        with self._local.changing(self._call):
            kept.go_back()
        self._local.on_every_rank(lambda worker: worker.updates.restart(), self._call)

    def _tell(self, text: str) -> list[str]:
        with self._local.called(self._call), self._local.changing(self._call):
            return self._local.launched.tell("change", text, self._timeout, self._local.check)
