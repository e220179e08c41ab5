"""Compare the ops that stages run with those that eager torch runs for the same microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from adaptra.graph.capture.eager_ops import EagerOp
from adaptra.graph.capture.op_signature import Signature, of_node, shown, without_strides


@dataclass(frozen=True, slots=True)
class OpsDifference:
    """The first op that eager torch runs and the stages don't, or the other way round.

    Attributes:
        where: The module and line of the model; empty in the backward pass.
        eager: The first op of eager torch that no stage runs, as text; empty if there is none.
        captured: The first op of the stages that eager torch does not run, as text; empty if there is none.
        missing, added: How many there are of either.
        failed: Why nothing could be compared; empty if it could.
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
    """The first difference between what eager torch and the stages' graphs of F, I and W run, or None.

    Args:
        eager: What eager torch runs.
        stages: The graphs of all stages.
        again: Whether stages may run ops more often than eager torch: what several stages need, each computes for itself, and
            what lies in checkpointed regions is computed again.
        dense: Whether strides may differ, as they do behind a cut: a tensor that crosses it with gaps arrives without.
        elsewhere: What the runtime does of it beside the stages' graphs, and how often: sums of gradients of shared parameters.
    """
    captured = [one for graph in stages for node in graph.graph.nodes for one in of_node(node)]
    remaining, beside = Counter(captured), Counter(elsewhere or {})
    missing: list[EagerOp] = []
    for one in eager:
        if remaining[one.signature] > 0:
            remaining[one.signature] -= 1
        elif beside[one.signature] > 0:
            beside[one.signature] -= 1
        else:
            missing.append(one)
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
    """Those that have no partner in what remains, whatever the strides; their partners are taken out of it."""
    alike: dict[Signature, list[Signature]] = {}
    for one, count in remaining.items():
        alike.setdefault(without_strides(one), []).extend([one] * count)
    left: list[EagerOp] = []
    for one in missing:
        partners = alike.get(without_strides(one.signature))
        if partners:
            remaining[partners.pop()] -= 1
        else:
            left.append(one)
    return left
