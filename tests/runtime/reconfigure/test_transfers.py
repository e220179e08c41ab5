"""Transfers of a change of layout: each new holder receives each item once, and nothing moves that stays."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from adaptra.program.roles import Roles, moved
from adaptra.runtime.reconfigure.transfers import cut_transfers, role_transfers, senders_to, sent_by, transfers

RANKS = 5
HELD = st.lists(st.integers(0, RANKS - 1), unique=True)
Layouts = dict[str, tuple[list[int], list[int]]]
LAYOUTS = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.tuples(HELD.filter(bool), HELD))
"""Per item its holders before and after."""


@given(LAYOUTS)
def test_every_new_holder_receives_each_item_once_from_the_first_that_had_it(
    layouts: Layouts,
) -> None:
    before, after = ({item: both[when] for item, both in layouts.items()} for when in (0, 1))
    found = transfers(before, after, layouts)
    arrived = Counter((one.item, one.receiver) for one in found)
    assert arrived == Counter((item, rank) for item in layouts for rank in after[item] if rank not in before[item])
    assert all(one.sender == before[one.item][0] != one.receiver for one in found)
    had = Counter((item, rank) for item, holders in before.items() for rank in holders)
    assert {(item, rank) for item in layouts for rank in after[item]} <= {*(had | arrived)}


@given(LAYOUTS)
def test_every_rank_finds_the_same_transfers(layouts: Layouts) -> None:
    """They depend on the order of the items alone, and not on the order of the mappings."""
    before, after = ({item: both[when] for item, both in layouts.items()} for when in (0, 1))
    items = sorted(layouts)
    other_way = [{item: some[item] for item in reversed(some)} for some in (before, after)]
    assert transfers(before, after, items) == transfers(other_way[0], other_way[1], items)


@given(LAYOUTS)
def test_a_layout_that_stays_moves_nothing(layouts: Layouts) -> None:
    before = {item: holders for item, (holders, _) in layouts.items()}
    assert transfers(before, {item: holders[::-1] for item, holders in before.items()}, before) == []


@given(LAYOUTS)
def test_what_ranks_send_is_what_others_expect(layouts: Layouts) -> None:
    before, after = ({item: both[when] for item, both in layouts.items()} for when in (0, 1))
    found = transfers(before, after, layouts)
    for rank in range(RANKS):
        for receiver, items in sent_by(rank, found).items():
            assert rank in senders_to(receiver, found)
            assert items == [one.item for one in found if (one.sender, one.receiver) == (rank, receiver)]
        assert all(rank in sent_by(sender, found) for sender in senders_to(rank, found))


STAGES = st.lists(st.sets(st.sampled_from("abcdefgh")), min_size=RANKS, max_size=RANKS)


@given(STAGES, STAGES, st.permutations(range(RANKS)))
def test_a_moved_cut_gives_every_stage_its_tensors(before: list[set[str]], after: list[set[str]], ranks: list[int]) -> None:
    names = sorted(set[str]().union(*before))
    after = [stage & {*names} for stage in after]
    found = cut_transfers([sorted(one) for one in before], [sorted(one) for one in after], ranks)
    for stage, rank in enumerate(ranks):
        arrived = [one.item for one in found if one.receiver == rank]
        assert sorted(arrived) == sorted(after[stage] - before[stage])
    first = {name: next(rank for rank, stage in zip(ranks, before, strict=True) if name in stage) for name in names}
    assert all(one.sender == first[one.item] for one in found)


@given(st.permutations(range(6)), st.permutations(range(6)), st.sampled_from([1, 2, 3, 6]))
def test_changed_roles_move_the_state_of_each_moved_role(one: list[int], other: list[int], stages: int) -> None:
    before, after = Roles(stages, tuple(one)), Roles(stages, tuple(other))
    found = role_transfers(before, after)
    assert sorted(each.sender for each in found) == sorted(each.receiver for each in found) == moved(before, after)
    assert all(before.of(each.sender) == after.of(each.receiver) == each.item for each in found)
