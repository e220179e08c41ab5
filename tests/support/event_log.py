"""What the events of a run must show, all ranks together: never two plans at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from adaptra.runtime.control.plans.events import ControlEvent, EventKind


class EventFile:
    """Keeps a rank's events in a file, each before anything else happens, so that they outlive a rank that is killed."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder) / f"{rank}.jsonl"

    def __call__(self, event: ControlEvent) -> None:
        """Take an event; an ``on_event`` of the pipeline's options."""
        with self._path.open("a") as file:
            file.write(json.dumps(event.to_json()) + "\n")


def read_events(folder: Path) -> dict[int, list[ControlEvent]]:
    """The events of every rank, in their order."""
    found: dict[int, list[ControlEvent]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[int(path.stem)] = [ControlEvent(**line | {"kind": EventKind(line["kind"])}) for line in lines]
    return found


def check_events(events: Mapping[int, Sequence[ControlEvent]], reached: Mapping[int, int]) -> dict[int, int]:
    """Make sure that no step ran under two plans, that versions only grow, and that all ranks had confirmed what any ran.

    Args:
        events: Of every rank, in their order on that rank.
        reached: Per rank the first step that it has not begun; ranks of which that is not known may be missing.

    Returns:
        The step from which each version ran, by version.

    Raises:
        AssertionError: Says which rank, step and version.
    """
    switches: dict[int, int] = {}
    for rank, told in events.items():
        own = [(event.step, event.version) for event in told if event.kind is EventKind.SWITCHED]
        for (step, version), (later, newer) in pairwise(own):
            assert step < later and version < newer, f"rank {rank}: plan {newer} at step {later} after {version} at {step}"
        for step, version in own:
            first = switches.setdefault(version, step)
            assert first == step, f"rank {rank} switched to plan {version} at step {step}, another at {first}"
    for version, step in switches.items():
        for rank, end in reached.items():
            has_switched = any((event.kind, event.version) == (EventKind.SWITCHED, version) for event in events[rank])
            assert has_switched == (end > step), f"rank {rank} ran the steps before {end}: plan {version} began at {step}"
        for rank, told in events.items():
            kinds = [event.kind for event in told if event.version == version]
            assert EventKind.CONFIRMED in kinds, f"rank {rank} never confirmed plan {version}"
            if EventKind.SWITCHED in kinds:
                is_before = kinds.index(EventKind.CONFIRMED) < kinds.index(EventKind.SWITCHED)
                assert is_before, f"rank {rank} ran plan {version} before it confirmed it"
    _check_agreed(events.values(), switches)
    return switches


def _check_agreed(events: Iterable[Sequence[ControlEvent]], switches: Mapping[int, int]) -> None:
    agreed: dict[int, int] = {}
    for told in events:
        for event in told:
            if event.kind is EventKind.AGREED:
                assert event.version not in agreed, f"plan {event.version} was agreed twice"
                agreed[event.version] = event.step
                expected = switches.get(event.version, event.step)
                assert event.step == expected, f"plan {event.version} was agreed for step {event.step}, and ran from {expected}"
            if event.kind is EventKind.WITHDRAWN:
                assert event.version not in switches, f"plan {event.version} was withdrawn, and ran"


def event(kind: EventKind, rank: int, step: int, version: int) -> Any:
    """An event by hand."""
    return ControlEvent(kind, rank, step, version, "")
