"""Numbers of replicas are compared by the means of their bits: no other numbers look equal, whatever their mean."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from adaptra.runtime.data_parallel.equal_numbers import BITS, are_equal, bits_of, mean_number


def means(numbers: list[list[int]]) -> list[float]:
    """The mean of each bit over the replicas, as a sum in float32 gives it."""
    total = np.zeros(BITS * len(numbers[0]), np.float32)
    for one in numbers:
        total += np.array(bits_of(one), np.float32)
    return (total / np.float32(len(numbers))).tolist()


@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 49, 1000])
@pytest.mark.parametrize("number", [0, 1, 1023, 2**24 + 1, 2**32 - 1])
def test_equal_numbers_are_equal(replicas: int, number: int) -> None:
    found = means([[number, 5]] * replicas)
    assert are_equal(found)
    assert mean_number(found[:BITS]) == number


def test_other_numbers_are_not_even_where_one_is_the_mean() -> None:
    for numbers in product(range(6), repeat=3):
        assert are_equal(means([[one] for one in numbers])) == (len(set(numbers)) == 1), numbers
    for one in (2**24, 2**31):
        found = means([[one - 1], [one], [one + 1]])
        assert not are_equal(found)
        assert mean_number(found) == pytest.approx(one)
