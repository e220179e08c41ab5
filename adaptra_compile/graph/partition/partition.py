"""Partition: a flat graph becomes contiguous pieces of about equal cost, in the order of execution.

A cut point is a position before a node. A value that a later piece reads crosses every cut between that piece and its producer,
so each stage exchanges messages with its neighbours only. No cut point separates a change in place from the memory changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, fx

from adaptra.errors import PartitionError
from adaptra.graph.capture.capture import FlatGraph
from adaptra.graph.ops.specs import tensor_bytes
from adaptra.graph.partition.analyze import Analysis
from adaptra.graph.partition.balance import Cuts
from adaptra.simulation.cut_points import CutPoint, CutPoints


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a flat graph that one stage executes.

    Attributes:
        index: The stage's index.
        nodes: The nodes that it executes, in order. A free node is in every piece that needs it.
        inputs: The values that it receives: the model's inputs on the first stage, else the outputs of the stage before.
        outputs: The values that it sends; on the last stage the results.
        state, constants, targets: The other placeholders it reads.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]


def find_cuts(flat: FlatGraph, analysis: Analysis) -> Cuts:
    """Find the possible cut points of a graph and their costs."""
    count = len(analysis.nodes)
    position = {node: index for index, node in enumerate(analysis.nodes)} | dict.fromkeys(flat.inputs, -1)
    last_use = _last_uses(flat, analysis, position)
    possible = _possible(flat, analysis, position)
    crossing: list[tuple[fx.Node, ...] | None] = []
    live: list[fx.Node] = []
    for cut in range(count + 1):
        live = [node for node in live if last_use[node] >= cut]
        made = list(flat.inputs) if cut == 0 else [analysis.nodes[cut - 1]]
        live += [node for node in made if last_use.get(node, -2) >= cut]
        whole = all(isinstance(analysis.values[node], Tensor) for node in live)
        crossing.append(tuple(live) if possible[cut] and whole else None)
    work = [0.0]
    for node, cost in zip(analysis.nodes, analysis.cost, strict=True):
        work.append(work[-1] + (0.0 if node in analysis.free else cost))
    sizes = tuple(0 if nodes is None else sum(tensor_bytes(analysis.values[node]) for node in nodes) for nodes in crossing)
    return Cuts(tuple(crossing), sizes, tuple(work))


def cut_before(flat: FlatGraph, analysis: Analysis, cuts: Cuts, split: Sequence[str], stages: int) -> tuple[int, ...]:
    """Return the cut points that a user asks for: each named module begins a stage.

    Raises:
        PartitionError: The number of names is not stages - 1, a name is unknown, or the names are not in the order of
            execution. Also if no cut is possible there. For an unknown name, the text lists similar names.
    """
    if len(split) != stages - 1:
        raise PartitionError(
            f"split={list(split)}: {len(split)} names for {stages} stages: expected {stages - 1}, one per later stage"
        )
    first = _first_node_of_module(flat, analysis)
    positions: list[int] = []
    for name in split:
        if name not in first:
            near = difflib.get_close_matches(name, first, n=3, cutoff=0.4)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else f"modules that run: {', '.join(list(first)[:8])}"
            )
            raise PartitionError(f"split={list(split)}: no module {name!r} runs in this model: {hint}")
        position = first[name]
        before = positions[-1] if positions else 0
        if cuts.work[position] <= cuts.work[before] or position <= before:
            raise PartitionError(
                f"split={list(split)}: {name!r} leaves nothing to compute in the stage before it: expected names in the "
                "order in "
                "which the modules run, the first stage's module not among them"
            )
        if cuts.crossing[position] is None:
            raise PartitionError(
                f"split={list(split)}: no stage can begin at {name!r}: a tensor made before it is changed in place "
                "behind it, or the "
                "loss's targets are used before it; name another module"
            )
        positions.append(position)
    return tuple(positions)


def places_of(flat: FlatGraph, analysis: Analysis, cuts: Cuts, positions: Sequence[int]) -> CutPoints:
    """Return the cut points at these positions, and all other cut points at which a module begins."""
    named: dict[int, str] = {}
    for name, position in _first_node_of_module(flat, analysis).items():
        # A module begins with its first submodule. Users name the outermost module.
        if position not in named or name.count(".") < named[position].count("."):
            named[position] = name

    def place(position: int) -> CutPoint:
        return CutPoint(named.get(position), cuts.bytes[position], cuts.work[position], position)

    possible = [one for one in sorted(named) if cuts.crossing[one] is not None and 0 < cuts.work[one] < cuts.work[-1]]
    return CutPoints(tuple(map(place, positions)), tuple(map(place, possible)), cuts.work[-1])


def align(
    cuts: Cuts,
    anchors: Mapping[tuple[str, int], int],
    stage_of: Mapping[tuple[str, int], int],
    stages: int,
) -> tuple[int, ...]:
    """Cut another graph of the same model so that each use of state is on the stage that has the state.

    Args:
        cuts: The possible cut points of the graph to cut.
        anchors: The uses of state in that graph: (name, number of the use) to the node's index.
        stage_of: The stage of each use in the graph that was cut first.
        stages: The number of stages.

    Raises:
        PartitionError: The two graphs use the state in different orders.
    """
    count = len(cuts.crossing) - 1
    low, high = [0] * (stages + 1), [count] * (stages + 1)
    for use, index in anchors.items():
        if use in stage_of:
            for cut in range(1, stages):
                if stage_of[use] < cut:
                    low[cut] = max(low[cut], index + 1)
                else:
                    high[cut] = min(high[cut], index)
    chosen: list[int] = []
    for cut in range(1, stages):
        least = max(low[cut], chosen[-1] if chosen else 0)
        places = [one for one in range(least, high[cut] + 1) if cuts.crossing[one] is not None]
        if not places:
            names = sorted({name for (name, _), index in anchors.items() if high[cut] <= index < low[cut]})
            raise PartitionError(
                f"stage {cut}: in evaluation mode the model uses {', '.join(names) or 'its state'} in another order "
                "than in training "
                "mode: expected one order, or a split= that keeps these on one stage"
            )
        chosen.append(min(places, key=lambda one: (cuts.bytes[one], one)))
    return tuple(chosen)


def pieces(
    flat: FlatGraph, analysis: Analysis, cuts: Cuts, positions: Sequence[int], results: Sequence[fx.Node]
) -> tuple[Piece, ...]:
    """Cut a graph at the given positions. ``results`` are the outputs of the last piece."""
    bounds = [0, *positions, len(analysis.nodes)]
    parts: list[Piece] = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        is_last = index == len(bounds) - 2
        inputs = flat.inputs if index == 0 else _crossing(cuts, begin)
        outputs = tuple(results) if is_last else _crossing(cuts, end)
        own = [node for node in analysis.nodes[begin:end] if node not in analysis.free]
        needed = _with_free(analysis, own, outputs)
        reads = {one for node in needed for one in node.all_input_nodes} | set(outputs)
        parts.append(
            Piece(
                index,
                tuple(node for node in analysis.nodes if node in needed),
                inputs,
                outputs,
                tuple(node for node in flat.state if node in reads),
                tuple(node for node in flat.constants if node in reads),
                tuple(flat.targets) if is_last else (),
            )
        )
    return tuple(parts)


def state_uses(flat: FlatGraph, analysis: Analysis) -> dict[tuple[str, int], int]:
    """Return a graph's uses of state: (name, number of the use) to the node's index. Uses by free nodes don't count."""
    uses: dict[tuple[str, int], int] = {}
    times: dict[str, int] = {}
    for index, node in enumerate(analysis.nodes):
        for name in [flat.state[one] for one in node.all_input_nodes if one in flat.state and node not in analysis.free]:
            uses[name, times.setdefault(name, 0)] = index
            times[name] += 1
    return uses


