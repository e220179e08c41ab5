"""Reading the PROGRAM of a command line: a file, standard input, or the name of a generated schedule."""

from __future__ import annotations

import sys
from pathlib import Path

from adaptra.cost import Case
from adaptra.errors import CaseError, ScheduleError
from adaptra.program import Program
from adaptra.schedules import GENERATORS, generate
from adaptra.torch_csv import from_csv
from adaptra.verify import verify


def read_program(given: str, case: Case) -> Program:
    """The program that ``given`` names, verified, and fit for the case.

    ``-`` is standard input, a name of :data:`adaptra.schedules.GENERATORS` the schedule of the case's size, a file ending in
    ``.csv`` torch's form, and every other file the text form.

    Raises:
        ScheduleError: It can't be read, or no set of ranks could execute it.
        CaseError: It has other stages, ranks or microbatches than the case.
    """
    program = generate(given, len(case.placement), case.microbatches) if given in GENERATORS else _read(given)
    _check_fits(given, program, case)
    try:
        verify(program)
    except ScheduleError as error:
        raise ScheduleError(f"{given}: {error}") from None
    return program


def _check_fits(given: str, program: Program, case: Case) -> None:
    """Refuse a program that is for another size of problem than the case.

    Raises:
        CaseError: Names what differs.
    """
    for what, has, expected in (
        ("stages", program.stages, len(case.placement)),
        ("microbatches", program.microbatches, case.microbatches),
        ("placement", _listed(program.placement), _listed(case.placement)),
    ):
        if has != expected:
            raise CaseError(f"{given} has {what} {has}, the case {case.name} has {expected}: expected them to be equal")


def _read(given: str) -> Program:
    try:
        text = sys.stdin.read() if given == "-" else Path(given).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScheduleError(f"{given}: no such file, and no schedule of that name: {', '.join(GENERATORS)}") from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{given}: not text: {error}") from None
    except OSError as error:
        raise ScheduleError(f"{given}: {error.strerror}") from None
    try:
        if Path(given).suffix.lower() == ".csv":
            return from_csv(text, name=_name(given))
        return Program.parse(text)
    except ScheduleError as error:
        raise ScheduleError(f"{given}: {error}") from None


def _name(path: str) -> str:
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.+-") else "_" for letter in Path(path).stem)


def _listed(placement: tuple[int, ...]) -> str:
    return ",".join(map(str, placement))
