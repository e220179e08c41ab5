"""An equation: a sympy relation or expression with its subject and source, printed with numbers and evaluated."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation of a model.

    Attributes:
        title: Its subject, for people.
        source: Its source.
        expression: The sympy relation or expression.
        arguments: Its symbols in the order in which :attr:`evaluate` takes their values.
    """

    title: str
    source: str
    expression: Any
    arguments: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The equation as plain text."""
        return str(self.expression)

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols in the equation, without their indices: keys of the model's symbols."""
        return frozenset(str(symbol).partition("_")[0] for symbol in self.expression.free_symbols)

    @property
    def is_relation(self) -> bool:
        """Whether the equation is a relation, so that :attr:`evaluate` returns a truth value and not a number."""
        return bool(self.expression.is_Relational)

    def with_values(self, *values: float) -> str:
        """Return the equation as plain text, with values instead of symbols."""
        text = self.text
        given = {str(symbol): f"{value:g}" for symbol, value in zip(self.arguments, values, strict=True)}
        return re.sub(r"[A-Za-z]+(?:_(?:\{[^}]*\}|\w+))?", lambda match: given.get(match[0], match[0]), text)

    def evaluate(self, *values: float) -> Any:
        """Return the value of the expression, or the truth of the relation, in plain floating-point arithmetic."""
        return _compile(self)(*values)


@functools.cache
def _compile(equation: Equation) -> Callable[..., Any]:
    import sympy

    return sympy.lambdify(equation.arguments, equation.expression, modules="math")


def legend(used: Iterable[Equation], meanings: Mapping[str, str]) -> dict[str, str]:
    """Return the meanings of these equations' symbols, in the order of the model's ``meanings``."""
    symbols = frozenset[str]().union(*(equation.symbols for equation in used))
    return {symbol: meaning for symbol, meaning in meanings.items() if symbol in symbols}
