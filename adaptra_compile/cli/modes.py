"""The command ``modes``: what each synchronisation mode takes to a loss in a case, and which one is chosen and why."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adaptra.cli import tables
from adaptra.cli.output import as_json, line_width
from adaptra.equations.equation import legend
from adaptra.equations.synchrony import SYNCHRONY_SYMBOLS, synchrony_equations
from adaptra.errors import CaseError, OptionError
from adaptra.planning.synchrony.case import FIELDS, SynchronyCase, parse_case, read_case_fields
from adaptra.planning.synchrony.choice import ModeChoice
from adaptra.planning.synchrony.loss_curve import UpdatesToLoss, updates_to
from adaptra.planning.synchrony.modes import is_trial
from adaptra.planning.synchrony.reallocation import Reallocation, reallocation
from adaptra.report.recorded_case import RecordedCase, recorded_case
from adaptra.report.run_records import load_run
from adaptra.simulation.case_files import load_case


def run_modes(options: Namespace) -> str:
    """Run the command ``modes`` and return its standard output.

    Raises:
        CaseError: The case can't be read, or a value of it is impossible.
        OptionError: The noise scale or the number of replicas is missing, or a slow replica can't be read. Or the losses of
            the run don't tell when the wanted one comes.
        ReportError: The run has no records of what is needed.
    """
    case, recorded = _case(options)
    choice = ModeChoice(case)
    moved = reallocation(case, choice.times, None if options.job is None else load_case(options.job))
    reach = None if options.loss is None or recorded is None else _updates_to(options.loss, recorded, options.case)
    if options.json:
        shown = {"reallocation": moved.to_json()} | ({} if recorded is None else {"run": recorded.to_json()})
        return as_json(
            choice.to_json() | shown | ({} if reach is None else {"loss": {"loss": options.loss, **reach.to_json()}})
        )
    unit = "samples" if recorded is None else recorded.unit
    title = f"{case.replicas} replicas, {case.batch:.6g} {unit} each a step, noise scale {case.phi:.6g} {unit}"
    lines = [tables.modes(title, choice, line_width(options)), *(() if recorded is None else recorded.lines())]
    if reach is not None and recorded is not None and options.loss is not None:
        lines += _to_loss(options.loss, reach, recorded, choice)
    return "\n".join([*lines, *_lines(choice, moved)]) + "\n"


def _case(options: Namespace) -> tuple[SynchronyCase, RecordedCase | None]:
    """Return the case of the file or the run, with the options' values in place of its own, and what the run has shown."""
    named = {name: getattr(options, name) for name in FIELDS if getattr(options, name) is not None}
    if options.case is None and not {"replicas", "phi"} <= named.keys():
        raise OptionError("modes: expected a case's file, or --replicas N and --phi SAMPLES")
    if options.slow is not None:
        named["slow"] = _slow_ones(options.slow)
    recorded = None
    if options.case is not None and Path(options.case).is_dir():
        recorded = recorded_case(load_run(options.case), needs_noise="phi" not in named)
    elif options.loss is not None:
        raise OptionError("modes: --loss: expected the folder of a run, whose losses tell how many updates it takes")
    fields = recorded.fields if recorded is not None else {} if options.case is None else read_case_fields(options.case)
    return parse_case({**fields, **named}, options.case or ""), recorded


def _updates_to(loss: float, recorded: RecordedCase, where: str) -> UpdatesToLoss:
    """Return how many updates a loss takes from the run's first one on."""
    if not recorded.losses:
        raise OptionError(f"{where}: no losses: expected a run with Options(noise_scale=True), which records them")
    try:
        return updates_to(loss, recorded.losses)
    except CaseError as error:
        raise OptionError(f"--loss {loss:g}: {error}") from None


def _to_loss(loss: float, reach: UpdatesToLoss, recorded: RecordedCase, choice: ModeChoice) -> Iterator[str]:
    """Yield the updates that a loss takes and the seconds from now on, mode by mode."""
    updates = f"{reach.value:.4g} updates ({reach.low:.4g} to {reach.high:.4g})"
    yield f"loss      {loss:g} after {updates}; the run has done {recorded.done}"
    yield "          by a power law through the run's losses, which has no floor: rather more than less"
    if reach.value <= recorded.done:
        return
    left = [max(0.0, one - recorded.done) for one in (reach.value, reach.low, reach.high)]
    for price in choice.prices:
        if price.time is not None and choice.exact.time is not None:
            each = choice.exact.pace.seconds * price.time / choice.exact.time
            seconds, low, high = (f"{each * one:.4g}" for one in left)
            yield f"          {'≈ ' if is_trial(price.mode) else ''}{price.mode}: {seconds} s from now on ({low} to {high})"


def _slow_ones(words: Sequence[str]) -> dict[str, float]:
    """Return replicas and their factors, from texts such as ``0=2``."""
    factors: dict[str, float] = {}
    for word in words:
        match = re.fullmatch(r"0*([0-9]{1,6})=([0-9]+(?:\.[0-9]+)?)", word)
        if match is None:
            raise OptionError(f"--slow {word:.80}: expected REPLICA=FACTOR, such as 0=2")
        if match[1] in factors:
            raise OptionError(
                f"--slow {word:.80}: replica {match[1]} has a factor of {factors[match[1]]:g} already: expected each once"
            )
        factors[match[1]] = float(match[2])
    return factors


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
