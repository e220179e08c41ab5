"""Passes over programs, one per file. The file name is the pass name.

A pass turns a valid program into a valid program; see :class:`adaptra.passes.base.Pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from adaptra.passes.adapt_order import AdaptOrder
from adaptra.passes.base import Pass, PassPipeline
from adaptra.passes.fuse_backward import FuseBackward
from adaptra.passes.insert_comm import InsertComm
from adaptra.passes.insert_crossing import InsertCrossing
from adaptra.passes.lower_comm import LowerComm
from adaptra.passes.split_backward import SplitBackward

__all__ = [
    "PASSES",
    "AdaptOrder",
    "FuseBackward",
    "InsertComm",
    "InsertCrossing",
    "LowerComm",
    "Pass",
    "PassPipeline",
    "SplitBackward",
    "parse_pipeline",
]

PASSES: Final[Mapping[str, type[Pass]]] = MappingProxyType(
    {known.name: known for known in (SplitBackward, AdaptOrder, FuseBackward, InsertComm, InsertCrossing, LowerComm)}
)
"""adaptra's passes by name."""


def parse_pipeline(text: str) -> PassPipeline:
    """Parse a pipeline of adaptra's passes, such as ``split-backward,adapt-order{in_flight=12}``.

    Raises:
        PassError: The text is invalid. The error names the token, its column and the expected form.
    """
    return PassPipeline.parse(text, PASSES)
