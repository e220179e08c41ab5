"""Comparison of the ops that stages run with those that eager torch runs for the same microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from adaptra.graph.capture.eager_ops import EagerOp
from adaptra.graph.capture.op_signature import Signature, of_node, shown, without_strides


@dataclass(frozen=True, slots=True)
class OpsDifference:
    """The difference between the ops of eager torch and those of the stages.

    Attributes:
        where: The module and line of the model; empty in the backward pass.
        eager: The first op of eager torch that no stage runs, as text; empty if there is none.
        captured: The first op of the stages that eager torch does not run, as text; empty if there is none.
        missing, added: The numbers of ops of both kinds.
        failed: The reason why the comparison failed; empty if it did not.
    """

    where: str
    eager: str
    captured: str
    missing: int
    added: int
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            return f"the ops of the captured stages could not be compared with eager torch's: {self.failed}"
        begin = "the captured stages run other ops than eager torch"
        if not self.eager:
            return f"{begin}: {self.added} more, the first {self.captured}"
        instead = f"; the stages run {self.captured} and {self.added - 1} more instead" if self.captured else ""
        place = self.where or "the backward pass"
        return f"{begin}: {place}: eager torch runs {self.eager}, and {self.missing - 1} more that no stage runs{instead}"


def compare_ops(
    eager: Sequence[EagerOp],
    stages: Iterable[fx.GraphModule],
    *,
    again: bool = False,
    dense: bool = False,
    elsewhere: Mapping[Signature, int] | None = None,
) -> OpsDifference | None:
    """Compare the ops of eager torch with those of the stages' F, I and W graphs.

    Args:
        eager: The ops that eager torch runs.
        stages: The graphs of all stages.
        again: Whether stages may run an op more often than eager torch. Each stage computes a value that several stages need,
            and checkpointed regions are computed again.
        dense: Whether strides may differ, as they do after a cut: a tensor with gaps becomes dense when it is sent.
        elsewhere: Ops that the runtime runs outside the stages' graphs, with their numbers: sums of gradients of shared
            parameters.

    Returns:
        The difference, or None if there is none.
    """
    captured = [one for graph in stages for node in graph.graph.nodes for one in of_node(node)]
    remaining, beside = Counter(captured), Counter(elsewhere or {})
    missing: list[EagerOp] = []
    for op in eager:
        if remaining[op.signature] > 0:
            remaining[op.signature] -= 1
        elif beside[op.signature] > 0:
            beside[op.signature] -= 1
        else:
            missing.append(op)
    if dense:
        missing = _match_without_strides(missing, remaining)
    known = {without_strides(one.signature) if dense else one.signature for one in eager} if again else set[Signature]()
    surplus = {
        one: count for one, count in remaining.items() if count > 0 and (without_strides(one) if dense else one) not in known
    }
    if not missing and not surplus:
        return None
    first = next((one for one in captured if one in surplus), None)
    return OpsDifference(
        where=missing[0].where if missing else "",
        eager=shown(missing[0].signature) if missing else "",
        captured="" if first is None else shown(first),
        missing=len(missing),
        added=sum(surplus.values()),
    )


def _match_without_strides(missing: Sequence[EagerOp], remaining: Counter[Signature]) -> list[EagerOp]:
    """Match ops without regard to strides and remove their partners from ``remaining``.

    Returns:
        The ops without a partner.
    """
    alike: dict[Signature, list[Signature]] = {}
    for signature, count in remaining.items():
        alike.setdefault(without_strides(signature), []).extend([signature] * count)
    left: list[EagerOp] = []
    for op in missing:
        partners = alike.get(without_strides(op.signature))
        if partners:
            remaining[partners.pop()] -= 1
        else:
            left.append(op)
    return left
