"""The one rule for numbers that are not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from crowdml.arrays import LARGEST_NUMBER, finite_or_zero, is_usable

BROKEN = (np.nan, np.inf, -np.inf)
both = pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])


@both
@pytest.mark.parametrize("bad", BROKEN)
def test_a_row_with_a_broken_number_is_zero_and_the_others_are_as_they_were(xp, bad):
    rows = xp.asarray([[1.0, bad, 2.0], [3e38, -1.0, 1e-40]], xp.float32)
    found = finite_or_zero(rows, rows=True)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[0, 0, 0], np.asarray(rows)[1]])


@both
@pytest.mark.parametrize("bad", BROKEN)
def test_number_by_number_only_the_broken_one_is_zero(xp, bad):
    found = finite_or_zero(xp.asarray([1.0, bad, -2.0], xp.float32))
    np.testing.assert_array_equal(found, [1, 0, -2])


@both
def test_where_there_is_a_limit_what_is_beyond_it_counts_as_broken(xp):
    edge = np.float32(LARGEST_NUMBER)
    values = xp.asarray([edge, -edge, np.nextafter(edge, np.float32(np.inf)), -3e38, np.nan, np.inf], xp.float32)
    assert is_usable(values, LARGEST_NUMBER).tolist() == [True, True, False, False, False, False]
    np.testing.assert_array_equal(finite_or_zero(values, most=LARGEST_NUMBER), [edge, -edge, 0, 0, 0, 0])
    assert is_usable(values).tolist() == [True, True, True, True, False, False]


def test_whole_numbers_stay_whole():
    counts = np.array([[1, 2], [3, 4]], np.int32)
    found = finite_or_zero(counts, rows=True)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, counts)
