"""What importing adaptra costs, and what of it needs torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "torch.distributed", "sympy", "numpy", "matplotlib", "rich", "transformers", "accelerate")


def loaded_after(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after running some code."""
    script = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_adaptra_loads_nothing_heavy() -> None:
    assert loaded_after("import adaptra; dir(adaptra); adaptra.__version__") == set()


@pytest.mark.parametrize("name", ["GENERATORS", "Case", "CostModel", "Kind", "Op", "Program", "generate", "load_case"])
def test_programs_and_costs_need_no_torch(name: str) -> None:
    assert "torch" not in loaded_after(f"import adaptra; adaptra.{name}")


def test_planning_simulating_and_verifying_need_no_torch() -> None:
    code = """
import adaptra
from adaptra.planning.planner import plan
from adaptra.simulation.simulate import simulate
from adaptra.program.verify import verify
cost = adaptra.CostModel.uniform(4, 1.0, 1.0, 1.0, latency=0.5)
program = plan(adaptra.Case(cost, 8, (0, 1, 2, 3)))
verify(program)
assert simulate(program, cost).makespan > 0
"""
    assert "torch" not in loaded_after(code)


def test_every_public_name_is_there() -> None:
    import adaptra

    assert all(getattr(adaptra, name) is not None for name in adaptra.__all__)
    with pytest.raises(AttributeError, match="module 'adaptra' has no attribute 'compil'"):
        adaptra.compil  # noqa: B018 - reading it is the test
