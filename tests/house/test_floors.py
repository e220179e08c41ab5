"""The house: imports go down its floors, no two rooms import each other, no folder is crowded, some rooms never load torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict

from paths import ROOT, TESTS
from rooms import IMPORTS, MODULES, room_of

FLOORS = """
    errors checks sizes progress known_keywords json_files unlike_numbers profiled weakly
    program simulation equations collectives
    graph.ops graph.effects graph.capture graph.partition graph.stages graph.backward graph
    passes planning planning.routes planning.layouts planning.remedies planning.responses planning.explaining planning.synchrony
    runtime.world runtime.control_store runtime.transports runtime.devices runtime.transports.staging
    runtime.transports.c10d runtime.transports.delegate runtime.transports.nccl
    runtime.rdma runtime.injection runtime.measuring runtime.detection runtime.data_parallel.collectives runtime.data_parallel
    runtime.membership runtime.survival runtime.exchange runtime.launch runtime.state
    runtime.control.mail runtime.control.plans runtime.control.agreement runtime.control.deciding runtime.control
    runtime.telemetry runtime.options runtime runtime.step_messages runtime.synchrony runtime.outputs runtime.reconfigure
    runtime.worker.stages runtime.worker.ends runtime.worker.step runtime.worker reduction
    report frontend.arguments frontend.saved frontend.weights frontend.shapes frontend.losses frontend.module_like
    frontend.followed frontend.planned frontend.running frontend.pipeline frontend integrations cli
""".split()
"""The rooms from the ground up, and the files that stand in no room. A room imports from those before it only."""

WITHOUT_TORCH = """
    program simulation equations collectives
    passes planning planning.routes planning.layouts planning.remedies planning.responses planning.explaining planning.synchrony
    runtime.world runtime.rdma runtime.measuring runtime.detection runtime.membership
    runtime.control.plans runtime.control.deciding runtime.telemetry
    report cli
""".split()
"""Rooms that never load torch."""

MODULES_WITHOUT_TORCH = [
    "runtime.control.coordinator",
    "runtime.control.mail.mail",
    "runtime.control.mail.relay",
    "runtime.control.agreement.participant",
    "runtime.control.agreement.preparation",
    "runtime.reconfigure.transfers",
]
"""The part of the control plane that the model checker steps, and who sends what to whom in a change of layout."""

MOST_FILES = 15
"""More modules in one folder, and somebody new has to read a list instead of a plan."""

ARROWS = {(module, imported) for module, found in IMPORTS.items() for imported in found if room_of(imported) != room_of(module)}


def test_every_room_has_a_floor_and_every_floor_a_room() -> None:
    assert {room_of(module) for module in MODULES} == {*FLOORS, ""}, "the empty name is the package's face"


def test_imports_go_down_only() -> None:
    floor = {room: number for number, room in enumerate(FLOORS)}
    up = [
        f"{module} imports {imported}"
        for module, imported in sorted(ARROWS)
        if module != "adaptra" and imported != "adaptra" and floor[room_of(imported)] > floor[room_of(module)]
    ]
    assert not up, "\n".join(up)


def test_nothing_imports_the_face_but_for_its_version() -> None:
    assert {module for module, imported in ARROWS if imported == "adaptra"} <= {"adaptra.cli", "adaptra.cli.doctor"}


def test_no_two_rooms_import_each_other() -> None:
    pairs = {(room_of(module), room_of(imported)) for module, imported in ARROWS if "adaptra" not in (module, imported)}
    assert not [pair for pair in pairs if pair[::-1] in pairs]


def test_no_folder_is_crowded() -> None:
    sources = [*(path for path in MODULES.values() if path.name != "__init__.py"), *(ROOT / "csrc").rglob("*.cc")]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in sources)
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_these_rooms_never_load_torch() -> None:
    named = {f"adaptra.{name}" for name in MODULES_WITHOUT_TORCH}
    assert named <= set(MODULES)
    named |= {module for module in MODULES if room_of(module) in WITHOUT_TORCH and not module.endswith("__main__")}
    script = f"""
import importlib, sys
for name in {sorted(named)!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_class_name_has_one_meaning() -> None:
    places = defaultdict[str, list[str]](list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.strip("_")].append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_every_test_module_has_a_name_of_its_own() -> None:
    """Else pytest refuses to collect both in one run."""
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]


def test_contributing_names_paths_that_exist() -> None:
    named = re.findall(
        r"`((?:adaptra_compile|passes|runtime|csrc|tests|bench|docs)/[\w/.]*)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_the_map_of_the_code_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT) for path in MODULES.values()}
    rooms = {str(folder) for folder in folders if len(folder.parts) == 2 or folder.name == "arguments"} | {"passes"}
    assert not [room for room in sorted(rooms) if f"| `{room}/` |" not in page]
