"""From a model to compiled stages: capture, partition and differentiate in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptra.errors import CaptureError, PartitionError
from adaptra.graph.backward.differentiate import differentiate, evaluate
from adaptra.graph.capture.batch import InputFormat, LossFunction, OutputFormat, TargetFormat
from adaptra.graph.capture.capture import FlatGraph, StateNames, capture, list_eager_ops, state_names
from adaptra.graph.capture.eager_ops import EagerOp
from adaptra.graph.capture.op_signature import Signature, sum_of
from adaptra.graph.capture.ops_comparison import OpsDifference, compare_ops
from adaptra.graph.ops.checkpoints import region_of
from adaptra.graph.ops.fake import fake_like, fake_mode
from adaptra.graph.partition.analyze import Analysis, analyze
from adaptra.graph.partition.balance import Cuts, balance
from adaptra.graph.partition.partition import Piece, align, cut_before, find_cuts, pieces, places_of, state_uses
from adaptra.graph.stages.stages import EvalStage, TrainStage
from adaptra.progress import Progress, log_progress
from adaptra.simulation.cut_points import CutPoints


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A trainable parameter that several stages use: each has a copy, and W on each returns its own contributions.

    Attributes:
        name: The name it goes by; every stage's copy has it.
        aliases: Its other names in the user's model.
        stages: The stages that hold a copy, ascending.
        owner: The stage whose copy counts for the model's state: the first.
        order: The stage of each contribution, in the order in which those of one microbatch must be added: the latest use
            first, each use to the sum so far. That is autograd's own order, so the sum is bitwise autograd's. Empty if no use
            reaches the loss: the parameter has no gradient then.
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
        train: The training stages.
        eval: The same stages in evaluation mode, forward only.
        tied: The trainable parameters that several stages use.
        names: Every name of the model's state, aliases included, to the stages that hold it.
        aliases: Every name of the model's state to the one it goes by in stages.
        non_persistent: The buffers that the model's state_dict leaves out.
        changing: The buffers that training or evaluation changes; of stages that were given as modules, all.
        inputs, targets: Flatten and check what a user gives.
        outputs: Puts together what the model returns in evaluation mode.
        places: Where the stages begin, and where else they could.
        captured: What they were cut from; None for stages that were given as modules.
    """

    train: tuple[TrainStage, ...]
    eval: tuple[EvalStage, ...]
    tied: tuple[TiedParameter, ...]
    names: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    non_persistent: frozenset[str]
    changing: frozenset[str]
    inputs: InputFormat
    targets: TargetFormat
    outputs: OutputFormat
    places: CutPoints
    captured: Captured | None = None

    @property
    def difference(self) -> OpsDifference | None:
        """Where the training stages run other ops than eager torch; None if nowhere, or if it was not compared."""
        return None if self.captured is None else self.captured.difference

    def copied(self, placement: Sequence[int]) -> frozenset[str]:
        """The trainable parameters that stages of several ranks use, each rank with a copy."""
        return frozenset(one.name for one in self.tied if len({placement[stage] for stage in one.stages}) > 1)

    @property
    def with_loss(self) -> bool:
        """Whether the last stage returns a loss; else it returns what the model returns."""
        return bool(self.eval[-1].loss)

    @staticmethod
    def of(
        names: StateNames,
        holders: Mapping[str, tuple[int, ...]],
        train: tuple[TrainStage, ...],
        evaluation: tuple[EvalStage, ...],
        formats: tuple[InputFormat, TargetFormat, OutputFormat],
        places: CutPoints,
        captured: Captured | None = None,
    ) -> CompiledStages:
        """The pipeline of these stages, which hold the model's state as ``holders`` says.

        Raises:
            CaptureError: A stage that holds a shared trainable parameter does not train it.
        """
        inputs, targets, outputs = formats
        return CompiledStages(
            train=train,
            eval=evaluation,
            tied=_tied(names, holders, train),
            names={name: holders[first] for name, first in names.aliases.items()},
            aliases=dict(names.aliases),
            non_persistent=frozenset(name for name in names.buffers if name not in names.persistent),
            changing=frozenset(names.buffers) if captured is None else captured.changing,
            inputs=inputs,
            targets=targets,
            outputs=outputs,
            places=places,
            captured=captured,
        )


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured model, which can be cut again: graphs and fake tensors, so that it needs next to no memory.

    Attributes:
        stages: Into how many stages it is cut.
        names: Of the model's state.
        flat, analysis, cuts: The training graph, what it does, and where it could be cut.
        eval_flat, eval_analysis, eval_cuts: The same of the evaluation graph.
        formats: What flattens and checks inputs, targets and outputs.
        sizes: The bytes of each parameter and buffer.
        mode: The fake mode of both analyses.
        difference: Where the stages that it was first cut into run other ops than eager torch, if that was compared.
    """

    stages: int
    names: StateNames
    flat: FlatGraph
    analysis: Analysis
    cuts: Cuts
    eval_flat: FlatGraph
    eval_analysis: Analysis
    eval_cuts: Cuts
    formats: tuple[InputFormat, TargetFormat, OutputFormat]
    sizes: Mapping[str, int]
    mode: FakeTensorMode
    difference: OpsDifference | None = None

    @property
    def changing(self) -> frozenset[str]:
        """The buffers that either graph changes."""
        return self.analysis.changed_state | self.eval_analysis.changed_state

    def positions(self, split: Sequence[str]) -> tuple[int, ...]:
        """Where stages begin that begin with these modules.

        Raises:
            PartitionError: It can't be cut like that; says what to change.
        """
        return cut_before(self.flat, self.analysis, self.cuts, split, self.stages)

    def cut(self, positions: Sequence[int], progress: Progress = log_progress) -> CompiledStages:
        """The stages that begin at these ops of the training graph; the same for the same positions in every process.

        Raises:
            CaptureError, PartitionError: It can't be cut like that; says what to change.
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
        places = places_of(flat, analysis, self.cuts, positions)
        return CompiledStages.of(names, holders, train, evaluation, self.formats, places, self)


