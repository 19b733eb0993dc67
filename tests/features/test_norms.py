"""Rows on the sphere and in the ball: the bound that every sensitivity starts from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from crowdml.errors import DataError
from crowdml.features import into_ball, normalise

ANY_ROWS = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, max_side=8),
    elements=st.floats(allow_nan=True, allow_infinity=True, width=64),
)
KINDS = st.sampled_from(["l1", "l2"])
BOUNDS = st.floats(2.0**-20, 2.0**20)


def norms(x, kind):
    wide = x.astype(np.longdouble)
    return np.abs(wide).sum(axis=1) if kind == "l1" else np.sqrt((wide * wide).sum(axis=1))


@settings(max_examples=300, deadline=None)
@given(ANY_ROWS, KINDS, BOUNDS)
def test_no_row_is_ever_longer_than_the_bound(x, kind, bound):
    for scaled in (normalise(x, kind, bound), into_ball(x, kind, bound)):
        assert np.isfinite(scaled).all()
        assert (norms(scaled, kind) <= bound).all()


@settings(max_examples=300, deadline=None)
@given(ANY_ROWS, KINDS, BOUNDS)
def test_finite_rows_reach_the_bound_and_zero_and_non_finite_rows_become_zero(x, kind, bound):
    scaled = normalise(x, kind, bound)
    alive = np.isfinite(x).all(axis=1) & (x != 0).any(axis=1)
    assert (scaled[~alive] == 0).all()
    assert (norms(scaled[alive], kind) >= bound * (1 - 1e-6)).all()


@settings(deadline=None)
@given(arrays(np.float64, (5, 4), elements=st.floats(-1e3, 1e3, width=32)), KINDS)
def test_rows_inside_the_ball_are_left_as_they_are(x, kind):
    kept = into_ball(x, kind, 1e6)
    assert (kept == x.astype(np.float32)).all()


def test_the_direction_of_a_row_does_not_change():
    x = np.random.default_rng(3).standard_normal((50, 7))
    scaled = normalise(x, "l2", 2.0)
    np.testing.assert_allclose(scaled, 2 * x / np.linalg.norm(x, axis=1, keepdims=True), rtol=1e-6)


def test_the_norm_none_keeps_rows_and_still_zeroes_what_is_not_finite():
    x = np.array([[1.0, -2.0], [np.nan, 1.0], [1e300, 0.0], [0.0, 0.0]])
    assert normalise(x, "none").tolist() == [[1, -2], [0, 0], [0, 0], [0, 0]]


def test_each_row_is_treated_alone():
    x = np.random.default_rng(4).standard_normal((6, 3))
    changed = x.copy()
    changed[2] = np.inf
    others = [0, 1, 3, 4, 5]
    assert (normalise(x, "l1")[others] == normalise(changed, "l1")[others]).all()


def test_an_empty_split_stays_empty():
    assert normalise(np.zeros((0, 5)), "l2").shape == (0, 5)


@pytest.mark.parametrize("bound", [0.0, -1.0, np.nan, np.inf])
def test_an_impossible_bound_is_refused_with_its_value(bound):
    with pytest.raises(DataError, match="norm bound"):
        normalise(np.ones((2, 2)), "l2", bound)


def test_an_unknown_norm_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match="'l1', 'l2', 'none'"):
        normalise(np.ones((2, 2)), "linf")
