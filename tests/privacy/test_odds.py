"""Odds for people: the formula against an exact attack, bounds that are rounded up, and words that fit the number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from crowdml.privacy.calibration import gdp_epsilon
from crowdml.privacy.odds import certainty, odds


def best_guess(mu: float) -> float:
    """How often the best guess about Gaussian noise of standard deviation 1 / mu is right, after one look."""
    return float(norm.cdf(mu / 2))


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.1, 0.5, 0.9])
def test_no_guess_is_right_more_often_than_the_page_says(mu: float, delta: float) -> None:
    """Review 2, privacy finding 1: without delta the page said 50 % where a guess was right 96.7 % of the time."""
    epsilon = max(0.0, gdp_epsilon(mu, delta))
    assert best_guess(mu) <= certainty(epsilon, delta) + 1e-9


def test_the_bound_is_met_where_delta_says_everything() -> None:
    assert certainty(0.0, 0.9) == pytest.approx(0.95), "the data itself in nine of ten cases, and a coin in the tenth"
    assert certainty(0.0, 0.0) == 0.5
    assert certainty(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert certainty(1e6, 1e-6) == 1.0
    assert certainty(math.inf, 1e-6) == 1.0


@given(st.floats(0, 50), st.floats(0, 1))
def test_what_is_shown_is_never_below_the_bound_and_never_a_hundred_percent(epsilon: float, delta: float) -> None:
    """Review 2: no rounded 100 %."""
    found = odds(epsilon, delta)
    assert found.shown <= 0.999
    assert found.strength == "none" or found.right <= found.shown + 1e-12
    assert "100" not in found.sentence


@pytest.mark.parametrize(
    ("epsilon", "strength", "said"),
    [
        (0.1, "strong", "at most 52.5 %"),
        (1.0, "strong", "at most 73.2 %"),
        (2.0, "fair", "at most 88.1 %"),
        (4.0, "weak", "at most 98.3 %"),
        (6.9, "weak", "at most 99.9 %"),
        (7.0, "none", "more than 99.9 %"),
        (100.0, "none", "more than 99.9 %"),
    ],
)
def test_words_follow_the_number(epsilon: float, strength: str, said: str) -> None:
    found = odds(epsilon, 1e-6)
    assert found.strength == strength
    assert said in found.sentence
