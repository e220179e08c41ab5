"""Synchronisation modes as data: which gradients are in an update, and what an update waits for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, cast

from adaptra.checks import is_finite, is_list_of, is_whole, require_flag, require_word
from adaptra.errors import OptionError
from adaptra.known_keywords import known_keywords

Groups = tuple[tuple[int, ...], ...]

_ROUNDING: Final = 1e-9
"""By how much a share of a whole number may be above another whole number that it is meant to be."""


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Every update has the gradients of all microbatches, of the same parameters: the bits of one process.

    Attributes:
        stealing: Whether replicas that are done take microbatches that others have not begun, within the step. Otherwise
            microbatches are shared beforehand, by what is known of lasting slowness.
    """

    stealing: bool = False

    def __str__(self) -> str:
        return "stealing" if self.stealing else "exact"


@known_keywords
@dataclass(frozen=True)
class XOrder:
    """An update happens when x replicas have reported. Gradients of the others are older when they are in an update (STAR).

    A replica that has reported waits for its update, whose parameters it goes on with. What a model learns is another than in
    ``"exact"``, and the clock decides what is in an update: see ``pipe.exchange_log`` and ``pipe.replay``.

    Attributes:
        x: The number of replicas whose gradients an update has at least; 1 is asynchronous, and all of them is exact. None with
            groups.
        groups: The replicas of each group, which reports as a whole; or ``"auto"`` for groups by the time of a step.
        staleness: The most updates by which a gradient may be old. Updates wait for replicas whose gradients would be older in
            the next one. None is no limit.
        divide: ``"present"`` for the mean over the replicas in an update. ``"all"`` divides by the number of all replicas, as
            STAR's program does: then an update has a smaller learning rate, the fewer replicas it has.

    Raises:
        OptionError: A value is out of range; names it.
    """

    x: int | None = None
    _: KW_ONLY
    groups: Groups | Literal["auto"] | None = None
    staleness: int | None = None
    divide: Literal["present", "all"] = "present"

    def __post_init__(self) -> None:
        counts: tuple[tuple[str, object, int], ...] = (("x", self.x, 1), ("staleness", self.staleness, 0))
        for name, value, least in counts:
            if not (value is None or (is_whole(value) and value >= least)):
                raise OptionError(f"XOrder: {name}={value!r}: expected a whole number of at least {least}, or None")
        if (self.x is None) == (self.groups is None):
            raise OptionError(f"XOrder: x={self.x}, groups={self.groups!r}: expected one of them")
        groups: Any = self.groups
        if not (groups is None or groups == "auto" or _are_groups(groups)):
            raise OptionError(f"XOrder: groups={groups!r}: expected 'auto', or the replicas of each group, as ((0, 1), (2, 3))")
        require_word("XOrder: divide", self.divide, ("present", "all"))

    def __str__(self) -> str:
        return "groups" if self.groups is not None else "asynchronous" if self.x == 1 else f"x-order={self.x}"


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, tuple) and all(
        isinstance(group, tuple) and group and all(map(is_whole, group)) for group in cast("tuple[Any, ...]", groups)
    )


@known_keywords
@dataclass(frozen=True)
class Deadline:
    """Once a share of all microbatches is begun, replicas begin no more. The others come first in the next step; none is lost.

    A step's gradient is the mean over what is in it, of one set of parameters. What a model learns is another than in
    ``"exact"``, as updates have other numbers of microbatches. The clock decides which: see ``pipe.exchange_log`` and
    ``pipe.replay``.

    Attributes:
        quorum: The share, of a step's own microbatches and those that are deferred to it. 1 is exact without sharing.

    Raises:
        OptionError: It is out of range; shows it.
    """

    quorum: float = 0.9

    def __post_init__(self) -> None:
        if not (is_finite(self.quorum) and 0 < self.quorum <= 1):
            raise OptionError(f"Deadline: quorum={self.quorum!r}: expected a share above 0, and at most 1")

    def __str__(self) -> str:
        return f"deadline={self.quorum:g}"

    def extra_slots(self, microbatches: int) -> int:
        """Return the most microbatches that a replica with so many has in a step beside them: deferred ones."""
        return microbatches - 1

    def more_of_own(self, microbatches: int) -> int:
        """Return how many of these are the replica's own."""
        return microbatches - 1

    def free(self, microbatches: int, deferred: Sequence[int]) -> int:
        """Return how many microbatches of a step are begun by whoever comes first.

        Beside them each replica has those that are deferred to the step, and its first one.

        Args:
            microbatches: Those of a replica's step.
            deferred: How many of each replica are deferred to this step.
        """
        replicas, first = len(deferred), sum(deferred)
        quorum = math.ceil(self.quorum * (replicas * microbatches + first) - _ROUNDING)
        return max(0, quorum - first - replicas)