def compile_stages(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    stages: int,
    loss: LossFunction | None = None,
    targets: Any = None,
    split: Sequence[str] | None = None,
    with_loss: bool = True,
    compare: bool = False,
    progress: Progress = log_progress,
) -> CompiledStages:
    """Compile a model into stages. The model is only read: no reference to it or to its state is kept.

    The same model, example and arguments give the same stages in every process. Whether a parameter is trainable is decided
    by its ``requires_grad`` now.

    Args:
        model: The model. If it is in training mode its modules' own modes are kept for training, so that a part that was set to
            evaluation mode stays frozen; else the training stages are captured in training mode.
        args, kwargs: One microbatch of the model's inputs. Values that are not tensors become constants.
        stages: How many stages.
        loss: Called as ``loss(outputs, targets)``, returns a scalar. None when the model returns the loss itself: a scalar,
            or a dict, tuple or dataclass whose ``.loss`` or first element it is.
        targets: One microbatch of targets; they enter at the last stage.
        split: Names of the modules that begin stages 1, 2, …; None balances by estimated cost.
        with_loss: False when there is no loss: then the last stage returns all that the model returns, I starts from a gradient
            for each of these tensors that requires one, and the first stage's I returns gradients of inputs that require them.
        compare: Whether to compare the ops that the training stages run with those that eager torch runs.
        progress: Told of every part that is done.

    Raises:
        CaptureError: The model can't become one graph; names its module and line.
        PartitionError: It can't be cut like that; says what to change.
        BatchError: The example is not a call the model takes.
    """
    if stages < 1:
        raise PartitionError(f"stages={stages}: expected at least 1")
    names = state_names(model)
    inputs, target_format = InputFormat(model, args, kwargs), TargetFormat(targets)
    flat_inputs, flat_targets = tuple(inputs.flatten(args, kwargs)), tuple(target_format.flatten(targets))
    mode = fake_mode()

    def captured(evaluation: bool, changed: frozenset[str]) -> tuple[FlatGraph, Analysis, OutputFormat | None]:
        flat, outputs = capture(
            model,
            flat_inputs,
            inputs,
            flat_targets,
            target_format,
            loss,
            names=names,
            evaluation=evaluation,
            with_loss=with_loss,
        )
        with mode:
            example = _example(model, flat, flat_inputs, flat_targets, names)
            if not with_loss:
                for node, tensor in zip(flat.inputs, flat_inputs, strict=True):
                    example[node].requires_grad_(tensor.requires_grad)
            return flat, analyze(flat, frozenset(names.buffers) - changed, example), outputs

    flat, analysis, _ = captured(evaluation=False, changed=frozenset())
    progress("captured", 1, 2)
    if not any(analysis.values[node].requires_grad for node in flat.results):
        raise CaptureError(
            "the loss depends on no trainable parameter: expected one at least; requires_grad_(True) makes a parameter one"
        )
    cuts = find_cuts(flat, analysis)
    positions = balance(cuts, stages) if split is None else cut_before(flat, analysis, cuts, split, stages)
    progress("cut into stages", 1, 1)

    eval_flat, eval_analysis, outputs = captured(evaluation=True, changed=analysis.changed_state)
    progress("captured", 2, 2)
    assert outputs is not None, "an evaluation capture has outputs"
    made = Captured(
        stages=stages,
        names=names,
        flat=flat,
        analysis=analysis,
        cuts=cuts,
        eval_flat=eval_flat,
        eval_analysis=eval_analysis,
        eval_cuts=find_cuts(eval_flat, eval_analysis),
        formats=(inputs, target_format, outputs),
        sizes=_state_bytes(model),
        mode=mode,
    )
    compiled = made.cut(positions, progress)
    if not compare:
        return compiled
    try:
        eager = list_eager_ops(model, flat_inputs, inputs, flat_targets, target_format, loss, names=names, with_loss=with_loss)
        difference = _difference(made, compiled, eager)
    except Exception as error:
        # What can be captured can be trained; that it could not be compared is said.
        failed = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')[:300]}"
        difference = OpsDifference("", "", "", 0, 0, failed)
    return replace(compiled, captured=replace(made, difference=difference))


