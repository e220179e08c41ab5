"""The command line: its documented examples, its errors, what it writes, and what it loads."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import Page
from paths import DOCS
from run_files import whole_run

from adaptra.cli import main
from adaptra.planning.routes.steady_steps import PERIOD
from adaptra.program import Program
from adaptra.program.schedules import generate
from adaptra.program.torch_csv import from_csv
from adaptra.program.verify import verify
from adaptra.report import perfetto
from adaptra.simulation.case import Case
from adaptra.simulation.case_files import case_from_json, case_to_json, load_case
from adaptra.simulation.sensitivity import sensitivity
from adaptra.simulation.simulate import lower_bound, simulate

DOCUMENT = DOCS / "command-line.md"
CASE = {"S": 3, "M": 6, "t_f": 2, "t_b": 2, "t_w": 1, "c_f": [0, 4], "mem_cap": 6}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the case ``slow.json``."""
    monkeypatch.chdir(tmp_path)
    Path("slow.json").write_text(json.dumps(CASE))
    return tmp_path


def test_every_documented_example_prints_what_the_document_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page.read(DOCUMENT)
    (case,) = page.data
    Path("slow.json").write_text(case)
    assert len(page.examples) == 37
    whole_run(folder / "runs" / "1")
    for example in page.examples:
        program, *arguments = shlex.split(example.command)
        assert program == "adaptra"
        status = main(arguments)
        shown = capsys.readouterr()
        assert status == (2 if example.printed.startswith("adaptra: ") else 0), f"{example.command}\n{shown.err}"
        assert example.matches(shown.err if status else shown.out), f"{example.command}\n{shown.out}"
    files = {path.name for path in folder.iterdir()}
    programs, pictures = (
        {"plan.sched", "lowered.sched", "shortest.sched", "robust.sched", "around.sched"},
        {"plan.svg", "compared.svg", "sweep.svg", "step.svg", "page.svg", "days.svg", "around.svg", "rounds.svg"},
    )
    assert files == {"runs", "slow.json", "before.json", "step.json", *programs, *pictures}


def test_every_command_is_documented() -> None:
    listed = subprocess.run([sys.executable, "-m", "adaptra.cli", "--help"], capture_output=True, text=True, check=True)
    commands = re.findall(r"^    (\w+)(?: +\S.*)?$", listed.stdout, re.MULTILINE)
    assert set(commands) == set(re.findall(r"^## (\w+)$", DOCUMENT.read_text(), re.MULTILINE)) - {"Errors"}
    assert len(commands) == 11


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Runs a command that must succeed, and reads all of its standard output as one JSON object."""
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found = json.loads(shown.out)
    assert isinstance(found, dict)
    return found


# simulate


def test_simulate_gives_the_figures_of_the_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = load_case("slow.json")
    main(["schedule", "zb_h1", "-s", "3", "-m", "6"])
    Path("z.sched").write_text(capsys.readouterr().out)
    expected = simulate(Program.parse(Path("z.sched").read_text()), case.cost)
    found = run_json(capsys, "simulate", "z.sched", "slow.json", "--json")
    assert found == run_json(capsys, "simulate", "zb_h1", "slow.json", "--json")
    assert found["makespan"] == expected.makespan
    assert found["bound"] == lower_bound(case).value
    assert found["peak_in_flight"] == list(expected.peak_in_flight)
    assert found["bubble"] == list(expected.bubble)
    assert found["gap"] == expected.makespan / lower_bound(case).value - 1


def test_simulate_reads_torch_csv_and_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path("p.sched")
    main(["schedule", "gpipe", "-s", "3", "-m", "6"])
    program.write_text(capsys.readouterr().out)
    Path("my plan.csv").write_text("\n".join(",".join(map(str, o)) for o in Program.parse(program.read_text()).orders) + "\n")
    expected = run_json(capsys, "simulate", "p.sched", "slow.json", "--json")
    assert run_json(capsys, "simulate", "my plan.csv", "slow.json", "--json") == expected | {"name": "my_plan"}
    with program.open() as standard_input:
        monkeypatch.setattr(sys, "stdin", standard_input)
        assert run_json(capsys, "simulate", "-", "slow.json", "--json") == expected


def test_simulate_says_which_rank_exceeds_its_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow.json").write_text(json.dumps(CASE | {"mem_cap": [2, 6, 6]}))
    assert main(["simulate", "1f1b", "slow.json"]) == 0
    assert "0     0       30    30      3          3       2 exceeded\n" in capsys.readouterr().out
    assert run_json(capsys, "simulate", "1f1b", "slow.json", "--json")["over_memory"] == [0]


def test_simulate_joins_the_stages_of_a_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("v.json").write_text(json.dumps({"S": 3, "M": 1, "t_f": 1, "t_b": 1, "t_w": 1, "placement": [[0, 2], [1]]}))
    Path("v.sched").write_text("schedule v placement=0,1,0 microbatches=1\n0: 0F0 2F0 2B0 0B0\n1: 1F0 1B0\n")
    assert main(["simulate", "v.sched", "v.json"]) == 0
    assert "\n0     0+2     6     3       1+1        2\n" in capsys.readouterr().out
    found = run_json(capsys, "simulate", "v.sched", "v.json", "--json")
    assert found["bubble"] == [3.0, 6.0]
    assert found["peak_in_flight"] == [1, 1, 1]


def test_a_program_without_gradients_has_no_bound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.json").write_text(json.dumps({"S": 1, "M": 2, "t_f": 1, "t_b": 1, "t_w": 1}))
    Path("f.sched").write_text("schedule f placement=0 microbatches=2\n0: 0F0 0F1\n")
    found = run_json(capsys, "simulate", "f.sched", "f.json", "--json")
    assert (found["bound"], found["gap"], found["makespan"]) == (None, None, 2.0)
    assert main(["simulate", "f.sched", "f.json"]) == 0
    assert "bound    none for programs without gradients\n" in capsys.readouterr().out


def test_an_infinite_bound_is_null_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No plan fits a limit below one microbatch; a program may still be timed."""
    Path("slow.json").write_text(json.dumps(CASE | {"mem_cap": 0.5}))
    found = run_json(capsys, "simulate", "1f1b", "slow.json", "--json")
    assert (found["bound"], found["gap"]) == (None, None)
    assert run_json(capsys, "explain", "slow.json", "1f1b", "--json")["bound"] is None


