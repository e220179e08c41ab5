"""Compilation of a model into stages: capture, partition and differentiation in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptra.errors import CaptureError, PartitionError
from adaptra.graph.backward.differentiate import differentiate, evaluate
from adaptra.graph.backward.outputs_beside import OutputsBeside
from adaptra.graph.capture.batch import InputFormat, LossFunction, OutputFormat, TargetFormat
from adaptra.graph.capture.capture import FlatGraph, StateNames, list_eager_ops
from adaptra.graph.capture.eager_ops import EagerOp
from adaptra.graph.capture.op_signature import Signature, shown, sum_of
from adaptra.graph.capture.ops_comparison import OpsDifference, compare_ops
from adaptra.graph.microbatch import Microbatch
from adaptra.graph.modes import as_for_training
from adaptra.graph.ops.checkpoints import region_of
from adaptra.graph.ops.specs import tensor_bytes
from adaptra.graph.partition.analyze import Analysis
from adaptra.graph.partition.balance import Cuts, balance
from adaptra.graph.partition.partition import Piece, align, cut_before, find_cuts, pieces, places_of, state_uses
from adaptra.graph.stages.stages import EvalStage, TrainStage
from adaptra.progress import Progress, log_progress
from adaptra.simulation.cut_points import CutPoints, positions_of

Formats = tuple[InputFormat, TargetFormat, OutputFormat, OutputFormat]
"""The formats of inputs and targets, and of the outputs in evaluation and in training."""


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A trainable parameter that several stages use: each has a copy, and W on each returns its own contributions.

    Attributes:
        name: Its name in all stages.
        aliases: Its other names in the user's model.
        stages: The stages that have a copy, ascending.
        owner: The stage whose copy counts as the model's state: the first.
        order: The stage of each contribution of one microbatch, in the order of addition: the latest use first, each use added
            to the sum so far. This is autograd's own order, so the sum is bitwise autograd's. It is empty if no use reaches
            the loss, since the parameter then has no gradient.
    """

    name: str
    aliases: tuple[str, ...]
    stages: tuple[int, ...]
    owner: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledStages:
    """A model as a pipeline of stages.

    Attributes:
        train: The training stages; none if the stages only evaluate.
        eval: The same stages in evaluation mode, forward only; none if the stages only train.
        tied: The trainable parameters that several stages use.
        names: Every name of the model's state, aliases included, to the stages that have it.
        aliases: Every name of the model's state to its name in stages.
        saved: Every name in the model's state_dict to its name in stages.
        non_persistent: The buffers that are not in the model's state_dict.
        changing: The buffers that training or evaluation changes; all buffers if the stages are modules.
        inputs, targets: The formats that flatten and check the user's inputs and targets.
        outputs: The format that assembles the model's outputs in evaluation mode.
        outputs_in_training: The same in training mode.
        cut_points: The cut points of the stages, and the other possible cut points.
        captured: The captured model from which they were cut, or None if the stages are modules. Of stages that only train or
            only evaluate, the graph that they lack is that of the stages to which they are alike.
    """

    train: tuple[TrainStage, ...]
    eval: tuple[EvalStage, ...]
    tied: tuple[TiedParameter, ...]
    names: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    saved: Mapping[str, str]
    non_persistent: frozenset[str]
    changing: frozenset[str]
    inputs: InputFormat
    targets: TargetFormat
    outputs: OutputFormat
    outputs_in_training: OutputFormat
    cut_points: CutPoints
    captured: Captured | None = None

    @property
    def trains(self) -> bool:
        """Whether there are training stages."""
        return bool(self.train)

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluation stages."""
        return bool(self.eval)

    @property
    def difference(self) -> OpsDifference | None:
        """The difference between the training stages' ops and eager torch's; None if there is none or it was not compared."""
        return None if self.captured is None else self.captured.difference

    @property
    def owners(self) -> dict[str, int]:
        """The stage whose copy counts as the model's state, of each trainable parameter that several stages use."""
        return {one.name: one.owner for one in self.tied}

    def copied(self, placement: Sequence[int]) -> frozenset[str]:
        """Return the trainable parameters that stages on several ranks use. Each of these ranks has a copy."""
        return frozenset(one.name for one in self.tied if len({placement[stage] for stage in one.stages}) > 1)

    def changing_in(self, *stages: int) -> list[str]:
        """Return the names of the buffers that training stages change, sorted."""
        return sorted(self.changing.intersection(name for stage in stages for name in self.train[stage].buffers))

    @property
    def with_loss(self) -> bool:
        """Whether the last stage returns a loss and not the model's outputs. Stages that only train do."""
        return not self.eval or bool(self.eval[-1].loss)

    def with_evaluation_of(self, other: CompiledStages) -> CompiledStages:
        """Return these stages with the evaluation stages of others, which were compiled for the same shape of microbatch."""
        assert self.captured is not None and other.captured is not None, "stages given as modules have one shape"
        inputs, targets, _, outputs = self.captured.formats
        captured = replace(
            self.captured,
            eval_flat=other.captured.eval_flat,
            eval_analysis=other.captured.eval_analysis,
            eval_cuts=other.captured.eval_cuts,
            formats=(inputs, targets, other.outputs, outputs),
        )
        return replace(self, eval=other.eval, outputs=other.outputs, captured=captured)

    def positions_in(self, flat: FlatGraph, analysis: Analysis, cuts: Cuts) -> tuple[int, ...]:
        """Return where to cut the graph of another shape of microbatch, so that its stages have the same state as these.

        Raises:
            CaptureError: The model uses its state in another order for that shape.
        """
        own = self.captured
        assert own is not None, "stages given as modules are not captured"
        positions = positions_of(self.cut_points.chosen)
        before = max(positions, default=0)
        # The last stage may have other ops: a contiguous() of one row is none.
        ops, others = ([str(node.target) for node in one.nodes[:before]] for one in (own.analysis, analysis))
        if ops == others and all(cuts.crossing[one] is not None for one in positions):
            return positions
        stage_of = {use: sum(one <= index for one in positions) for use, index in state_uses(own.flat, own.analysis).items()}
        try:
            return align(cuts, state_uses(flat, analysis), stage_of, len(self.train))
        except PartitionError as error:
            raise CaptureError(f"it can't be cut where the pipeline is cut: {error}") from error

    def require_same_state(self, other: CompiledStages) -> None:
        """Check that the stages of another shape of microbatch have the same state as these.

        Raises:
            CaptureError: They don't. The text names the stage or the parameter.
        """
        for mine, theirs in zip(self.train, other.train, strict=True):
            for what in ("parameters", "buffers", "trainable", "contributions"):
                here, there = (sorted(getattr(one, what)) for one in (mine, theirs))
                if here != there:
                    names = sorted(set(here).symmetric_difference(there)) or there
                    raise CaptureError(
                        f"stage {mine.index} would have other {what}: {', '.join(names[:3])}: expected a model "
                        "that uses the same state for all shapes; compile another pipeline for this shape"
                    )
        if self.tied != other.tied or self.changing != other.changing:
            raise CaptureError(
                "the model shares parameters or changes buffers in another way: expected the same for all "
                "shapes; compile another pipeline for this shape"
            )

    @staticmethod
    def of(
        names: StateNames,
        holders: Mapping[str, tuple[int, ...]],
        train: tuple[TrainStage, ...],
        evaluation: tuple[EvalStage, ...],
        formats: Formats,
        cut_points: CutPoints,
        captured: Captured | None = None,
    ) -> CompiledStages:
        """Return the pipeline of these stages. ``holders`` gives the stages of each parameter and buffer.

        Raises:
            CaptureError: A stage that has a shared trainable parameter does not train it.
        """
        inputs, targets, outputs, trained = formats
        return CompiledStages(
            train=train,
            eval=evaluation,
            tied=_tied(names, holders, train),
            names={name: holders[first] for name, first in names.aliases.items()},
            aliases=dict(names.aliases),
            saved=dict(names.saved),
            non_persistent=frozenset(names.buffers) - set(names.saved.values()),
            changing=frozenset(names.buffers) if captured is None else captured.changing,
            inputs=inputs,
            targets=targets,
            outputs=outputs,
            outputs_in_training=trained,
            cut_points=cut_points,
            captured=captured,
        )


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured model, which can be cut again. It has graphs and fake tensors only, so it needs next to no memory.

    Attributes:
        stages: The number of stages.
        names: The names of the model's state.
        flat, analysis, cuts: The training graph, its analysis and its possible cut points.
        eval_flat, eval_analysis, eval_cuts: The same for the evaluation graph.
        formats: The formats of inputs, targets and outputs, and of outputs in training.
        sizes: The bytes of each parameter and buffer.
        mode: The fake mode of both analyses.
        difference: The difference between eager torch's ops and those of the stages of the first cut, if compared.
    """

    stages: int
    names: StateNames
    flat: FlatGraph
    analysis: Analysis
    cuts: Cuts
    eval_flat: FlatGraph
    eval_analysis: Analysis
    eval_cuts: Cuts
    formats: Formats
    sizes: Mapping[str, int]
    mode: FakeTensorMode
    difference: OpsDifference | None = None

    @property
    def changing(self) -> frozenset[str]:
        """The buffers that either graph changes."""
        return self.analysis.changed_state | self.eval_analysis.changed_state

    def positions(self, split: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of the stages that begin with these modules.

        Raises:
            PartitionError: The model can't be cut like this. The text says what to change.
        """
        return cut_before(self.flat, self.analysis, self.cuts, split, self.stages)

    def cut(self, positions: Sequence[int], progress: Progress = log_progress) -> CompiledStages:
        """Return the stages that begin at these ops of the training graph. The result is the same in every process.

        Raises:
            CaptureError, PartitionError: The model can't be cut like this. The text says what to change.
        """
        flat, analysis, names = self.flat, self.analysis, self.names
        parts = pieces(flat, analysis, self.cuts, positions, flat.results)
        stage_of = {use: sum(one <= index for one in positions) for use, index in state_uses(flat, analysis).items()}
        eval_positions = align(self.eval_cuts, state_uses(self.eval_flat, self.eval_analysis), stage_of, self.stages)
        eval_parts = pieces(self.eval_flat, self.eval_analysis, self.eval_cuts, eval_positions, self.eval_flat.results)
        holders = _holders(names, [(flat, parts), (self.eval_flat, eval_parts)], self.stages)
        for name in names.buffers:
            if name in analysis.changed_state and len(holders[name]) > 1:
                raise PartitionError(
                    f"{name}: training changes this buffer on stage {holders[name][0]}, and evaluation also reads it on stage "
                    f"{holders[name][-1]}: expected one stage; use split= to keep the modules that use it together"
                )
        with self.mode:
            train = differentiate(flat, analysis, parts, holders, names, self.sizes, progress)
            evaluation = evaluate(self.eval_flat, self.eval_analysis, eval_parts, progress)
        if flat.loss is not None:
            beside = OutputsBeside(flat, analysis, parts[-1], train, self.formats[3], self.mode)
            train = (*train[:-1], train[-1].with_outputs(beside))
        cut_points = places_of(flat, analysis, self.cuts, positions)
        return CompiledStages.of(names, holders, train, evaluation, self.formats, cut_points, self)


