"""The user's options of what stages compute: random numbers, compilers, changed buffers, and sums over replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from adaptra.checks import is_whole, require_flag, require_word
from adaptra.errors import OptionError
from adaptra.planning.synchrony.modes import BESIDE_EXACT, Apart, Auto, BesideExact, Local, WithinStep
from adaptra.runtime.options.rank_agreement import agreed, per_rank
from adaptra.runtime.options.reduce_options import Reduce

EXACT: Final = "exact"
"""The mode of synchronisation in which every update has the gradients of all microbatches."""

Synchrony = Literal["exact"] | BesideExact
"""What an update waits for in a running job."""

_MODES: Final = f"{EXACT!r}, {BESIDE_EXACT}"


def check_synchrony(mode: Any) -> None:
    """Refuse what is no mode of a running job.

    Raises:
        OptionError: It is none. The text shows it.
    """
    if mode != EXACT and not isinstance(mode, BesideExact):
        raise OptionError(f"synchrony={mode!r}: expected {_MODES}")


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Options of what stages compute.

    Attributes:
        seed: Seed of random numbers such as those of dropout. They depend only on the seed, the step and the number of the
            microbatch, which counts on through the replicas. So two replicas of M microbatches draw the same numbers as one
            process with 2·M.
        inner: The backend of torch.compile that compiles the graphs of F, I and W, such as ``"inductor"``. ``"eager"`` runs
            them op by op, bitwise equal to one process. Evaluation graphs are compiled by the first evaluation.
        captured: The reaction if captured stages run other ops than eager torch does for the same microbatch. Such ops may
            round differently or take longer. ``"warn"`` of the first such op with its module and line, ``"error"``, or
            ``"accept"``.
        broadcast_buffers: With several replicas, broadcast the first one's buffers to all before each forward pass, as DDP
            does. These are the buffers that the model changes, such as the statistics of BatchNorm. False: each replica has its
            own.
        reduce: How gradients and losses are added over replicas.
        deterministic: Run kernels only that give the same bits each time. ``compile`` sets
            ``torch.use_deterministic_algorithms(True)`` and ``torch.backends.cudnn.benchmark = False`` for the whole process.
            Each step checks that they are still set. On a GPU the environment needs ``CUBLAS_WORKSPACE_CONFIG``, see
            ``docs/design/numerics.md``.
        shapes: The number of shapes of batches that are kept compiled, beside the first one. The least recently used one goes
            first, and is compiled again when a batch has it. None keeps as many as take about a GiB, but 16 to 128.
        synchrony: What an update waits for: ``"exact"``, the gradients of all microbatches. With :class:`adaptra.Stealing`
            replicas help each other within a step, with the same bits. What a model learns is another with
            :class:`adaptra.Deadline`, where what is late comes first in the next step. So it is with :class:`adaptra.Local`,
            for slow links between sites, and with :class:`adaptra.XOrder`, for the gradients of some replicas.
            ``pipe.take_synchrony`` and ``pipe.settle_synchrony`` change it later. With :class:`adaptra.Auto` the latter tries
            modes where something is slow. See ``docs/design/synchrony.md``.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    seed: int = field(default=0, metadata=agreed())
    inner: str = field(default="eager", metadata=agreed())
    captured: Literal["warn", "error", "accept"] = field(
        default="warn", metadata=per_rank("each rank compares and reacts on its own; an error ends all of them")
    )
    broadcast_buffers: bool = field(default=True, metadata=agreed())
    reduce: Reduce = field(default_factory=Reduce, metadata=agreed())
    deterministic: bool = field(default=False, metadata=agreed())
    shapes: int | None = field(default=None, metadata=agreed())
    synchrony: Synchrony | Auto = field(default=EXACT, metadata=agreed(repr))

    def __post_init__(self) -> None:
        seed: Any = self.seed
        if not is_whole(seed) or not 0 <= seed < 2**63:
            raise OptionError(f"seed={seed!r}: expected a whole number of 0..2**63-1")
        require_word("captured", self.captured, ("warn", "error", "accept"))
        require_flag("broadcast_buffers", self.broadcast_buffers)
        require_flag("deterministic", self.deterministic)
        shapes: Any = self.shapes
        if shapes is not None and (not is_whole(shapes) or shapes < 1):
            raise OptionError(f"shapes={shapes!r}: expected a whole number of at least 1")
        reduce: Any = self.reduce
        if not isinstance(reduce, Reduce):
            raise OptionError(f"reduce={reduce!r}: expected adaptra.Reduce(...)")
        if not isinstance(self.synchrony, Auto):
            check_synchrony(self.synchrony)

    @property
    def first_synchrony(self) -> Synchrony:
        """What the first update waits for."""
        return EXACT if isinstance(self.synchrony, Auto) else self.synchrony

    @property
    def possible_synchrony(self) -> tuple[Synchrony, ...]:
        """What updates may wait for: the modes that trials may choose, or the one that the user has chosen."""
        return self.synchrony.allow if isinstance(self.synchrony, Auto) else (self.synchrony,)

    @property
    def auto(self) -> Auto | None:
        """The modes that trials may choose where something is slow; None where the user decides on trials."""
        return self.synchrony if isinstance(self.synchrony, Auto) else None

    @property
    def apart(self) -> Apart | None:
        """How sites update by themselves; None where every update has all gradients."""
        return self.synchrony if isinstance(self.synchrony, Apart) else None

    @property
    def local(self) -> Local | None:
        """How sites exchange that take local steps; None in other modes."""
        return self.synchrony if isinstance(self.synchrony, Local) else None

    @property
    def within_step(self) -> WithinStep | None:
        """How it is decided within a step which microbatches a replica computes; None where that is known before."""
        return self.synchrony if isinstance(self.synchrony, WithinStep) else None
