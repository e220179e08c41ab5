"""One state of the model in :mod:`protocol_model`, and how large its runs are."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from adaptra.runtime.control.agreement.participant import Participant
from adaptra.runtime.control.mail.relay import Relay, RelayOptions
from adaptra.runtime.control.plans.plan_log import Agreement, Log


@dataclass(frozen=True, slots=True)
class Faults:
    """How many faults of each kind a run may have.

    Attributes:
        lost: Mails that are lost.
        repeated: Mails that arrive twice.
        broken: Connections that break and coordinators that give up.
        early: Waits that end in impatience though something is still under way: a rank that lags.
        refused: Proposals that a rank refuses, or that are withdrawn because one lags.
        crashes: Processes that die.
    """

    lost: int = 0
    repeated: int = 0
    broken: int = 0
    early: int = 0
    refused: int = 0
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large the runs are.

    Attributes:
        ranks: How many ranks there are.
        steps: How many steps they run.
        proposals: How many plans are proposed at most.
        ahead: How many steps the log is ahead of the slowest rank.
        eager: Whether a rank runs a step as soon as the log covers it, so that only its report lags. Far fewer states.
        faults: What may go wrong.
        speculative: Whether speculative plans may also be proposed, and then released or withdrawn at any time.
        relaying: How mail travels by a tree of the ranks; None if all of it is direct.
    """

    ranks: int
    steps: int
    proposals: int
    ahead: int = 1
    eager: bool = False
    faults: Faults = field(default_factory=Faults)
    speculative: bool = False
    relaying: RelayOptions | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All of a plan that the protocol looks at."""

    version: int
    digest: str
    reason: str = ""
    predicted: float = 0.0

    def to_json(self) -> ModelPlan:
        """What travels: itself."""
        return self


@dataclass(slots=True)
class World:
    """One state; ``participants`` and ``relays`` are never changed but replaced by changed copies."""

    participants: list[Participant]
    keys: list[Hashable]
    """Per participant and its relay what is equal for equal ones."""
    alive: list[bool]
    told: list[bool]
    """Whether a rank has been told that another died, and has ended."""
    covered: list[tuple[int, ...]]
    """Per rank the versions of the steps that it knows the log to cover."""
    ran: list[int]
    """Per rank how many steps it has run."""
    considering: list[tuple[ModelPlan, ...]]
    mail: dict[tuple[int, int], tuple[int, ...]]
    """By sender and receiver, as numbers that stand for equal mail."""
    store: dict[str, Any]
    written: tuple[int, int]
    """The latest entry of the log, whether it is still there or not."""
    proposals: int
    faults: Faults
    unreleased: frozenset[str] = frozenset()
    """The digests of the speculative plans that have not been released."""
    relays: list[Relay] = field(default_factory=list[Relay])
    """The ranks' relays; none if all mail is direct."""

    def copied(self) -> World:
        """A state that can be changed without changing this one."""
        return World(
            self.participants[:],
            self.keys[:],
            self.alive[:],
            self.told[:],
            self.covered[:],
            self.ran[:],
            self.considering[:],
            self.mail.copy(),
            self.store.copy(),
            self.written,
            self.proposals,
            self.faults,
            self.unreleased,
            self.relays[:],
        )

    def key(self) -> Hashable:
        """Equal for equal states."""
        return (
            tuple(self.keys),
            tuple(self.alive),
            tuple(self.told),
            tuple(self.covered),
            tuple(self.ran),
            tuple(self.considering),
            frozenset(self.mail.items()),
            frozenset(self.store.items()),
            self.proposals,
            self.faults,
            self.unreleased,
        )


_OWN = (Participant, Agreement, Log, Relay)


def cloned(value: Any) -> Any:
    if isinstance(value, _OWN):
        made = copy(value)
        for name, part in vars(value).items():
            if isinstance(part, (list, dict, set, deque, *_OWN)):
                setattr(made, name, cloned(part))
        return made
    return copy(value)


_OF_PARTICIPANTS = {"_rank", "_ranks", "_initial", "_around", "_ahead", "_first_step", "_store", "_before"}
_OF_RELAYS = {"_options", "_coordinator", "_push", "_teller", "_reader"}
_UNCHANGING = frozenset(_OF_PARTICIPANTS | _OF_RELAYS)


def frozen(value: Any) -> Hashable:
    if isinstance(value, _OWN):
        return tuple([frozen(part) for name, part in vars(value).items() if name not in _UNCHANGING])
    if isinstance(value, (list, deque)):
        return tuple(value)
    if isinstance(value, dict):
        return frozenset(value.items())
    if isinstance(value, set):
        return frozenset(value)
    return value
