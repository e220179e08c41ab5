"""Passes, and pipelines of passes.

A pass is a frozen dataclass whose fields are its options. It turns a valid program into a valid program. A pipeline is a
sequence of passes, with a text form that parses and prints::

    split-backward,adapt-order{in_flight=12},insert-comm{receives=ahead},lower-comm{slow=1>2}

Options with default values are not printed. The runner depends on no pass. It verifies the program before the first pass and
after each.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from adaptra.errors import PassError, ScheduleError
from adaptra.program import Program
from adaptra.program.verify import verify
from adaptra.simulation.cost import CostModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass(ABC):
    """A transformation of programs. Subclasses are frozen dataclasses; each field is an option made by :func:`option`.

    :meth:`apply` never changes its input. It gives the same program for the same input on every machine. Its result verifies if
    its input does. A subclass's docstring states its further guarantees and the programs that it refuses.
    """

    name: ClassVar[str]
    """The name in pipelines: the file name with ``-`` for ``_``."""

    @property
    def uses_cost(self) -> bool:
        """Whether the result depends on the cost model. If not, ``adaptra opt`` runs the pass without a case."""
        return True

    @abstractmethod
    def apply(self, program: Program, cost: CostModel) -> Program:
        """Return the transformed program.

        Raises:
            PassError: The pass refuses the program.
            PlanError: No program satisfies the limits.
        """

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Pass:
        """Make the pass from the texts of its options.

        Raises:
            PassError: An option is unknown, or its value does not have the expected form.
        """
        forms = {entry.name: entry.metadata["form"] for entry in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in forms:
                raise PassError(f"{cls.name}: option {name!r}: expected {_one_of(forms)}")
            form: OptionForm = forms[name]
            try:
                values[name] = form.parse(text)
            except ValueError:
                raise PassError(f"{cls.name}: {name}={text}: expected {name}={form.expected}") from None
        return cls(**values)

    def __str__(self) -> str:
        options: list[str] = []
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value != entry.default:
                form: OptionForm = entry.metadata["form"]
                options.append(f"{entry.name}={form.print(value)}")
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


class OptionForm(ABC):
    """The text form of an option's value. :meth:`parse` and :meth:`print` are inverse to each other."""

    expected: str
    """The expected form, for error messages."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """Return the value of a text.

        Raises:
            ValueError: The text has no value.
        """

    def print(self, value: Any) -> str:
        """Return the text of a value."""
        return str(value)


def option(default: Any, form: OptionForm) -> Any:
    """Return a dataclass field that is an option of a pass."""
    return field(default=default, metadata={"form": form})


class Count(OptionForm):
    """A whole number."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.expected = f"N with N a whole number of at least {least}"

    def parse(self, text: str) -> int:
        """Return the number."""
        return _count(text, self.least)


class CountPerStage(OptionForm):
    """One whole number for all stages, or ``+``-separated numbers, one per stage."""

    expected = "N or N+N+… (one per stage) with whole numbers of at least 1"

    def parse(self, text: str) -> int | tuple[int, ...]:
        """Return one number, or a tuple of them."""
        numbers = tuple(_count(part, 1) for part in text.split("+"))
        return numbers[0] if len(numbers) == 1 else numbers

    def print(self, value: Any) -> str:
        """Return one number, or all joined by ``+``."""
        return str(value) if isinstance(value, int) else "+".join(map(str, value))


class StageSet(OptionForm):
    """Stages such as ``0+2``."""

    expected = "STAGE, several joined by +, such as 0+2"

    def parse(self, text: str) -> tuple[int, ...]:
        """Return the stages."""
        return tuple(_count(part, 0) for part in text.split("+"))

    def print(self, value: Any) -> str:
        """Return the stages joined by ``+``."""
        return "+".join(map(str, value))


class Word(OptionForm):
    """One word out of a few, or any that matches a pattern."""

    def __init__(self, pattern: str, expected: str) -> None:
        self.pattern = re.compile(pattern)
        self.expected = expected

    def parse(self, text: str) -> str:
        """Return the word."""
        if self.pattern.fullmatch(text) is None:
            raise ValueError(text)
        return text


