"""A plan, on which the ranks of a pipeline agree: a program, the case that it was made for, and the expected times."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from adaptra.errors import CaseError, ControlError, ScheduleError
from adaptra.json_files import Fields
from adaptra.planning.remedies.job_remedies import JobRemedy
from adaptra.planning.routes.joined_programs import crossed_replicas
from adaptra.program import Program
from adaptra.program.placement import Edge
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import case_from_json, case_to_json

MAX_REASON: Final = 10_000
"""The longest reason of a plan, in characters."""

Edges = tuple[Edge, ...]
"""Directed edges of stages: (sending stage, receiving stage)."""


@dataclass(frozen=True)
class Plan:
    """A program with the case that it was made for.

    Attributes:
        version: Counts the plans of a pipeline from 0; never used twice.
        program: Compute ops only; every rank lowers its own order for its own transport.
        case: The cost model, microbatches and placement that it was planned for; seconds.
        predicted: The simulated seconds of a step under that case: its makespan behind a barrier, otherwise the period.
        bound: A lower bound of them under any program.
        reason: The reason for the plan, for people.
        delegated: The directed edges of stages whose messages travel by the delegate, in ascending order.
        rounded: The directed edges whose messages are rounded to bfloat16 while they travel, in ascending order.
        predicted_before: The same seconds of the plan that it replaces, under the same case; None for plan 0.
        remedy: The remedy of a job of several replicas that the plan is, such as a share; None for the plan of one pipeline.
    """

    version: int
    program: Program
    case: Case
    predicted: float
    bound: float
    reason: str
    delegated: Edges = ()
    rounded: Edges = ()
    predicted_before: float | None = None
    remedy: JobRemedy | None = None

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything that a rank runs of the plan: ranks with the same digest run the same program in the same
        way.
        """
        return digest_of(self.program, self.delegated, self.rounded)

    def is_plainer_than(self, other: Plan) -> bool:
        """Return True if it rounds fewer edges than the other, or if it alone leaves all microbatches at home."""
        return set(self.rounded) < set(other.rounded) or (other.is_routed and not self.is_routed)

    @property
    def is_routed(self) -> bool:
        """True if a replica's worker computes microbatches of another one."""
        return bool(crossed_replicas(self.program.routing))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads back to an equal plan."""
        return {
            "version": self.version,
            "program": str(self.program),
            "digest": self.digest,
            "case": case_to_json(self.case),
            "predicted": self.predicted,
            "bound": self.bound,
            "reason": self.reason,
            "delegated": [list(edge) for edge in self.delegated],
            "rounded": [list(edge) for edge in self.rounded],
            "predicted_before": self.predicted_before,
            "remedy": None if self.remedy is None else self.remedy.value,
        }

    @staticmethod
    def from_json(data: object) -> Plan:
        """Read a plan.

        Raises:
            ControlError: A field is missing, unknown or invalid, the digest is not the program's, or the program
                has communication ops.
        """
        fields = Fields(data, "plan")
        try:
            plan = Plan(
                version=fields.whole("version"),
                program=Program.parse(fields.text("program")),
                case=case_from_json(fields.raw("case")),
                predicted=fields.number("predicted"),
                bound=fields.number("bound"),
                reason=fields.text("reason", at_most=MAX_REASON),
                delegated=_edges(fields, "delegated"),
                rounded=_edges(fields, "rounded"),
                predicted_before=fields.number_or_none("predicted_before"),
                remedy=_remedy(fields),
            )
        except (ScheduleError, CaseError) as error:
            raise ControlError(f"plan: {error}") from None
        digest = fields.text("digest", at_most=64)
        fields.end()
        if digest != plan.digest:
            raise ControlError(f"plan {plan.version}: the program's digest is {plan.digest[:12]}, the plan says {digest[:12]}")
        if plan.program.is_lowered:
            raise ControlError(f"plan {plan.version}: expected compute ops only, got a program with communication ops")
        return plan


def digest_of(program: Program, delegated: Edges = (), rounded: Edges = ()) -> str:
    """Return the SHA-256 of a program's text and of the edges that take the delegate or round, in hexadecimal."""
    marks = [(delegated, "delegate"), (rounded, "bfloat16")]
    lines = "".join(f"{source}>{destination}@{mark}\n" for edges, mark in marks for source, destination in edges)
    return hashlib.sha256((str(program) + lines).encode()).hexdigest()


def _remedy(fields: Fields) -> JobRemedy | None:
    remedy = fields.raw("remedy")
    names = [one.value for one in JobRemedy]
    if remedy is None:
        return None
    if remedy not in names:
        raise fields.refuse("remedy", f"None or one of {', '.join(names)}", remedy)
    return JobRemedy(remedy)


def _edges(fields: Fields, name: str) -> Edges:
    edges: list[tuple[int, int]] = []
    for item in fields.items(name):
        match item:
            case [int(source), int(destination)] if source >= 0 and abs(source - destination) == 1:
                edges.append((source, destination))
            case _:
                raise fields.refuse(name, "pairs of neighbouring stages", item)
    return tuple(edges)
