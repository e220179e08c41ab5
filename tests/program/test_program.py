"""The program and its text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import programs

from adaptra.errors import ScheduleError
from adaptra.program import Kind, Op, Program, parse_op, place_in

TEXT = """schedule 1f1b placement=0,1 microbatches=3
0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2
"""


def test_the_text_form_reads_and_prints() -> None:
    program = Program.parse(TEXT)
    assert (program.name, program.placement, program.microbatches) == ("1f1b", (0, 1), 3)
    assert (program.stages, program.ranks) == (2, 2)
    assert program.orders[0][:3] == (Op(0, Kind.F, 0), Op(0, Kind.F, 1), Op(0, Kind.I, 0))
    assert str(program) == TEXT


@given(programs(), st.sampled_from([None, "delegate", "c10d.2-x_y"]))
def test_any_program_reads_back_equal_lanes_included(program: Program, lane: str | None) -> None:
    orders = [[Op(op.stage, op.kind, op.microbatch, None if op.kind.is_compute else lane) for op in o] for o in program.orders]
    program = Program.of_pipeline(program.name, program.placement, program.microbatches, tuple(map(tuple, orders)))
    again = Program.parse(str(program))
    assert again == program
    assert str(again) == str(program)


@given(programs(), st.data())
def test_the_place_of_an_op_in_a_text_is_where_it_stands(program: Program, data: st.DataObject) -> None:
    blanks = st.sampled_from(["", " ", "   "])
    lines = [f"{data.draw(blanks)}{line.replace(' ', ' ' + data.draw(blanks))}  # 0: 0F0" for line in str(program).splitlines()]
    lines[0] = str(program).splitlines()[0]
    text = "# a comment\n\n" + "\n".join(lines) + "\n"
    assert Program.parse(text) == program
    for rank, order in enumerate(program.orders):
        for number, op in enumerate(order):
            line, column = place_in(text, rank, number)
            assert text.splitlines()[line - 1][column - 1 :].split()[0] == str(op)
        line, column = place_in(text, rank, None)
        assert text.splitlines()[line - 1][column - 1 :].startswith(f"{rank}:")


def test_comments_and_blank_lines_are_ignored_and_the_version_may_be_named() -> None:
    text = "# a plan\n\nschedule a.b+c-d_1 version=1 placement=0 microbatches=1  # one stage\n\n  0: 0F0 0B0 # the end\n"
    assert str(Program.parse(text)) == "schedule a.b+c-d_1 placement=0 microbatches=1\n0: 0F0 0B0\n"


def test_a_rank_may_have_no_ops() -> None:
    text = "schedule x placement=0,1 microbatches=1\n0:\n1: 1F0\n"
    assert str(Program.parse(text)) == text


def test_a_lane_is_not_part_of_an_ops_identity() -> None:
    assert parse_op("1SEND_B3@delegate") == parse_op("1SEND_B3")
    assert hash(parse_op("1SEND_B3@delegate")) == hash(parse_op("1SEND_B3"))
    assert parse_op("1SEND_B3@delegate").lane == "delegate"


@pytest.mark.parametrize(
    "token",
    [
        *[
            "",
            "F0",
            "0F",
            "0X0",
            "0f0",
            "00F0",
            "0F01",
            "-1F0",
            "0F-1",
            "0F0zzz",
            "x0F0",
            "0FX",
            "0F0 0F1",
            "0F1_0",
            "0F9999999999",
        ],
        *["0SENDF0", "0SEND_F0@", "0SEND_F0@A", "0SEND_F0@1", "0SEND_F0@a@b", "0F٣", "٣F0"],
    ],
)
def test_a_token_that_is_not_an_op_is_named(token: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse_op(token)
    assert str(error.value) == f"op {token!r}: expected STAGE KIND MICROBATCH [@LANE] such as 2F0 or 1SEND_B3@delegate"


HEADER = "schedule x placement=0,1 microbatches=1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^line 1, column 1: empty schedule: expected a line 'schedule NAME placement=0,1 microbatches=M'$"),
        ("# nothing\n\n", r"^line 1, column 1: empty schedule"),
        (
            "0: 0F0\n",
            r"^line 1, column 1: header '0: 0F0': expected 'schedule NAME placement=RANK,RANK,… microbatches=M' or "
            r"'schedule NAME version=2 stages=S microbatches=M'$",
        ),
        ("schedule x placement=0 microbatches=1 more=2\n", r"^line 1, column 1: header .*more=2"),
        ("schedule x y placement=0 microbatches=1\n", r"^line 1, column 1: header"),
        ("schedule x placement=0,,1 microbatches=1\n", r"^line 1, column 1: header"),
        ("schedule x placement=00 microbatches=1\n", r"^line 1, column 1: header"),
        ("schedule x placement=0 microbatches=١\n", r"^line 1, column 1: header"),
        ("schedule x placement=0 microbatches=-1\n", r"^line 1, column 1: header"),
        (
            "schedule x version=2 placement=0 microbatches=1\n",
            r"^line 1, column 20: schedule version 2: this adaptra reads version 2 ",
        ),
        (
            "schedule x version=3 stages=1 microbatches=1\n",
            r"^line 1, column 20: schedule version 3: this adaptra reads version 2 with",
        ),
        ("schedule x stages=1 microbatches=1\n", r"^line 1, column 1: header"),
        ("schedule x placement=0 microbatches=1\n0: 0:0F0\n", r"^line 2, column 4: op '0:0F0': expected STAGE KIND MICROBATCH"),
        (
            "schedule x placement=0 microbatches=1\n0: 0F0 0STEP0\n",
            r"^line 2, column 8: op '0STEP0': expected STAGE KIND MICROBATCH",
        ),
        ("schedule x placement=0 microbatches=0\n0: 0F0\n", r"^line 1, column 1: microbatches=0: expected at least 1$"),
        (HEADER + "0: 0F0\n2: 1F0\n", r"^line 3, column 1: '2:': expected the line of rank 1 to start with '1:'$"),
        (HEADER + "\n0 : 0F0\n", r"^line 3, column 1: '0': expected the line of rank 0 to start with '0:'$"),
        (HEADER + "0: 0F0 # one\n1:   1F0 1Q0\n", r"^line 3, column 10: op '1Q0': expected STAGE KIND MICROBATCH"),
        (HEADER + "0: 0F0,0I0\n", r"^line 2, column 4: op '0F0,0I0'"),
        (HEADER + "0: 0F0\n", r"^line 1, column 1: placement=0,1 with 1 op sequences: expected every rank 0\.\.0 to hold"),
        (
            HEADER + "0: 0F0\n1: 1F0\n2: 2F0\n",
            r"^line 1, column 1: placement=0,1 with 3 op sequences: expected every rank 0\.\.2 to hold",
        ),
        ("schedule x placement=0,2 microbatches=1\n0: 0F0\n1: 1F0\n", r"^line 1, column 1: placement=0,2 with 2 op sequences"),
    ],
)
def test_a_bad_text_is_refused_by_line_with_the_form_expected(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Program.parse(text)


@pytest.mark.parametrize("name", ["", "a b", "a#b", "a\nb", "é"])
def test_a_name_that_would_not_read_back_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"expected letters, digits and _ \. \+ -$"):
        Program.of_pipeline(name, (0,), 1, ((),))


def test_what_kind_of_program_it_is() -> None:
    program = Program.parse(TEXT)
    assert not program.is_lowered
    assert not program.is_forward_only
    lowered = Program.parse(
        "schedule x placement=0,1 microbatches=1\n0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0\n"
    )
    assert lowered.is_lowered
    assert str(lowered.compute_only()) == "schedule x placement=0,1 microbatches=1\n0: 0F0 0B0\n1: 1F0 1B0\n"
    assert Program.parse("schedule x placement=0 microbatches=1\n0: 0F0\n").is_forward_only


@given(programs(lowered=True))
def test_compute_only_drops_communication_and_nothing_else(program: Program) -> None:
    computed = program.compute_only()
    assert not computed.is_lowered
    assert [[op for op in order if op.kind.is_compute] for order in program.orders] == [
        list(order) for order in computed.orders
    ]
