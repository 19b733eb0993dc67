"""The functional mechanism: its sensitivity, its noise, its price, and the minimum that it leads to."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from audits import Stream
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.errors import GuaranteeError
from crowdml.privacy.grid import Grid
from crowdml.privacy.losses import Pure
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.polynomials import PolynomialLaplace, coefficients_move
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, Adjacency


def make(features: int = 4, labels: int = 2, clip: int = 8, batch: int = 5, **more: Any) -> PolynomialLaplace:
    grid = Grid(Fraction(1, clip))
    return PolynomialLaplace(clip, features, labels, Fraction(1), grid, Rows(0, batch), "the loss, blurred", **more)


def test_the_constants_of_the_paper():
    """Review, section 4: 840 for b = 80, and Lemma 4's 42240 for b = 128 and ten classes is M times the squares."""
    assert Fraction(coefficients_move(1, 80, 1), 16) == 840
    assert Fraction(coefficients_move(1, 128, 10), 8) == 10 * 128 + 128**2 // 4 == 5376
    assert 10 * (128 + 128**2 // 4) == 42240


ROWS = arrays(np.float64, (5, 6), elements=st.floats(-2, 2) | st.sampled_from([np.nan, np.inf, -np.inf]))


@given(ROWS, arrays(np.float64, 6, elements=st.floats(-2, 2)))
def test_replacing_a_sample_moves_the_coefficients_by_no_more_than_the_table_says(rows: Any, other: Any):
    row, changed = make(), rows.copy()
    changed[2] = other
    moved = np.abs(row.coefficients(rows) - row.coefficients(changed)).sum()
    assert moved <= row.sensitivity.bound
    assert row.sensitivity == L1(Fraction(2 * 8**2 * (4**2 + 4 * 4 * 2)))


def test_the_bound_is_reached_by_labels_that_turn_round_but_for_the_squares():
    """From (h, t) to (h, -t) every linear coefficient moves by twice its most."""
    row, one = make(batch=1), np.ones((1, 6))
    other = one.copy()
    other[:, 4:] = -1
    assert np.abs(row.coefficients(one) - row.coefficients(other)).sum() == 2 * 4 * 8**2 * 4 * 2
    empty = np.zeros((1, 6))
    assert 2 * np.abs(row.coefficients(one) - row.coefficients(empty)).sum() == row.sensitivity.bound


def test_the_scale_is_the_sensitivity_over_epsilon_and_is_drawn():
    row = make(features=20, labels=2)
    assert row.scale == row.sensitivity.bound
    assert row.loss == Pure(Fraction(1))
    assert row.device_loss == Pure(Fraction(5))
    drawn = np.concatenate(
        [row.draw(np.zeros((5, 22)), SystemSource(Stream(f"polynomial {run}"))) for run in range(40)]
    )
    assert np.abs(drawn).mean() == pytest.approx(float(row.scale), rel=0.05)
    low, high = row.reach
    assert low < drawn.min() < 0 < drawn.max() < high < 2**31


def test_a_device_that_is_protected_whole_pays_for_all_of_its_samples():
    row = make(adjacency=Adjacency.REPLACE_DEVICE)
    assert row.sensitivity.bound == 5 * make().sensitivity.bound
    assert row.device_loss == row.loss == Pure(Fraction(1))


def test_the_equations_are_the_sums_and_their_solution_the_minimum_of_the_polynomial():
    rng = np.random.default_rng(1)
    h, y = rng.integers(0, 9, (5, 4)) / 8, rng.integers(0, 2, (5, 2))
    row = make()
    gram, cross, deviation = row.equations(row.draw(np.concatenate([h, 1 - 2 * y], 1), Silence()), 3)
    np.testing.assert_allclose(gram, h.T @ h)
    np.testing.assert_allclose(cross, h.T @ (2 * y - 1))
    assert deviation == pytest.approx(math.sqrt(3 * row.law.variance / 2) / 64)
    weights = 2 * np.linalg.solve(gram, cross)  # where the gradient of (1 - 2y) s / 2 + s^2 / 8 is zero
    slope = h.T @ ((1 - 2 * y) / 2 + (h @ weights) / 4)
    np.testing.assert_allclose(slope, 0, atol=1e-9)


@pytest.mark.parametrize("wrong", [{"clip": 0}, {"features": 0}, {"clip": 2**14}])
def test_a_polynomial_that_proves_nothing_or_has_no_room_is_refused(wrong: dict[str, int]):
    with pytest.raises((GuaranteeError, ValueError)):
        make(**wrong) if "clip" not in wrong else replace(make(), **wrong)


def test_rows_of_another_width_are_refused():
    with pytest.raises(GuaranteeError, match="prices 4 features and 2 labels a sample; this has"):
        make().draw(np.zeros((5, 7)), Silence())
