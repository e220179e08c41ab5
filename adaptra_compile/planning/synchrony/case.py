"""A case for synchronisation modes: replicas, how slow each is, their jitter, the noise scale, the batch and the exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from adaptra.checks import is_finite, is_whole
from adaptra.errors import CaseError, OptionError
from adaptra.json_files import Fields, read_json
from adaptra.planning.synchrony.modes import KINDS, Mode, check_mode, parse_mode

_BATCH: Final = 128.0
"""Samples of a replica's step, unless given: those of STAR's workers."""
_MICROBATCHES: Final = 8
_MOST_REPLICAS: Final = 4096
_MOST: Final = 1e18
"""With values up to this, and from one over it, no product of a few overflows or comes to nothing."""


@dataclass(frozen=True, slots=True)
class SynchronyCase:
    """Replicas that train together.

    A replica's step takes ``seconds``, times its factor. With jitter that is times a lognormal number, of median 1. A pause
    lasts ``seconds`` times a Pareto number of exponent 1.5, less 1: mostly short, at times very long.

    Attributes:
        replicas: The number of replicas, each a whole pipeline.
        phi: The gradient noise scale, in samples.
        slow: The factor of each replica that is slow for long, by its number.
        jitter: The standard deviation of the logarithm of a step's time.
        pauses: The chance that a replica's step has a pause.
        batch: The samples of one replica's step.
        microbatches: The microbatches of one replica's step.
        seconds: The time of a replica's step, without slowness.
        exchange: The time for which an exchange of gradients keeps an update waiting.
        modes: The modes to compare; empty for the usual ones.
        allow: The kinds of modes beside exact ones that may be chosen; see :data:`adaptra.planning.synchrony.modes.KINDS`.

    Raises:
        CaseError: A value is impossible. The text names it.
    """

    replicas: int
    phi: float
    slow: Mapping[int, float]
    jitter: float = 0.0
    pauses: float = 0.0
    batch: float = _BATCH
    microbatches: int = _MICROBATCHES
    seconds: float = 1.0
    exchange: float = 0.0
    modes: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, most in (("replicas", self.replicas, _MOST_REPLICAS), ("microbatches", self.microbatches, 1 << 20)):
            if not (is_whole(value) and 1 <= value <= most):
                raise CaseError(f"{name} {value!r}: expected a whole number of 1 to {most}")
        for name, value in (("phi", self.phi), ("batch", self.batch), ("seconds", self.seconds)):
            if not (is_finite(value) and value > 0):
                raise CaseError(f"{name} {value!r}: expected a number above 0")
            if not 1 / _MOST <= value <= _MOST:
                raise CaseError(f"{name} {value!r}: expected a number of {1 / _MOST:g} to {_MOST:g}")
        for name, value, most in (("jitter", self.jitter, 5), ("pauses", self.pauses, 1), ("exchange", self.exchange, _MOST)):
            if not (is_finite(value) and 0 <= value <= most):
                raise CaseError(f"{name} {value!r}: expected a number of at least 0, at most {most:g}")
        self._check_slow()
        self._check_modes()

    def _check_slow(self) -> None:
        for replica, factor in self.slow.items():
            if not 0 <= replica < self.replicas:
                raise CaseError(f"slow {replica}: expected a replica of 0..{self.replicas - 1}")
            if not (is_finite(factor) and factor >= 1):
                raise CaseError(f"slow {replica}={factor!r}: expected a factor of at least 1")
            if factor > _MOST:
                raise CaseError(f"slow {replica}={factor!r}: expected a factor of at most {_MOST:g}")

    def _check_modes(self) -> None:
        for kind in self.allow:
            if kind not in KINDS:
                raise CaseError(f"allow {kind!r}: expected some of {', '.join(KINDS)}")
        try:
            for mode in map(parse_mode, self.modes):
                check_mode(mode, self.replicas)
        except OptionError as error:
            raise CaseError(str(error)) from None

    @property
    def factors(self) -> tuple[float, ...]:
        """The lasting factor of each replica."""
        return tuple(self.slow.get(replica, 1.0) for replica in range(self.replicas))

    @property
    def is_random(self) -> bool:
        """Whether the times of steps differ from step to step."""
        return self.jitter > 0 or self.pauses > 0

    @property
    def all_modes(self) -> tuple[Mode, ...]:
        """The modes to compare, ``exact`` first."""
        exact = parse_mode("exact")
        if self.modes:
            return exact, *(mode for mode in dict.fromkeys(map(parse_mode, self.modes)) if mode != exact)
        if self.replicas == 1:
            return (exact,)
        late = sum(factor > 1 for factor in self.factors) or 1
        order = () if self.replicas - late <= 1 else (f"x-order={self.replicas - late}",)
        groups = ("groups",) if len(set(self.factors)) - 1 > 0 else ()
        return exact, *map(parse_mode, ("stealing", *order, *groups, "asynchronous", "deadline=0.9", "local=32"))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; :func:`parse_case` reads them."""
        slow = {str(replica): factor for replica, factor in self.slow.items()}
        return asdict(self) | {"slow": slow, "modes": [str(mode) for mode in self.all_modes], "allow": [*self.allow]}


FIELDS: Final = tuple(SynchronyCase.__dataclass_fields__)


def read_case_fields(path: str) -> dict[str, Any]:
    """Read the fields of a case from a JSON file, for :func:`parse_case`.

    Raises:
        CaseError: It can't be read, or is no JSON object. The text names the file.
    """
    data = read_json(path, CaseError)
    if not isinstance(data, dict):
        raise CaseError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def parse_case(data: Mapping[str, Any], where: str) -> SynchronyCase:
    """Make a case of decoded JSON.

    Args:
        data: The fields of :class:`SynchronyCase`; only ``replicas`` and ``phi`` are required.
        where: The beginning of every error, such as the file's name.

    Raises:
        CaseError: A field is missing, unknown or impossible. The text names it.
    """
    fields = Fields(data, where, CaseError)
    numbers = {name: fields.instant(name) for name in ("jitter", "pauses", "batch", "seconds", "exchange") if fields.has(name)}
    slow = dict[int, float]()
    for name, factor in fields.by_name("slow").items():
        if not (name.isascii() and name.isdigit()):
            raise fields.refuse("slow", "numbers of replicas with their factors", name)
        if not is_finite(factor):
            raise fields.refuse(f"slow.{name}", "a factor of at least 1", factor)
        slow[int(name)] = factor
    microbatches = fields.whole("microbatches", 1) if fields.has("microbatches") else _MICROBATCHES
    modes, allow = fields.texts("modes"), fields.texts("allow")
    replicas, phi = fields.whole("replicas", 1), fields.instant("phi")
    fields.end()
    try:
        return SynchronyCase(replicas, phi, slow, microbatches=microbatches, modes=modes, allow=allow, **numbers)
    except CaseError as error:
        raise CaseError(f"{where}: {error}" if where else str(error)) from None
