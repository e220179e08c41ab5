"""What users call: compile a model into a pipeline, train with it, look at it.

    pipe = adaptra.compile(model, stages=4, microbatches=16, example_inputs=(inputs, targets), loss=loss_function)
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.step(inputs, targets)
    optimizer.step()
    optimizer.zero_grad()

Under torchrun every rank runs the same lines and holds one stage, or two; without a launcher all stages run as threads of this
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from adaptra.errors import BatchError, OptionError, PipelineError, StateError
from adaptra.frontend.activation_memory import predicted_peaks
from adaptra.frontend.arguments.arguments import STRAIGHT, CompileArguments, check_split
from adaptra.frontend.builder import build
from adaptra.frontend.grad_scaler import GradScaler
from adaptra.frontend.not_a_module import NotAModule
from adaptra.frontend.session import Session
from adaptra.planning.explanation import explain
from adaptra.planning.layout_change import RoleChange, SplitChange
from adaptra.program.roles import Roles
from adaptra.report import perfetto, picture
from adaptra.report.files import check_suffix
from adaptra.report.stage_table import stage_table
from adaptra.report.standing_out import slow_edges_of
from adaptra.runtime.control.events import ControlEvent
from adaptra.runtime.control.plan import Plan
from adaptra.runtime.options import Options
from adaptra.runtime.worker.batch import require_no_gradient
from adaptra.runtime.worker.worker import Worker
from adaptra.simulation.simulate import simulate
from adaptra.simulation.timeline import Timeline

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


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
    placement: str = STRAIGHT,
    mesh: DeviceMesh | None = None,
    transport: str | None = None,
    options: Options | None = None,
) -> Pipeline:
    """Compile a model into a training pipeline that adapts to slow links and stages.

    Args:
        model: Any module that torch.export can capture. Every rank builds the same one; the pipeline keeps only its own
            stage's parameters, so delete the model to free the others. Or a list of modules, one for every stage, each called
            with what the one before returned (a tuple is its arguments): they run as they are and nothing is captured, but
            their W can't be split off I, so plans have less to fill waits with.
        stages: Number of pipeline stages, one on each rank unless ``placement`` says otherwise. Under torchrun the number of
            ranks is a multiple of what they need; more make data-parallel replicas.
        microbatches: Into how many parts a batch is split along its first dimension.
        example_inputs: The positional arguments of :meth:`Pipeline.step`, a whole batch: inputs alone, or
            ``(inputs, targets)``. Only shapes, dtypes and constants matter, but a list of modules runs with its first
            microbatch. Without it the first call of step compiles.
        example_kwargs: The keyword arguments of step, if the model takes any.
        loss: ``loss(outputs, targets)`` → scalar. Without it the model itself returns the scalar loss, and targets, if given,
            are its last positional argument.
        reduction: How the losses of microbatches and replicas become that of the batch, and their gradients alike. ``"mean"``
            gives each the same weight. ``"sum"`` adds them up. ``"weighted"`` divides the sum of all sums by the sum of all
            weights; ``loss``, or the model, then returns the two scalars ``(sum, weight)`` first, such as the sum over all
            labels and their number.
        memory: What a rank may hold of activations at a time: a size such as ``"2GiB"``, with what an op needs while it runs
            and messages on their way; or a number of microbatches. A microbatch counts from its F to its W; what its I frees is
            known from the stage's graphs and counts no longer after I. None for what the devices have free, shared among the
            ranks of a device; the first plan then holds least of those at most a hundredth longer than the best one found.
        split: Names of the modules that begin stages 1, 2, …; without it the stages are balanced by estimated cost.
        placement: ``"straight"`` for one stage on each rank, or ``"v"`` for two, there and back: the first rank then also has
            the last stage. Two stages half as large fill the pipeline sooner within the same memory, and cross each link
            twice. Not over NCCL; such stages are not cut elsewhere later, and ranks keep their roles.
        mesh: A ``torch.distributed`` DeviceMesh of all ranks whose dimensions are ``dp`` and ``pp``, or ``pp`` alone: along
            ``pp`` lie the stages of a replica. Without it these are consecutive ranks.
        transport: ``"local"``, ``"c10d"``, the name of an installed transport, or None for c10d under a launcher, else local.
        options: How the runtime behaves; see :class:`adaptra.runtime.options.Options`.

    Raises:
        OptionError: An argument is not what it should be; names it.
        CaseError: A fault to inject can't be read, or names a stage that does not exist.
        CaptureError, PartitionError: The model can't be captured or cut; says where and what to change.
        BatchError: The example's batch does not divide into microbatches.
        LaunchError: The ranks don't fit the stages, there is no such transport, or another rank compiles something else.
        ScheduleError, PlanError: ``options.schedule`` is unknown, of another pipeline, or does not fit the memory; or one
            microbatch does not.
    """
    request = CompileArguments(
        model, stages, microbatches, loss, memory, split, mesh, transport, options or Options(), placement, reduction=reduction
    )
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


class Pipeline(NotAModule):
    """A compiled training pipeline: the ranks of it that run in this process.

    Made by :func:`compile`. Usable as a context manager; :meth:`close` ends its threads.
    """

    def __init__(self, request: CompileArguments) -> None:
        self._request: CompileArguments | None = request
        self._returns_loss = request.loss is None and request.with_loss
        self._built: Session | None = None
        self._losses: Tensor | None = None
        self._scaler: GradScaler | None = None
        self._is_closed = False

    def build(self, inputs: Any = None, targets: Any = None, /, **kwargs: Any) -> None:
        """Compile for batches like this one; called by :func:`compile` when it is given an example, else by the first step."""
        if self._is_closed:
            raise PipelineError("this pipeline is closed: call adaptra.compile for another one")
        if self._request is None:
            raise PipelineError("this pipeline is compiled already: call adaptra.compile again for batches of another shape")
        self._built = build(self._request, *self._arguments(inputs, targets), kwargs)
        # It holds the whole model, of which each rank keeps its own stage only.
        self._request = None

    def step(self, inputs: Any = None, targets: Any = None, /, **kwargs: Any) -> Tensor:
        """Run one training step on a batch and add its gradients to every parameter's ``grad``.

        Args:
            inputs: The model's input, or a tuple of its positional inputs: a whole batch. Needed on the first stage's rank.
            targets: What the loss compares with: a whole batch. Needed on the last stage's rank (and, when the model returns
                the loss itself, on the first stage's rank).
            kwargs: The model's keyword inputs. Needed on the first stage's rank.

        Returns:
            The loss of the batch as ``reduction=`` says, a scalar without gradient, on every rank.

        Raises:
            BatchError: The batch has no weight (``reduction="weighted"``), gradients are as before and the next step may
                follow. Or the batch is not what the pipeline was compiled for. Without a launcher nothing has happened and the
                next step may follow; under a launcher the other ranks are told, and the pipeline has failed on all of them.
                Or ranks of a replica were given different rows in an earlier call; names it, the ranks and the arguments.
            PeerLostError: Another rank failed; names it. The pipeline has failed.
            PipelineError: The pipeline has failed before or is closed.
        """
        if self._built is None:
            self.build(inputs, targets, **kwargs)
        built = self._require()
        with built.at_the_door():
            args, given = self._arguments(inputs, targets)
            microbatches = built.split_inputs(args, kwargs)
            wanted = built.split_targets(given)
            require_no_gradient(microbatches, built.compiled.inputs.labels, "inputs")
            require_no_gradient(wanted, built.compiled.targets.labels, "targets")
            built.compare_rows("step", inputs, targets, kwargs)
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._losses = built.on_every_rank(lambda worker: worker.step(microbatches, wanted, scale), "step")[0]
        return built.reduction.of_batch(self._losses)

    @property
    def microbatch_losses(self) -> Tensor:
        """The losses of the last step's microbatches, (microbatches,), in microbatch order.

        With ``reduction="weighted"`` (microbatches, 2), each a sum and its weight. Of several replicas these are means, or sums
        unless the reduction is a mean.
        """
        if self._losses is None:
            raise PipelineError("no step has run yet")
        return self._losses

    def eval_step(self, inputs: Any = None, targets: Any = None, /, **kwargs: Any) -> Any:
        """Run the model forward in evaluation mode on a batch, microbatch by microbatch, without gradients.

        It does what eager evaluation does: dropout is off and BatchNorm's buffers stay as they are, but a buffer that the
        model changes in evaluation too does change.

        Returns:
            With targets, or when the model returns the loss itself, the loss of the batch as :meth:`step` returns it, over all
            replicas. Without targets the model's outputs on the rank of the last stage, each tensor concatenated over the
            microbatches, and None elsewhere; each replica's are those of its own batch.
        """
        built = self._require()
        with built.at_the_door():
            args, given = self._arguments(inputs, targets)
            with_loss = given is not None or self._returns_loss
            microbatches = built.split_inputs(args, kwargs)
            wanted = built.split_targets(given) if with_loss else None
            built.compare_rows("eval_step", inputs, targets, kwargs)
        found = built.on_every_rank(lambda worker: worker.evaluate(microbatches, wanted), "eval_step")
        results = next(filter(None, found), {})
        if with_loss:
            return built.reduction.of_batch(torch.stack([loss for (loss,) in results.values()]))
        return built.compiled.outputs.merge([results[index] for index in sorted(results)]) if results else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the stages in this process, for any torch optimizer.

        Under a launcher that is this rank's stage only, so ``torch.nn.utils.clip_grad_norm_`` over them takes the norm of one
        stage, not of the model: use :meth:`clip_grad_norm_`. With threads a parameter that several stages use is here once for
        each copy.
        """
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients, on whatever rank, so that their norm over the whole model is at most ``max_norm``.

        What ``torch.nn.utils.clip_grad_norm_`` does in one process, bitwise; a parameter that several stages use counts once.
        All ranks call it between a step and the optimizer's.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: Which p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: Whether a norm that is infinite or no number is an error; else gradients are divided by it.

        Returns:
            The norm before, a scalar, the same on every rank.

        Raises:
            OptionError: No norm is meant by the arguments.
            PipelineError: No step has run yet, or the norm is not finite and ``error_if_nonfinite``; nothing is changed then.
            PeerLostError: Another rank failed; names it. The pipeline has failed.
        """
        for name, value, least in (("max_norm", max_norm, "0"), ("norm_type", norm_type, "1")):
            given: Any = value
            if isinstance(given, bool) or not isinstance(given, int | float) or not given >= float(least):
                raise OptionError(f"{name}={given!r}: expected a number of at least {least}")
        built = self._require()
        if self._losses is None:
            raise PipelineError("no step has run yet: there are no gradients to clip")
        total = built.on_every_rank(lambda worker: worker.gradient_norm(float(norm_type)), "clip_grad_norm_")[0]
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
        """A ``torch.amp.GradScaler`` for this pipeline, for training in float16: later steps scale their gradients by it.

        After a step call ``scaler.step(optimizer)`` and ``scaler.update()``, before them ``scaler.unscale_(optimizer)`` if
        gradients are clipped; the loss that step returns is not scaled. If the gradients of any stage are not finite, all ranks
        skip the optimizer's step and lower the scale: what torch does in one process, bitwise. All ranks call this.

        Args:
            init_scale, growth_factor, backoff_factor, growth_interval, enabled: As torch's GradScaler takes them.

        Raises:
            PipelineError: The pipeline has one already, or is not compiled yet.
        """
        built = self._require()
        if self._scaler is not None:
            raise PipelineError("this pipeline has a grad_scaler already: expected one, which all optimizers share")
        self._scaler = GradScaler(
            built,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        return self._scaler

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages in this process with their names in the user's model.

        A parameter that several stages use appears once for each of them, under its one name: every stage has a copy.
        """
        for name, value in self.held_tensors():
            if isinstance(value, nn.Parameter):
                yield name, value

    def held_tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The parameters and buffers of the stages in this process with their names; what several stages use once for each."""
        return [one for worker in self._require().workers for one in worker.state.items()]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of the stages in this process, by the names that the user's model gives it: the tensors, not copies.

        Without a launcher that is the whole model. Under torchrun it is one stage, and other ranks have the others: it is for
        what every rank saves in a place of its own. A file of the whole model is what :meth:`full_state_dict` returns.
        """
        built = self._require()
        return built.named(built.state)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state, as the plain model's ``state_dict()`` has it, on rank 0; an empty dict on other ranks.

        All ranks call it, between two steps; rank 0 is that of the job. It gets the state from one rank after the other, so it
        needs room for the result, and no rank for more than a few messages beside what it holds. Every name is there, tied
        parameters and aliases too, as one tensor; buffers that are not persistent are not. The tensors are copies, in memory of
        the CPU, with the dtypes that they have in the model. Of replicas, whose buffers may differ, these are the first one's.

            state = pipe.full_state_dict()
            if rank == 0:
                torch.save(state, "model.pt")  # or plain.save_pretrained("model", state_dict=state)

        Raises:
            PipelineError: The pipeline is closed or has failed.
            PeerLostError: Another rank failed; names it. The pipeline has failed.
        """
        return self._require().full_state()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy values into the stages of this process. A checkpoint of the plain model works on every rank.

        Under a launcher all ranks call it. What several ranks hold, such as the replicas of a stage, is compared then as when
        the pipeline is compiled: where copies differ the first rank's are taken, and one line of the log says so.

        Args:
            state: Tensors by their names in the user's model.
            strict: Whether a missing name of these stages, or a name that the model does not have, is an error.

        Raises:
            StateError: Names are missing or unknown, or a value is no tensor or of another shape, here or, where ranks hold
                copies, on any rank. Nothing is changed then on any of these.
            PeerLostError: Another rank failed; names it. The pipeline has failed.
        """
        built = self._require()
        present = built.agreed_to_load(lambda: self._fitting(state, strict))
        with torch.no_grad():
            for worker in built.workers:
                for name, canonical in present.items():
                    if canonical in worker.state:
                        worker.state[canonical].copy_(state[name])
        built.align_copies()

    def _fitting(self, state: Mapping[str, Tensor], strict: bool) -> dict[str, str]:
        """What to take of a state, by its name there and in the stages of this process; raises as :meth:`load_state_dict`."""
        built = self._require()
        given: Any = state
        if not isinstance(given, Mapping):
            raise StateError(f"state_dict: a {type(given).__name__}: expected a dict of tensors by their names in the model")
        names = built.saved_names
        wanted = {name: canonical for name, canonical in names.items() if canonical in built.state}
        missing, unknown = sorted(set(wanted) - set(state)), sorted(set(state) - set(names))
        if strict and (missing or unknown):
            raise StateError(
                f"state_dict: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}: expected the names of the model "
                "that was compiled; strict=False takes what fits"
            )
        present = {name: canonical for name, canonical in wanted.items() if name in state}
        for name, canonical in present.items():
            value: Any = state[name]
            shape = list(value.shape) if isinstance(value, Tensor) else f"none: it is a {type(value).__name__}"
            if shape != list(built.state[canonical].shape):
                raise StateError(f"state_dict: {name} has shape {shape}: expected {list(built.state[canonical].shape)}")
            if built.state[canonical].is_meta and not state[name].is_meta:
                raise StateError(
                    f"state_dict: {name} is on the meta device, which holds no values: expected a model with memory, by "
                    "model.to_empty(device=...) before adaptra.compile"
                )
        return present

    @property
    def roles(self) -> Roles | None:
        """Which stage of which data-parallel replica each rank of the job holds; None if there is one replica."""
        return self._require().launched.roles

    @property
    def replicas(self) -> int:
        """How many data-parallel replicas the job has, 1 without a launcher: into how many parts to divide the rows."""
        roles = self._require().launched.roles
        return 1 if roles is None else roles.replicas

    @property
    def replica(self) -> int:
        """The data-parallel replica that this process belongs to, 0 if there is one: whose part of a batch to give to step."""
        replicas = self._require().launched.replicas
        return 0 if replicas is None else replicas.index

    def settle_roles(self, optimizer: torch.optim.Optimizer, *, horizon: int = 1000) -> RoleChange | None:
        """Measure the links between the ranks of a job, and let them change roles if the simulator says it wins.

        Averaging gradients over a slow link hides nothing of it, a plan hides much of a slow link between two stages, and a
        link may carry nothing at all: so a slow link can be worth a change of places, see :meth:`take_roles`. All ranks call
        it at the same place between two steps, such as every thousand: that is where :attr:`replica` may change. It takes a
        few round trips per pair of ranks.

        Args:
            optimizer: As for :meth:`take_roles`.
            horizon: Over how many steps a change must save more than moving costs.

        Returns:
            The change that was made, the same on every rank, or None; its text says what is gained.

        Raises:
            PipelineError: No step has run yet.
            OptionError, StateError, LaunchError, PeerLostError: As :meth:`take_roles`.
        """
        return self._require().settle_roles(optimizer, horizon)

    def take_roles(self, roles: Roles, optimizer: torch.optim.Optimizer) -> None:
        """Let the ranks of a job with several replicas change places, so that a slow link carries something else.

        Parameters, buffers, gradients and the optimizer's state move to the ranks that take the roles; later steps are bitwise
        what they would have been. All ranks call it between two steps with the same roles. Then :meth:`parameters` are other
        tensors on the ranks that moved, which ``optimizer`` steps from now on, and each rank gives to :meth:`step` the part of
        the batch that belongs to its new :attr:`replica` and stage. The plan is the first one again, and adapts again.

        Args:
            roles: The new roles, such as ``pipe.roles.swapped(1, 2)``.
            optimizer: The torch optimizer of this process's parameters, of the same groups on every rank.

        Raises:
            OptionError: There is one replica only, or the roles are those of another job; nothing is changed.
            StateError: Something of a rank can't be moved; no rank has moved, and the pipeline goes on as it was.
            LaunchError, PeerLostError: A rank did not come or is lost; the pipeline has failed.
        """
        self._require().take_roles(roles, optimizer)

    @property
    def split(self) -> tuple[str | None, ...]:
        """The modules at which stages 1, 2, … begin; None where a stage begins within one."""
        return tuple(place.module for place in self._require().compiled.places.chosen)

    def settle_split(self, optimizer: torch.optim.Optimizer, *, horizon: int = 1000) -> SplitChange | None:
        """Cut the model elsewhere if an edge's bandwidth binds and the simulator says that a cut where less is sent wins.

        No order of ops hides a lack of bandwidth, and a smaller message needs less of it. All ranks call it at the same place
        between two steps, such as every thousand. The costs are those measured last; what moving takes is estimated.

        Args:
            optimizer: As for :meth:`take_split`.
            horizon: Over how many steps a change must save more than moving costs.

        Returns:
            The change that was made, the same on every rank, or None; its text says what is gained.

        Raises:
            PipelineError: No step has run yet.
            OptionError, StateError, LaunchError, PeerLostError: As :meth:`take_split`.
        """
        return self._require().settle_split(optimizer, horizon)

    def take_split(self, split: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        """Begin the stages at other modules, in the running pipeline.

        Parameters, buffers, gradients and the optimizer's state move to the stages that need them; later steps are bitwise what
        they would have been, but for rounding to bfloat16 (``lossy_bf16``), which happens where the cuts are. All ranks call it
        between two steps with the same split. Then :meth:`parameters` are other tensors on the ranks concerned, which
        ``optimizer`` steps from now on. The plan is a first one for the new stages, and adapts again. It takes the time that
        cutting and differentiating the captured model took when it was compiled.

        Args:
            split: Names of the modules that begin stages 1, 2, …, as :func:`compile` takes them.
            optimizer: The torch optimizer of this process's parameters, of the same groups on every rank.

        Raises:
            OptionError: The stages were given as modules, or ``split`` is no list of names; nothing is changed.
            PartitionError, CaptureError, PlanError: The model can't be cut like that; nothing is changed.
            StateError: Something of a rank can't be moved; no rank has moved, and the pipeline goes on as it was.
            LaunchError, PeerLostError: A rank did not come, has another split or is lost; the pipeline has failed.
        """
        check_split(split)
        self._require().take_split(split, optimizer)

    @property
    def plan(self) -> Plan:
        """The plan that the last step ran under, or that the first one will."""
        return self._require().workers[0].plan

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """What the controller has told in this process: detections, proposals, switches; oldest first.

        Those from before a change of roles or of the split are there too.

        Under torchrun the rank of the first stage coordinates and tells most of them.
        """
        return self._require().workers[0].controller.events

    @property
    def slow_edges(self) -> tuple[tuple[int, int], ...]:
        """The directed edges (sending stage, receiving stage) on which the plan expects a message to take over F / 10."""
        cost = self.plan.case.cost
        limit = sum(cost.forward) / cost.stages / 10
        edges = range(cost.stages - 1)
        forward = [(i, i + 1) for i in edges if cost.latency_forward[i] + cost.occupancy_forward[i] > limit]
        backward = [(i + 1, i) for i in edges if cost.latency_backward[i] + cost.occupancy_backward[i] > limit]
        return tuple(sorted(forward + backward))

    def explain(self) -> str:
        """Why the plan is as it is: the bubble equations with its numbers filled in, its bound and what limits it.

        Where the bandwidth of an edge does, which no order hides: what more connections, rounding, or a cut elsewhere would
        give, and what would limit the step then.
        """
        plan, means = self.plan, self._require().means
        explanation = explain(
            plan.program,
            plan.case.cost,
            plan.case.microbatches,
            means=means,
            spread=plan.delegated,
            rounded=plan.rounded,
            unit="seconds",
        )
        difference = self._require().compiled.difference
        return str(explanation) if difference is None else f"{difference}\n{explanation}"

    @property
    def rank(self) -> int:
        """The rank of this process in the job; 0 where one process runs all stages. For what only one rank should print."""
        return torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0

    def report(self) -> str:
        """A table of what was compiled: per stage the FLOPs, parameters, activations and their peak, and messages."""
        built = self._require()
        peaks = simulate(self.plan.program, self.plan.case.cost).peak_in_flight
        sizes = predicted_peaks(self.plan.program, built.compiled.train)
        of_stage = [sizes[rank] for rank in self.plan.program.placement]
        return stage_table(built.compiled.train, self.plan.program, peaks, of_stage)

    def timeline(self) -> Timeline | None:
        """The measured timeline of the last step. Under torchrun all ranks call this; only the first stage's rank gets it."""
        return self._timeline("timeline")

    def _timeline(self, call: str) -> Timeline | None:
        built = self._require()
        built.require_running()
        if self._losses is None or not built.workers[0].measured:
            raise PipelineError("no step has run yet: a timeline shows the last step")
        return built.on_every_rank(Worker.timeline, call)[0]

    def save_trace(self, path: str | Path) -> None:
        """Write the measured last step as a trace for Perfetto (.json) or a picture (.svg, .png).

        Slow edges are marked: :attr:`slow_edges`, and those that stand out in this step.

        Under torchrun all ranks call this; the first stage's rank writes.

        Raises:
            ReportError: Another suffix, or there is no such folder.
            MissingExtraError: A picture needs matplotlib, and it is not installed; says what to install.
        """
        suffix = check_suffix(path, (".json", *picture.SUFFIXES))
        timeline = self._timeline("save_trace")
        if timeline is None:
            return
        slow = {*self.slow_edges, *slow_edges_of(timeline)}
        named = [(f"step under plan {self.plan.version}", timeline)]
        if suffix == ".json":
            perfetto.write(named, path, slow)
        else:
            picture.draw(named, path, slow_edges=slow)

    def close(self) -> None:
        """End the pipeline's threads and connections. May be called twice; the parameters stay usable."""
        self._is_closed = True
        if self._built is not None:
            self._built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arguments(self, inputs: Any, targets: Any) -> tuple[tuple[Any, ...], Any]:
        """The model's positional arguments and the loss's targets, from what the user gave to step."""
        args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
        if self._returns_loss and targets is not None:
            return (*args, targets), None
        return args, targets

    @property
    def built(self) -> Session:
        """The workers and what they run, for adaptra's own modules; it changes from version to version."""
        return self._require()

    def _require(self) -> Session:
        if self._built is None:
            raise PipelineError("this pipeline is not compiled yet: give adaptra.compile example_inputs=, or run a first step")
        return self._built
