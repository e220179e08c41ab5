"""Parsing of command-line values: PROGRAM (a file, standard input or a name), --sweep and --uncertain."""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

from adaptra.errors import CaseError, InvalidProgramError, ProgramTextError, ScheduleError
from adaptra.program import Program, place_in
from adaptra.program.schedules import GENERATORS, PLACED, generate, generate_for
from adaptra.program.torch_csv import from_csv
from adaptra.program.verify import verify
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import load_case, worker_of
from adaptra.simulation.job import check_fit


class VerifierArguments(TypedDict, total=False):
    """What a case says about which programs its workers can execute; see :func:`adaptra.program.verify.verify`."""

    hands_over: bool
    barrier: bool
    changing: Container[int]


def verifier_arguments(case: Case) -> VerifierArguments:
    """Return what a case says to the verifier."""
    return {"hands_over": case.hands_over, "barrier": case.barrier, "changing": case.changing}


def read_program(name: str, case: Case) -> Program:
    """Read the program that a user calls ``name``, verify it, and check that it fits the case.

    ``-`` means standard input. A name of :func:`adaptra.program.schedules.generate_for` means the schedule of the case's size.
    A file ending in ``.csv`` has torch's form, and every other file the text form.

    Raises:
        ScheduleError: The program can't be parsed, or no set of ranks can execute it.
        CaseError: The program has other replicas, stages, ranks or microbatches than the case.
    """
    source = source_for(name, case)
    source.verify(verifier_arguments(case))
    return source.program


def source_for(name: str, case: Case) -> ProgramSource:
    """Read a program as :func:`read_program` does, and don't verify it."""
    generated = _generated(name, case)
    source = read_source(name) if generated is None else ProgramSource(name, None, generated)
    if case.is_one_pipeline:
        source.program.require_one_pipeline(name)
        _check_fits(name, source.program, case)
    else:
        check_fit(source.program, case)
    return source


@dataclass(frozen=True)
class ProgramSource:
    """A program and where it comes from.

    Attributes:
        name: What the user calls it: a file, ``-``, or the name of a schedule.
        text: The text form that was read. None for a schedule that was generated and for torch's CSV.
        program: The program.
    """

    name: str
    text: str | None
    program: Program

    def verify(self, arguments: VerifierArguments) -> None:
        """Prove that ranks can execute the program; see :func:`adaptra.program.verify.verify`.

        Raises:
            ScheduleError: A rule is broken. The text begins with file, line and column of the op.
        """
        try:
            verify(self.program, **arguments)
        except InvalidProgramError as error:
            place = "" if self.text is None else "".join(f":{n}" for n in place_in(self.text, error.rank, error.number))
            raise ScheduleError(f"{self.name}{place}: {error}") from None


_OF_ONE_PIPELINE: Final = ("sweep", "exact", "uncertain", "in_flight", "slow_edge", "sensitivity")
"""The options that several replicas don't have."""


def read_case(options: Namespace) -> Case:
    """Return the case that the file and the options describe. With lost or slow workers one pipeline is a job of one replica.

    Raises:
        CaseError: The file or an option is invalid, or an option belongs to one pipeline and this is a job of workers of their
            own.
    """
    case, replicas = load_case(options.case), getattr(options, "replicas", None)
    changes = {name: getattr(options, name, None) for name in ("lost", "slow", "optimizer", "reduce")}
    if replicas and not case.is_one_pipeline:
        raise CaseError(f"--replicas {replicas}: {options.case} says how many: P={case.replicas}")
    if case.is_one_pipeline and (replicas or any(value is not None for value in changes.values())):
        case = case.of_replicas(replicas or 1)
    case = _changed(replace(case, barrier=True) if getattr(options, "barrier", None) else case, changes)
    for name in _OF_ONE_PIPELINE:
        if getattr(options, name, None):
            case.require_one_pipeline(f"--{name.replace('_', '-')}")
    return case


def _changed(case: Case, changes: Mapping[str, Any]) -> Case:
    if changes["lost"] is not None:
        lost = [worker_of("--lost", one, case.placement) for one in changes["lost"]]
        case = replace(case, lost=case.lost | frozenset(lost))
    named = set[int]()
    for word in changes["slow"] or ():
        worker, equals, factor = word.partition("=")
        try:
            value = float(factor)
        except ValueError:
            equals = ""
            value = 0.0
        if not equals:
            raise CaseError(f"--slow {word:.80}: expected WORKER=FACTOR such as 1.2=2.0")
        number = worker_of("--slow", worker, case.placement)
        if number in named:
            raise CaseError(f"--slow {word:.80}: this worker has a factor already: expected each once")
        named.add(number)
        case = replace(case, slow={**case.slow, number: value})
    if changes["optimizer"] is not None:
        case = replace(case, step=(changes["optimizer"],) * case.stages)
    if changes["reduce"] is not None:
        case = replace(case, reduce=(changes["reduce"],) * case.stages)
    return case


class SweepRange(TypedDict):
    """Arguments of :func:`adaptra.planning.explaining.comparison.sweep_delay`."""

    edges: list[tuple[int, int]]
    delays: list[float]
    names: NotRequired[list[str]]


