"""The command ``adaptra``: see ``docs/command-line.md``.

The start loads neither torch nor sympy nor matplotlib. Each command loads the modules that it uses when it runs.
"""

from __future__ import annotations

import math
import os
import re
import sys
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from adaptra import __version__
from adaptra.errors import AdaptraError
from adaptra.sizes import UNITS

_Add = Callable[[str, str], "_Parser"]

_CASE: Final = "cost model as JSON (docs/formats.md); all its times share one unit, its memory another"
_PROGRAM: Final = (
    "a program: a .sched file, a .csv of torch.distributed.pipelining, - for a program on standard input, "
    "or the name of a generated schedule (gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv)"
)
_PASSES: Final = (
    "passes joined by commas, each with its options in braces: split-backward, adapt-order{in_flight=N,effort=N,seed=N}, "
    "fuse-backward, insert-comm{receives=ahead|late,ahead=N,fold=handover|contributions}, "
    "insert-crossing{fold=handover|contributions,buffers=N+N,receives=ahead|late}, lower-comm{slow=A>B+B>A,lane=NAME}"
)
_COMPARED: Final = "gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv, paper (the published adaptive rule)"
_SWEEP: Final = (
    "step time against delay: edge=A-B (both ways, or A>B for one), delay=FROM:TO in the case's unit, optionally steps=N "
    "(default 13) and names=NAME,… (those of --compare, adapted, and kept: the plan for the smallest delay)"
)
_SLOW: Final = (
    "mark messages from stage A to its neighbour B in the picture, in a measured step only where they were slow; repeatable. "
    "Without it, directed edges that take more than twice the time of the median edge are marked"
)


