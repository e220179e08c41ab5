"""Options of a pipeline's runtime that few users change, kept out of compile()'s own arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from adaptra.errors import OptionError
from adaptra.program import Program
from adaptra.runtime.injection.emulation import EmulatedDevice
from adaptra.runtime.telemetry.options import Telemetry


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a pipeline's runtime.

    Attributes:
        adapt: Re-plan when a link or a stage turns slow. False measures and reports, and never switches.
        schedule: The program to start with: a generator's name such as ``"1f1b"``, a compute-only Program, or None for the plan
            adapted to the estimated costs. Of the plans within one per cent of the best makespan, that is the one with the
            least memory. If ``memory`` is given, spare memory is spread evenly over the edges as slack.
        expected_delays: Delays that a link may get, if they are known beforehand. Per directed edge of neighbouring stages: the
            seconds added to each message, and their relative weights, such as ``{(1, 2): {0.0: 0.9, 0.06: 0.1}}``. The first
            plan is then good on average over all combinations.
        planning_seconds: The longest search for another plan, in seconds, beside training and on one rank alone. It never takes
            more than half a step, or a tenth of a step for a speculative plan. The search for the first plan is limited by
            effort instead, so that every rank finds the same one.
        seed: Seed of random numbers such as those of dropout. They depend only on the seed, the step and the number of the
            microbatch, which counts on through the replicas. So two replicas of M microbatches draw the same numbers as one
            process with 2·M.
        timeout: Seconds an op waits for a message, and a step for its plan, before the step fails.
        faults: Faults to inject, such as ``"delay 1-2 60ms @8"``: see :mod:`adaptra.runtime.injection.faults`.
        emulate: Pad every op to a stated duration by sleeping, to see the timeline of devices that this machine doesn't have.
        delegate: Set up the delegate beside c10d. True: edges that turn slow take it. Directed edges such as ``[(1, 2)]``:
            these take it from the start, too.
        addresses: The delegate's paths, the best first: numeric addresses of this rank's host, and RDMA ports such as
            ``rdma:mlx5_0/1``. Every rank gives equally many of the same kinds. () for the usable RDMA ports of the host,
            followed by the address by which it reaches the job's store.
        lossy_bf16: Round messages between stages from float32 to bfloat16 while they travel. That halves the bytes, but
            activations and their gradients lose precision, so training is no longer bitwise that of one process. All messages
            must be float32. ``"slow"``: as part of a plan, only over edges whose bandwidth limits the step, for as long as it
            does.
        inner: The backend of torch.compile that compiles the graphs of F, I and W, such as ``"inductor"``. ``"eager"`` runs
            them op by op, bitwise equal to one process. Evaluation graphs are compiled by the first evaluation.
        captured: The reaction if captured stages run other ops than eager torch does for the same microbatch. Such ops may
            round differently or take longer. ``"warn"`` of the first such op with its module and line, ``"error"``, or
            ``"accept"``.
        broadcast_buffers: With several replicas, broadcast the first one's buffers to all before each forward pass, as DDP
            does. These are the buffers that the model changes, such as the statistics of BatchNorm. False: each replica has its
            own.
        on_event: Called with each event of the controller, such as a detected slow edge or a switch of plans, on a thread of
            telemetry's own. The first exception that it raises is logged.
        telemetry: Receivers of the run's records, see :class:`adaptra.runtime.telemetry.options.Telemetry`.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    adapt: bool = True
    schedule: str | Program | None = None
    expected_delays: Mapping[tuple[int, int], Mapping[float, float]] = field(default_factory=dict[Any, Any])
    planning_seconds: float = 0.1
    seed: int = 0
    timeout: float = 300.0
    faults: Sequence[str] = ()
    emulate: EmulatedDevice | None = None
    delegate: bool | Sequence[tuple[int, int]] = False
    addresses: Sequence[str] = ()
    lossy_bf16: bool | Literal["slow"] = False
    inner: str = "eager"
    captured: Literal["warn", "error", "accept"] = "warn"
    broadcast_buffers: bool = True
    on_event: Callable[[Any], None] | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)

    @property
    def delegated(self) -> tuple[tuple[int, int], ...]:
        """The directed edges that take the delegate from the start, in ascending order."""
        return () if isinstance(self.delegate, bool) else tuple(sorted({(source, to) for source, to in self.delegate}))

    @property
    def uses_delegate(self) -> bool:
        """True if any edge may ever take the delegate."""
        return self.delegate is not False

    def __post_init__(self) -> None:
        _check_flags(adapt=self.adapt, broadcast_buffers=self.broadcast_buffers)
        given: Any = self.schedule
        if given is not None and not isinstance(given, str | Program):
            raise OptionError(f"schedule={given!r}: expected a generator's name such as '1f1b', an adaptra.Program, or None")
        _check_delays(self.expected_delays, self.schedule)
        given = self.seed
        if not is_whole(given) or not 0 <= given < 2**63:
            raise OptionError(f"seed={given!r}: expected a whole number of 0..2**63-1")
        for name in ("planning_seconds", "timeout"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int | float) or not (math.isfinite(given) and given > 0):
                raise OptionError(f"{name}={given!r}: expected a number of seconds above 0")
        given = self.faults
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
            raise OptionError(f"faults={given!r}: expected a list of texts such as ['delay 1-2 60ms @8']")
        given = self.emulate
        if given is not None and not isinstance(given, EmulatedDevice):
            raise OptionError(f"emulate={given!r}: expected an adaptra.EmulatedDevice or None")
        given = self.delegate
        if not isinstance(given, bool) and not _are_edges(given):
            raise OptionError(
                f"delegate={given!r}: expected True, False or directed edges of neighbouring stages such as [(1, 2)]"
            )
        given = self.addresses
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
            raise OptionError(f"addresses={given!r}: expected a list of numeric addresses of this host such as ['10.0.0.1']")
        given = self.lossy_bf16
        if not isinstance(given, bool) and given != "slow":
            raise OptionError(f"lossy_bf16={given!r}: expected True, False or 'slow'")
        given = self.on_event
        if given is not None and not callable(given):
            raise OptionError(f"on_event={given!r}: expected a function that is called with each event, or None")
        given = self.telemetry
        if not isinstance(given, Telemetry):
            raise OptionError(f"telemetry={given!r}: expected adaptra.Telemetry(...)")
        _check_captured(self.captured)


def _check_captured(given: object) -> None:
    if given not in ("warn", "error", "accept"):
        raise OptionError(f"captured={given!r}: expected 'warn', 'error' or 'accept'")


def _check_flags(**flags: object) -> None:
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise OptionError(f"{name}={given!r}: expected True or False")


def _are_edges(given: object) -> bool:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    for edge in cast("Sequence[object]", given):
        match edge:
            case (int(source), int(destination)) if source >= 0 <= destination and abs(source - destination) == 1:
                continue
            case _:
                return False
    return True


def _check_delays(given: Mapping[tuple[int, int], Mapping[float, float]], schedule: object) -> None:
    if not _are_delays(given):
        raise OptionError(
            f"expected_delays={given!r}: expected per directed edge of neighbouring stages its delays in seconds and the "
            "weight of each, such as {(1, 2): {0.0: 0.9, 0.06: 0.1}}"
        )
    if given and schedule is not None:
        raise OptionError("expected_delays=… together with schedule=…: expected one of them, as both say what comes first")


def _are_delays(given: object) -> bool:
    if not isinstance(given, Mapping):
        return False
    delays = cast("Mapping[object, object]", given)
    return _are_edges(list(delays)) and all(isinstance(each, Mapping) and _are_weighted(each) for each in delays.values())


def _are_weighted(given: Mapping[object, object]) -> bool:
    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0

    return bool(given) and all(is_number(delay) and is_number(weight) and weight != 0 for delay, weight in given.items())


def is_whole(given: object) -> bool:
    """Return True if this is a whole number; True and False are none."""
    return isinstance(given, int) and not isinstance(given, bool)
