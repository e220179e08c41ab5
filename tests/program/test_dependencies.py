"""The dependency rule: each kind of op on first, middle and last stage, apart and on one rank."""

import pytest

from adaptra.program import Kind, Program, parse_op
from adaptra.program.dependencies import RECEIVED_BY, RULE, SENT_BY, Need, needs, peer_stage

APART = (0, 1, 2)
TOGETHER = (0, 0, 0)


def spelled(token: str, placement: tuple[int, ...], lowered: bool) -> list[str]:
    return [str(need) for need in needs(parse_op(token), placed(placement), lowered)]


def placed(placement: tuple[int, ...]) -> Program:
    return Program.of_pipeline("x", placement, 5, ((),) * (max(placement) + 1))


@pytest.mark.parametrize(
    ("token", "implied", "lowered"),
    [
        ("0F4", [], []),
        ("1F4", ["0F4"], ["1RECV_F4"]),
        ("2F4", ["1F4"], ["2RECV_F4"]),
        ("0I4", ["0F4", "1I4 or 1B4"], ["0F4", "0RECV_B4"]),
        ("1I4", ["1F4", "2I4 or 2B4"], ["1F4", "1RECV_B4"]),
        ("2I4", ["2F4"], ["2F4"]),
        ("0B4", ["0F4", "1I4 or 1B4"], ["0F4", "0RECV_B4"]),
        ("2B4", ["2F4"], ["2F4"]),
        ("0W4", ["0I4"], ["0I4"]),
        ("2W4", ["2I4"], ["2I4"]),
    ],
)
def test_what_a_compute_op_waits_for(token: str, implied: list[str], lowered: list[str]) -> None:
    assert spelled(token, APART, lowered=False) == implied
    assert spelled(token, APART, lowered=True) == lowered
    # On one rank there is no message, so a lowered program has no RECV to wait for.
    assert spelled(token, TOGETHER, lowered=True) == implied


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("0SEND_F4", ["0F4"]),
        ("1RECV_F4", ["0SEND_F4"]),
        ("2SEND_B4", ["2I4 or 2B4"]),
        ("1RECV_B4", ["2SEND_B4"]),
    ],
)
def test_what_a_communication_op_waits_for(token: str, expected: list[str]) -> None:
    assert spelled(token, APART, lowered=True) == expected


def test_only_the_edge_between_ranks_is_a_message() -> None:
    assert spelled("1F0", (0, 0, 1), lowered=True) == ["0F0"]
    assert spelled("2F0", (0, 0, 1), lowered=True) == ["2RECV_F0"]
    assert needs(parse_op("0I0"), placed((0, 1, 0)), lowered=True) == (Need(0, (Kind.F,), 0), Need(0, (Kind.RECV_B,), 0))


def test_the_table_has_a_row_for_every_kind_and_its_tables_agree() -> None:
    assert set(RULE) == set(Kind)
    for receive, send in SENT_BY.items():
        (row,) = RULE[receive]
        assert row.kinds == (send,)
        if receive.is_crossing:
            continue
        # A RECV points to the same neighbour as the need that it brings. An accumulator comes from the same stage.
        assert RECEIVED_BY.get(row.offset, Kind.RECV_W) is receive


@pytest.mark.parametrize(("token", "peer"), [("1SEND_F0", 2), ("1RECV_F0", 0), ("1SEND_B0", 0), ("1RECV_B0", 2)])
def test_the_stage_at_the_other_end(token: str, peer: int) -> None:
    assert peer_stage(parse_op(token)) == peer


@pytest.mark.parametrize("token", ["1F0", "1I0", "1W0", "1B0"])
def test_a_compute_op_has_no_other_end(token: str) -> None:
    with pytest.raises(ValueError, match=rf"^{token} has no peer: it sends and receives nothing$"):
        peer_stage(parse_op(token))
