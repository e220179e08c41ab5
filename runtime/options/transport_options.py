"""The user's options of transports: by which paths messages travel, in which form, and how long they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from adaptra.checks import are_edges, is_list_of, require_seconds
from adaptra.errors import OptionError
from adaptra.runtime.options.rank_agreement import agreed, per_rank


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Options of transports.

    Attributes:
        timeout: Seconds an op waits for a message, and a step for its plan, before the step fails.
        delegate: Set up the delegate beside c10d or NCCL. True: edges that turn slow take it. Directed edges such as
            ``[(1, 2)]``: these take it from the start, too.
        addresses: The delegate's paths, the best first: numeric addresses of this rank's host, and RDMA ports such as
            ``rdma:mlx5_0/1``. Every rank gives equally many of the same kinds. () for the usable RDMA ports of the host,
            followed by the address by which it reaches the job's store.
        lossy_bf16: Round messages between stages from float32 to bfloat16 while they travel. That halves the bytes, but
            activations and their gradients lose precision, so training is no longer bitwise that of one process. All messages
            must be float32. ``"slow"``: as part of a plan, only over edges whose bandwidth limits the step, for as long as it
            does.
        survive: Go on after the loss of processes, as long as each stage has one and each replica one that is given its batch.
            A call that breaks is done again, with the same numbers. Needs several replicas, and the delegate. All ranks of a
            replica give its whole batch.

    Raises:
        OptionError: An option is invalid; names it, the given value and the expected one.
    """

    timeout: float = field(default=300.0, metadata=per_rank("each rank limits its own waits; the shortest limit ends the job"))
    delegate: bool | Sequence[tuple[int, int]] = field(default=False, metadata=agreed())
    addresses: Sequence[str] = field(default=(), metadata=per_rank("each host has its own; their kinds are compared later"))
    lossy_bf16: bool | Literal["slow"] = field(default=False, metadata=agreed())

    survive: bool = field(default=False, metadata=agreed())

    @property
    def delegated(self) -> tuple[tuple[int, int], ...]:
        """The directed edges that take the delegate from the start, in ascending order."""
        return () if isinstance(self.delegate, bool) else tuple(sorted({(source, to) for source, to in self.delegate}))

    @property
    def uses_delegate(self) -> bool:
        """True if any edge may ever take the delegate."""
        return self.delegate is not False

    def __post_init__(self) -> None:
        require_seconds("timeout", self.timeout)
        delegate: Any = self.delegate
        if not isinstance(delegate, bool) and not are_edges(delegate):
            raise OptionError(
                f"delegate={delegate!r}: expected True, False or directed edges of neighbouring stages such as [(1, 2)]"
            )
        addresses: Any = self.addresses
        if not is_list_of(str, addresses):
            raise OptionError(
                f"addresses={addresses!r}: expected a list of numeric addresses of this host such as ['10.0.0.1']"
            )
        lossy_bf16: Any = self.lossy_bf16
        if not isinstance(lossy_bf16, bool) and lossy_bf16 != "slow":
            raise OptionError(f"lossy_bf16={lossy_bf16!r}: expected True, False or 'slow'")
        survive: Any = self.survive
        if not isinstance(survive, bool):
            raise OptionError(f"survive={survive!r}: expected True or False")