class _Parser(ArgumentParser):
    """A parser that takes options anywhere, and whose error is one line, after which nobody has to look for it."""

    _splits = False
    """Whether options and other arguments are being parsed apart."""
    splits_options = True
    """Whether options may stand anywhere. Behind a script they are the script's."""

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        """Parse a command's options first, so that they may stand between arguments of which one may be left out.

        In Python 3.11 argparse alone leaves such an argument out if an option follows the next one.
        """
        if self._splits or self._subparsers is not None or not self.splits_options:
            return super().parse_known_args(*arguments, **named)
        self._splits = True
        try:
            return self.parse_known_intermixed_args(*arguments, **named)
        finally:
            self._splits = False

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and end with status 2."""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what it takes\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, or with None the process's own arguments.

    Returns:
        The exit status: 0 done, 1 standard output was closed early, 2 wrong input (with one line on standard error), 130
        interrupted. That of ``run``: see :func:`adaptra.cli.run_job.run_job`.
    """
    options = _parser().parse_args(arguments)
    from adaptra.cli import commands

    try:
        if options.command == "run":
            from adaptra.cli.run_job import run_job

            return run_job(options)
        # By lines: in unbuffered Python, a single write to a closed pipe ends early and without an error.
        sys.stdout.writelines(commands.run(options).splitlines(keepends=True))
        sys.stdout.flush()
    except AdaptraError as error:
        sys.stderr.write(f"adaptra: {error}\n")
        return 2
    except BrokenPipeError:
        # The reader of our output is gone. Without this, Python would report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="adaptra",
        description="Plan, time and look at pipeline-parallel programs.",
        epilog="adaptra COMMAND --help describes one command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"adaptra {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, description: str) -> _Parser:
        first, _, _ = description.partition(".\n")
        return commands.add_parser(
            name,
            help=first.rstrip("."),
            description=description,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    for command in (_plan, _simulate, _resilience, _explain, _trace, _schedule, _opt, _reduce, _modes, _run, _doctor):
        command(add)
    return parser


def _plan(add: _Add) -> None:
    parser = add(
        "plan",
        "Find the order of ops with the shortest step for a case, and write it as a program.\n\n"
        "Without -o the program goes to standard output, or with --compare or --sweep a table. Times are in the case's own\n"
        "unit. --picture draws the plan, all schedules compared, or step time against delay.",
    )
    parser.add_argument("case", metavar="CASE", help=_CASE)
    question = parser.add_mutually_exclusive_group()
    question.add_argument(
        "--compare",
        type=_names,
        metavar="NAME,…",
        help=f"compare the plan with others: some of {_COMPARED}; for several replicas some of healthy, kept, blocks, turns",
    )
    question.add_argument("--sweep", nargs="+", metavar="KEY=VALUE", help=_SWEEP)
    question.add_argument(
        "--exact", type=_seconds, metavar="TIME", help="prove the shortest plan, at most so long, such as 60s (extra exact)"
    )
    question.add_argument(
        "--uncertain", action="append", metavar="A-B=LOW:HIGH",
        help="plan for a delay that messages between stages A and B may have or not, each direction on its own; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--objective", choices=("expected", "worst"), default="expected", help="with --uncertain: mean or longest step time"
    )
    parser.add_argument(
        "--in-flight", type=_at_least_one, metavar="N", help="microbatches in flight per stage at most (F started, I not ended)"
    )
    parser.add_argument(
        "--budget", type=_seconds, metavar="TIME", help="search each plan so long at most, such as 100ms; not with --exact"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the program here: .sched, or .csv for torch's form")
    _job(parser)
    parser.add_argument(
        "--lower", action="store_true", help="insert SEND and RECV; otherwise the program holds compute ops only"
    )
    _picture(parser)
    _json(parser)


def _job(parser: ArgumentParser) -> None:
    """Add the options of several replicas."""
    parser.add_argument(
        "--replicas",
        type=_at_least_one,
        metavar="N",
        help="N replicas of the case; worker replica · ranks + rank has the stages of a rank",
    )
    parser.add_argument("--lost", type=_names, metavar="R.S,…", help="workers that are lost, such as 1.2 or its number")
    parser.add_argument(
        "--slow", action="append", metavar="R.S=FACTOR", help="a worker whose ops take FACTOR times as long; repeatable"
    )
    parser.add_argument("--optimizer", type=_duration, metavar="T", help="duration of the optimizer, in the case's unit")
    parser.add_argument("--reduce", type=_duration, metavar="T", help="duration of adding up a stage's gradients")
    parser.add_argument(
        "--barrier", action="store_true", default=None, help="steps end together, as with clipping: all update at once"
    )


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_AMOUNT:
        raise ArgumentTypeError(f"{text!r:.80}: expected a number that is not negative, at most {_MOST_AMOUNT:g}")
    return value


def _simulate(add: _Add) -> None:
    parser = add(
        "simulate",
        "Time one step of a program under a case, exactly.\n\n"
        "Times are in the case's own unit: makespan, the lower bound that no program beats, bubble (idle time within\n"
        "the makespan, per rank). In flight: the most microbatches whose F has started and whose I has not ended, per stage.",
    )
    parser.add_argument("program", metavar="PROGRAM", help=_PROGRAM)
    parser.add_argument("case", metavar="CASE", help=_CASE)
    _job(parser)
    parser.add_argument("--trace", metavar="FILE.json", help="write a trace for Perfetto, one unit of time as one millisecond")
    parser.add_argument("--width", type=_at_least_one, metavar="N", help="characters per line of the printed timeline")
    _picture(parser)
    _json(parser)


def _resilience(add: _Add) -> None:
    parser = add(
        "resilience",
        "Show what several replicas still do with lost workers, and which response to a loss pays.\n\n"
        "For each number of lost workers: period, bounds, memory and decision. With --lost or --slow: all responses to that,\n"
        "with their costs. With --mtbf or --trace: the average throughput over days, and with -o its curve. Periods are in\n"
        "the case's own unit, costs in seconds.",
    )
    parser.add_argument("case", metavar="CASE", help=_CASE)
    _job(parser)
    parser.add_argument("--gpus", type=_at_least_one, metavar="N", help="as many replicas as N workers make")
    parser.add_argument("--losses", type=_at_least_one, metavar="N", help="lost workers in the table at most (default 4)")
    parser.add_argument("--budget", type=_seconds, metavar="TIME", help="search each plan so long at most, such as 100ms")
    trace = parser.add_mutually_exclusive_group()
    trace.add_argument("--mtbf", type=_seconds, metavar="TIME", help="mean time between failures of the whole job, such as 3h")
    trace.add_argument("--trace", metavar="FILE", help="a failure trace: lines milliseconds,add|remove,name")
    parser.add_argument("--days", type=_duration, metavar="N", help="with --mtbf: how long (default 7)")
    parser.add_argument("--repair", type=_seconds, metavar="TIME", help="with --mtbf: until a worker is back (default 4h)")
    parser.add_argument("--seed", type=int, metavar="N", help="with --mtbf: seed of the failures (default 0)")
    parser.add_argument("--node", type=_at_least_one, metavar="N", help="with --trace: the workers of one name (default 1)")
    prices = parser.add_argument_group("what responses cost")
    prices.add_argument("--unit", type=_seconds, metavar="TIME", help="one unit of the case's time (default 10ms)")
    prices.add_argument("--state", type=_bytes, metavar="SIZE", help="a stage's parameters and optimizer state (default 16GB)")
    prices.add_argument("--rate", type=_bytes, metavar="SIZE", help="bytes per second between two workers (default 10GB)")
    prices.add_argument("--room", type=_bytes, metavar="SIZE", help="a worker's memory for such state (default: enough)")
    prices.add_argument("--pieces", type=_at_least_one, metavar="N", help="equal pieces of a stage to cut at (default 12)")
    prices.add_argument("--planning", type=_seconds, metavar="TIME", help="until a plan around a loss runs (default 1s)")
    prices.add_argument("--restart", type=_seconds, metavar="TIME", help="a restart from a checkpoint (default 5min)")
    prices.add_argument("--checkpoint-age", type=_seconds, metavar="TIME", help="work that a restart loses (default 15min)")
    prices.add_argument("--joiner", type=_seconds, metavar="TIME", help="until a worker joins (default: none does)")
    prices.add_argument(
        "--horizon", type=_seconds, metavar="TIME", help="over which a response must pay (default: --mtbf, or else 3h)"
    )
    parser.add_argument("-o", "--output", metavar="PICTURE", help="draw throughput over time: .svg or .png (extra viz)")
    _json(parser)


def _explain(add: _Add) -> None:
    parser = add(
        "explain",
        "Show why a plan is as it is: what limits it, what would help, and with --equations its equations with numbers.\n\n"
        "Of one pipeline the equations say why it has its warm-up forwards, of several replicas what bounds the period.\n"
        "Times are in the case's own unit.",
    )
    parser.add_argument("case", metavar="CASE", help=_CASE)
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help=f"{_PROGRAM}; the plan for CASE when left out")
    parser.add_argument("--equations", action="store_true", help="also print the equations with the plan's numbers")
    parser.add_argument(
        "--sensitivity", action="store_true", help="also say how much delay every edge absorbs before the step takes longer"
    )
    _job(parser)
    _json(parser)


def _trace(add: _Add) -> None:
    parser = add(
        "trace",
        "Draw what happened: a run from the folder that its telemetry wrote, or saved traces of steps on one time axis.\n\n"
        "A run's page shows iteration times, delays seen, plans, switches and failures. Without -o all is printed as text.\n"
        "Times are in milliseconds where the trace knows its unit.",
    )
    parser.add_argument(
        "files", metavar="RUN", nargs="+",
        help="the folder of a run, Telemetry(folder=...); or traces (.json), such as before and after",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="PICTURE", help="the picture to write: .svg or .png")
    parser.add_argument("--title", help="a heading of the picture")
    parser.add_argument("--slow-edge", type=_edge, action="append", metavar="A-B", help="mark messages from stage A to stage B")
    parser.add_argument("--width", type=_at_least_one, metavar="N", help="characters per line of the printed timeline")
    _json(parser)


def _schedule(add: _Add) -> None:
    parser = add("schedule", "Print a schedule of the literature as a program: one stage per rank; interleaved and zbv two.")
    parser.add_argument("name", metavar="NAME", help="gpipe, 1f1b, zb_h1, zb_h2, interleaved or zbv")
    parser.add_argument("-s", "--stages", type=_at_least_one, required=True, metavar="S", help="number of stages")
    parser.add_argument("-m", "--microbatches", type=_at_least_one, required=True, metavar="M", help="microbatches per step")
    _json(parser)


def _opt(add: _Add) -> None:
    parser = add(
        "opt",
        "Run passes over a program, and print the program that they make.\n\n"
        "The program is verified before the first pass and after each. What is wrong in its text, or which op breaks a rule,\n"
        "is named by file, line and column.",
    )
    parser.add_argument("passes", metavar="PASSES", nargs="?", help=_PASSES)
    parser.add_argument("program", metavar="PROGRAM", help=f"{_PROGRAM}; the last with --case")
    parser.add_argument("--case", metavar="CASE", help=f"for passes that use costs, and programs of several replicas: {_CASE}")
    parser.add_argument("--verify-only", action="store_true", help="run no pass: say whether ranks can execute the program")
    _json(parser)


def _reduce(add: _Add) -> None:
    parser = add(
        "reduce",
        "Show what a sum over ranks takes when some are late or have narrow ports, and which algorithm is the shortest.\n\n"
        "Late ranks arrive --delay after the others. For each algorithm: its rounds and seconds, played on the ports, and\n"
        "what its equation says. Then the delay from which on a late rank should own nothing, and what no sum goes below.",
    )
    parser.add_argument("--ranks", type=_at_least_one, required=True, metavar="N", help="the ranks that add up")
    parser.add_argument("--bytes", type=_bytes, required=True, metavar="SIZE", help="bytes of one rank's terms, such as 1GiB")
    parser.add_argument("--alpha", type=_seconds, required=True, metavar="TIME", help="a message without bytes, such as 3us")
    parser.add_argument("--rate", type=_rate, required=True, metavar="SIZE/s", help="a port's rate each way, such as 450GiB/s")
    parser.add_argument(
        "--delay", type=_seconds, metavar="TIME", help="how late late ranks arrive, such as 30ms (default: none)"
    )
    parser.add_argument("--late", type=_names, metavar="R,…", help="the late ranks (default: the last one)")
    parser.add_argument("--port", action="append", metavar="R=SHARE", help="rank R's port has SHARE of the rate; repeatable")
    parser.add_argument("--picture", metavar="FILE", help="draw the rounds of the choice: .svg or .png (needs the extra viz)")
    _json(parser)


def _modes(add: _Add) -> None:
    parser = add(
        "modes",
        "Show what synchronisation modes of replicas take to a loss when some are slow, and which one is chosen and why.\n\n"
        "For each mode: seconds of an update by a simulated clock, its samples, the age of its gradients, and updates needed.\n"
        "Modes are exact (microbatches shared by lasting speed), stealing (and within the step), x-order=N, groups,\n"
        "asynchronous, deadline=SHARE and local=STEPS. Jobs run exact and local=STEPS; the others are not built yet.",
    )
    parser.add_argument(
        "case", metavar="CASE", nargs="?",
        help="fields as JSON (docs/formats.md); or a run's folder, which tells most of them. Options replace them",
    )  # fmt: skip
    parser.add_argument("--loss", type=_duration, metavar="LOSS", help="of a run: the seconds until its loss is this one")
    parser.add_argument("--replicas", type=_at_least_one, metavar="N", help="the replicas")
    parser.add_argument("--phi", type=_duration, metavar="SAMPLES", help="the gradient noise scale")
    parser.add_argument(
        "--slow", action="append", metavar="R=FACTOR", help="replica R takes FACTOR times as long, lastingly; repeatable"
    )
    parser.add_argument("--jitter", type=_duration, metavar="SIGMA", help="deviation of the logarithm of a step's time")
    parser.add_argument(
        "--pauses", type=_duration, metavar="CHANCE", help="chance of a pause in a replica's step, at times long"
    )
    parser.add_argument("--batch", type=_duration, metavar="SAMPLES", help="of one replica's step (default 128)")
    parser.add_argument("--microbatches", type=_at_least_one, metavar="M", help="of one replica's step (default 8)")
    parser.add_argument("--seconds", type=_seconds, metavar="TIME", help="a replica's step without slowness (default 1s)")
    parser.add_argument(
        "--exchange", type=_seconds, metavar="TIME", help="how long an exchange delays an update (default: none)"
    )
    parser.add_argument("--modes", type=_names, metavar="MODE,…", help="the modes to compare with exact (default: all)")
    parser.add_argument("--allow", type=_names, metavar="KIND,…", help="kinds that may be chosen: x-order, deadline, local")
    parser.add_argument("--job", metavar="FILE", help="a job's case: what moving work on its workers and links would bring")
    _json(parser)


def _run(add: _Add) -> None:
    parser = add(
        "run",
        "Start the processes of a job on this host, each by itself, and say how each ends.\n\n"
        "One process that fails does not end the others: they learn of it as the job does. With --hosts run the same command\n"
        "on each of the hosts; the first one has the store. The environment of processes is torchrun's.",
    )
    parser.splits_options = False
    parser.add_argument("-n", "--processes", type=_at_least_one, metavar="N", help="processes of a job on this host alone")
    parser.add_argument("--hosts", metavar="FILE", help="the hosts of a job: a line 'NAME COUNT' for each, the store's first")
    parser.add_argument("--host", metavar="NAME", help="this host's name in FILE; by default its own")
    parser.add_argument("--port", type=_at_least_one, metavar="N", help="the store's port: any free one, with --hosts 29500")
    parser.add_argument("--logs", metavar="FOLDER", help="write what processes print into a folder for each rank there")
    parser.add_argument(
        "--grace", type=_seconds, metavar="TIME", help="once a process has failed, end the others after TIME (default: never)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as behind python -m")
    _json(parser)
    parser.add_argument("script", metavar="SCRIPT", nargs=REMAINDER, help="a Python script, and its arguments")


def _doctor(add: _Add) -> None:
    _json(add("doctor", "Show versions, what is installed, and what to install for the rest."))


def _json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")


def _picture(parser: ArgumentParser) -> None:
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline: .svg or .png (needs the extra viz)")
    parser.add_argument("--slow-edge", type=_edge, action="append", metavar="A-B", help=_SLOW)


_MOST_COUNT: Final = 10**9
_MOST_AMOUNT: Final = 1e18
_LEAST_SECONDS: Final = 1e-9
_MOST_SECONDS: Final = 36_500 * 86_400.0
_MOST_BYTES: Final = 1e18
"""What is beyond these is a slip of the hand. Within them no product of a few values overflows, or comes to nothing."""


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= _MOST_COUNT):
        raise ArgumentTypeError(f"{text!r:.80}: expected a whole number of at least 1, at most {_MOST_COUNT}")
    return int(text)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise ArgumentTypeError(f"{text!r:.80}: expected names joined by commas, none of them empty")
    return names