@as_for_training()
def compile_stages(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    stages: int,
    loss: LossFunction | None = None,
    targets: Any = None,
    split: Sequence[str] | None = None,
    like: CompiledStages | None = None,
    same_state: bool = True,
    with_loss: bool = True,
    compare: bool = False,
    progress: Progress = log_progress,
) -> CompiledStages:
    """Compile a model into stages. The model is only read: no reference to it or to its state is kept.

    The same model, example and arguments give the same stages in every process. Whether a parameter is trainable is decided
    by its ``requires_grad`` now.

    Args:
        model: The model. In training mode its modules keep their own modes, so that a part in evaluation mode stays frozen.
            Otherwise the training stages are captured in training mode.
        args, kwargs: One microbatch of the model's inputs. Values that are not tensors become constants.
        stages: The number of stages.
        loss: Called as ``loss(outputs, targets)``; returns a scalar. None if the model returns the loss itself: a scalar, or a
            dict, tuple or dataclass with the loss as ``.loss`` or first element.
        targets: One microbatch of targets. They enter at the last stage.
        split: Names of the modules that begin stages 1, 2, …; None balances by estimated cost.
        like: Stages of the same model for another shape of microbatch, or before it changed. They are cut alike.
        same_state: Whether a model that uses other state than ``like`` is an error.
        with_loss: Whether there is a loss. Without one the last stage returns all of the model's outputs, and I starts from
            their gradients. The first stage's I then returns the gradients of inputs that require them.
        compare: Whether to compare the training stages' ops with those of eager torch.
        progress: Called after every part.

    Raises:
        CaptureError: The model can't become one graph. The text names its module and line.
        PartitionError: The model can't be cut like this. The text says what to change.
        BatchError: The example is not a call that the model accepts.
    """
    if stages < 1:
        raise PartitionError(f"stages={stages}: expected at least 1")
    microbatch = Microbatch.of(model, args, kwargs, targets, loss, with_loss=with_loss)
    flat, analysis, trained = microbatch.captured(evaluation=False, changed=frozenset())
    progress("captured", 1, 2)
    require_trained(flat, analysis)
    cuts = find_cuts(flat, analysis)
    if like is not None:
        positions = like.positions_in(flat, analysis, cuts)
    else:
        positions = balance(cuts, stages) if split is None else cut_before(flat, analysis, cuts, split, stages)
    progress("cut into stages", 1, 1)

    eval_flat, eval_analysis, outputs = microbatch.captured(evaluation=True, changed=analysis.changed_state)
    progress("captured", 2, 2)
    captured = Captured(
        stages=stages,
        names=microbatch.names,
        flat=flat,
        analysis=analysis,
        cuts=cuts,
        eval_flat=eval_flat,
        eval_analysis=eval_analysis,
        eval_cuts=find_cuts(eval_flat, eval_analysis),
        formats=(microbatch.inputs, microbatch.targets, outputs, trained),
        sizes=_state_bytes(model),
        mode=microbatch.mode,
    )
    compiled = captured.cut(positions, progress)
    if like is not None and with_loss and same_state:
        like.require_same_state(compiled)
    if not compare:
        return compiled
    try:
        batch = microbatch.flat_inputs, microbatch.inputs, microbatch.flat_targets, microbatch.targets
        eager = list_eager_ops(model, *batch, loss, names=microbatch.names, with_loss=with_loss)
        difference = _difference(captured, compiled, eager)
    except Exception as error:
        # A captured model can be trained even if the comparison fails. The failure is recorded.
        failed = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')[:300]}"
        difference = OpsDifference("", "", "", 0, 0, failed)
    return replace(compiled, captured=replace(captured, difference=difference))