def _crossing(cuts: Cuts, position: int) -> tuple[fx.Node, ...]:
    nodes = cuts.crossing[position]
    assert nodes is not None
    return nodes


def _with_free(analysis: Analysis, own: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> set[fx.Node]:
    needed = set(own)
    waiting = [one for node in own for one in node.all_input_nodes] + list(outputs)
    while waiting:
        node = waiting.pop()
        if node in analysis.free and node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _last_uses(flat: FlatGraph, analysis: Analysis, position: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return, for every value that may cross a cut, the index of its last reader. Results are read at the end."""
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(analysis.nodes):
        if node not in analysis.free:
            for one in node.all_input_nodes:
                if one in position and one not in analysis.free:
                    last[one] = index
    end = len(analysis.nodes)
    last.update({node: end for node in flat.results if node in position and node not in analysis.free})
    return last


def _possible(flat: FlatGraph, analysis: Analysis, position: Mapping[fx.Node, int]) -> list[bool]:
    count = len(analysis.nodes)
    possible = [True] * (count + 1)
    state = frozenset().union(*(analysis.memory[node] for node in flat.state)) if flat.state else frozenset[int]()
    first_at: dict[int, int] = {}
    for node, index in sorted(position.items(), key=lambda item: item[1]):
        for memory in analysis.memory[node]:
            first_at.setdefault(memory, index)
    changed = {memory: index for index, memories in analysis.changed.items() for memory in memories}
    for memory, index in changed.items():
        uses = [index]
        if memory in state:
            # A read of a buffer must see the writes of other ops of the model, so all of them are on one stage.
            uses += [
                i
                for i, node in enumerate(analysis.nodes)
                if any(memory in analysis.memory[one] for one in _values(node, analysis))
            ]
        begin = min(uses) if memory in state else first_at[memory]
        for cut in range(begin + 1, max(uses) + 1):
            possible[cut] = False
    targets = set(flat.targets)
    first_target = next((i for i, node in enumerate(analysis.nodes) if targets & set(node.all_input_nodes)), count)
    for cut in range(first_target + 1, count + 1):
        possible[cut] = False
    return possible


def _values(node: fx.Node, analysis: Analysis) -> list[fx.Node]:
    return [one for one in node.all_input_nodes if one in analysis.memory]


def _first_node_of_module(flat: FlatGraph, analysis: Analysis) -> dict[str, int]:
    first: dict[str, int] = {}
    for index, node in enumerate(analysis.nodes):
        if node not in analysis.free:
            for name in flat.placements[node]:
                first.setdefault(name, index)
    return {name: index for name, index in first.items() if name}
