"""The command ``reduce``: what a sum over ranks takes when some are late or narrow, and what no sum goes below."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable
from typing import Final

from adaptra.cli import tables
from adaptra.cli.output import as_json, check_outputs, line_width
from adaptra.collectives.choice import SumCase
from adaptra.collectives.ports import Ports
from adaptra.equations.equation import legend
from adaptra.equations.sums import SUM_SYMBOLS
from adaptra.errors import OptionError
from adaptra.report import drawing
from adaptra.report.text import percent
from adaptra.sizes import size_text

_MOST_RANKS: Final = 256
_MOST_SHARE: Final = 1e6


def run_reduce(options: Namespace) -> str:
    """Run the command ``reduce`` and return its standard output.

    Raises:
        OptionError: A rank is not there, all ranks are late, or a port has no rate.
        ReportError: The picture can't be written.
    """
    check_outputs({options.picture: drawing.SUFFIXES})
    case = SumCase(options.bytes, _ports(options))
    title = f"{size_text(case.nbytes)} over {case.ports.ranks} ranks, {case.ports.latency * 1e6:.4g} µs a message"
    if options.picture is not None:
        from adaptra.report.rounds import draw_rounds

        way = case.prices[0].way
        draw_rounds(case, way, options.picture, f"{title}: {way}")
    if options.json:
        return as_json(case.to_json())
    return "\n".join([tables.sums(title, case.prices, line_width(options)), *_lines(case)]) + "\n"


def _lines(case: SumCase) -> Iterable[str]:
    """Yield what is said below the table: the choice, the bound and the gap, and the equations with the numbers filled in."""
    chosen, bound, last = case.prices[0], case.bound.seconds, max(case.ports.arrivals)
    above = chosen.seconds / bound - 1
    yield f"choice    {chosen.way}: {_time(chosen.seconds)}, {_time(chosen.seconds - last)} after the last rank arrives"
    yield f"bound     {_time(bound)} for any sum over these ports; the choice is {percent(above)} above"
    critical, count = case.critical_delay, case.streamed_from
    if critical is None:
        yield "critical  none: of two ranks neither can do the other's part, and direct is the shortest"
    else:
        yield f"critical  a delay of {_time(critical.result)}, from which on merge beats direct"
    if count is not None:
        yield f"late      streamed beats merge from {count} late rank{'s' if count > 1 else ''} on"
    others = ", ".join(f"{name} {_time(seconds)}" for name, seconds in case.references.items())
    yield f"others    {others}: they add in another order, so their bits differ"
    named = [(price.way.algorithm, case.applied(price.way)) for price in case.prices]
    named += [] if critical is None else [("critical", critical)]
    yield "\nequations, in seconds from when all owners are there:"
    for name, applied in named:
        yield f"  {name:9} {applied.equation.text}"
        yield f"          = {applied.equation.with_values(*applied.values)} = {applied.result:.6g}"
    meanings = legend((applied.equation for _, applied in named), SUM_SYMBOLS)
    yield from ("where", *(f"  {symbol:9} {meaning}" for symbol, meaning in meanings.items()))


def _ports(options: Namespace) -> Ports:
    """Return the ports that the options describe."""
    ranks = options.ranks
    if not 2 <= ranks <= _MOST_RANKS:
        raise OptionError(f"--ranks {ranks}: expected 2 to {_MOST_RANKS}, as every round of every algorithm is played")
    late = _late(options)
    arrivals = tuple(options.delay or 0.0 if rank in late else 0.0 for rank in range(ranks))
    factors: dict[int, float] = {}
    for word in options.port or ():
        rank, share = _factor(word, ranks)
        if rank in factors:
            raise OptionError(f"--port {word}: rank {rank} has a share of {factors[rank]:g} already: expected each rank once")
        factors[rank] = share
    return Ports(options.alpha, tuple(1 / (options.rate * factors.get(rank, 1.0)) for rank in range(ranks)), arrivals)


def _late(options: Namespace) -> set[int]:
    """Return the late ranks: by default the last one, if there is a delay."""
    if options.late is None:
        return {options.ranks - 1}
    if options.delay is None:
        raise OptionError(f"--late {','.join(options.late)}: expected --delay TIME too, by which they are late")
    late = {_rank(f"--late {word}", word, options.ranks) for word in options.late}
    if len(late) == options.ranks:
        raise OptionError(f"--late {','.join(options.late)}: all {options.ranks} ranks are late: expected one that is not")
    return late


def _rank(what: str, word: str, ranks: int) -> int:
    if not (word.isascii() and word.isdigit() and len(word) <= 6 and int(word) < ranks):
        raise OptionError(f"{what:.80}: expected a rank of 0..{ranks - 1}")
    return int(word)


def _factor(word: str, ranks: int) -> tuple[int, float]:
    """Return the rank of a port and its share of the rate, from a text such as ``2=0.5``."""
    name, _, share = word.partition("=")
    if re.fullmatch(r"\d+(\.\d+)?", share, re.ASCII) is None or not 1 / _MOST_SHARE <= float(share) <= _MOST_SHARE:
        raise OptionError(
            f"--port {word:.80}: expected RANK=SHARE, a rank and a share of the rate of {1 / _MOST_SHARE:g} to "
            f"{_MOST_SHARE:g}, such as 2=0.5"
        )
    return _rank(f"--port {word}", name, ranks), float(share)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.6g} ms"