def _difference(made: Captured, compiled: CompiledStages, eager: Sequence[EagerOp]) -> OpsDifference | None:
    parameters = {name: made.analysis.values[node] for node, name in made.flat.state.items()}
    sums: Counter[Signature] = Counter()
    for tied in compiled.tied:
        # Each stage gives what it has of the gradient, and the runtime adds it up in autograd's order.
        sums[sum_of(parameters[tied.name])] += max(0, len(tied.order) - 1)
    again = made.stages > 1 or any(region_of(node) is not None for node in made.analysis.nodes)
    graphs = [graph for stage in compiled.train for graph in stage.graphs]
    return compare_ops(eager, graphs, again=again, dense=made.stages > 1, elsewhere=sums)


def _example(
    model: nn.Module, flat: FlatGraph, inputs: Sequence[Tensor], targets: Sequence[Tensor], names: StateNames
) -> dict[fx.Node, Tensor]:
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    example = {node: fake_like(tensors[name], name in names.trainable) for node, name in flat.state.items()}
    example |= {node: fake_like(tensor) for node, tensor in flat.constants.items()}
    example |= {node: fake_like(tensor) for node, tensor in zip(flat.inputs, inputs, strict=True)}
    example |= {node: fake_like(tensor) for node, tensor in zip(flat.targets, targets, strict=True)}
    return example


def _holders(names: StateNames, graphs: Sequence[tuple[FlatGraph, Sequence[Piece]]], stages: int) -> dict[str, tuple[int, ...]]:
    """Which stages hold each parameter and buffer. State that no graph uses lies with the state named before it."""
    found: dict[str, set[int]] = {}
    for flat, parts in graphs:
        for piece in parts:
            for node in piece.state:
                found.setdefault(flat.state[node], set()).add(piece.index)
    holders: dict[str, tuple[int, ...]] = {}
    last: tuple[int, ...] = (0,)
    for name in (*names.parameters, *names.buffers):
        last = tuple(sorted(found[name])) if name in found else last[:1]
        holders[name] = last
    return holders


def _tied(names: StateNames, holders: Mapping[str, tuple[int, ...]], train: Sequence[TrainStage]) -> tuple[TiedParameter, ...]:
    found: list[TiedParameter] = []
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
            found.append(TiedParameter(name, aliases, held, held[0], order))
    return tuple(found)


def _state_bytes(model: nn.Module) -> dict[str, int]:
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