def read_sweep(words: Sequence[str]) -> SweepRange:
    """Parse the words after ``--sweep``: ``edge=1-2 delay=0:60``, and optionally ``steps=13 names=1f1b,adapted``.

    Raises:
        CaseError: A word is invalid. The text names it and the expected form.
    """
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("edge", "delay", "steps", "names") or not equals or name in values:
            raise CaseError(f"sweep {word!r}: expected edge=A-B, delay=FROM:TO, steps=N or names=NAME,…, each once")
        values[name] = value
    for name in ("edge", "delay"):
        if name not in values:
            raise CaseError(f"sweep: {name} is missing: expected such as edge=1-2 delay=0:60")
    edges = _edges(f"sweep edge={values['edge']}", values["edge"])
    first, last = _range(f"sweep delay={values['delay']}", values["delay"])
    steps = values.get("steps", str(_SWEEP_STEPS))
    if not (steps.isascii() and steps.isdigit() and len(steps) <= 6 and 2 <= int(steps) <= _MOST_SWEEP_STEPS):
        raise CaseError(f"sweep steps={steps:.80}: expected a whole number of 2 to {_MOST_SWEEP_STEPS}")
    width = (last - first) / (int(steps) - 1)
    sweep = SweepRange(edges=edges, delays=[first + width * step for step in range(int(steps))])
    if "names" in values:
        sweep["names"] = values["names"].split(",")
    return sweep


def read_uncertain(words: Sequence[str]) -> dict[tuple[int, int], dict[float, float]]:
    """Parse the words after ``--uncertain``, such as ``1-2=0:60``: a low and a high delay per directed edge, equally likely.

    Raises:
        CaseError: A word is invalid. The text names it and the expected form.
    """
    uncertain: dict[tuple[int, int], dict[float, float]] = {}
    for word in words:
        edge, equals, delays = word.partition("=")
        if not equals:
            raise CaseError(f"uncertain {word}: expected A-B=LOW:HIGH, such as 1-2=0:60")
        low, high = _range(f"uncertain {word}", delays)
        for directed in _edges(f"uncertain {word}", edge):
            if directed in uncertain:
                raise CaseError(f"uncertain {word}: {directed[0]}>{directed[1]} has delays already: expected each way once")
            uncertain[directed] = {low: 1.0, high: 1.0}
    return uncertain


def _edges(what: str, given: str) -> list[tuple[int, int]]:
    edge = re.fullmatch(r"(\d{1,6})([->])(\d{1,6})", given, re.ASCII)
    if edge is None:
        raise CaseError(f"{what}: expected A-B for both ways or A>B for one, such as 1-2")
    source, destination = int(edge[1]), int(edge[3])
    return [(source, destination), (destination, source)] if edge[2] == "-" else [(source, destination)]


def _range(what: str, given: str) -> tuple[float, float]:
    try:
        low, high = map(float, given.split(":"))
    except ValueError:
        raise CaseError(f"{what}: expected FROM:TO, such as 0:60") from None
    if not (math.isfinite(high) and 0 <= low < high):
        raise CaseError(f"{what}: expected 0 <= FROM < TO")
    return low, high


_SWEEP_STEPS: Final = 13
_MOST_SWEEP_STEPS: Final = 1000


def _generated(name: str, case: Case) -> Program | None:
    if name not in (*GENERATORS, *PLACED):
        return None
    if not case.is_one_pipeline:
        raise ScheduleError(f"{name}: a schedule of one pipeline: expected the file of a program for {case.name}")
    if name in GENERATORS:
        return generate(name, len(case.placement), case.microbatches)
    return generate_for(name, case.placement, case.microbatches)


def _check_fits(name: str, program: Program, case: Case) -> None:
    """Refuse a program of another size than the case.

    Raises:
        CaseError: The sizes differ. The text names the difference.
    """
    for what, has, expected in (
        ("stages", program.stages, len(case.placement)),
        ("microbatches", program.microbatches, case.microbatches),
        ("placement", _listed(program.placement), _listed(case.placement)),
    ):
        if has != expected:
            raise CaseError(f"{name} has {what} {has}, the case {case.name} has {expected}: expected them to be equal")


def read_source(name: str) -> ProgramSource:
    """Read a program from a file, or from standard input for ``-``.

    Raises:
        ScheduleError: The file can't be read or parsed. The text begins with the file, and of the text form with the line and
            the column of what is wrong.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScheduleError(
            f"{name}: no such file, and no schedule of that name: {', '.join((*GENERATORS, *PLACED))}"
        ) from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: not text: {error}") from None
    except OSError as error:
        raise ScheduleError(f"{name}: {error.strerror}") from None
    try:
        if Path(name).suffix.lower() == ".csv":
            return ProgramSource(name, None, from_csv(text, name=_name(name)))
        return ProgramSource(name, text, Program.parse(text))
    except ProgramTextError as error:
        raise ScheduleError(f"{name}:{error.line}:{error.column}: {error.reason}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None


def _name(path: str) -> str:
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.+-") else "_" for letter in Path(path).stem)


def _listed(placement: tuple[int, ...]) -> str:
    return ",".join(map(str, placement))
