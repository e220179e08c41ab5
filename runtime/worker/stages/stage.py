"""One stage on its rank: runs its F, I and W, and keeps the values that F saves for I, and I for W."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from adaptra.graph.ops.random_state import RandomKey
from adaptra.graph.stages.stages import EvalStage, Take, TrainStage
from adaptra.runtime.outputs.step_outputs import StepOutputs, own_copies
from adaptra.runtime.step_messages.shared_gradients import Gradients
from adaptra.runtime.worker.stages.loss_reduction import RootGradient


class ForwardStage(Protocol):
    """The executor's interface of a stage in a program of forwards, whether it trains or only evaluates."""

    def begin_step(self, loss_scale: float, steps_before: int = 0, outputs: StepOutputs | None = None) -> None:
        """Start a step."""
        ...

    def forward(self, step: int, microbatch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run F and return the tensors for the next stage; on the last stage, the results."""
        ...


class Stage(ForwardStage, Protocol):
    """The executor's interface of a stage that trains."""

    def input_grad(self, microbatch: int, grad_outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run I and return the gradients for the previous stage."""
        ...

    def weight_grad(self, microbatch: int, computed: Callable[[float], None]) -> None:
        """Run W and accumulate the parameters' gradients. W may call ``computed`` with the share that it has computed."""
        ...

    def hand_over(self) -> tuple[Tensor, ...]:
        """Return the sums of the weight gradients so far, which another worker continues."""
        ...

    def take_over(self, sums: Sequence[Tensor]) -> None:
        """Continue the sums that another worker has handed over. They are copied."""
        ...

    def hand_over_buffers(self) -> tuple[Tensor, ...]:
        """Return the present values of the buffers that the stage changes, for the worker of its next microbatch."""
        ...

    def take_over_buffers(self, values: Sequence[Tensor]) -> None:
        """Take the values of these buffers that another worker has handed over. They are copied."""
        ...


S = TypeVar("S", bound=ForwardStage)


class TrainingStage:
    """F, I and W of one stage.

    Args:
        stage: The compiled stage.
        state: The stage's own parameters and buffers by their names in the user's model.
        seed: Seed of the job's random numbers.
        root: The gradient with which the last stage's backward pass begins.
        replica: The index of this stage's replica; random numbers depend on the microbatch's number among those of all
            replicas.
        is_last: Whether this is the last stage, whose only output is the loss.
        gradients: Takes each parameter's gradient of each microbatch.
        await_buffers: Called before each F: waits until the buffers that the replicas share have arrived.
        changing: The names of the buffers that the stage changes.
        complete: Called with the name of a parameter as soon as the last W has computed its gradient, if no other stage adds to
            it. None if nobody needs it before the end of the step.
        first_microbatch: The number of this replica's first microbatch among those of all replicas; by default as if all
            replicas had ``microbatches``.
    """

    def __init__(
        self,
        stage: TrainStage,
        state: Mapping[str, Tensor],
        *,
        seed: int,
        root: RootGradient,
        replica: int,
        is_last: bool,
        gradients: Gradients,
        await_buffers: Callable[[], None],
        changing: Sequence[str] = (),
        complete: Callable[[str], None] | None = None,
        first_microbatch: int | None = None,
    ) -> None:
        self._stage = stage
        self._state = state
        self._seed = seed
        self._gradients = gradients
        self._saved: dict[int, Any] = {}
        self._root = root
        self._first_microbatch = replica * root.microbatches if first_microbatch is None else first_microbatch
        self._await_buffers = await_buffers
        self._is_last = is_last
        self._root_gradients: Sequence[Tensor] = ()
        self._steps_before = 0
        self._outputs: StepOutputs | None = None
        self._handed_over = gradients.unshared(stage.contributions)
        self._changing = [state[name] for name in changing]
        self._complete = complete
        # With one microbatch its gradients become the parameters' ``grad`` without a copy, which needs them all at the end.
        self._in_turn = None if complete is None or root.microbatches == 1 else stage.weight_grad_in_turn()

    def begin_step(self, loss_scale: float, steps_before: int = 0, outputs: StepOutputs | None = None) -> None:
        """Start a step.

        Args:
            loss_scale: The factor of the loss in the gradients.
            steps_before: The number of training steps before this pipeline's first one, which random numbers add to the step.
            outputs: Takes the model's outputs, on the last stage if this step returns them.
        """
        self._steps_before = steps_before
        self._outputs = outputs
        if self._is_last:
            # There is none if the loss depends on no trained parameter.
            self._root_gradients = tuple(self._root.of(one, loss_scale) for one in self._stage.grad_outputs)

    def keep_outputs(self, outputs: StepOutputs) -> None:
        """Have ``outputs`` take the model's outputs from now on in this step."""
        self._outputs = outputs

    def forward(self, step: int, microbatch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run F, and keep the values for I and W until they run. A negative number is a microbatch of the step before."""
        self._await_buffers()
        later, number = divmod(microbatch, self._root.microbatches)
        key = RandomKey(self._seed, self._steps_before + step + later, self._first_microbatch + number)
        if self._outputs is None or microbatch < 0:
            outputs, self._saved[microbatch] = self._stage.run_forward(self._state, inputs, key, targets)
        else:
            outputs, self._saved[microbatch] = self._outputs.run_forward(
                self._stage, microbatch, self._state, inputs, key, targets
            )
        return outputs

    def input_grad(self, microbatch: int, grad_outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run I. The last stage gets no ``grad_outputs``, because the gradient starts there."""
        if self._is_last:
            grad_outputs = self._root_gradients
        grad_inputs, self._saved[microbatch] = self._stage.run_input_grad(self._saved.pop(microbatch), grad_outputs)
        return grad_inputs

    def weight_grad(self, microbatch: int, computed: Callable[[float], None]) -> None:
        """Run W and pass each gradient on; those of the last microbatch one by one, if the sum over replicas waits for them."""
        saved = self._saved.pop(microbatch)
        if self._in_turn is not None and microbatch == self._root.microbatches - 1:
            self._in_turn(saved, self._taking(microbatch, computed))
            self._gradients.end_microbatch(self._stage.index, microbatch)
        else:
            self._add(microbatch, self._stage.run_weight_grad(saved), self._stage.fresh_gradients)

    def add_from_elsewhere(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the weight gradients of a microbatch that another worker has computed, as if W had done so here."""
        self._add(microbatch, gradients, (False,) * len(gradients))

    def _add(self, microbatch: int, gradients: Sequence[Tensor | None], fresh: Sequence[bool]) -> None:
        for name, gradient, is_fresh in zip(self._stage.contributions, gradients, fresh, strict=True):
            self._gradients.add(self._stage.index, name, microbatch, gradient, fresh=is_fresh)
        self._gradients.end_microbatch(self._stage.index, microbatch)

    def _taking(self, microbatch: int, computed: Callable[[float], None]) -> Take:
        """Return a function that takes W's gradients of a replica's last microbatch one by one."""
        sizes = [self._state[name].nbytes for name in self._stage.contributions]
        whole, done = max(1, sum(sizes)), 0

        def take(number: int, gradient: Tensor) -> None:
            nonlocal done
            name = self._stage.contributions[number]
            self._gradients.add(self._stage.index, name, microbatch, gradient)
            done += sizes[number]
            computed(done / whole)
            if self._complete is not None and name in self._handed_over:
                self._complete(name)

        return take

    def hand_over(self) -> tuple[Tensor, ...]:
        """Return the sums of the weight gradients so far, which another worker continues. This stage then has none."""
        return self._gradients.hand_over(self._handed_over)

    def take_over(self, sums: Sequence[Tensor]) -> None:
        """Continue the sums that another worker has handed over."""
        self._gradients.take_over(self._handed_over, sums)

    def hand_over_buffers(self) -> tuple[Tensor, ...]:
        """Return the present values of the buffers that the stage changes, once those that replicas share have arrived."""
        self._await_buffers()
        return tuple(one.detach().clone() for one in self._changing)

    def take_over_buffers(self, values: Sequence[Tensor]) -> None:
        """Take the values of these buffers that another worker has handed over."""
        for one, value in zip(self._changing, values, strict=True):
            one.copy_(value)


class UnevenForwards(Generic[S]):
    """One stage of a program whose first microbatches have one row more than the others.

    Args:
        larger: Runs the first microbatches.
        smaller: Runs the others.
        count: The number of larger microbatches.
    """

    def __init__(self, larger: S, smaller: S, count: int) -> None:
        self._larger = larger
        self._smaller = smaller
        self._count = count

    def _of(self, microbatch: int) -> S:
        return self._larger if microbatch < self._count else self._smaller

    def begin_step(self, loss_scale: float, steps_before: int = 0, outputs: StepOutputs | None = None) -> None:
        """Start a step; see :meth:`TrainingStage.begin_step`."""
        for stage in (self._larger, self._smaller):
            stage.begin_step(loss_scale, steps_before, outputs)

    def forward(self, step: int, microbatch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run F."""
        return self._of(microbatch).forward(step, microbatch, inputs, targets)


class UnevenStage(UnevenForwards[Stage]):
    """One stage of a step whose first microbatches have one row more than the others."""

    def input_grad(self, microbatch: int, grad_outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run I."""
        return self._of(microbatch).input_grad(microbatch, grad_outputs)

    def weight_grad(self, microbatch: int, computed: Callable[[float], None]) -> None:
        """Run W."""
        self._of(microbatch).weight_grad(microbatch, computed)

    def hand_over(self) -> tuple[Tensor, ...]:
        """Return the sums so far. Both parts add to the same."""
        return self._larger.hand_over()

    def take_over(self, sums: Sequence[Tensor]) -> None:
        """Continue the sums that another worker has handed over."""
        self._larger.take_over(sums)

    def hand_over_buffers(self) -> tuple[Tensor, ...]:
        """Return the present values of the buffers that the stage changes."""
        return self._larger.hand_over_buffers()

    def take_over_buffers(self, values: Sequence[Tensor]) -> None:
        """Take the values of these buffers that another worker has handed over."""
        self._larger.take_over_buffers(values)


class TwoPassStage(TrainingStage):
    """A stage whose forwards and backwards are two programs, with anything between them, including other forwards.

    Args:
        send_outputs: Called with the number of a microbatch and its outputs on the last stage.
        send_input_gradients: Called with the number of a microbatch and the gradients of its inputs on the first stage.
        Others: As of :class:`TrainingStage`.
    """

    def __init__(
        self,
        stage: TrainStage,
        state: Mapping[str, Tensor],
        *,
        seed: int,
        root: RootGradient,
        replica: int,
        is_last: bool,
        gradients: Gradients,
        await_buffers: Callable[[], None],
        send_outputs: Callable[[int, tuple[Tensor, ...]], None],
        send_input_gradients: Callable[[int, tuple[Tensor, ...]], None],
    ) -> None:
        super().__init__(
            stage,
            state,
            seed=seed,
            root=root,
            replica=replica,
            is_last=is_last,
            gradients=gradients,
            await_buffers=await_buffers,
        )
        self._send_outputs = send_outputs
        self._send_input_gradients = send_input_gradients
        self._tangents: Sequence[Sequence[Tensor]] = ()

    def take_saved(self) -> dict[int, Any]:
        """Return and remove the values that the forwards have saved for the backwards."""
        saved, self._saved = self._saved, {}
        return saved

    def begin_backward(self, saved: dict[int, Any], tangents: Sequence[Sequence[Tensor]]) -> None:
        """Continue with saved values.

        Args:
            saved: The values that :meth:`take_saved` returned.
            tangents: On the last stage, per microbatch the gradient of each output that has one.
        """
        self._saved, self._tangents = saved, tangents

    def forward(self, step: int, microbatch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run F on copies of received inputs, because its backward may come after other messages have reused their buffers."""
        given = inputs if self._stage.index == 0 else [one.clone() for one in inputs]
        outputs = super().forward(step, microbatch, given, targets)
        if self._is_last:
            self._send_outputs(microbatch, outputs)
        return outputs

    def input_grad(self, microbatch: int, grad_outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run I."""
        if self._is_last:
            self._root_gradients = self._tangents[microbatch]
        grad_inputs = super().input_grad(microbatch, grad_outputs)
        if self._stage.index == 0:
            self._send_input_gradients(microbatch, grad_inputs)
        return grad_inputs


class EvaluationStage:
    """The forward pass of one stage in evaluation mode, as eager evaluation runs it; no values are kept for a backward pass.

    Args:
        evaluation: The stage's evaluation graph.
        state: The stage's own parameters and buffers by their names in the user's model.
        with_loss: True if the last stage returns the loss and takes targets, False if it returns the model's outputs.
        with_outputs: True if the last stage computes the model's outputs beside the loss.
        is_last: True for the last stage, whose results outlive received messages.
        await_buffers: As of :class:`TrainingStage`.
    """

    def __init__(
        self,
        evaluation: EvalStage,
        state: Mapping[str, Tensor],
        *,
        with_loss: bool,
        with_outputs: bool,
        is_last: bool,
        await_buffers: Callable[[], None],
    ) -> None:
        self._evaluation = evaluation
        self._state = state
        self._with_loss = with_loss
        self._with_outputs = with_outputs
        self._is_last = is_last
        self._await_buffers = await_buffers
        self._outputs: StepOutputs | None = None

    def begin_step(self, loss_scale: float, steps_before: int = 0, outputs: StepOutputs | None = None) -> None:
        """Start an evaluation. Nothing depends on its number. ``outputs`` takes the model's outputs on the last stage."""
        self._outputs = outputs

    def forward(self, step: int, microbatch: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run F; ``step`` does not matter, because nothing is random."""
        self._await_buffers()
        results = self._evaluation.run_forward(
            self._state, inputs, targets, with_loss=self._with_loss, with_outputs=self._with_outputs
        )
        if not self._is_last:
            return results
        losses, others = 1 if self._with_loss else 0, (*inputs, *targets, *self._state.values())
        if self._outputs is not None:
            self._outputs.add(microbatch, results[losses:], others)
        return own_copies(results[:losses], others)
