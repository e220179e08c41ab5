"""The parameters, gradients and state of the stages in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adaptra.checks import is_real, is_whole
from adaptra.errors import OptionError, PipelineError, StateError
from adaptra.frontend.arguments.arguments import refuse_scaler
from adaptra.frontend.pipeline.attached_optimizer import refuse_foreign
from adaptra.frontend.pipeline.grad_scaler import GradScaler
from adaptra.frontend.pipeline.held_session import HeldSession
from adaptra.frontend.pipeline.sharded_optimizer import Group, Kind, Sharding, check_kind, groups_of, parameters_in
from adaptra.frontend.saved.fitting_model import FittingModel
from adaptra.planning.synchrony.modes import XOrder
from adaptra.runtime.synchrony.deferral import Deferral
from adaptra.runtime.synchrony.local_steps import LocalSteps
from adaptra.runtime.worker.ends.x_order import XOrderSteps


class StateMethods(HeldSession):
    """What an optimizer and a checkpoint need of a pipeline."""

    _filler: nn.Parameter
    _scaler: GradScaler | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the stages in this process, for any torch optimizer.

        Under a launcher these are of this rank's stage only. ``torch.nn.utils.clip_grad_norm_`` over them would use the norm of
        one stage, not of the model, so use :meth:`clip_grad_norm_`. Without a launcher a parameter that several stages use
        occurs once for each copy. A rank that trains nothing also yields one parameter without elements and without a name, as
        optimizers need one. It never has a gradient, and no state or norm includes it.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        trains = any(one.requires_grad for one in found) or not self._require().is_launched
        yield from found if trains else [*found, self._filler]

    def require_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of other parameters than this pipeline's, for adaptra's own modules.

        Raises:
            StateError: Gives the number of foreign parameters.
        """
        self._require_own_in(optimizer.param_groups)

    def _require_own_in(self, groups: Sequence[Group]) -> None:
        # A cut change may have brought parameters to a rank that had none.
        refuse_foreign(parameters_in(groups), [*self.parameters(), self._filler])

    def shard(self, optimizer: Callable[..., Kind], params: Iterable[Any] | None = None, /, **settings: Any) -> Kind:
        """Return an optimizer of which the replicas keep a part each: a rank steps the parameters that it owns.

        A step's gradients go to the owners only: ``grad`` of other parameters is None. ``optimizer.step()`` brings the new
        values to all replicas. Every bit is that of the same optimizer without shards, if it steps each parameter by itself.
        :meth:`clip_grad_norm_`, :meth:`grad_scaler` and :class:`adaptra.TrainingState` take it as any other. Hooks of a
        parameter run on its owner. All ranks call this, before the first step that it is to take part in.

            optimizer = pipe.shard(torch.optim.AdamW, lr=1e-3)
            pipe.step(inputs, targets)
            optimizer.step()

        Args:
            optimizer: A class of optimizers.
            params: This process's parameters, or groups of them, as torch takes them; by default :meth:`parameters`. Several
                sharded optimizers may share them, until each trainable one is in an optimizer.
            settings: Those of the optimizer.

        Returns:
            The optimizer, whose groups have what this rank owns. With one replica it has all.

        Raises:
            OptionError: It is no class of optimizers, or one that steps all parameters as one vector. Or the job survives
                losses, a parameter is in two optimizers, or replicas shard other parameters.
            StateError: A parameter is not this pipeline's.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        check_kind(optimizer)
        groups = groups_of(self.parameters() if params is None else params)
        self._require_own_in(groups)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.named_parameters()}
        return Sharding(self._require(), names).optimizer(optimizer, groups, settings)

    def held_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """Return names and tensors of all parameters and buffers in this process, once per stage that uses them."""
        return [one for worker in self._require().local.home for one in worker.state.items()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the stages in this process with their names in the user's model.

        A parameter that several stages use occurs once for each of them, under one name, since every stage has a copy.
        """
        for name, value in self.held_tensors():
            if isinstance(value, nn.Parameter):
                yield name, value

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients on all ranks so that their norm over the whole model is at most ``max_norm``.

        The result is bitwise that of ``torch.nn.utils.clip_grad_norm_`` in one process. A parameter that several stages use
        counts once. All ranks call this between a step and the optimizer's step.

        Args:
            max_norm: The largest norm that is not scaled.
            norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: Whether to raise an error if the norm is infinite or NaN. Else gradients are divided by it.

        Returns:
            The norm before scaling, a scalar, the same on every rank.

        Raises:
            OptionError: The arguments are not valid for a norm.
            PipelineError: No step has run yet, or the norm is not finite and ``error_if_nonfinite`` is set. Nothing changes
                then.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        for name, value, least in (("max_norm", max_norm, "0"), ("norm_type", norm_type, "1")):
            given: Any = value
            if not is_real(given) or not given >= float(least):
                raise OptionError(f"{name}={given!r}: expected a number of at least {least}")
        session = self._require()
        if self._losses is None:
            raise PipelineError("no step has run yet: there are no gradients to clip")
        total = session.local.on_every_rank(lambda worker: worker.gradient_norm(float(norm_type)), "clip_grad_norm_")[0]
        if error_if_nonfinite and not total.isfinite():
            raise PipelineError(
                f"the norm of all gradients is {total.item()}: expected a finite one, as error_if_nonfinite=True"
            )
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def grad_scaler(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> GradScaler:
        """Return a ``torch.amp.GradScaler`` for this pipeline, for training in float16.

        Later steps scale their gradients by it. After a step call ``scaler.step(optimizer)`` and ``scaler.update()``; to clip
        gradients, call ``scaler.unscale_(optimizer)`` before them. The loss that step returns is not scaled. If the gradients
        of any stage are not finite, all ranks skip the optimizer's step and lower the scale. The result is bitwise that of
        torch in one process. All ranks call this.

        Args:
            init_scale, growth_factor, backoff_factor, growth_interval, enabled: As for torch's GradScaler.

        Raises:
            OptionError: Replicas update by themselves in x-order.
            PipelineError: The pipeline has a scaler already, or is not compiled yet.
        """
        session = self._require()
        if enabled:
            refuse_scaler("grad_scaler", session.local.synchrony, session.launched.world.sites)
        if self._scaler is not None:
            raise PipelineError("this pipeline has a grad_scaler already: expected one, which all optimizers share")
        self._scaler = GradScaler(
            session,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        return self._scaler

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the stages in this process, by its names in the user's model: the tensors, not copies.

        Without a launcher this is the whole model. Under torchrun it is this rank's part, to be saved by every rank in its own
        file. For a file of the whole model, use :meth:`full_state_dict`. Where microbatches are deferred to the next step, the
        log says that they are not in it.
        """
        session = self._require()
        session.local.warn_of_deferred("state_dict")
        return session.held.named(session.held.tensors)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state on the job's rank 0, like the plain model's ``state_dict()``.

        All ranks call this between two steps. Rank 0 receives the state from one rank after the other. So it needs room for the
        result, and every other rank for a few messages. All names are included, and those of a tied parameter have one tensor.
        Buffers that are not persistent are not included. Extra state of modules is, as ``get_extra_state`` gives it. The
        tensors are copies in CPU memory, with the dtypes of the model. If replicas have different buffers, the first replica's
        are returned. Where microbatches are deferred to the next step, the log says that they are not in it.

            state = pipe.full_state_dict()
            if rank == 0:
                torch.save(state, "model.pt")  # or plain.save_pretrained("model", state_dict=state)

        Returns:
            The state on rank 0, and an empty dict on other ranks.

        Raises:
            PipelineError: The pipeline is closed or has failed.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        session = self._require()
        session.local.warn_of_deferred("full_state_dict")
        return session.held.whole()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy values into the stages of this process. A checkpoint of the plain model works on every rank.

        Under a launcher all ranks call this. Behind some steps with a quorum or in x-order, sites exchange before, as by
        :meth:`exchange`. Copies on several ranks, such as the replicas of a stage, are then compared, as at compilation. If
        they differ, the first rank's values are used, and the log has one line about it.

        Args:
            state: Tensors by their names in the user's model.
            strict: Whether a missing name of these stages, or a name that the model does not have, is an error.

        Raises:
            StateError: Names are missing or unknown, or a value is not a tensor or has another shape. If ranks have copies,
                an error on any of them is raised on all. Nothing changes then on any of them.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        session = self._require()
        self.take(session.held.agreed_to_load(lambda: session.held.fitting(state, strict=strict), "load_state_dict"))

    def exchange(self) -> None:
        """Exchange now what sites have learnt, of all stages: all have the same parameters then.

        For jobs with ``Options(synchrony=adaptra.Local(...))`` or ``adaptra.XOrder(...)``, between two steps: before an
        evaluation, or at the end of the training. All ranks of the job call it. In x-order replicas wait until all are there,
        and take what they lack, with the optimizer's state. Where each update has all of them, there is nothing to exchange.

        Raises:
            OptionError: All replicas are one site, which are equal anyway.
            StateError: A log is replayed that has no such exchange here. Or an outer state was loaded too early. Or sites with
                local steps and no quorum have made different numbers of them.
            PipelineError: In x-order no optimizer is attached, or it has not made the last update.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        local, apart = self._require().local, self._apart("exchange")
        if apart is None:
            local.require_running()
            return
        apart.check_exchange()
        local.on_every_rank(lambda worker: worker.exchange(), "exchange")

    def defer_nothing(self) -> None:
        """Have the next step take in all microbatches, under ``Options(synchrony=adaptra.Deadline(...))``.

        All ranks call it, before the last step, and before a step after which the training is saved or changed. What was
        deferred to that step is in it in any case.

        Raises:
            OptionError: The job has no deadline.
        """
        self._require().local.defer_nothing()

    @property
    def updates(self) -> int:
        """The number of updates of the parameters in the whole training, the same on all replicas that have the last one.

        It is the number of steps, but behind some in ``Options(synchrony=adaptra.XOrder(...))``. A learning rate that follows a
        schedule follows this number there, as a late replica has made fewer steps. It goes on where the mode changes.
        """
        return self._require().workers[0].updates.count

    def outer_state_dict(self) -> dict[str, Any]:
        """Return what a site has beside its :meth:`state_dict` where sites update by themselves.

        Under ``Options(synchrony=adaptra.XOrder(...))`` these are the numbers of this replica's steps and of updates, after
        :meth:`exchange`. Under ``adaptra.Local(...)`` it is this rank's: its parameters as they are, those after the last
        exchange, the outer optimizer's momentum, and numbers. One is that of the training's step, on which random numbers
        depend. Every rank saves it in a file of its own. The tensors are no copies.

        Raises:
            OptionError: All replicas are one site.
            StateError: Replicas in x-order may be at different updates.
        """
        apart, step = self._apart("outer_state_dict"), self._require().training_step
        if isinstance(apart, LocalSteps):
            return {**apart.state(), "step": step}
        if apart is not None:
            apart.require_equal("outer_state_dict")
        return {"steps": step, "updates": self.updates}

    def load_outer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this rank's :meth:`outer_state_dict`, after :meth:`load_state_dict`, which makes sites equal.

        One without the number of the training's step, as an earlier version has saved it, goes on at that of local steps. In
        the other order the next step is refused.

        Raises:
            OptionError: All replicas are one site.
            StateError: It is of another site or mode, of other stages or parameters. Nothing changes then.
        """
        apart = self._apart("load_outer_state_dict")
        if isinstance(apart, LocalSteps):
            self._require().go_on_at(apart.load(state))
            return
        numbers: Any = state
        has_both = isinstance(numbers, Mapping) and {*numbers} == {"steps", "updates"}
        if not has_both or not all(is_whole(one) and one >= 0 for one in numbers.values()):
            raise StateError(
                f"outer state: {state!r:.60}: expected that of pipe.outer_state_dict() in x-order, which has steps and updates"
            )
        self._require().go_on_at(numbers["steps"], numbers["updates"])

    @property
    def exchange_log(self) -> list[dict[str, Any]]:
        """This rank's exchanges so far, as JSON values: after how many steps, of which stage, and each site's weight.

        With ``adaptra.Local(quorum=...)`` the clock decides who takes part. Then :meth:`replay` needs it. With
        ``adaptra.XOrder(...)`` these are this replica's updates: who is in each, and with the parameters of which update. Also
        from whom this replica has taken the state before it. With ``adaptra.Deadline(...)`` these are steps, the same on all
        ranks: of each replica the first of its microbatches in a step, counted from its first step on, and how many. After a
        change to exact updates it is that of the last mode, and of no other ones.

        Raises:
            OptionError: Every update has the gradients of all microbatches.
        """
        session = self._require()
        logged = session.workers[0].updates.logged
        if logged is None and session.synchrony.log is not None:
            return session.synchrony.log
        logged = logged or self._apart("exchange_log")
        return [] if logged is None else logged.log

    def replay(self, log: Sequence[Any]) -> None:
        """Have updates of the same gradients as a run had, from the next step on: with the same batches that gives its bits.

        All ranks of the job call it, each with its own rank's :attr:`exchange_log` of that run. With
        ``adaptra.Deadline(...)`` all have the same one, and tell each other.

        Raises:
            OptionError: Every update has the gradients of all microbatches.
            StateError: It is no such log, or under a deadline that of another rank is another one. Nothing changes then.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        session = self._require()
        logged = session.workers[0].updates.logged or self._apart("replay")
        if isinstance(logged, Deferral):
            session.synchrony.replay(log, logged)
        elif logged is not None:
            logged.replay(log)
        elif log:
            raise StateError(
                f"replay: a log of {len(log)} updates, where each update has all {self.replicas} replicas: expected the log of "
                "such a run, which is empty"
            )

    def _apart(self, call: str) -> LocalSteps | XOrderSteps | None:
        """Return what sites do that update by themselves; None in x-order of all replicas, which is exact.

        Raises:
            OptionError: All replicas are one site.
        """
        session = self._require()
        apart = session.workers[0].updates.apart
        if apart is None and not isinstance(session.local.synchrony, XOrder):
            raise OptionError(f"{call}: all replicas are one site: expected Options(synchrony=adaptra.Local(...)), or XOrder")
        return apart

    def take(self, fitting: FittingModel) -> None:
        """Load a state that fits, for adaptra's own modules."""
        session = self._require()
        session.held.take(fitting)
        if (local := session.workers[0].updates.local) is not None:
            local.lose_loaded()
