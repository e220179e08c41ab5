"""The user's API: compile a model into a pipeline, train with it and inspect it.

    pipe = adaptra.compile(model, stages=4, microbatches=16, example_inputs=(inputs, targets), loss=loss_function)
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.step(inputs, targets)
    optimizer.step()
    optimizer.zero_grad()

Under torchrun every rank runs the same lines and has one stage or several. Without a launcher all stages run as threads of
this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from adaptra.checks import is_real
from adaptra.errors import BatchError, OptionError, PipelineError
from adaptra.frontend.arguments.accelerate_doors import refuse_accelerate, refuse_accelerator
from adaptra.frontend.arguments.arguments import CompileArguments, check_split
from adaptra.frontend.arguments.placing import STRAIGHT, Placement
from adaptra.frontend.arguments.step_arguments import Outputs, StepArguments, check_outputs, name_of_call
from adaptra.frontend.attached_optimizer import given_or_attached, refuse_foreign
from adaptra.frontend.builder import build
from adaptra.frontend.grad_scaler import GradScaler
from adaptra.frontend.module_like.module_methods import ModuleMethods
from adaptra.frontend.planned.activation_memory import predicted_peaks
from adaptra.frontend.planned.given_routes import changed_buffers
from adaptra.frontend.running.session import Session
from adaptra.frontend.saved.fitting_model import FittingModel
from adaptra.frontend.shapes.shapes import PipelineShape
from adaptra.known_keywords import known_keywords
from adaptra.planning.explaining.explanation import explain
from adaptra.planning.explaining.job_explanation import explain_job
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.planning.routes.steady_steps import timing_of
from adaptra.program.roles import Roles
from adaptra.program.routing import Route, Routing
from adaptra.report import drawing, perfetto, picture, step_picture
from adaptra.report.files import check_suffix
from adaptra.report.stage_table import PADDED, MeasuredStep, measured_lines, stage_table
from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.control.plans.plan import Plan
from adaptra.runtime.measuring.reduces import StageReduce
from adaptra.runtime.options import Options
from adaptra.runtime.worker.batch import require_no_gradient
from adaptra.runtime.worker.worker import Worker
from adaptra.simulation.cost import CostModel
from adaptra.simulation.period import alike_case, simulate_alike
from adaptra.simulation.simulate import simulate
from adaptra.simulation.standing_out import slow_edges_of, slow_in
from adaptra.simulation.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@known_keywords
def compile(
    model: nn.Module | Sequence[nn.Module],
    *,
    stages: int,
    microbatches: int,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    reduction: str = "mean",
    memory: int | str | None = None,
    split: Sequence[str] | None = None,
    placement: Placement = STRAIGHT,
    mesh: DeviceMesh | None = None,
    transport: str | None = None,
    options: Options | None = None,
    weights: str | Path | None = None,
) -> Pipeline:
    """Compile a model into a training pipeline that adapts to slow links and stages.

    Args:
        model: Any module that torch.export can capture. Every rank builds the same one. The pipeline keeps only its own
            stage's parameters, so delete the model to free the others. Or a list of modules, one per stage, each called with
            the result of the one before; a tuple gives several arguments. They run unchanged, without capture. But I and W of
            such stages are one computation, so plans have fewer ops to fill bubbles with.
        stages: Number of pipeline stages, one on each rank unless ``placement`` says otherwise. Under torchrun the number of
            ranks must be a multiple of the ranks of one pipeline. Further multiples are data-parallel replicas.
        microbatches: The number of parts into which a batch is split along its first dimension.
        example_inputs: The positional arguments of :meth:`Pipeline.step`, a whole batch: inputs alone, or
            ``(inputs, targets)``. Only shapes, dtypes and constants matter, but a list of modules runs with its first
            microbatch. Without it the first call of step compiles.
        example_kwargs: The keyword arguments of step, if the model takes any.
        loss: ``loss(outputs, targets)`` → scalar. Without it the model itself returns the scalar loss, and targets, if given,
            are its last positional argument.
        reduction: How the losses of microbatches and replicas are reduced to that of the batch, and their gradients likewise.
            ``"mean"`` gives each the same weight, and warns where the example's microbatches have unequally many labels.
            ``"sum"`` adds them up. ``"weighted"`` divides the sum of all sums by the sum of all weights. Then ``loss``, or the
            model, returns the two scalars ``(sum, weight)`` first, such as the sum over all labels and their number.
        memory: The limit of activations on a rank: a size such as ``"2GiB"``, or a number of microbatches. A size includes
            temporary memory of ops and messages in flight. A microbatch counts from its F to its W. The memory that its I
            frees is known from the stage's graphs and no longer counts after I. With None, the limit is the free memory of the
            devices, shared among the ranks of a device. The first plan then is the one of least memory whose period is at
            most 1 % longer than the best one.
        split: Names of the modules that begin stages 1, 2, …; without it the stages are balanced by estimated cost.
        placement: ``"straight"`` for one stage on each rank, or ``"v"`` for two. In V placement stages go down the ranks and
            back, so the first rank also has the last stage. ``"interleaved"`` is two stages on each rank in turn,
            ``"interleaved-3"`` three, and so on. Or a list with the rank of each stage, such as ``[0, 1, 1, 0, 0, 1]``. Ranks
            are numbered in the order of their first stages.
            Several smaller stages fill the pipeline sooner within the same memory, but messages cross each link more often.
        mesh: A ``torch.distributed`` DeviceMesh of all ranks with dimensions ``dp`` and ``pp``, or ``pp`` alone. The stages of
            a replica are along ``pp``. Without a mesh they are on consecutive ranks.
        transport: ``"local"``, ``"c10d"``, the name of an installed transport, or None for c10d under a launcher, else local.
        options: Options of the runtime; see :class:`adaptra.runtime.options.Options`.
        weights: The values of a model built within ``torch.device("meta")``. Each rank gets those of its own stages, on the
            example's device. A .safetensors file, a folder of such files as on Hugging Face's
            hub, or a checkpoint of torch.distributed.checkpoint. With None the modules' own ``reset_parameters`` compute
            them, with the values that one process would draw.

    Raises:
        OptionError: An argument is invalid. The text names it.
        CaseError: A fault to inject can't be parsed, names a stage or replica that does not exist, or divides a rate that no
            other fault gives.
        CaptureError, PartitionError: The model can't be captured or cut. The text says where and what to change.
        BatchError: The example's batch does not divide into microbatches.
        LaunchError: The ranks don't fit the stages, the transport does not exist, or another rank compiles something else.
        StateError: The weights don't fit a model on the meta device. The text names the tensor.
        MissingExtraError: The weights need safetensors, which is not installed.
        ScheduleError, PlanError: ``options.schedule`` is unknown, of another pipeline, or does not fit the memory. Or one
            microbatch does not fit.
    """
    request = CompileArguments(
        model,
        stages,
        microbatches,
        loss,
        memory,
        split,
        mesh,
        transport,
        options or Options(),
        placement,
        reduction=reduction,
        weights=weights,
    )
    refuse_accelerate(request.whole_model)
    pipeline = Pipeline(request)
    named: Any = {} if example_kwargs is None else example_kwargs
    if not isinstance(named, Mapping):
        raise OptionError(f"example_kwargs={named!r}: expected a dict of the model's keyword arguments")
    if example_inputs is not None or named:
        given = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        if len(given) > 2:
            raise BatchError(
                f"example_inputs: a tuple of {len(given)}: expected inputs alone or (inputs, targets); several inputs are a "
                "tuple of their own, as in ((first, second), targets)"
            )
        pipeline.build(*given, **named)
    return pipeline


class Pipeline(ModuleMethods):
    """A compiled training pipeline, with its ranks that run in this process.

    :func:`compile` makes it. It can be used as a context manager. :meth:`close` ends its threads.
    """

    def __init__(self, request: CompileArguments) -> None:
        super().__init__(request.whole_model)
        self._request: CompileArguments | None = request
        first = request.whole_model if request.stage_modules is None else request.stage_modules[0]
        self._arguments = StepArguments(first, returns_loss=request.loss is None and request.with_loss)
        self._session: Session | None = None
        self._losses: Tensor | None = None
        self._scaler: GradScaler | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_closed = False
        self._filler = nn.Parameter(torch.empty(0))

    def build(self, inputs: Any = None, targets: Any = None, /, **kwargs: Any) -> None:
        """Compile for batches like this one. :func:`compile` calls this if it has an example, otherwise the first step does."""
        if self._is_closed:
            raise PipelineError("this pipeline is closed: call adaptra.compile for another one")
        if self._request is None:
            raise PipelineError("this pipeline is compiled already: call adaptra.compile again for batches of another shape")
        inputs, targets, named = self._arguments.resolve(inputs, targets, kwargs)
        self._session = build(self._request, *self._arguments.positional(inputs, targets), named)
        # The request refers to the whole model, of which each rank keeps only its own stage.
        self._request = None

    @overload
    def step(self, inputs: Any = ..., targets: Any = ..., /, *, outputs: Literal[False] = ..., **kwargs: Any) -> Tensor: ...

    @overload
    def step(self, inputs: Any = ..., targets: Any = ..., /, *, outputs: Outputs, **kwargs: Any) -> tuple[Tensor, Any]: ...

    def step(self, inputs: Any = None, targets: Any = None, /, *, outputs: Outputs = False, **kwargs: Any) -> Any:
        """Run one training step on a batch and add its gradients to every parameter's ``grad``.

        Args:
            inputs: The model's input, or a tuple of its positional inputs: a whole batch. Needed on the first stage's rank.
            targets: The targets of the loss: a whole batch. Needed on the last stage's rank. If the model returns the loss
                itself, also needed on the first stage's rank.
            outputs: Whether to return the model's outputs beside the loss. With True the rank of the last stage has them. Each
                rank may decide for itself, in each step. With ``"all"`` all ranks have them. Then all ranks of the job give
                it in the same step, and wait until the outputs have been sent.
            kwargs: The model's keyword inputs. Needed on the first stage's rank. ``inputs=`` and ``targets=`` by name are the
                arguments above, unless the model's forward has arguments of these names. With ``loss=`` given, ``targets=`` is
                always the loss's.

        Returns:
            The loss of the batch, reduced by ``reduction``, as a scalar without gradient, on every rank.

            With ``outputs=True`` that loss and the model's outputs: what its forward returned in this step, without gradients,
            for the whole batch of this replica. Only the rank of the last stage has them, and others get None in their place.
            With ``outputs="all"`` every rank of the replica has them. Tensors are concatenated over the microbatches in the
            order of rows; tensors without dimensions are averaged.

        Raises:
            BatchError: The batch has no weight (``reduction="weighted"``). Then gradients are unchanged and the next step may
                follow. Or the batch differs from those the pipeline was compiled for. Without a launcher nothing has changed
                then, and the next step may follow. Under a launcher the pipeline fails on all ranks. Or ranks of a replica
                got different rows in an earlier call. Then the text names the call, the ranks and the arguments.
            OptionError: An output does not reach the last stage. The text names it. Or this process has an Accelerator of
                accelerate with an engine or a precision of its own.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
            PipelineError: The pipeline has failed before or is closed.
        """
        wanted = check_outputs(outputs)
        inputs, targets, named = self._arguments.resolve(inputs, targets, kwargs)
        if self._session is None:
            self.build(inputs, targets, **named)
        session = self._require()
        with session.local.at_the_door():
            self.require_training()
            if self._losses is None:  # the Accelerator may be younger than the pipeline
                refuse_accelerator()
            self._follow(session, evaluates=False)
            args, given = self._arguments.positional(inputs, targets)
            batch = session.batches.of(args, given, named)
            require_no_gradient(batch.inputs, session.compiled.inputs.labels, "inputs")
            require_no_gradient(batch.targets, session.compiled.targets.labels, "targets")
            if session.look is not None:
                session.look.at(batch)
            if wanted:
                session.batches.prepare_outputs(batch)
            session.batches.compare_rows("step", inputs, targets, named)
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        given_to_all = {"inputs": batch.inputs, "targets": batch.targets, "shape": batch.number}
        to_all = wanted == "all" and session.is_launched
        run = partial(Worker.step, **given_to_all, loss_scale=scale, with_outputs=bool(wanted), to_all=to_all)
        found = session.local.on_every_rank(run, name_of_call("step", wanted))
        self._losses = found[0][0]
        loss = session.reduction.of_batch(self._losses, batch.shares)
        if not wanted:
            return loss
        flat = next((one for _, one in found if one is not None), None)
        return loss, None if flat is None else batch.outputs_by.outputs_in_training.unflatten(flat)

    @property
    def microbatch_losses(self) -> Tensor:
        """The losses of the last step's microbatches, of shape (microbatches,), in microbatch order.

        With ``reduction="weighted"`` the shape is (microbatches, 2), with a sum and its weight in each row. Over several
        replicas the losses are averaged if the reduction is ``"mean"``, otherwise summed.
        """
        if self._losses is None:
            raise PipelineError("no step has run yet")
        return self._losses

    def eval_step(self, inputs: Any = None, targets: Any = None, /, *, outputs: Outputs = False, **kwargs: Any) -> Any:
        """Run the model forward in evaluation mode on a batch, microbatch by microbatch, without gradients.

        It behaves like eager evaluation: dropout is off, and BatchNorm's buffers do not change. A buffer that the model changes
        in evaluation mode too does change.

        Args:
            inputs, targets, kwargs: As for :meth:`step`.
            outputs: Whether to return the model's outputs beside the loss. ``"all"`` returns them on every rank, also without
                targets. All ranks of the job give the same.

        Returns:
            With targets, or if the model returns the loss itself, the loss of the batch as :meth:`step` returns it, over all
            replicas. With ``outputs=True`` the loss and the model's outputs, as :meth:`step` returns both. Without targets, the
            model's outputs on the rank of the last stage, and None on other ranks unless they give ``"all"``. Each tensor is
            concatenated over the microbatches. Each replica returns the outputs of its own batch.

        Raises:
            BatchError: ``outputs=True`` without targets, unless the model returns the loss. Or as :meth:`step`.
        """
        wanted = check_outputs(outputs)
        inputs, targets, named = self._arguments.resolve(inputs, targets, kwargs)
        with_loss = self._arguments.positional(inputs, targets)[1] is not None or self._arguments.returns_loss
        if wanted is True and not with_loss:
            raise BatchError(
                "eval_step: outputs=True without targets: expected targets for the loss; without outputs=True the "
                "outputs are returned alone"
            )
        return self._evaluate("eval_step", inputs, targets, named, with_loss=with_loss, outputs=wanted)

    def _aliases(self) -> Mapping[str, str]:
        return self._require().compiled.aliases

    def _infer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, _, named = self._arguments.opened(inputs, None, kwargs)
        return self._evaluate("call", given, None, named, with_loss=False, outputs=False)

    def _evaluate(
        self, call: str, inputs: Any, targets: Any, named: dict[str, Any], *, with_loss: bool, outputs: Outputs
    ) -> Any:
        """Return the loss in evaluation mode, the outputs, or both."""
        session = self._require()
        with session.local.at_the_door():
            self._follow(session, evaluates=True)
            args, given = self._arguments.positional(inputs, targets)
            batch = session.batches.of(args, given, named, with_loss=with_loss, training=False)
            session.batches.compare_rows(call, inputs, targets, named)
        given_to_all = {"inputs": batch.inputs, "targets": batch.targets if with_loss else None, "shape": batch.number}
        to_all = outputs == "all" and session.is_launched
        run = partial(Worker.evaluate, **given_to_all, with_outputs=bool(outputs) and with_loss, to_all=to_all)
        found = session.local.on_every_rank(run, name_of_call(call, outputs))
        losses = found[0][0]
        loss = None if losses is None else session.reduction.of_batch(losses, batch.shares)
        if losses is not None and not outputs:
            return loss
        flat = next((one for _, one in found if one is not None), None)
        whole = None if flat is None else batch.outputs_by.outputs.unflatten(flat)
        return whole if losses is None else (loss, whole)

    def _follow(self, session: Session, *, evaluates: bool) -> None:
        """Compile anew if the model has changed."""
        model = session.changes.follow(evaluates=evaluates)
        if model is not None:
            self.outline(model)

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
        # A cut change may have brought parameters to a rank that had none.
        refuse_foreign(optimizer, [*self.parameters(), self._filler])

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
            PipelineError: The pipeline has a scaler already, or is not compiled yet.
        """
        session = self._require()
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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the stages in this process with their names in the user's model.

        A parameter that several stages use occurs once for each of them, under one name, since every stage has a copy.
        """
        for name, value in self.held_tensors():
            if isinstance(value, nn.Parameter):
                yield name, value

    def held_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """Return names and tensors of all parameters and buffers in this process, once per stage that uses them."""
        return [one for worker in self._require().workers for one in worker.state.items()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the stages in this process, by its names in the user's model: the tensors, not copies.

        Without a launcher this is the whole model. Under torchrun it is this rank's part, to be saved by every rank in its own
        file. For a file of the whole model, use :meth:`full_state_dict`.
        """
        session = self._require()
        return session.held.named(session.held.tensors)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state on the job's rank 0, like the plain model's ``state_dict()``.

        All ranks call this between two steps. Rank 0 receives the state from one rank after the other. So it needs room for the
        result, and every other rank for a few messages. All names are included, and those of a tied parameter have one tensor.
        Buffers that are not persistent are not included. Extra state of modules is, as ``get_extra_state`` gives it. The
        tensors are copies in CPU memory, with the dtypes of the model. If replicas have different buffers, the first replica's
        are returned.

            state = pipe.full_state_dict()
            if rank == 0:
                torch.save(state, "model.pt")  # or plain.save_pretrained("model", state_dict=state)

        Returns:
            The state on rank 0, and an empty dict on other ranks.

        Raises:
            PipelineError: The pipeline is closed or has failed.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
        """
        return self._require().held.whole()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy values into the stages of this process. A checkpoint of the plain model works on every rank.

        Under a launcher all ranks call this. Copies on several ranks, such as the replicas of a stage, are then compared, as at
        compilation. If they differ, the first rank's values are used, and the log has one line about it.

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

    def take(self, fitting: FittingModel) -> None:
        """Load a state that fits, for adaptra's own modules."""
        self._require().held.take(fitting)

    @property
    def roles(self) -> Roles | None:
        """The place in its pipeline and the data-parallel replica of each rank of the job; None if there is one replica.

        The place is the rank's stage, or its number in ``placement`` if ranks have several stages.
        """
        return self._require().launched.roles

    @property
    def replicas(self) -> int:
        """The number of data-parallel replicas of the job, 1 without a launcher. Divide the rows into this number of parts."""
        roles = self._require().launched.roles
        return 1 if roles is None else roles.replicas

    @property
    def replica(self) -> int:
        """The data-parallel replica of this process, 0 if there is only one. Give its part of a batch to step."""
        replicas = self._require().launched.replicas
        return 0 if replicas is None else replicas.index

    @property
    def workers(self) -> tuple[int, ...]:
        """The rank in the job of each worker: worker w is rank w % n of replica w // n, with n ranks in a pipeline.

        Routes and events name workers, which stay the same when ranks change roles.
        """
        roles = self._require().launched.roles
        return tuple(range(len(set(self.plan.case.placement)))) if roles is None else roles.ranks

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes of the last step's microbatches: for each range of each replica's, the worker of every stage.

        Without a slow worker or link each replica has one route, through its own workers. So it has in a step in which a
        replica's batch is not of the shape for which the pipeline was compiled.
        """
        program = self._require().workers[0].program
        if program.is_one_pipeline:
            return Routing.at_home(program.placement, self.replicas, program.microbatches).routes
        return program.routing.routes

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let this optimizer's state move with the parameters, so that changes of roles and cuts need not be given it.

        Every rank attaches its own, with the same groups. Another call replaces it. You still call ``optimizer.step()``.

        Args:
            optimizer: A torch optimizer of this process's :meth:`parameters`.

        Raises:
            StateError: The optimizer has parameters that are not this pipeline's.
        """
        self.require_own(optimizer)
        self._optimizer = optimizer

    def settle_roles(self, optimizer: torch.optim.Optimizer | None = None, *, horizon: int = 1000) -> RoleChange | None:
        """Measure the links between the ranks of a job, and change roles if the simulator predicts a saving.

        A slow link hurts the gradient all-reduce in full; between two stages a schedule hides most of it. A change of roles can
        move a slow link between two stages, or to a pair of ranks that exchanges nothing; see :meth:`take_roles`. All ranks
        call this at the same point between two steps, for example every thousand steps. :attr:`replica` may change then. It
        takes a few round trips per pair of ranks.

        Args:
            optimizer: As for :meth:`take_roles`.
            horizon: The number of steps over which a change must save more than it costs.

        Returns:
            The change that was made, the same on every rank, or None. Its text gives the saving.

        Raises:
            PipelineError: No step has run yet.
            OptionError, StateError, LaunchError, PeerLostError: As :meth:`take_roles`.
        """
        return self._require().changes.settle_roles(given_or_attached("settle_roles", optimizer, self._optimizer), horizon)

    def take_roles(self, roles: Roles, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Change the roles of the ranks of a job with several replicas, so that a slow link carries other messages.

        Parameters, buffers, gradients and the optimizer's state move to the ranks that take the roles. Later steps are bitwise
        the same as without the change. All ranks call this between two steps with the same roles. On ranks that moved,
        :meth:`parameters` returns other tensors, and ``optimizer`` steps these from now on. Each rank then gives :meth:`step`
        the part of the batch for its new :attr:`replica` and stage. Planning starts again from the first plan.

        Args:
            roles: The new roles, such as ``pipe.roles.swapped(1, 2)``.
            optimizer: The torch optimizer of this process's parameters, of the same groups on every rank; by default the one
                given to :meth:`attach`.

        Raises:
            OptionError: There is only one replica, or the roles are of another job. Nothing changes.
            StateError: Some state of a rank can't be moved. No rank has moved, and the pipeline continues as before.
            LaunchError, PeerLostError: A rank did not join or is lost. The pipeline has failed.
        """
        self._require().changes.take_roles(roles, given_or_attached("take_roles", optimizer, self._optimizer))

    @property
    def split(self) -> tuple[str | None, ...]:
        """The modules at which stages 1, 2, … begin, with None for a stage that begins inside a module."""
        return tuple(place.module for place in self._require().compiled.cut_points.chosen)

    def settle_split(self, optimizer: torch.optim.Optimizer | None = None, *, horizon: int = 1000) -> SplitChange | None:
        """Move a cut point if an edge's bandwidth limits the step and the simulator predicts that smaller messages save time.

        No order of ops hides a lack of bandwidth, but a smaller message needs less of it. All ranks call this at the same point
        between two steps, for example every thousand steps. It uses the last measured costs and an estimate of the cost of the
        move.

        Args:
            optimizer: As for :meth:`take_split`.
            horizon: The number of steps over which a change must save more than it costs.

        Returns:
            The change that was made, the same on every rank, or None. Its text gives the saving.

        Raises:
            PipelineError: No step has run yet.
            OptionError, StateError, LaunchError, PeerLostError: As :meth:`take_split`.
        """
        return self._require().changes.settle_split(given_or_attached("settle_split", optimizer, self._optimizer), horizon)

    def take_split(self, split: Sequence[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Move the cut points of the running pipeline to other modules.

        Parameters, buffers, gradients and the optimizer's state move to the stages that need them. Later steps are bitwise the
        same as without the change, except for rounding to bfloat16 (``lossy_bf16``), which depends on the cut points. All ranks
        call this between two steps with the same split. On the ranks concerned, :meth:`parameters` returns other tensors, and
        ``optimizer`` steps these from now on. Planning starts again with a first plan for the new stages. The call takes as
        long as cutting and differentiating the captured model took at compilation.

        Args:
            split: Names of the modules that begin stages 1, 2, …, as :func:`compile` takes them.
            optimizer: The torch optimizer of this process's parameters, of the same groups on every rank; by default the one
                given to :meth:`attach`.

        Raises:
            OptionError: The stages were given as modules, or ``split`` is not a list of names. Nothing changes.
            PartitionError, CaptureError, PlanError: The model can't be cut like this. Nothing changes.
            StateError: Some state of a rank can't be moved. No rank has moved, and the pipeline continues as before.
            LaunchError, PeerLostError: A rank did not join, has another split or is lost. The pipeline has failed.
        """
        check_split(split)
        self._require().changes.take_split(split, given_or_attached("take_split", optimizer, self._optimizer))

    @property
    def shapes(self) -> tuple[PipelineShape, ...]:
        """The shapes of batches that are compiled: that of the example, then others, the most recently used last.

        Each has the sizes of its tensors, the rows of its microbatches, the seconds of its compilation and the number of its
        steps and evaluations. ``Options(shapes=…)`` limits how many are kept.
        """
        return self._require().batches.shapes.listed()

    @property
    def plan(self) -> Plan:
        """The plan of the last step, or that of the first step if none has run."""
        return self._require().workers[0].plan

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The controller's events in this process: detections, proposals and switches, oldest first.

        Events before a change of roles or of the split are included. Under torchrun the rank of the first stage coordinates
        and has most of the events.
        """
        return self._require().workers[0].controller.events

    @property
    def slow_edges(self) -> tuple[tuple[int, int], ...]:
        """The directed edges (sending stage, receiving stage) on which a message takes over F / 10.

        On the rank of the first stage that is by the times measured last. Other ranks know those for which the plan was made.
        """
        cost = self._known_cost
        limit = sum(cost.forward) / cost.stages / 10
        edges = range(cost.stages - 1)
        forward = [(i, i + 1) for i in edges if cost.latency_forward[i] + cost.occupancy_forward[i] > limit]
        backward = [(i + 1, i) for i in edges if cost.latency_backward[i] + cost.occupancy_backward[i] > limit]
        return tuple(sorted(forward + backward))

    @property
    def reduces(self) -> tuple[StageReduce, ...]:
        """REDUCE of the last step but one: the sum over the replicas of each stage's gradients. Empty without other replicas.

        Each entry has the seconds that the sum took, and the bytes of its gradients. ``exposed`` are the seconds by which it
        delayed its rank's next step, and ``hidden`` the others. So a step's sum is known once the next step has ended.

        Both are None where ranks have waited for each other between these two steps, as in ``eval_step`` or
        ``clip_grad_norm_``.

        Under torchrun the rank of the first stage coordinates, and gets an entry for every stage once all ranks have reported.
        That is soon after the step. Other ranks have those of their own stages.
        """
        workers = self._require().workers
        return next((worker.last.reduces for worker in workers if worker.controller.coordinates), workers[0].last.reduces)

    def explain(self, *, equations: bool = False) -> str:
        """Explain the plan: its period and makespan, what limits it and what would help; with ``equations`` also the equations.

        The period counts: the time of a step among others in a row. Once ranks are seen to meet between steps, as in
        ``clip_grad_norm_``, the makespan counts. A table shows it for less and for more memory.

        The first line says which times are meant. On the rank of the first stage they are those measured last, also where no
        plan was made for them. Other ranks know those for which the plan was made.

        If the bandwidth of an edge limits the step, no order of ops hides it. Then the text gives the savings by more
        connections, rounding or another cut point, and the limit that would remain.

        With several replicas the text says which microbatches no other replica would compute, and why. It ends with the last
        measured REDUCE: see :attr:`reduces`.
        """
        alone = "".join(f"{line}\n" for line in self._require().alone)
        measured = "".join(f"last measured REDUCE, {one}\n" for one in self.reduces)
        return self._explain_plan(equations) + alone + measured

    @property
    def _known_cost(self) -> CostModel:
        """The costs measured last where they are known, else those for which the plan was made."""
        measured = self._require().workers[0].controller.measured_cost
        return self.plan.case.cost if measured is None else measured

    def _explain_plan(self, equations: bool) -> str:
        plan, bandwidth, cost = self.plan, self._require().bandwidth, self._known_cost
        what = "for which it was made" if cost == plan.case.cost else "measured last, which differ from those it was made for"
        which = f"plan {plan.version}, in the times {what}\n"
        if not plan.program.is_one_pipeline:
            changing = changed_buffers(self._require().compiled)
            job = explain_job(plan.program, alike_case(plan.program, cost, changing=changing))
            return which + job.text(equations=equations)
        explanation = explain(
            plan.program,
            cost,
            plan.case.microbatches,
            bandwidth=bandwidth,
            spread=plan.delegated,
            rounded=plan.rounded,
            unit="seconds",
            timing=timing_of(barrier=plan.case.barrier),
        )
        difference = self._require().compiled.difference
        return which + ("" if difference is None else f"{difference}\n") + explanation.text(equations=equations)

    @property
    def rank(self) -> int:
        """The rank of this process in the job; 0 if one process runs all stages. Use it to print on one rank only."""
        return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0

    @property
    def last_step(self) -> MeasuredStep | None:
        """The measured time of the last step and the size of its batch; None if these stages have run no step yet.

        The time is that of the ranks of this process, so it differs a little between ranks. The batch is that of this replica.
        """
        first, *others = self._require().workers
        if not first.monitor.kept:
            return None
        records = first.monitor.kept[-1]
        # After a failed step the others' last one may be another.
        same = [records, *(one for worker in others for one in worker.monitor.kept if one.step == records.step)]
        seconds = max(one.end for one in same) - min(one.start for one in same)
        tokens, counted_in = first.last.tokens or (None, None)
        return MeasuredStep(first.numbers.steps_before + records.step, seconds, first.last.samples, tokens, counted_in)

    def report(self) -> str:
        """Return a table of the stages with their FLOPs, parameters, activations, peak memory and messages.

        Below it stand the time of the last step and its tokens per second, as :attr:`last_step` has them. On the rank of the
        first stage the times of F, I and W follow, once they are measured. So the table alone is the same on every rank.
        """
        worker = self._require().workers[0]
        estimated, measured = worker.initial.case.cost, worker.controller.measured_cost
        padded = self._require().has_padded_ops
        return self._stage_table() + measured_lines(self.last_step, self.replicas, estimated, measured, padded=padded)

    def _stage_table(self) -> str:
        session = self._require()
        program, cost = self.plan.program, self.plan.case.cost
        sizes = predicted_peaks(program, session.compiled.train)
        if program.is_one_pipeline:
            in_flight, workers = simulate(program, cost).peak_in_flight, program.placement
        else:
            workers = tuple(worker for worker in program.routing.workers[self.replica] if worker is not None)
            of_worker = simulate_alike(program, cost).peak_in_flight
            in_flight = tuple(of_worker[worker] for worker in workers)
        return stage_table(session.compiled.train, program, in_flight, [sizes[worker] for worker in workers])

    def timeline(self) -> Timeline | None:
        """Return the measured timeline of the last step.

        With several replicas it is that of the whole job: a row for each worker, and ops with the replica of their microbatch.
        :func:`adaptra.simulation.worker_steps.worker_steps` condenses it to one entry per worker.

        Under torchrun all ranks of the job call this. Only the rank of worker 0 gets the timeline, the others None. That is the
        rank of replica 0 with the first stage.
        """
        return self._timeline("timeline")

    def _timeline(self, call: str) -> Timeline | None:
        session = self._require()
        session.local.require_running()
        if self._losses is None or not session.workers[0].monitor.kept:
            raise PipelineError("no step has run yet: a timeline shows the last step")
        return session.local.on_every_rank(Worker.timeline, call)[0]

    def save_trace(self, path: str | Path) -> None:
        """Write the measured last step as a trace for Perfetto (.json) or a picture (.svg, .png).

        Edges are marked whose messages were slow in this step: over F / 10, and in :attr:`slow_edges` or over twice the usual.

        With several replicas it shows the whole job: a row for each worker, and microbatches in the colour of their home.

        Under torchrun all ranks call this; the rank of worker 0 writes, as :meth:`timeline` says.

        Raises:
            ReportError: The suffix is unknown, or the folder does not exist.
            MissingExtraError: A picture needs matplotlib, which is not installed. The text says what to install.
        """
        suffix = check_suffix(path, (".json", *drawing.SUFFIXES))
        timeline = self._timeline("save_trace")
        if timeline is None:
            return
        slow = slow_in(timeline, self.slow_edges) | {*slow_edges_of(timeline)}
        named = [(f"step under plan {self.plan.version}{f'; {PADDED}' if self.session.has_padded_ops else ''}", timeline)]
        if suffix == ".json":
            perfetto.write(named, path, slow)
        elif timeline.program.is_one_pipeline:
            picture.draw(named, path, slow_edges=slow)
        else:
            step_picture.draw_steps(named, path)

    def close(self) -> None:
        """End the pipeline's threads and connections. It may be called twice. The parameters stay usable."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session(self) -> Session:
        """The session with the workers, for adaptra's own modules. It changes from version to version."""
        return self._require()

    def _require(self) -> Session:
        if self._session is None:
            raise PipelineError("this pipeline is not compiled yet: give adaptra.compile example_inputs=, or run a first step")
        return self._session
