"""Ratings of uploads on rows of the server's own: accuracy, and eq. (6) of Zhao et al. with min for max."""

from __future__ import annotations

import numpy as np

from crowdml.ratings import rate_classes, rate_numbers


def test_a_class_is_right_or_wrong():
    assert rate_classes(np.array([1, 2, 0]), np.array([1.0, 0.0, 0.0])).tolist() == [1, 0, 1]


def test_a_number_is_rated_by_how_far_off_it_is_in_parts_of_the_label():
    said, labels = np.array([0.5, 0.25, 0.75, 0.0, 1.0, 1.5, 5.0]), np.full(7, 0.5)
    assert rate_numbers(said, labels, 0.05).tolist() == [1, 0.5, 0.5, 0, 0, -1, -1]


def test_max_in_the_place_of_min_would_rate_every_small_prediction_as_the_worst():
    """Z6: as printed, every z at or below 3 y scores -1, and z = 10 y scores -8."""
    y = 0.2
    printed = [1 - abs((max(z, 3 * y) - y) / y) for z in (0.0, 0.2, 0.6, 2.0)]
    np.testing.assert_allclose(printed, [-1, -1, -1, -8], atol=1e-12)
    np.testing.assert_allclose(
        rate_numbers(np.array([0.0, 0.2, 0.6, 2.0]), np.full(4, y), 0.05), [0, 1, -1, -1], atol=1e-6
    )


def test_what_is_not_finite_is_rated_worst_and_no_label_divides_by_zero():
    said = np.array([np.nan, np.inf, -np.inf, -3.0, 0.05])
    assert rate_numbers(said, np.array([0.5, 0.5, 0.5, 0.5, 0.0]), 0.05).tolist() == [-1, -1, -1, 0, 1]
    assert rate_classes(np.array([np.nan]), np.array([0])).tolist() == [0]
