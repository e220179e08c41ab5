"""The failure that caused the others, and the errors that name it.

Failures are numbered by the store, and one failure soon looks like many. Every rank that waits for a failed one fails too, and
a rank that ends its connections because of a failure looks lost itself. So a report of another rank's loss gives way to that
rank's own report. All ranks that have read the same failures find the same cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from adaptra.errors import PeerLostError
from adaptra.runtime.membership.record import TEXT_LIMIT, Failure

if TYPE_CHECKING:
    from adaptra.runtime.transports.base import Identity


def cause_of(failures: Mapping[int, Failure]) -> int:
    """Return the rank whose failure caused the others.

    That is the first failure's rank. If it reports the loss of a rank that failed by itself, that rank is the cause.
    """
    rank = min(failures, key=lambda rank: failures[rank].ordinal)
    passed = {rank}
    while (lost := failures[rank].lost) is not None and lost in failures and lost not in passed:
        rank = lost
        passed.add(rank)
    return rank


def awaited_report(cause: int, failures: Mapping[int, Failure]) -> int | None:
    """Return the rank whose own report would replace the cause found so far, or None if no report can."""
    lost = failures[cause].lost
    return None if lost in failures or failures[cause].is_certain else lost


def placed(error: PeerLostError, failure: Failure) -> PeerLostError:
    """Add the edge and the op of this rank's own ``failure`` to ``error``, if that has none."""
    if error.edge is not None or failure.edge is None:
        return error
    message = f"{error}, noticed at {failure.op} on edge {failure.edge[0]}→{failure.edge[1]}"
    return PeerLostError(message, rank=error.rank, edge=failure.edge, op=failure.op)


def lost_error(rank: int | None, message: str, awaited: Identity | None) -> PeerLostError:
    """Return the error for a lost rank (or the store, rank None), with the message that this rank waits for from it."""
    if awaited is None:
        return PeerLostError(message, rank=rank)
    message = f"{message}, while edge {awaited.source}→{awaited.destination} waits for {awaited.op} of step {awaited.step}"
    return PeerLostError(message, rank=rank, edge=awaited.edge, op=awaited.op)


def failure_error(rank: int, failure: Failure, reader: int) -> PeerLostError:
    """Return the error for the failure of ``rank``."""
    where = "".join(
        [
            f" at {failure.op}" if failure.op else "",
            f" on edge {failure.edge[0]}→{failure.edge[1]}" if failure.edge else "",
        ]
    )
    if failure.lost is None or failure.lost == reader:
        message, who = f"rank {rank} failed{where}: {failure.message}", rank
    else:
        message, who = f"rank {failure.lost} is lost, as rank {rank} noticed{where}: {failure.message}", failure.lost
    return PeerLostError(message, rank=who, edge=failure.edge, op=failure.op)


def failure_of(error: BaseException, edge: tuple[int, int] | None, op: str | None) -> Failure:
    """Return an error as this rank's failure, or as its report of another rank's loss; the store numbers it later.

    Args:
        error: The error.
        edge, op: The directed edge of stages and the op at that time, if known; else those of the error.
    """
    is_report = isinstance(error, PeerLostError)
    return Failure(
        ordinal=0,
        message=f"{type(error).__name__}: {error}"[:TEXT_LIMIT],
        lost=error.rank if is_report else None,
        edge=edge or (error.edge if is_report else None),
        op=op or (error.op if is_report else None),
    )
