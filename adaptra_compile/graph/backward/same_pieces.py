"""Detection of pieces of a flat graph that differ only in the names of their state. Identical layers are differentiated once.

A piece's structure contains everything that its trace depends on. In it, the values that the piece reads have numbers instead
of names. A piece with a part that can't be compared equals no other piece and is traced on its own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from adaptra.graph.backward.trace import GradientMessage, TracedPiece, trace_piece
from adaptra.graph.capture.capture import FlatGraph
from adaptra.graph.ops.autocast import regions_of
from adaptra.graph.ops.checkpoints import region_of
from adaptra.graph.partition.analyze import Analysis
from adaptra.graph.partition.partition import Piece


class Tracer:
    """Traces the pieces of one flat graph, each structure once. Use it inside the fake mode of the analysis."""

    def __init__(self, flat: FlatGraph, analysis: Analysis) -> None:
        self._flat = flat
        self._analysis = analysis
        self._known: dict[Hashable, TracedPiece] = {}

    def trace(
        self,
        piece: Piece,
        gradients: Sequence[GradientMessage] | None,
        *,
        is_last: bool,
        used_later: frozenset[str] = frozenset(),
    ) -> TracedPiece:
        """Trace a piece like :func:`adaptra.graph.backward.trace.trace_piece`. Pieces of one structure share the module."""
        flat, analysis = self._flat, self._analysis
        structure = structure_of(flat, analysis, piece, gradients, is_last=is_last, used_later=used_later)
        if structure in self._known:
            return _renamed(self._known[structure], flat, piece)
        traced = trace_piece(
            flat.module,
            piece,
            analysis,
            flat.state,
            flat.constants,
            gradients=gradients,
            is_last=is_last,
            used_later=used_later,
        )
        if structure is not None:
            self._known[structure] = traced
        return traced


def structure_of(
    flat: FlatGraph,
    analysis: Analysis,
    piece: Piece,
    gradients: Sequence[GradientMessage] | None,
    *,
    is_last: bool,
    used_later: Collection[str] = (),
) -> Hashable | None:
    """Return everything that the trace and the split of a piece depend on. It is equal for pieces of equal graphs.

    Args:
        flat, analysis: The flat graph and its analysis.
        piece: A piece of the flat graph.
        gradients: The gradients that the next stage sends, or None for a piece that only runs forward.
        is_last: Whether the piece's outputs are results.
        used_later: Parameters for which later pieces have gradients too.

    Returns:
        A hashable value, or None if a part of the piece can't be compared.
    """
    number: dict[fx.Node, int] = {}
    for node in (*piece.state, *piece.constants, *piece.inputs, *piece.targets, *piece.nodes):
        number.setdefault(node, len(number))
    regions: dict[int, int] = {}
    autocasts: dict[int, int] = {}

    def region(node: fx.Node) -> int | None:
        found = region_of(node)
        return None if found is None else regions.setdefault(found, len(regions))

    def autocast(node: fx.Node) -> Hashable:
        return tuple(replace(one, number=autocasts.setdefault(one.number, len(autocasts))) for one in regions_of(node))

    def looks(nodes: Iterable[fx.Node]) -> Hashable:
        return tuple((number[node], *_look(analysis.values[node])) for node in nodes)

    names = [flat.state[node] for node in piece.state]
    try:
        return (
            (piece.index == 0, is_last, None if gradients is None else tuple(gradients)),
            tuple((names.index(name), name in used_later, name in analysis.changed_state) for name in names),
            *map(looks, (piece.state, piece.constants, piece.inputs, piece.targets, piece.outputs)),
            tuple(
                (_op(node), _value(node.args, number), _value(node.kwargs, number), region(node), autocast(node))
                for node in piece.nodes
            ),
        )
    except _IncomparableError:
        return None


def _renamed(traced: TracedPiece, flat: FlatGraph, piece: Piece) -> TracedPiece:
    """Return the trace of a piece of the same structure, with the state and the constants of ``piece`` instead."""
    names = [flat.state[node] for node in piece.state]
    new = dict(zip(traced.state.values(), names, strict=True))
    return replace(
        traced,
        state=dict(zip(traced.state, names, strict=True)),
        constants=dict(zip(traced.constants, (flat.constants[node] for node in piece.constants), strict=True)),
        weights=tuple((new[name], node) for name, node in traced.weights),
    )


class _IncomparableError(Exception):
    """A part of a piece can't be compared."""


def _look(value: Any) -> tuple[Hashable, ...]:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise _IncomparableError
    return (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)


def _op(node: fx.Node) -> Hashable:
    if not isinstance(node.target, OpOverload | HigherOrderOperator) and node.target is not operator.getitem:
        raise _IncomparableError
    return node.target


def _value(value: Any, number: Mapping[fx.Node, int]) -> Hashable:
    """Return an argument in a comparable form. Numbers are compared by their text, so that 1, 1.0 and True differ."""
    match value:
        case fx.Node() if value in number:
            return ("node", number[value])
        case fx.Node(op="get_attr"):
            # A submodule of the flat graph equals only itself, as in nodes that many pieces compute again.
            return ("submodule", str(value.target))
        case tuple() | list():
            return (type(value), *(_value(one, number) for one in value))
        case dict():
            return (dict, *((key, _value(one, number)) for key, one in value.items()))
        case None | bool() | int() | float() | complex() | str():
            return (type(value), repr(value))
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return value
        case _:
            raise _IncomparableError