def _seconds(text: str) -> float:
    """Return the seconds of a duration such as 100ms, 60s or 3h."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86_400.0)):
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdecimal() and number.isascii() and float(number) > 0:
            value = float(number) * scale
            if not _LEAST_SECONDS <= value <= _MOST_SECONDS:
                raise ArgumentTypeError(f"{text!r:.80}: expected a duration of 0.001us to 36500d")
            return value
    raise ArgumentTypeError(f"{text!r:.80}: expected a duration such as 100ms or 2s")


def _bytes(text: str) -> float:
    """Return the bytes of a size such as 16GB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]+)", text)
    if match is None or match[2] not in UNITS or not float(match[1]) > 0:
        raise ArgumentTypeError(f"{text!r:.80}: expected a size such as 16GB or 1.5GiB")
    value = float(match[1]) * UNITS[match[2]]
    if not 1 <= value <= _MOST_BYTES:
        raise ArgumentTypeError(f"{text!r:.80}: expected a size of 1B to 1000000TB")
    return value


def _rate(text: str) -> float:
    """Return the bytes per second of a rate such as 450GiB/s."""
    if not text.endswith("/s"):
        raise ArgumentTypeError(f"{text!r:.80}: expected a rate such as 10GB/s or 450GiB/s")
    return _bytes(text.removesuffix("/s"))


def _edge(text: str) -> tuple[int, int]:
    source, _, destination = text.partition("-")
    if not all(one.isascii() and one.isdigit() and len(one) <= 6 for one in (source, destination)):
        raise ArgumentTypeError(f"{text!r:.80}: expected two stages such as 1-2")
    return int(source), int(destination)