def test_simulate_saves_a_trace_of_the_simulated_timeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "simulate", "1f1b", "slow.json", "--json", "--trace", "t.json")
    ((title, timeline),) = perfetto.load_all("t.json")
    assert title == "1f1b on slow"
    assert timeline == simulate(timeline.program, load_case("slow.json").cost).timeline


def test_pictures_mark_the_edges_that_are_slower_than_most_or_those_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this case c_b is c_f, so both directions of the last link are slow."""
    run_json(capsys, "simulate", "1f1b", "slow.json", "--json", "--picture", "a.svg")
    assert "slow 1⇄2" not in Path("a.svg").read_text(), "half of the edges can't be slower than most"
    Path("slow.json").write_text(json.dumps(CASE | {"c_b": 0}))
    run_json(capsys, "simulate", "1f1b", "slow.json", "--json", "--picture", "b.svg")
    assert "slow 1→2" in Path("b.svg").read_text()
    run_json(
        capsys, "simulate", "1f1b", "slow.json", "--json", "--picture", "c.svg", "--slow-edge", "2-1", "--slow-edge", "1-0"
    )
    assert "slow 2→1" in Path("c.svg").read_text()
    assert "slow 1→0" in Path("c.svg").read_text()


def test_traces_of_several_files_are_drawn_on_one_axis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("1f1b", "gpipe"):
        run_json(capsys, "simulate", name, "slow.json", "--json", "--trace", f"{name}.json")
    assert main(["trace", "1f1b.json", "gpipe.json", "-o", "both.svg"]) == 0
    assert capsys.readouterr().out == ""
    drawn = Path("both.svg").read_text()
    assert drawn.index("1f1b on slow") < drawn.index("gpipe on slow")
    assert main(["trace", "1f1b.json", "gpipe.json"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [shown[0], shown[6]] == ["1f1b on slow", "gpipe on slow"]
    assert shown[5] == ""


def test_a_schedule_as_json_holds_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "schedule", "1f1b", "-s", "2", "-m", "3", "--json")
    assert found == {"name": "1f1b", "program": str(generate("1f1b", 2, 3))}


def test_schedules_with_two_stages_on_a_rank_are_printed_simulated_and_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, placement in (("zbv", [[0, 3], [1, 2]]), ("interleaved", [[0, 2], [1, 3]])):
        Path("two.json").write_text(json.dumps({"S": 4, "M": 4, "t_f": 1, "t_b": 1, "t_w": 1, "placement": placement}))
        assert main(["schedule", name, "-s", "4", "-m", "4"]) == 0
        Path("p.sched").write_text(capsys.readouterr().out)
        found = run_json(capsys, "simulate", name, "two.json", "--json")
        assert run_json(capsys, "simulate", "p.sched", "two.json", "--json") == found
        assert run_json(capsys, "plan", "two.json", "--compare", name, "--json")["runs"][0] == found


# plan


def test_plan_writes_a_program_that_simulates_to_the_printed_makespan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", "slow.json", "-o", "p.sched", "--json")
    program = Program.parse(Path("p.sched").read_text())
    assert str(program) == found["program"]
    assert not program.is_lowered
    simulated = run_json(capsys, "simulate", "p.sched", "slow.json", "--json")
    assert simulated == {name: value for name, value in found.items() if name not in ("program", "period_bound")}


@pytest.mark.parametrize(("given", "period", "makespan"), [((), 48.0, 54.0), (("--barrier",), None, 54.0)])
def test_plans_are_for_the_period_or_behind_a_barrier_for_the_makespan(
    folder: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], period: float | None, makespan: float
) -> None:
    late = {"S": 4, "M": 16, "t_f": 1, "t_b": 1, "t_w": 1, "c_f": 1}
    Path("late.json").write_text(json.dumps(late))
    Path("meeting.json").write_text(json.dumps(late | {"barrier": bool(given)}))
    found = run_json(capsys, "plan", "late.json", "--json", *given)
    assert found == run_json(capsys, "plan", "meeting.json", "--json") | {"case": "late"}
    assert found["period_bound"] == 48.0 and found["bound"] == makespan
    if period is None:
        assert found["makespan"] == makespan
    else:
        assert found["period"] == period
    explained = run_json(capsys, "explain", "late.json", "--json", *given)
    assert (explained["period"], explained["makespan"]) == (found["period"], found["makespan"])


def test_plan_lowers_on_request_without_moving_compute(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "plan", "slow.json", "-o", "p.sched", "--json")
    run_json(capsys, "plan", "slow.json", "--lower", "-o", "q.sched", "--json")
    lowered = Program.parse(Path("q.sched").read_text())
    assert lowered.is_lowered
    verify(lowered)
    assert str(lowered.compute_only()) == Path("p.sched").read_text()


def test_plan_writes_torch_csv_by_suffix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", "slow.json", "-o", "p.csv", "--json")
    assert str(from_csv(Path("p.csv").read_text(), name="adapted")) == found["program"]


def test_plan_keeps_within_the_memory_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", "slow.json", "--in-flight", "2", "--json")
    in_flight = found["peak_in_flight"]
    assert isinstance(in_flight, list)
    assert max(in_flight) <= 2


def test_compare_shows_the_figures_that_simulate_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", "slow.json", "--in-flight", "4", "--compare", "1f1b,paper", "--json")
    first, paper, adapted = found["runs"]
    assert first == run_json(capsys, "simulate", "1f1b", "slow.json", "--json")
    assert (paper["name"], adapted["name"]) == ("paper", "adapted")
    assert max(paper["peak_in_flight"]) <= 4
    assert adapted["period"] <= min(first["period"], paper["period"])
    behind = run_json(capsys, "plan", "slow.json", "--in-flight", "4", "--barrier", "--compare", "1f1b,paper", "--json")["runs"]
    assert behind[2]["makespan"] <= min(adapted["makespan"], first["makespan"], paper["makespan"])


def test_compare_draws_all_timelines_and_writes_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan slow.json --compare zb_h1,1f1b --picture all.svg -o p.sched".split()) == 0
    assert "adapted" in capsys.readouterr().out
    assert Program.parse(Path("p.sched").read_text()).name == "adapted"
    drawn = Path("all.svg").read_text()
    assert drawn.index("zb_h1 on slow") < drawn.index("1f1b on slow") < drawn.index("adapted on slow")


def test_compare_names_the_rank_that_is_over_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow.json").write_text(json.dumps(CASE | {"mem_cap": 4}))
    assert main(["plan", "slow.json", "--compare", "zb_h2"]) == 0
    assert re.search(r"^ zb_h2 .* over on worker 0$", capsys.readouterr().out, re.MULTILINE)
    found = run_json(capsys, "plan", "slow.json", "--sweep", "edge=1-2", "delay=0:1", "steps=2", "names=zb_h2", "--json")
    assert found["over_memory"] == {"zb_h2": [True, True]}
    assert main("plan slow.json --sweep edge=1-2 delay=0:1 steps=2 names=zb_h2".split()) == 0
    assert re.search(r"^ 0 .*\(\d+\)$", capsys.readouterr().out, re.MULTILINE)


def test_a_sweep_delays_one_direction_or_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = load_case("slow.json").cost
    for edge, slowed in (
        ("1>2", cost.with_latency(1, 2, 7)),
        ("2>1", cost.with_latency(2, 1, 7)),
        ("1-2", cost.with_latency(1, 2, 7).with_latency(2, 1, 7)),
    ):
        given = ["--sweep", f"edge={edge}", "delay=1:3", "steps=2", "names=1f1b", "--json"]
        found = run_json(capsys, "plan", "slow.json", *given)
        assert found["delays"] == [1, 3]
        assert found["periods"]["1f1b"][1] == simulate(generate("1f1b", 3, 6), slowed).period
        assert found["bounds"][1] == PERIOD.bound(Case(slowed, 6, (0, 1, 2)))
        found = run_json(capsys, "plan", "slow.json", "--barrier", *given)
        assert found["makespans"]["1f1b"][1] == simulate(generate("1f1b", 3, 6), slowed).makespan
        assert found["bounds"][1] == lower_bound(Case(slowed, 6, (0, 1, 2))).value


def test_explain_says_what_every_edge_absorbs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "explain", "slow.json", "1f1b", "--sensitivity", "--json")
    edges = sensitivity(generate("1f1b", 3, 6), load_case("slow.json").cost)
    assert found["sensitivity"] == [edge.to_json() for edge in edges]
    assert "sensitivity" not in run_json(capsys, "explain", "slow.json", "1f1b", "--json")


def test_an_exact_plan_is_proven(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools", reason="needs OR-tools: pip install 'adaptra[exact]'")
    found = run_json(capsys, "plan", "slow.json", "--in-flight", "3", "--exact", "20s", "--barrier", "--json")
    assert found["proven"] is True
    assert found["exact_bound"] == found["makespan"]
    assert max(found["peak_in_flight"]) <= 3
    steady = run_json(capsys, "plan", "slow.json", "--in-flight", "3", "--exact", "20s", "--json")
    assert steady["period"] <= found["period"] and steady["proven"] == (steady["period"] == steady["period_bound"])
    assert run_json(capsys, "plan", "slow.json", "--exact", "20s", "--json")["proven"] is True


@pytest.mark.parametrize("question", [[], ["--compare", "1f1b"], ["--sweep", "edge=1-2", "delay=0:5", "steps=2"]], ids=str)
def test_a_budget_ends_the_search_with_a_plan(folder: Path, capsys: pytest.CaptureFixture[str], question: list[str]) -> None:
    """Of a size that is not solved within the budget."""
    Path("large.json").write_text(json.dumps(CASE | {"S": 16, "M": 64, "t_w": [1 + n % 3 for n in range(16)], "c_f": 3}))
    found = run_json(capsys, "plan", "large.json", "--budget", "20ms", "--json", *question)
    assert found["case"] == "large"


def test_a_robust_plan_is_short_under_every_combination_of_delays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "slow.json", "--in-flight", "4", "--json", "-o", "p.sched"]
    found = run_json(capsys, *arguments, "--uncertain", "1-2=0:20", "--uncertain", "0>1=1:2", "--objective", "worst")
    assert len(found["periods"]) == len(found["bounds"]) == 8
    assert found["worst"] == max(found["periods"])
    assert Program.parse(Path("p.sched").read_text()) == Program.parse(found["program"])
    assert found["makespan"] == run_json(capsys, "simulate", "p.sched", "slow.json", "--json")["makespan"]
    assert found["expected"] >= run_json(capsys, *arguments, "--uncertain", "1-2=0:20", "--uncertain", "0>1=1:2")["expected"]


def test_every_field_of_a_case_is_documented() -> None:
    """The rows of each table are the fields that a case is written with: of one pipeline, then of several replicas."""
    text = (DOCS / "formats.md").read_text()
    pipeline, job = text.split("| `version` | of this format |")[1:]
    given = [json.loads(example) for example in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    written = [case_to_json(case_from_json(given[0]))["case"], case_to_json(case_from_json(given[1]))]
    for table, fields in zip((pipeline, job), written, strict=True):
        rows = re.findall(r"^\| (`.*?) \|", table.split("\n\n")[0], re.MULTILINE)
        assert {field for row in rows for field in re.findall(r"`(\w+)`", row)} == set(fields) - {"version", "name"}


def test_the_documented_programs_are_read_and_written_as_shown() -> None:
    examples = re.findall(r"```\n(schedule .*?)```", (DOCS / "formats.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        assert str(Program.parse(example)) == example
        verify(Program.parse(example))


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate 1f1b none.json", "none.json: No such file or directory"),
        (
            "simulate x.sched slow.json",
            "x.sched: no such file, and no schedule of that name: gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv",
        ),
        ("simulate . slow.json", ".: Is a directory"),
        ("simulate binary slow.json", "binary: not text: "),
        ("simulate slow.json slow.json", "slow.json:1:1: header "),
        ("simulate bad.csv slow.json", "bad.csv: row 1, column 1: "),
        ("simulate small.sched slow.json", "small.sched has stages 1, the case slow has 3: expected them to be equal"),
        ("simulate dead.sched slow.json", "dead.sched:2:1: dead: stage 0, microbatch 0: rank 0 has nothing"),
        ("simulate 1f1b v.json", "1f1b has placement 0,1,2, the case v has 0,1,0: expected them to be equal"),
        ("simulate 1f1b binary", "binary: not JSON: "),
        ("simulate 1f1b list.json", "list.json: expected a JSON object, got list"),
        ("simulate 1f1b slow.json --width 10", "width 10: expected at least 40 characters"),
        ("simulate 1f1b slow.json --picture p.pdf", "p.pdf: suffix '.pdf': expected .svg or .png"),
        ("simulate 1f1b slow.json --trace t.txt", "t.txt: suffix '.txt': expected .json"),
        ("simulate 1f1b slow.json --picture p.svg --slow-edge 0-2", "slow edge 0→2: expected two neighbouring stages of 0..2"),
        ("plan slow.json -o none/p.sched", "none/p.sched: there is no folder none"),
        ("plan slow.json -o p", "p: suffix '': expected .sched or .csv"),
        ("plan tight.json -o p.sched", ""),
        (
            "plan slow.json --compare 1f2b",
            "schedule '1f2b': expected some of gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv, paper, adapted",
        ),
        ("plan v.json --compare 1f1b", "placement 0,1,0: 1f1b places stages on ranks 0,1,2"),
        ("plan slow.json --sweep edge=1-2", "sweep: delay is missing: expected such as edge=1-2 delay=0:60"),
        ("plan slow.json --sweep edge=1-2 delay", "sweep 'delay': expected edge=A-B, delay=FROM:TO, steps=N or names=NAME,…"),
        ("plan slow.json --sweep edge=12 delay=0:1", "sweep edge=12: expected A-B for both ways or A>B for one, such as 1-2"),
        ("plan slow.json --sweep edge=1-3 delay=0:1", "edge 1→3: expected two neighbouring stages of 0..2"),
        ("plan slow.json --sweep edge=1-2 delay=1", "sweep delay=1: expected FROM:TO, such as 0:60"),
        ("plan slow.json --sweep edge=1-2 delay=2:1", "sweep delay=2:1: expected 0 <= FROM < TO"),
        ("plan slow.json --sweep edge=1-2 delay=0:1 steps=1", "sweep steps=1: expected a whole number of 2 to 1000"),
        ("plan slow.json --sweep edge=1-2 delay=0:1 names=", "schedule '': expected some of gpipe"),
        ("plan slow.json --sweep edge=1-2 delay=0:1 --picture p.txt", "p.txt: suffix '.txt': expected .svg or .png"),
        ("plan slow.json --exact 1s --budget 1s", "--budget with --exact: expected one of them; --exact takes a time itself"),
        ("plan slow.json --sweep edge=1-2 delay=0:1 -o p.sched", "--sweep with -o: expected one of them; a sweep has"),
        ("plan slow.json --uncertain 1-2", "uncertain 1-2: expected A-B=LOW:HIGH, such as 1-2=0:60"),
        ("plan slow.json --uncertain 1-3=0:1", "edge 1→3: expected two neighbouring stages of 0..2"),
        ("plan slow.json --uncertain 1=0:1", "uncertain 1=0:1: expected A-B for both ways or A>B for one, such as 1-2"),
        ("trace slow.json", "slow.json: not an adaptra trace: expected otherData.format to be 'adaptra-trace'"),
        ("simulate zbv slow.json", "placement 0,1,2: zbv places stages on ranks 0,1,2,2,1,0"),
        ("schedule zbv -s 3 -m 2", "zbv: 3 stages: expected an even number, two on each rank"),
        ("schedule 2f2b -s 2 -m 2", "schedule '2f2b': expected one of gpipe, 1f1b, zb_h1, zb_h2, interleaved, zbv\n"),
        ("schedule 1f1b -s 1000000 -m 1000000", "1f1b: 1,000,000 stages × 1,000,000 microbatches are 3,000,000,000,000 ops"),
        ("schedule 1f1b -s 1000000000 -m 1", "1f1b: 1,000,000,000 stages × 1 microbatches are 3,000,000,000 ops"),
        ("plan slow.json --slow 0.1=2 --slow 1=3", "--slow 1=3: this worker has a factor already: expected each once"),
        (
            "plan slow.json --uncertain 0-1=0:3 --uncertain 0>1=0:5",
            "uncertain 0>1=0:5: 0>1 has delays already: expected each way once",
        ),
        (f"plan slow.json --sweep edge=0-1 delay=0:1 steps={'9' * 5000}", f"sweep steps={'9' * 80}: expected a whole number"),
        (
            "schedule zbv -s 1000000 -m 10",
            "zbv: 1,000,000 stages × 10 microbatches are 30,000,000 ops F, I and W: expected at most",
        ),
    ],
)
def test_wrong_input_ends_with_status_2_and_says_what_and_where(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    files = {
        "small.sched": "schedule small placement=0 microbatches=1\n0: 0F0 0B0\n",
        "dead.sched": "schedule dead placement=0,1,2 microbatches=6\n0:\n1:\n2:\n",
        "bad.csv": "forward\n",
        "list.json": "[]",
        "v.json": json.dumps({"S": 3, "M": 6, "t_f": 1, "t_b": 1, "t_w": 1, "placement": [[0, 2], [1]]}),
        "tight.json": json.dumps(CASE | {"mem_cap": 0.5}),
    }
    for name, content in files.items():
        Path(name).write_text(content)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    before = sorted(folder.iterdir())
    assert main(arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"adaptra: {message}")
    assert "Traceback" not in shown.err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"S": 0}, "field 'S': expected a whole number of at least 1, got 0"),
        ({"M": 1e9}, "field 'M': expected a whole number of at least 1, got 1000000000.0"),
        ({"M": 10**9}, "field 'M': expected at most 1000000, got 1000000000"),
        ({"t_f": None}, "field 't_f': expected a number or a list of 3, got None"),
        ({"t_f": [1, 2]}, "field 't_f': expected a number or a list of 3, got [1, 2]"),
        ({"t_b": -1}, "field 't_b': expected a finite number that is not negative, got -1"),
        ({"M": 10**6, "S": 10**3, "c_f": 1}, "S, M: 1,000 stages × 1,000,000 microbatches are 3,000,000,000 ops F, I and W"),
        (
            {"t_f": 1e308},
            "t_f, t_b, t_w, c_f, c_b, o_f, o_b: 6 microbatches add up to more than 1.8e308: expected a larger unit",
        ),
        ({"mem_f": 1e308}, "mem_f: 6 microbatches add up to more than 1.8e308: expected a larger unit"),
        ({"t_w": 10**400}, "field 't_w': expected a finite number that is not negative, got 1000000"),
        ({"c_f": [0, float("nan")]}, "field 'c_f[1]': expected a finite number that is not negative, got nan"),
        ({"mem_b": 2}, "memory_input_grad of stage 0 is 2.0: expected at most memory_forward, 1.0"),
        ({"duplex": []}, "field 'duplex': expected one of full, half, got []"),
        ({"blocking_comm": "recv"}, "blocking_comm: expected false, true, 'send' or 'both', got 'recv'"),
        ({"placement": [[0, "a"], [1]]}, "field 'placement': expected each of the stages 0..2 once, got [[0, 'a'], [1]]"),
        ({"placement": [[0], [2]]}, "field 'placement': expected each of the stages 0..2 once, got [[0], [2]]"),
        ({"placement": [[0], [], [1, 2]]}, "field 'placement': expected a list with one list of stages per rank"),
        ({"t_g": 1}, "unknown field 't_g': expected some of M, P, S, "),
        ({"version": 2}, "case version 2: this adaptra reads version 1"),
    ],
)
def test_an_impossible_case_is_refused_by_file_and_field(
    folder: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, object], message: str
) -> None:
    Path("slow.json").write_text(json.dumps(CASE | changed))
    assert main(["simulate", "1f1b", "slow.json"]) == 2
    assert capsys.readouterr().err.startswith(f"adaptra: slow.json: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan slow.json --in-flight 0", "argument --in-flight: '0': expected a whole number of at least 1"),
        ("simulate 1f1b slow.json --slow-edge 1", "argument --slow-edge: '1': expected two stages such as 1-2"),
        ("plan", "the following arguments are required: CASE"),
        ("plan slow.json --exact 10", "argument --exact: '10': expected a duration such as 100ms or 2s"),
        ("plan slow.json --budget 0ms", "argument --budget: '0ms': expected a duration such as 100ms or 2s"),
        ("plan slow.json --exact 1s --compare 1f1b", "argument --compare: not allowed with argument --exact"),
        ("", "the following arguments are required: COMMAND"),
        ("plan slow.json --mem 3", "unrecognized arguments: --mem 3"),
    ],
)
def test_wrong_usage_ends_with_status_2(folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_pictures_without_matplotlib_say_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "1f1b", "slow.json", "--picture", "p.svg"]) == 2
    assert capsys.readouterr().err == "adaptra: pictures need matplotlib: pip install 'adaptra[viz]'\n"


def test_a_reader_that_closes_early_ends_the_command_quietly(folder: Path) -> None:
    """Enough output to overflow the pipe, of which only the first bytes are read."""
    command = [sys.executable, "-m", "adaptra.cli", "schedule", "1f1b", "-s", "64", "-m", "512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(8) == b"schedule"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


# doctor


def test_doctor_reports_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    found = run_json(capsys, "doctor", "--json")
    assert found["extension"] is True
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert isinstance(found["torch"], dict)
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["distributed"]["gloo"] is torch.distributed.is_gloo_available()


def test_doctor_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    from adaptra.cli import doctor

    def version(package: str) -> str:
        if package == "matplotlib":
            raise PackageNotFoundError(package)
        return "1.2"

    monkeypatch.setattr(doctor, "version", version)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in shown.splitlines())
    assert lines["extra viz"] == "missing, needed for pictures: pip install 'adaptra[viz]'"
    assert lines["extra exact"] == "ortools 1.2"
    assert lines["extra tensorboard"] == "tensorboard 1.2", "the longest name has its column too"


# Start-up


@pytest.mark.parametrize(
    ("arguments", "unloaded"),
    [
        (["--help"], ["torch", "sympy", "matplotlib", "rich", "adaptra._C"]),
        (["plan", "--help"], ["torch", "sympy", "matplotlib", "rich", "adaptra._C"]),
        (["simulate", "1f1b", "slow.json", "--json"], ["torch", "sympy", "matplotlib", "rich"]),
        (["plan", "slow.json"], ["torch", "matplotlib", "rich"]),
        (["opt", "--help"], ["torch", "sympy", "matplotlib", "rich", "adaptra._C"]),
        (["modes", "--replicas", "8", "--phi", "1000", "--json"], ["torch", "matplotlib"]),
        (["opt", "insert-comm", "1f1b", "--case", "slow.json"], ["torch", "sympy", "matplotlib", "rich"]),
    ],
)
def test_commands_load_only_what_they_use(folder: Path, arguments: list[str], unloaded: list[str]) -> None:
    code = (
        "import sys\nfrom adaptra.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print('loaded', [name for name in {unloaded!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "loaded []\n"
    assert done.stdout