class EdgeSet(OptionForm):
    """Directed edges between stages such as ``1>2+2>1``."""

    expected = "SOURCE>DESTINATION, several joined by +, such as 1>2+2>1"

    def parse(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return pairs of source and destination stage."""
        edges: list[tuple[int, int]] = []
        for part in text.split("+"):
            source, _, destination = part.partition(">")
            edges.append((_count(source, 0), _count(destination, 0)))
        return tuple(edges)

    def print(self, value: Any) -> str:
        """Return the edges joined by ``+``."""
        return "+".join(f"{source}>{destination}" for source, destination in value)


@dataclass(frozen=True)
class PassPipeline:
    """A sequence of passes.

    Attributes:
        passes: The passes, applied first to last.
    """

    passes: tuple[Pass, ...]

    def apply(
        self,
        program: Program,
        cost: CostModel,
        *,
        hands_over: bool = True,
        barrier: bool = False,
        changing: Container[int] = (),
    ) -> Program:
        """Run all passes, and verify the program before the first and after each that changes it.

        Args:
            program: The program to transform.
            cost: The cost model for which the passes plan.
            hands_over, barrier, changing: What :func:`adaptra.program.verify.verify` gets to know of several replicas.

        Raises:
            ScheduleError: ``program`` is not valid.
            PassError: A pass refuses its program.
            PlanError: No program satisfies the limits.
            AssertionError: A pass turned a valid program into an invalid one. This is a bug of the pass, which the text names.
        """
        check = partial(verify, hands_over=hands_over, barrier=barrier, changing=changing)
        check(program)
        for step in self.passes:
            before, program = program, step.apply(program, cost)
            if program is before:
                continue
            try:
                check(program)
            except ScheduleError as error:
                raise AssertionError(f"bug in pass {step}: its result does not verify: {error}") from error
            log.debug("%s: %s", step, program.name)
        return program

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    @staticmethod
    def parse(text: str, known: Mapping[str, type[Pass]]) -> PassPipeline:
        """Parse the text form.

        Args:
            text: Pass names separated by commas, each with its options in braces.
            known: The passes by name; :func:`adaptra.passes.parse_pipeline` gives all of adaptra's.

        Raises:
            PassError: The text is invalid. The error names the token, its column and the expected form.
        """
        passes: list[Pass] = []
        position = 0
        while True:
            match = _PASS.match(text, position)
            if match is None:
                found = text[position:] or "the end"
                raise PassError(f"pipeline {text!r}: column {position + 1}: {found!r}: expected PASS or PASS{{OPTION=VALUE,…}}")
            name, options = match["name"], match["options"]
            if name not in known:
                raise PassError(f"pipeline {text!r}: column {position + 1}: pass {name!r}: expected {_one_of(known)}")
            try:
                passes.append(known[name].from_options(_options(name, options)))
            except PassError as error:
                raise PassError(f"pipeline {text!r}: column {position + 1}: {error}") from None
            position = match.end()
            if position == len(text):
                return PassPipeline(tuple(passes))
            if text[position] != ",":
                raise PassError(f"pipeline {text!r}: column {position + 1}: {text[position:]!r}: expected ',' or the end")
            position += 1


_PASS: Final = re.compile(r"(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?:\{(?P<options>[^{}]*)\})?")
_OPTION: Final = re.compile(r"(?P<name>[a-z][a-z0-9_]*)=(?P<value>[^,={}\s]+)")


def _options(name: str, text: str | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for token in [] if text is None else text.split(","):
        match = _OPTION.fullmatch(token)
        if match is None:
            raise PassError(f"{name}: option {token!r}: expected OPTION=VALUE")
        if match["name"] in options:
            raise PassError(f"{name}: option {match['name']!r} is given twice")
        options[match["name"]] = match["value"]
    return options


def _count(text: str, least: int) -> int:
    if re.fullmatch(r"0|[1-9]\d*", text) is None or int(text) < least:
        raise ValueError(text)
    return int(text)


def _one_of(names: Mapping[str, Any]) -> str:
    return f"one of {', '.join(sorted(names))}" if names else "no options"