@known_keywords
@dataclass(frozen=True, slots=True)
class Stealing:
    """Replicas that are done take microbatches that others have not begun, within the step. Every bit is as in ``"exact"``.

    Attributes:
        most: The most microbatches that a replica takes in a step. The weight gradients of each are kept until its own program
            has ended. None: half as many as it has itself.

    Raises:
        OptionError: A value is out of range; names it.
    """

    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and not (is_whole(self.most) and self.most >= 1):
            raise OptionError(f"Stealing: most={self.most!r}: expected a whole number of at least 1, or None")

    def extra_slots(self, microbatches: int) -> int:
        """Return the most microbatches that a replica with so many takes."""
        return max(1, microbatches // 2) if self.most is None else self.most

    def more_of_own(self, microbatches: int) -> int:
        """Return how many of these are the replica's own: none."""
        return 0

    def __str__(self) -> str:
        return "stealing"


@known_keywords
@dataclass(frozen=True, kw_only=True)
class Outer:
    """The optimizer that takes what sites have learnt for a gradient: SGD, as ``torch.optim.SGD``.

    Attributes:
        lr: The learning rate; 1 without momentum takes the mean of the sites' parameters.
        momentum: The factor of the updates before.
        nesterov: Whether to look ahead by the momentum.

    Raises:
        OptionError: A value is out of range; names it.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (is_finite(self.lr) and self.lr > 0):
            raise OptionError(f"Outer: lr={self.lr!r}: expected a number above 0")
        if not (is_finite(self.momentum) and 0 <= self.momentum < 1):
            raise OptionError(f"Outer: momentum={self.momentum!r}: expected a number of at least 0, and below 1")
        require_flag("Outer: nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise OptionError("Outer: nesterov=True, momentum=0: expected momentum above 0, or nesterov=False")


@known_keywords
@dataclass(frozen=True)
class Local:
    """Each site updates by itself, and all exchange what they have learnt once in a while (DiLoCo).

    A site is as many consecutive replicas as each other one has. Its replicas stay equal to the last bit. Each stage has its
    own exchange, and these are spread over the interval. At a stage's exchange its parameters become equal on all sites.

    An exchange changes parameters in place, so use an optimizer that steps the parameters themselves. One that steps copies of
    its own, such as float32 ones of bfloat16 parameters, overwrites them at its next step, and undoes the exchange.

    Attributes:
        every: The number of steps between two exchanges of a stage. One that is due within an update of several steps waits for
            its end. So an update has at most so many steps.
        outer: The optimizer that takes what sites have learnt for a gradient.
        sites: The number of sites. None: each replica is one.
        quorum: The number of sites that suffice for an exchange, more than half of them. A site that comes later than
            ``grace`` misses that exchange, and what it has learnt is in a later one. None: all. With a quorum the clock
            decides who is in an exchange.
        grace: With a quorum, the seconds for which others are waited for once it is there.

    Raises:
        OptionError: A value is out of range; names it.
    """

    every: int = 32
    _: KW_ONLY
    outer: Outer = Outer()
    sites: int | None = None
    quorum: int | None = None
    grace: float = 1.0

    def __post_init__(self) -> None:
        counts: tuple[tuple[str, object, int], ...] = (
            ("every", self.every, 1),
            ("sites", self.sites, 2),
            ("quorum", self.quorum, 1),
        )
        for name, value, least in counts:
            if not ((is_whole(value) and value >= least) or (value is None and name != "every")):
                expected = f"a whole number of at least {least}" + (", or None" if name != "every" else "")
                raise OptionError(f"Local: {name}={value!r}: expected {expected}")
        outer: Any = self.outer
        if not isinstance(outer, Outer):
            raise OptionError(f"Local: outer={outer!r}: expected adaptra.Outer(...)")
        if not (is_finite(self.grace) and self.grace >= 0):
            raise OptionError(f"Local: grace={self.grace!r}: expected seconds, a number of at least 0")

    def __str__(self) -> str:
        return f"local={self.every}"


Mode = Synchronous | XOrder | Deadline | Local
Apart = XOrder | Local
"""In these modes sites update by themselves."""

WithinStep = Stealing | Deadline
"""In these modes it is decided as a step runs which microbatches a replica computes."""

BesideExact = WithinStep | Apart
"""The modes that a running job may have in the place of exact updates."""

BESIDE_EXACT: Final = "adaptra.Stealing(...), Deadline(...), Local(...) or XOrder(...)"
"""Those, for people."""


def check_allowed(call: str, allow: Any) -> None:
    """Refuse what is no list of modes that may replace exact updates.

    Raises:
        OptionError: It is none. The text names what was called, and shows it.
    """
    if not is_list_of(object, allow) or not allow or not all(isinstance(one, BesideExact) for one in allow):
        raise OptionError(f"{call}: allow={allow!r}: expected a list of {BESIDE_EXACT}")


@known_keywords
@dataclass(frozen=True)
class Auto:
    """Every update has all gradients, until a trial in ``pipe.settle_synchrony`` finds another mode surely faster.

    Attributes:
        allow: The modes that may replace ``"exact"``: :class:`Stealing`, :class:`Deadline`, :class:`Local`, :class:`XOrder`.

    Raises:
        OptionError: A mode is none of these; shows what was given.
    """

    allow: tuple[BesideExact, ...]

    def __post_init__(self) -> None:
        check_allowed("Auto", self.allow)
        object.__setattr__(self, "allow", tuple(self.allow))

    def __str__(self) -> str:
        return f"auto of exact, {', '.join(map(str, self.allow))}"


_WORDS: Final[Mapping[str, Mode]] = {
    "exact": Synchronous(),
    "stealing": Synchronous(stealing=True),
    "groups": XOrder(groups="auto"),
    "asynchronous": XOrder(x=1),
}
_NUMBERED: Final[Mapping[str, Callable[[str], Mode]]] = {
    "x-order": lambda number: XOrder(x=int(number)),
    "deadline": lambda number: Deadline(quorum=float(number)),
    "local": lambda number: Local(every=int(number)),
}
FORMS: Final = "exact, stealing, groups, asynchronous, x-order=N, deadline=SHARE or local=STEPS"
"""The texts that :func:`parse_mode` takes."""


def parse_mode(text: str) -> Mode:
    """Return the mode that a text names, such as ``exact`` or ``x-order=7``.

    Raises:
        OptionError: It names none. The text says what was expected.
    """
    name, _, number = text.partition("=")
    try:
        return _WORDS[text] if text in _WORDS else _NUMBERED[name](number)
    except OptionError:
        raise
    except (KeyError, ValueError):
        raise OptionError(f"mode {text!r}: expected {FORMS}") from None


def check_mode(mode: Mode, replicas: int) -> None:
    """Refuse a mode that so many replicas can't train in.

    Raises:
        OptionError: The mode is refused. The text names it, and what was expected.
    """
    match mode:
        case XOrder():
            _check_order(mode, replicas)
        case Local():
            _check_sites(mode, replicas)
        case Synchronous() | Deadline():
            pass


def _check_sites(mode: Local, replicas: int) -> None:
    if replicas < 2:
        raise OptionError(f"mode {mode}: expected at least 2 replicas, which exchange")
    sites = mode.sites or replicas
    if replicas % sites:
        raise OptionError(f"Local(sites={sites}) with {replicas} replicas: expected sites of equally many replicas")
    if mode.quorum is not None and not sites < 2 * mode.quorum <= 2 * sites:
        raise OptionError(
            f"Local(quorum={mode.quorum}) with {sites} sites: expected {sites // 2 + 1} to {sites}, more than half of them"
        )


def _check_order(mode: XOrder, replicas: int) -> None:
    if mode.x is not None and mode.x > replicas:
        raise OptionError(f"mode {mode}: expected 1 to {replicas} replicas in an update")
    if isinstance(mode.groups, tuple) and sorted(one for group in mode.groups for one in group) != [*range(replicas)]:
        raise OptionError(f"groups {mode.groups}: expected each replica of 0..{replicas - 1} in one group")


def kind_of(mode: Mode) -> str:
    """Return the kind of a mode, by which users allow it."""
    match mode:
        case Synchronous():
            return "exact"
        case XOrder():
            return "x-order"
        case Deadline():
            return "deadline"
        case Local():
            return "local"


KINDS: Final = ("exact", "x-order", "deadline", "local")
"""All that :func:`kind_of` returns."""


def is_trial(mode: Mode) -> bool:
    """Return whether only a trial can say how the loss falls: gradients are old, or replicas differ between exchanges."""
    return isinstance(mode, XOrder | Local)