def require_trained(flat: FlatGraph, analysis: Analysis) -> None:
    """Check that a training graph has something to train.

    Raises:
        CaptureError: No result requires a gradient.
    """
    if not any(analysis.values[node].requires_grad for node in flat.results):
        raise CaptureError(
            "the loss depends on no trainable parameter: expected one at least; requires_grad_(True) makes a parameter one"
        )


def require_state(like: CompiledStages, piece: Piece, flat: FlatGraph) -> None:
    """Check that a piece of the graph for another shape uses no other state than its stage has.

    Raises:
        CaptureError: It does. The text names the state.
    """
    held = like.train[piece.index]
    if other := sorted({flat.state[node] for node in piece.state}.difference(held.parameters, held.buffers)):
        raise CaptureError(
            f"stage {piece.index} would have other state: {', '.join(other[:3])}: expected a model that uses the same state "
            "for all shapes; compile another pipeline for this shape"
        )


def _difference(captured: Captured, compiled: CompiledStages, eager: Sequence[EagerOp]) -> OpsDifference | None:
    parameters = {name: captured.analysis.values[node] for node, name in captured.flat.state.items()}
    sums: Counter[Signature] = Counter()
    for tied in compiled.tied:
        # Each stage returns its contributions to the gradient, and the runtime adds them up in autograd's order.
        sums[sum_of(parameters[tied.name])] += max(0, len(tied.order) - 1)
    again = captured.stages > 1 or any(region_of(node) is not None for node in captured.analysis.nodes)
    graphs = [graph for stage in compiled.train for graph in stage.graphs]
    difference = compare_ops(eager, graphs, again=again, dense=captured.stages > 1, elsewhere=sums)
    for tied in compiled.tied if difference is not None and not difference.where else ():
        if difference is not None and any(difference.eager == shown(sum_of(parameters[tied.name].to(one))) for one in _CAST_TO):
            stages = " and ".join(map(str, tied.stages))
            difference = replace(
                difference, where=f"the gradient of {tied.name}, which stages {stages} each cast for themselves"
            )
    return difference


