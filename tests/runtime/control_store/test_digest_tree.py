"""Digests that go up a tree of ranks and come down again."""

from __future__ import annotations

import itertools
import random

import pytest

from adaptra.runtime.control_store.digest_tree import (
    DigestLevel,
    ancestors_of,
    children_of,
    lowest_two,
    parent_of,
    root_digest,
    subtree_digest,
    text_digest,
)


def levels(texts: list[str]) -> list[DigestLevel]:
    """Each rank's level, by rank."""
    found: dict[int, DigestLevel] = {}
    for rank in reversed(range(len(texts))):
        below = [subtree_digest(found[child].text, found[child].children) for child in children_of(rank, len(texts))]
        found[rank] = DigestLevel(text_digest(rank, texts[rank]), tuple(below))
    return [found[rank] for rank in range(len(texts))]


def roots(texts: list[str], read: list[DigestLevel]) -> list[str]:
    """The root's digest as each rank computes it from its own text and the levels that it reads."""
    own = [DigestLevel(text_digest(rank, text), read[rank].children) for rank, text in enumerate(texts)]
    return [
        root_digest(rank, subtree_digest(one.text, one.children), [read[above] for above in ancestors_of(rank)])
        for rank, one in enumerate(own)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 9, 10, 73, 1000])
def test_each_rank_but_the_root_is_the_child_of_one_parent(ranks: int) -> None:
    assert sorted(itertools.chain(*(children_of(rank, ranks) for rank in range(ranks)))) == list(range(1, ranks))
    assert all(rank in children_of(parent_of(rank), ranks) for rank in range(1, ranks))
    assert max(len(ancestors_of(rank)) for rank in range(ranks)) <= 4


@pytest.mark.parametrize("ranks", [1, 2, 9, 10, 80])
def test_all_ranks_compute_the_same_root_which_every_text_changes(ranks: int) -> None:
    texts = [f"text {rank}" for rank in range(ranks)]
    (root,) = set(roots(texts, levels(texts)))
    for rank in range(ranks):
        changed = [*texts[:rank], "another", *texts[rank + 1 :]]
        assert set(roots(changed, levels(changed))).isdisjoint({root})


@pytest.mark.parametrize("rank", [3, 20])
def test_a_rank_whose_text_others_read_changed_computes_another_root(rank: int) -> None:
    """As if a stranger replaced what rank 3, which has children, or rank 20, which has none, sent up."""
    texts = [f"text {rank}" for rank in range(30)]
    read = levels([*texts[:rank], "a stranger's", *texts[rank + 1 :]])
    found = roots(texts, read)
    others = {root for other, root in enumerate(found) if rank not in (other, *ancestors_of(other))}
    assert len(others) == 1 and found[rank] not in others


def test_old_digests_make_no_old_root() -> None:
    """As if a stranger replayed to rank 7 all that others sent in an earlier launch."""
    earlier = [f"text {rank}, first number" for rank in range(30)]
    (root,) = set(roots(earlier, levels(earlier)))
    fresh = [*earlier[:7], "text 7, second number", *earlier[8:]]
    assert roots(fresh, levels(earlier))[7] != root


def test_two_ranks_of_each_part_show_the_lowest_that_differs_from_any_value() -> None:
    draw = random.Random(1)
    for _ in range(300):
        values = [(rank, draw.choice("abc")) for rank in range(draw.randrange(1, 9))]
        parts: list[list[tuple[int, str]]] = [[], [], []]
        for one in values:
            draw.choice(parts).append(one)
        joined = lowest_two(itertools.chain(*map(lowest_two, parts)))
        for value in "abcd":
            different = [rank for rank, other in values if other != value]
            assert [rank for rank, other in joined if other != value][:1] == different[:1]
