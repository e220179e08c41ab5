"""What an update waits for: changes of the mode of synchronisation between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from adaptra.checks import is_list_of, is_whole
from adaptra.errors import OptionError
from adaptra.frontend.arguments.call_batches import CallBatch, inputs_and_targets
from adaptra.frontend.arguments.step_arguments import StepArguments
from adaptra.frontend.pipeline.attached_optimizer import given_or_attached
from adaptra.frontend.pipeline.layout import LayoutMethods
from adaptra.frontend.running.mode_trial import TrainingLoop
from adaptra.planning.synchrony.modes import BesideExact, Deadline, check_allowed
from adaptra.planning.synchrony.trial import LEAST_ROUNDS, Trial
from adaptra.runtime.options.stage_options import Synchrony


class SynchronyMethods(LayoutMethods):
    """What shows and changes the mode of synchronisation of a pipeline between two steps."""

    _arguments: StepArguments

    @property
    def synchrony(self) -> Synchrony:
        """What an update waits for now."""
        return self._require().local.synchrony

    def take_synchrony(self, mode: Synchrony, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Change what an update waits for from the next step on.

        All ranks call this between two steps, with the same mode, after ``optimizer.step()`` and ``optimizer.zero_grad()``.
        Where sites have updated by themselves, they first exchange all that they have learnt. All then go on with the state of
        the first site's optimizer, as each site's was its own. So all replicas are equal to the last bit. Parameters stay the
        same tensors, and the outer optimizer begins anew in each stretch of local steps. Planning starts again from the first
        plan.

        Args:
            mode: As for ``Options(synchrony=…)``, but for ``adaptra.Auto``.
            optimizer: The torch optimizer of all of this process's parameters; by default the one given to :meth:`attach`.

        Raises:
            OptionError: The job can't have this mode, or it does not fit the memory. Nothing changes, on no rank.
            StateError: A rank has a gradient, an optimizer of a part of the parameters, or was given another mode. Or
                microbatches are deferred to the next step, see :meth:`defer_nothing`. Nothing changes, on no rank. Sites with a
                quorum, or in x-order, have exchanged what they have learnt. In x-order all replicas have to have made as many
                steps.
            LaunchError, PeerLostError: A rank did not join or is lost. The pipeline has failed.
        """
        given = given_or_attached("take_synchrony", optimizer, self._optimizer)
        self._require().synchrony.take(mode, given, self._scaler, "take_synchrony")

    def settle_synchrony(
        self,
        batches: Sequence[Any],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        allow: Sequence[BesideExact] | None = None,
        rounds: int = 5,
        update: Callable[[], None] | None = None,
        keep: Sequence[Any] | None = None,
    ) -> Trial | None:
        """Try modes of synchronisation from the state as it is, and go on with what takes off the most loss in a second.

        All ranks call this between two steps, as :meth:`take_synchrony`. In each round every mode trains on the same batches,
        for as many steps as the longest ``every`` of them, or 16 without :class:`adaptra.Local`. The loss is that of these
        batches, by :meth:`eval_step`, before and after. Seconds are those of the slowest rank. Another mode than exact goes on
        only if it was faster beyond chance, see ``docs/design/synchrony.md``. All ranks take the same decision.

        Then parameters, buffers, the optimizer, random numbers, the number of the next step and what ``keep`` names are what
        they were. Where exact goes on, later steps have the bits that they would have had. Local steps that ran before have
        ended, as by :meth:`take_synchrony`.

        Args:
            batches: Batches of this replica, each what :meth:`step` takes: a tuple of inputs and targets, or a mapping of
                keywords. After the last one they begin again. With fewer than all rounds need, the noise of data shows less.
            optimizer: The torch optimizer of all of this process's parameters; by default the one given to :meth:`attach`.
            allow: The modes to try beside exact. By default those of ``Options(synchrony=adaptra.Auto(allow=...))``. Then there
                is a trial only if something is slow, and is so in another way than in the last trial.
            rounds: The number of rounds, at least 3.
            update: What your loop does after a step, such as clipping, the optimizer's step and ``zero_grad()``. By default the
                optimizer's step, through :meth:`grad_scaler` if there is one, and ``zero_grad()``.
            keep: What else ``update`` changes, such as a scheduler of the learning rate or an average of the parameters. Each
                has ``state_dict()`` and ``load_state_dict()``. Give an empty list if it changes nothing else.

        Returns:
            The figures and the decision. Its text is that of the event ``trial``. None if no trial was due.

        Raises:
            OptionError: An argument is not valid, or the job can't have a mode.
            StateError, LaunchError, PeerLostError: As :meth:`take_synchrony`.
        """
        stepping = given_or_attached("settle_synchrony", optimizer, self._optimizer)
        session, losses = self._require(), self._losses
        pipe: Any = self  # whose step and eval_step come with the batch's forms

        def updated() -> None:
            if self._scaler is None:
                stepping.step()
            else:
                self._scaler.step(stepping)
                self._scaler.update()
            stepping.zero_grad()

        loop = TrainingLoop(
            lambda batch: _called(pipe.step, batch),
            updated if update is None else update,
            lambda batch: float(_called(pipe.eval_step, batch)),
            batches,
            stepping,
            self._scaler,
            [] if keep is None else keep,
        )
        allowed = session.allowed_modes if allow is None else allow

        def check() -> None:
            _check_trial(batches, allowed, rounds, of_compile=self._batches is not None)
            _check_kept(keep, stepping, updates=update is not None)
            for mode in allowed:
                if isinstance(mode, Deadline):
                    given = [_batch_of(self._arguments, batch) for batch in batches]
                    session.batches.require_one_shape(f"settle_synchrony: {mode}", given)

        trial = session.trial("settle_synchrony").run(loop, allowed, rounds, check, where_due=allow is None)
        self._losses = losses
        return trial


