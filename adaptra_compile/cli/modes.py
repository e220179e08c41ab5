"""The command ``modes``: what each synchronisation mode takes to a loss in a case, and which one is chosen and why."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from adaptra.cli import tables
from adaptra.cli.output import as_json, line_width
from adaptra.equations.equation import legend
from adaptra.equations.synchrony import SYNCHRONY_SYMBOLS, synchrony_equations
from adaptra.errors import OptionError
from adaptra.planning.synchrony.case import FIELDS, SynchronyCase, parse_case, read_case_fields
from adaptra.planning.synchrony.choice import ModeChoice
from adaptra.planning.synchrony.reallocation import Reallocation, reallocation
from adaptra.simulation.case_files import load_case


def run_modes(options: Namespace) -> str:
    """Run the command ``modes`` and return its standard output.

    Raises:
        CaseError: The case can't be read, or a value of it is impossible.
        OptionError: The noise scale or the number of replicas is missing, or a slow replica can't be read.
    """
    choice = ModeChoice(_case(options))
    moved = reallocation(choice.case, choice.times, None if options.job is None else load_case(options.job))
    if options.json:
        return as_json(choice.to_json() | {"reallocation": moved.to_json()})
    case = choice.case
    title = f"{case.replicas} replicas, {case.batch:g} samples each a step, noise scale {case.phi:g} samples"
    return "\n".join([tables.modes(title, choice, line_width(options)), *_lines(choice, moved)]) + "\n"


def _case(options: Namespace) -> SynchronyCase:
    """Return the case of the file, with the options' values in place of the file's."""
    named = {name: getattr(options, name) for name in FIELDS if getattr(options, name) is not None}
    if options.case is None and not {"replicas", "phi"} <= named.keys():
        raise OptionError("modes: expected a case's file, or --replicas N and --phi SAMPLES")
    if options.slow is not None:
        named["slow"] = dict(map(_slow, options.slow))
    fields = {} if options.case is None else read_case_fields(options.case)
    return parse_case({**fields, **named}, options.case or "")


def _slow(word: str) -> tuple[str, float]:
    """Return the replica and its factor, from a text such as ``0=2``."""
    match = re.fullmatch(r"([0-9]+)=([0-9]+(?:\.[0-9]+)?)", word)
    if match is None:
        raise OptionError(f"--slow {word}: expected REPLICA=FACTOR, such as 0=2")
    return match[1], float(match[2])


def _lines(choice: ModeChoice, moved: Reallocation) -> Iterator[str]:
    """Yield what is said below the table: what moved work brings, the choice and why, bound, STAR's rules, the equation."""
    yield "updates and time are over exact's; of old gradients (≈) and local steps only a trial says what they do to a model"
    for index, line in enumerate(moved.lines()):
        yield f"{'' if index else 'first':9} {line}"
    yield f"choice    {choice.chosen.mode}"
    for index, reason in enumerate(choice.reasons()):
        yield f"{'' if index else 'because':9} {reason}"
    yield f"bound     {choice.capacity:.6g} s for an exact update, with all replicas busy"
    yield f"STAR      {', '.join(_published(choice.star()))}"
    yield "          (its rules: what they choose and predict over exact's time, without sharing, jitter and age)"
    model = synchrony_equations()
    yield f"\ntime to a loss: {model.time.text}"
    for price in choice.prices:
        if price.time is not None:
            pace = price.pace
            values = (pace.seconds, pace.age, choice.case.phi, pace.samples)
            same = "" if len(pace.updates) == 1 else ", by mean age and samples"
            yield f"  {price.mode!s:14} {model.time.with_values(*values)} = {model.time.evaluate(*values):.6g}{same}"
    yield from ("where", *(f"  {symbol:9} {meaning}" for symbol, meaning in legend([model.time], SYNCHRONY_SYMBOLS).items()))


def _published(star: dict[str, Any]) -> Iterator[str]:
    """Yield what each of STAR's rules takes, and its own prediction."""
    groups = star["groups"]
    for name, said in star.items():
        if name == "groups":
            yield f"groups {'+'.join(map(str, groups['sizes']))} ({groups['of_exact']:.3f})"
        else:
            yield f"{name} x={said['first']} ({said['first_of_exact']:.3f})"
