"""Equations at stages, edges, workers and links, with a plan's numbers filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from adaptra.equations.equation import Equation


@dataclass(frozen=True, slots=True)
class Line:
    """One equation at one stage or edge.

    Attributes:
        equation: The equation.
        where: The stage or edge.
        values: Its text with numbers instead of symbols.
        result: Its value, or for a relation whether it is satisfied.
    """

    equation: Equation
    where: str
    values: str
    result: float | bool

    @staticmethod
    def of(equation: Equation, where: str, *values: float) -> Line:
        """Return the line of an equation with values instead of its arguments."""
        result = equation.evaluate(*values)
        return Line(equation, where, equation.with_values(*values), bool(result) if equation.is_relation else float(result))

    def __str__(self) -> str:
        if isinstance(self.result, bool):
            return f"{self.where}: {self.values}  {'holds' if self.result else 'DOES NOT HOLD'}"
        return f"{self.where}: {self.values} = {self.result:g}"

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        return {
            "title": self.equation.title,
            "source": self.equation.source,
            "equation": self.equation.text,
            "where": self.where,
            "values": self.values,
            "result": self.result,
        }


def texts_of(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines as text, under a heading for each equation."""
    for equation, group in groupby(lines, key=lambda line: line.equation):
        yield f"\n{equation.title} ({equation.source}):\n  {equation.text}"
        yield from (f"    {line}" for line in group)