def _batch_of(arguments: StepArguments, batch: Any) -> CallBatch:
    """Return a batch of a trial as a step takes it."""
    by_name = {key: one for key, one in batch.items() if key != "outputs"} if isinstance(batch, Mapping) else {}
    by_place = () if isinstance(batch, Mapping) else inputs_and_targets(tuple(batch), "settle_synchrony: a batch")
    inputs, targets = (*by_place, None, None)[:2]
    return CallBatch.of(arguments, *arguments.resolve(inputs, targets, by_name))


def _called(call: Callable[..., Any], batch: Any) -> Any:
    return call(**batch) if isinstance(batch, Mapping) else call(*batch)


def _check_trial(batches: Any, allow: Any, rounds: Any, *, of_compile: bool) -> None:
    """Refuse arguments of a trial. ``of_compile`` says whether each step has its batch from a function.

    Raises:
        OptionError: Names the argument.
    """
    if of_compile:
        raise OptionError(
            "settle_synchrony: compile(batches=...) gives each step its batch: expected a pipeline whose steps are given theirs"
        )
    if not is_list_of(object, batches) or not batches or not all(isinstance(one, tuple | list | Mapping) for one in batches):
        raise OptionError(
            f"settle_synchrony: batches={batches!r:.80}: expected a list of batches, each a tuple of inputs and targets or a "
            "mapping of keywords"
        )
    check_allowed("settle_synchrony", allow)
    if not is_whole(rounds) or rounds < LEAST_ROUNDS:
        raise OptionError(f"settle_synchrony: rounds={rounds!r}: expected a whole number of at least {LEAST_ROUNDS}")


def _check_kept(keep: Any, optimizer: torch.optim.Optimizer, *, updates: bool) -> None:
    """Refuse what a trial can't put back. ``updates`` says whether the user's function steps the optimizer.

    Raises:
        OptionError: Names the argument.
    """
    has_state = is_list_of(object, keep) and all(
        callable(getattr(one, name, None)) for one in keep for name in ("state_dict", "load_state_dict")
    )
    if keep is not None and not has_state:
        raise OptionError(
            f"settle_synchrony: keep={keep!r:.80}: expected a list of what has state_dict() and load_state_dict(), such as a "
            "scheduler"
        )
    if keep is None and updates and any("initial_lr" in group for group in optimizer.param_groups):
        raise OptionError(
            "settle_synchrony: update=… and no keep=, with an optimizer whose rate follows a scheduler: expected "
            "keep=[scheduler], as later steps would go on from a trial's; or keep=[] if update does not step it"
        )