_CAST_TO: Final = (torch.bfloat16, torch.float16)
"""The precisions of autocast, which casts a parameter once for the whole model and so sums its gradients in that precision."""


def _holders(names: StateNames, graphs: Sequence[tuple[FlatGraph, Sequence[Piece]]], stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter and buffer. State that no graph uses goes with the state named before it."""
    stages_of: dict[str, set[int]] = {}
    for flat, parts in graphs:
        for piece in parts:
            for node in piece.state:
                stages_of.setdefault(flat.state[node], set()).add(piece.index)
    holders: dict[str, tuple[int, ...]] = {}
    last: tuple[int, ...] = (0,)
    for name in (*names.parameters, *names.buffers):
        last = tuple(sorted(stages_of[name])) if name in stages_of else last[:1]
        holders[name] = last
    return holders


def _tied(names: StateNames, holders: Mapping[str, tuple[int, ...]], train: Sequence[TrainStage]) -> tuple[TiedParameter, ...]:
    tied: list[TiedParameter] = []
    for name in names.parameters:
        held = holders[name]
        if len(held) > 1 and name in names.trainable:
            order = tuple(stage for stage in reversed(held) for one in train[stage].contributions if one == name)
            if order and any(name not in train[stage].trainable for stage in held):
                raise CaptureError(
                    f"{name}: evaluation mode uses this trainable parameter on stages {list(held)}, training mode does "
                    "not: expected "
                    "every stage that holds a trainable parameter to train it; use split= to keep it on one stage"
                )
            aliases = tuple(alias for alias, first in names.aliases.items() if first == name and alias != name)
            tied.append(TiedParameter(name, aliases, held, held[0], order))
    return tuple(tied)


def _state_bytes(model: nn.Module) -> dict[str, int]:
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
