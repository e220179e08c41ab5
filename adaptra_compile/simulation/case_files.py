"""Cases in their JSON form, which ``adaptra plan`` and ``adaptra simulate`` read from files; see ``docs/formats.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from adaptra.errors import CaseError
from adaptra.json_files import Fields, read_json
from adaptra.program import refuse_size
from adaptra.simulation.case import Case, WorkerLink, placement_lists
from adaptra.simulation.case_fields import placement_of
from adaptra.simulation.cost import Blocking, CostModel
from adaptra.sizes import MemoryLimit

PIPELINE_VERSION: Final = 1
"""The version of a file of one pipeline."""

JOB_VERSION: Final = 2
"""The version of a file of several replicas."""

_MOST: Final = 1_000_000
"""The most stages, replicas or microbatches of a case. More are refused before they fill the memory."""

_PLACE: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


def load_case(path: str | Path) -> Case:
    """Read a case file.

    Raises:
        CaseError: The file is invalid. The text names the file, the field, its value and what was expected.
    """
    data = read_json(path, CaseError)
    try:
        return case_from_json(data, name=Path(path).stem)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None


def case_from_json(data: Any, name: str = "case") -> Case:
    """Read a case from its JSON object, which may also be wrapped as ``{"name": …, "case": {…}}``."""
    outer = Fields(data, "", CaseError)
    fields = Fields(outer.by_name("case"), "", CaseError) if outer.has("case") else outer
    name = str(outer.raw("name", name))
    return _job_of(fields, name) if fields.has("P") else _pipeline_of(fields, name)


def case_to_json(case: Case) -> dict[str, Any]:
    """Return the JSON object from which :func:`case_from_json` reads an equal case, of one pipeline in version 1."""
    if case == Case(case.cost, case.microbatches, case.placement, case.name, case.barrier):
        return {"name": case.name, "case": _pipeline_fields(case)}
    return {
        "version": JOB_VERSION,
        "name": case.name,
        "P": case.replicas,
        "S": case.stages,
        "M": case.microbatches,
        "t_f": list(case.cost.forward),
        "t_i": list(case.cost.input_grad),
        "t_w": list(case.cost.weight_grad),
        "t_opt": list(case.step),
        "t_reduce": list(case.reduce),
        "c": list(case.cost.latency_forward),
        "c_b": list(case.cost.latency_backward),
        "o": list(case.cost.occupancy_forward),
        "o_b": list(case.cost.occupancy_backward),
        "links": {f"{a}-{b}": {"c": link.latency, "o": link.occupancy} for (a, b), link in case.links.items()},
        "ports": {str(worker): value for worker, value in case.ports.items()},
        "slow": {str(worker): value for worker, value in case.slow.items()},
        "lost": [case.place_of(worker) for worker in sorted(case.lost)],
        "handover": case.hand_over,
        "fold": case.fold,
        "mem_cap": None if case.memory is None else list(case.memory),
        "placement": placement_lists(case.placement),
        "barrier": case.barrier,
        "changing": sorted(case.changing),
        "at_home": sorted(case.at_home),
    }


def _pipeline_fields(case: Case) -> dict[str, Any]:
    cost = case.cost
    return {
        "version": PIPELINE_VERSION,
        "S": cost.stages,
        "M": case.microbatches,
        "t_f": list(cost.forward),
        "t_b": list(cost.input_grad),
        "t_w": list(cost.weight_grad),
        "c_f": list(cost.latency_forward),
        "c_b": list(cost.latency_backward),
        "o_f": list(cost.occupancy_forward),
        "o_b": list(cost.occupancy_backward),
        "duplex": "half" if cost.half_duplex else "full",
        "blocking_comm": {Blocking.NONE: False, Blocking.SEND: "send", Blocking.BOTH: "both"}[cost.blocking],
        "mem_f": list(cost.memory_forward),
        "mem_b": list(cost.memory_input_grad),
        "mem_cap": None if cost.memory_limit is None else list(cost.memory_limit),
        "placement": placement_lists(case.placement),
        "barrier": case.barrier,
        **({"t_update": list(cost.update)} if any(cost.update) else {}),
    }


def worker_of(what: str, text: str, placement: Sequence[int]) -> int:
    """Read a worker: its number, or ``REPLICA.STAGE``, the worker that has this stage.

    Raises:
        CaseError: The text is neither; ``what`` begins the error.
    """
    if match := _PLACE.fullmatch(text):
        replica, stage = int(match[1]), int(match[2])
        if stage >= len(placement):
            raise CaseError(f"{what}: {text!r}: stage {stage} does not exist: expected 0..{len(placement) - 1}")
        return replica * (max(placement) + 1) + placement[stage]
    if _INDEX.fullmatch(text):
        return int(text)
    raise CaseError(f"{what}: {text!r}: expected a worker such as '1.2' for stage 2 of replica 1, or its number")


def _pipeline_of(fields: Fields, name: str) -> Case:
    """Read a case of version 1."""
    if fields.raw("version", PIPELINE_VERSION) != PIPELINE_VERSION:
        raise CaseError(f"case version {fields.raw('version')!r}: this adaptra reads version {PIPELINE_VERSION}")
    stages, microbatches = (fields.whole(one, 1, _MOST) for one in "SM")
    placement = placement_of(fields, stages)
    ranks, edges = max(placement) + 1, stages - 1
    cost = CostModel(
        forward=fields.numbers("t_f", stages),
        input_grad=fields.numbers("t_b", stages),
        weight_grad=fields.numbers("t_w", stages),
        latency_forward=fields.numbers("c_f", edges, 0),
        latency_backward=fields.numbers("c_b", edges, fields.raw("c_f", 0)),
        occupancy_forward=fields.numbers("o_f", edges, 0, null=0),
        occupancy_backward=fields.numbers("o_b", edges, fields.raw("o_f", 0), null=0),
        half_duplex=fields.one_of("duplex", ("full", "half")) == "half",
        blocking=_blocking(fields.raw("blocking_comm", False)),
        memory_forward=fields.numbers("mem_f", stages, 1),
        memory_input_grad=fields.numbers("mem_b", stages, 0.5),
        memory_limit=None if fields.raw("mem_cap", None) is None else MemoryLimit(fields.numbers("mem_cap", ranks)),
        update=fields.numbers("t_update", stages, 0),
    )
    barrier = fields.flag("barrier", False)
    fields.end()
    return Case(cost, microbatches, placement, name, barrier)


def _job_of(fields: Fields, name: str) -> Case:
    """Read a case of version 2."""
    if fields.raw("version", JOB_VERSION) != JOB_VERSION:
        raise CaseError(f"version {fields.raw('version')!r}: a case with replicas, P, has version {JOB_VERSION}")
    replicas, stages, microbatches = (fields.whole(one, 1, _MOST) for one in "PSM")
    if refused := refuse_size(replicas * stages, microbatches):
        raise CaseError(f"P, S, M: {refused}")
    fold = fields.one_of("fold", ("handover", "contributions"))
    placement = placement_of(fields, stages)
    caps = None if fields.raw("mem_cap", None) is None else fields.numbers("mem_cap", max(placement) + 1)
    cost = CostModel(
        forward=fields.numbers("t_f", stages),
        input_grad=fields.numbers("t_i", stages),
        weight_grad=fields.numbers("t_w", stages),
        latency_forward=fields.numbers("c", stages - 1, 0),
        latency_backward=fields.numbers("c_b", stages - 1, fields.raw("c", 0)),
        occupancy_forward=fields.numbers("o", stages - 1, 0),
        occupancy_backward=fields.numbers("o_b", stages - 1, fields.raw("o", 0)),
    )
    case = Case(
        cost,
        microbatches,
        placement,
        str(fields.raw("name", name)),
        fields.flag("barrier", False),
        replicas=replicas,
        step=fields.numbers("t_opt", stages, 0),
        reduce=fields.numbers("t_reduce", stages, 0),
        links=_links(fields),
        ports={worker_of("ports", one, placement): value for one, value in fields.numbers_by_name("ports").items()},
        slow={worker_of("slow", one, placement): value for one, value in fields.numbers_by_name("slow").items()},
        lost=frozenset(worker_of("lost", one, placement) for one in fields.texts("lost")),
        hand_over=fields.number("handover", 0),
        hands_over=fold == "handover",
        memory=None if caps is None else tuple(map(_whole_cap, caps)),
        changing=frozenset(fields.wholes("changing", ())),
        at_home=frozenset(fields.wholes("at_home", ())),
    )
    fields.end()
    return case


def _blocking(value: Any) -> Blocking:
    match value:
        case False | None:
            return Blocking.NONE
        case "send":
            return Blocking.SEND
        case True | "both":
            return Blocking.BOTH
        case _:
            raise CaseError(f"blocking_comm: expected false, true, 'send' or 'both', got {value!r}")


def _links(fields: Fields) -> dict[tuple[int, int], WorkerLink]:
    links: dict[tuple[int, int], WorkerLink] = {}
    for name, value in fields.by_name("links").items():
        ends = name.split("-")
        if len(ends) != 2 or not all(_INDEX.fullmatch(end) for end in ends):
            raise CaseError(f"links: {name!r}: expected two workers such as '1-2', from 1 to 2")
        link = Fields(value, f"links {name}", CaseError)
        links[int(ends[0]), int(ends[1])] = WorkerLink(link.number("c", 0), link.number("o", 0))
        link.end()
    return links


def _whole_cap(cap: float) -> int:
    if cap < 1 or cap != int(cap):
        raise CaseError(f"mem_cap: {cap:g}: expected a whole number of microbatches, at least 1")
    return int(cap)
