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

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from adaptra.errors import BatchError, OptionError, PipelineError
from adaptra.frontend.arguments.accelerate_doors import refuse_accelerate, refuse_accelerator
from adaptra.frontend.arguments.arguments import CompileArguments
from adaptra.frontend.arguments.call_batches import CallBatch, OfReplica, given_by, inputs_and_targets, require_same
from adaptra.frontend.arguments.placing import STRAIGHT, Placement
from adaptra.frontend.arguments.step_arguments import Outputs, StepArguments, check_outputs, name_of_call
from adaptra.frontend.builder import build
from adaptra.frontend.pipeline.observation import ObservationMethods
from adaptra.frontend.pipeline.synchrony import SynchronyMethods
from adaptra.frontend.running.session import Session
from adaptra.known_keywords import known_keywords
from adaptra.runtime.devices.determinism import require_deterministic
from adaptra.runtime.options import Options
from adaptra.runtime.worker.batch import require_no_gradient
from adaptra.runtime.worker.worker import Worker

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
    replicas: int | None = None,
    batches: Callable[[int, int], Any] | None = None,
) -> Pipeline:
    """Compile a model into a training pipeline that adapts to slow links and stages.

    Args:
        model: Any module that torch.export can capture. Every rank builds the same one. The pipeline keeps only its own
            stage's parameters, so delete the model to free the others. Or a list of modules, one per stage, each called with
            the result of the one before; a tuple gives several arguments. They run unchanged, without capture. But I and W of
            such stages are one computation, so plans have fewer ops to fill bubbles with. In one process they may be on
            several GPUs: each rank trains on that of its stages' parameters.
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
        transport: ``"local"``, ``"c10d"``, ``"delegate"``, ``"nccl"``, the name of an installed transport, or None. None is
            local without a launcher, else the delegate for a model on cuda and c10d for others. NCCL needs a GPU for each rank.
        options: Options of the runtime; see :class:`adaptra.runtime.options.Options`.
        weights: The values of a model built within ``torch.device("meta")``. Each rank gets those of its own stages, on the
            example's device. A .safetensors file, a folder of such files as on Hugging Face's
            hub, or a checkpoint of torch.distributed.checkpoint. With None the modules' own ``reset_parameters`` compute
            them, with the values that one process would draw.
        replicas: The number of data-parallel replicas. With None, the ranks make as many as they can. Fewer ranks than these
            replicas have may run them: some ranks then also host workers of other replicas. Every number stays that of as many
            ranks. Each replica needs one rank that is given its batch.
        batches: A function of the training step and the replica that returns their batch, each time the same one. That is
            inputs, ``(inputs, targets)``, or a dict of step's arguments. Then :meth:`Pipeline.step` takes no batch. Steps are
            counted from 0, over earlier pipelines that a checkpoint continues. With ``Options(survive=True)`` a replica may
            then lose all its processes.

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
        replicas=replicas,
        batches=batches,
    )
    refuse_accelerate(request.whole_model)
    pipeline = Pipeline(request)
    named: Any = {} if example_kwargs is None else example_kwargs
    if not isinstance(named, Mapping):
        raise OptionError(f"example_kwargs={named!r}: expected a dict of the model's keyword arguments")
    if example_inputs is not None or named:
        pipeline.build(*inputs_and_targets(example_inputs, "example_inputs"), **named)
    return pipeline


class Pipeline(SynchronyMethods, ObservationMethods):
    """A compiled training pipeline, with its ranks that run in this process.

    :func:`compile` makes it. It can be used as a context manager. :meth:`close` ends its threads.
    """

    def __init__(self, request: CompileArguments) -> None:
        super().__init__(request.whole_model)
        self._request: CompileArguments | None = request
        self._batches = request.batches
        first = request.whole_model if request.stage_modules is None else request.stage_modules[0]
        self._arguments = StepArguments(first, returns_loss=request.loss is None and request.with_loss)
        self._filler = nn.Parameter(torch.empty(0))

    def build(self, inputs: Any = None, targets: Any = None, /, **kwargs: Any) -> None:
        """Compile for batches like this one. :func:`compile` calls this if it has an example, otherwise the first step does."""
        if self._is_closed:
            raise PipelineError("this pipeline is closed: call adaptra.compile for another one")
        if self._request is None:
            raise PipelineError("this pipeline is compiled already: call adaptra.compile again for batches of another shape")
        if self._batches is not None and inputs is None and not kwargs:
            example = given_by(self._arguments, self._batches, "batches", 0)(0)
        else:
            example = CallBatch.of(self._arguments, *self._arguments.resolve(inputs, targets, kwargs))
        self._session = build(self._request, example.args, example.targets, example.kwargs)
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
                With ``compile(batches=…)`` none is needed; if one is given it must be what the function returns.
            targets: The targets of the loss: a whole batch. Needed on the last stage's rank. If the model returns the loss
                itself, also needed on the first stage's rank.
            outputs: Whether to return the model's outputs beside the loss. With True the rank of the last stage has them. Each
                rank may decide for itself, in each step. With ``"all"`` all ranks have them. Then all ranks of the job give
                it in the same step, and wait until the outputs have been sent. Under :class:`adaptra.Stealing` and
                :class:`adaptra.Deadline` all ranks of a pipeline give the same, as it then computes its whole batch itself.
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
                got different rows in an earlier call. Then the text names the call, the ranks and the arguments. Or only some
                ranks ask for outputs where all have to.
            OptionError: An output does not reach the last stage. The text names it. Or this process has an Accelerator of
                accelerate with an engine or a precision of its own.
            PeerLostError: Another rank failed. The text names it. The pipeline has failed.
            PipelineError: The pipeline has failed before or is closed.
        """
        wanted = check_outputs(outputs)
        inputs, targets, named = self._arguments.resolve(inputs, targets, kwargs)
        if self._session is None:
            self.build(inputs, targets, **named)
        session, call = self._require(), name_of_call("step", wanted)
        return session.local.made(call, lambda: self._step(session, call, inputs, targets, named, wanted))

    def _step(
        self, session: Session, call: str, inputs: Any, targets: Any, named: dict[str, Any], wanted: Outputs
    ) -> Tensor | tuple[Tensor, Any]:
        """Run a step of what :meth:`step` was given; ``call`` is its name for other ranks."""
        with session.local.at_the_door():
            self.require_training()
            if self._losses is None:  # the Accelerator may be younger than the pipeline
                refuse_accelerator()
            self._follow(session, evaluates=False)
            session.require_outputs_at_home(wanted)
            home, of_replica = CallBatch.of(self._arguments, inputs, targets, named), None
            if self._batches is not None:
                of_replica = given_by(self._arguments, self._batches, "batches", session.training_step)
                expected = of_replica(self.replica)
                require_same(home, expected, f"batches({session.training_step}, {self.replica})")
                home = expected
            hosted = session.hosted_batches.of("step", home, of_replica, with_loss=True, training=True)
            batch = hosted[self.replica]
            require_no_gradient(batch.inputs, session.compiled.inputs.labels, "inputs")
            require_no_gradient(batch.targets, session.compiled.targets.labels, "targets")
            if session.look is not None:
                session.look.at(batch)
            if wanted:
                session.batches.prepare_outputs(batch)
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        to_all = wanted == "all" and session.is_launched

        def run(worker: Worker) -> tuple[Tensor, list[Tensor] | None]:
            given = hosted[worker.replica]
            how = {"with_outputs": bool(wanted), "to_all": to_all}
            return worker.step(given.inputs, given.targets, scale, given.number, **how)

        by_rank = session.hosted_batches.run(run, call, Worker.commit)[: len(session.local.home)]
        self._losses = by_rank[0][0]
        loss = session.reduction.of_batch(self._losses, batch.shares)
        if not wanted:
            return loss
        flat = next((one for _, one in by_rank if one is not None), None)
        return loss, None if flat is None else batch.outputs_by.outputs_in_training.unflatten(flat)

    @property
    def microbatch_losses(self) -> Tensor:
        """The losses of the last step's microbatches, of shape (microbatches,), in microbatch order.

        With ``reduction="weighted"`` the shape is (microbatches, 2), with a sum and its weight in each row. Over several
        replicas the losses are averaged if the reduction is ``"mean"``, otherwise summed. In x-order that is
        over the replicas in the update; those of unequal rows all have its mean. Under a deadline there are as many as
        the replica with most of them has had in the step. Deferred ones come first, and the mean is the step's loss.
        """
        if self._losses is None:
            raise PipelineError("no step has run yet")
        return self._losses

    def eval_step(self, inputs: Any = None, targets: Any = None, /, *, outputs: Outputs = False, **kwargs: Any) -> Any:
        """Run the model forward in evaluation mode on a batch, microbatch by microbatch, without gradients.

        It behaves like eager evaluation: dropout is off, and BatchNorm's buffers do not change. A buffer that the model changes
        in evaluation mode too does change.

        Args:
            inputs, targets, kwargs: As for :meth:`step`. Or alone a function of the replica that returns its batch: inputs,
                ``(inputs, targets)``, or a dict of these arguments. All ranks give one, or none does. A job that survives
                with ``batches=`` needs it, as a replica may have lost all its processes.
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
        of_replica = None
        if callable(inputs) and not isinstance(inputs, Tensor):
            if targets is not None or kwargs:
                raise BatchError("eval_step: a function of the replica beside other arguments: expected it alone")
            of_replica = given_by(self._arguments, inputs, "eval_step: the function of the replica")
            home = of_replica(self.replica)
        else:
            home = CallBatch.of(self._arguments, *self._arguments.resolve(inputs, targets, kwargs))
        with_loss = home.targets is not None or self._arguments.returns_loss
        if wanted is True and not with_loss:
            raise BatchError(
                "eval_step: outputs=True without targets: expected targets for the loss; without outputs=True the "
                "outputs are returned alone"
            )
        return self._evaluate("eval_step", home, of_replica, with_loss=with_loss, outputs=wanted)

    def _aliases(self) -> Mapping[str, str]:
        return self._require().compiled.aliases

    def _infer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, _, named = self._arguments.opened(inputs, None, kwargs)
        batch = CallBatch.of(self._arguments, given, None, named)
        return self._evaluate("call", batch, None, with_loss=False, outputs=False)

    def _evaluate(self, call: str, home: CallBatch, of_replica: OfReplica | None, *, with_loss: bool, outputs: Outputs) -> Any:
        """Return the loss in evaluation mode, the outputs, or both."""
        session, name = self._require(), name_of_call(call, outputs)
        if of_replica is None and not session.launched.world.needs_homes:
            raise BatchError(
                f"{call}: one replica's batch, in a job that may lose all processes of a replica: expected a function of the "
                "replica that returns its batch, as in pipe.eval_step(lambda replica: …)"
            )
        name = name if of_replica is None else f"{name} of a function"

        def evaluated() -> Any:
            return self._evaluated(session, call, name, home, of_replica, with_loss=with_loss, outputs=outputs)

        return session.local.made(name, evaluated)

    def _evaluated(
        self,
        session: Session,
        call: str,
        name: str,
        home: CallBatch,
        of_replica: OfReplica | None,
        *,
        with_loss: bool,
        outputs: Outputs,
    ) -> Any:
        with session.local.at_the_door():
            self._follow(session, evaluates=True)
            session.require_outputs_at_home(outputs or not with_loss)
            hosted = session.hosted_batches.of(call, home, of_replica, with_loss=with_loss, training=False)
            batch = hosted[self.replica]
        to_all = outputs == "all" and session.is_launched

        def run(worker: Worker) -> tuple[Tensor | None, list[Tensor] | None]:
            given = hosted[worker.replica]
            how = {"with_outputs": bool(outputs) and with_loss, "to_all": to_all}
            return worker.evaluate(given.inputs, given.targets if with_loss else None, given.number, **how)

        by_rank = session.hosted_batches.run(run, name, lambda worker: worker.kept.commit())[: len(session.local.home)]
        losses = by_rank[0][0]
        loss = None if losses is None else session.reduction.of_batch(losses, batch.shares)
        if losses is not None and not outputs:
            return loss
        flat = next((one for _, one in by_rank if one is not None), None)
        whole = None if flat is None else batch.outputs_by.outputs.unflatten(flat)
        return whole if losses is None else (loss, whole)

    def _follow(self, session: Session, *, evaluates: bool) -> None:
        """Compile anew if the model has changed. torch's switches must be as the options say."""
        if session.is_deterministic:
            require_deterministic()
        model = session.changes.follow(evaluates=evaluates)
        if model is not None:
            self.outline(model)
