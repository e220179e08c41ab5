"""The abstract run: one op per rank and step, stuck where the caller's rule says so."""

from adaptra.program import Op, Program, parse_op
from adaptra.program.lockstep import run_in_lockstep

PROGRAM = Program.parse("schedule x placement=0,1 microbatches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n")


def test_without_waiting_every_rank_runs_one_op_per_step() -> None:
    run = run_in_lockstep(PROGRAM, lambda op, executed: None)
    assert [[run.steps[op] for op in order] for order in PROGRAM.orders] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert run.stuck == {}
    assert list(run.grid()) == [
        "step    0    1    2    3",
        "rank 0  0F0  0F1  0B0  0B1  end",
        "rank 1  1F0  1B0  1F1  1B1  end",
    ]


def test_an_op_runs_in_the_step_after_the_one_it_waits_for() -> None:
    def waits_for(op: Op, executed: object) -> Op | None:
        assert isinstance(executed, dict)
        needed = {"1F0": "0F1", "0B0": "1B0"}.get(str(op))
        return parse_op(needed) if needed and parse_op(needed) not in executed else None

    run = run_in_lockstep(PROGRAM, waits_for)
    assert [[run.steps[op] for op in order] for order in PROGRAM.orders] == [[0, 1, 4, 5], [2, 3, 4, 5]]


def test_a_stuck_rank_says_how_far_it_came_and_what_it_waits_for() -> None:
    def waits_for(op: Op, executed: object) -> Op | None:
        return parse_op("1F1") if op == parse_op("1B0") else None

    run = run_in_lockstep(PROGRAM, waits_for)
    assert run.stuck == {1: (1, parse_op("1F1"))}
    assert list(run.grid()) == [
        "step    0    1    2    3",
        "rank 0  0F0  0F1  0B0  0B1  end",
        "rank 1  1F0  .    .    .    →1B0  1F1  1B1",
    ]


def test_a_rank_without_ops_has_reached_its_end() -> None:
    run = run_in_lockstep(Program.of_pipeline("x", (0, 1), 1, ((parse_op("0F0"),), ())), lambda op, executed: None)
    assert list(run.grid()) == ["step    0", "rank 0  0F0  end", "rank 1  .    end"]
