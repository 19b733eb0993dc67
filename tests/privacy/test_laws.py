"""The laws against independent oracles: mpmath for enclosures, SciPy and plain formulas for the mass functions."""

import math
from fractions import Fraction
from functools import cache
from itertools import accumulate

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from crowdml.errors import TaskError
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Geometric, Skellam, _enclose, exp_minus

DIGITS = 140
SMALL = [
    DiscreteLaplace(Fraction(1, 7)),
    DiscreteLaplace(Fraction(5, 2)),
    DiscreteGaussian(Fraction(2, 9)),
    DiscreteGaussian(Fraction(13, 4)),
    Skellam(Fraction(1, 50)),
    Skellam(Fraction(23, 3)),
]
LARGE = [DiscreteLaplace(Fraction(700)), DiscreteGaussian(Fraction(2**15)), Skellam(Fraction(2**30))]
PARTS = [Geometric(Fraction(9, 2)), Geometric(Fraction(9, 2), below=16), Geometric(Fraction(3), below=2)]
EVERY = [*SMALL, *LARGE]


def exact(x: Fraction) -> mpmath.mpf:
    return mpmath.mpf(x.numerator) / x.denominator


def weights(law, count):
    """Unnormalised P(k) for k = 0 .. count - 1, by textbook formulas at the working precision of mpmath."""
    match law:
        case DiscreteLaplace(scale) | Geometric(scale):
            return [mpmath.exp(-k / exact(scale)) for k in range(count)]
        case DiscreteGaussian(sigma):
            return [mpmath.exp(-k * k / (2 * exact(sigma) ** 2)) for k in range(count)]
        case Skellam(variance):
            return [mpmath.exp(-exact(variance)) * mpmath.besseli(k, exact(variance)) for k in range(count)]


@cache
def cumulative(law, digits=DIGITS, terms=1500):
    """F(0), F(1), ...: of |X|, or of a geometric variable, right to about that many digits."""
    sides = 1 if isinstance(law, Geometric) else 2
    below = law.below if isinstance(law, Geometric) else None
    with mpmath.workdps(digits):
        mass = [w * (sides if k else 1) for k, w in enumerate(weights(law, below or terms))]
        total = mpmath.fsum(mass)
        inside = [part / total for part in accumulate(mass)]
    return [*inside[:-1], mpmath.mpf(1)]


@given(st.fractions(min_value=0, max_value=3000), st.integers(8, 400))
@example(Fraction(0), 8)
@example(Fraction(1, 2**40 + 1), 8)
@example(Fraction(3000), 8)
@settings(max_examples=150, deadline=None)
def test_an_integer_power_of_e_is_enclosed_within_two_units(x, precision):
    low = exp_minus(x, precision)
    with mpmath.workprec(6000):
        value = mpmath.exp(-exact(x)) * mpmath.mpf(2) ** precision
        assert low <= value <= low + 2


@pytest.mark.parametrize("bits", [63, 127, 300])
@pytest.mark.parametrize("law", [*SMALL, *PARTS], ids=str)
def test_thresholds_enclose_the_cumulative_distribution(law, bits):
    cuts = law.thresholds(bits)
    truth = cumulative(law)[: len(cuts)]
    with mpmath.workdps(DIGITS):
        whole = mpmath.mpf(2) ** bits
        assert all(cut <= whole * f < cut + 2 for cut, f in zip(cuts, truth, strict=True))
        assert whole * (1 - truth[-1]) < 1


def test_an_enclosure_pays_for_the_errors_of_its_ratios():
    bits, places = 63, 149  # a uniform law, with ratios as wrong as an enclosure of 63 bits can just bear

    def ratios(count, precision):
        error = 1 << (precision - bits - 10)
        return [(1 << precision) - error] * count, error

    cuts = _enclose(ratios, lambda k: k / 10, bits, sides=1, below=places)
    assert all(cut <= Fraction(2**bits * (k + 1), places) < cut + 2 for k, cut in enumerate(cuts))


@pytest.mark.parametrize("law", LARGE, ids=str)
def test_thresholds_of_large_laws_agree_with_the_mass_function(law):
    cuts = np.array(law.thresholds(63), dtype=np.float64) / 2.0**63
    mass = reference(law, np.arange(len(cuts)))
    mass[1:] *= 2
    assert np.abs(np.cumsum(mass) - cuts).max() < 1e-10
    assert np.all(np.diff(cuts) >= 0)


@given(
    st.sampled_from([DiscreteLaplace, DiscreteGaussian, Skellam, Geometric]),
    st.fractions(min_value=Fraction(1, 40), max_value=60),
)
@settings(max_examples=60, deadline=None)
def test_more_bits_only_narrow_an_enclosure(kind, parameter):
    law = kind(parameter)
    coarse, fine = law.thresholds(63), law.thresholds(191)
    assert len(fine) >= len(coarse)
    whole = 1 << 128
    for wide, narrow in zip(coarse, fine, strict=False):
        assert wide * whole < narrow + 2  # the two enclosures meet
        assert narrow < (wide + 2) * whole


def reference(law, k):
    """P(X = k) by formulas that share nothing with the module."""
    k = np.abs(k)
    match law:
        case DiscreteLaplace(scale):
            q = math.exp(-1 / float(scale))
            return (1 - q) / (1 + q) * np.exp(-k / float(scale))
        case DiscreteGaussian(sigma):
            every = np.arange(-int(40 * sigma) - 5, int(40 * sigma) + 6)
            return np.exp(-(k**2) / (2 * float(sigma) ** 2)) / np.exp(-(every**2) / (2 * float(sigma) ** 2)).sum()
        case Skellam(variance):
            if variance < 2**20:
                return special.ive(k, float(variance))
            v = float(variance)  # Debye's expansion to second order: its error is of the order of v^-3
            s = np.hypot(k, v)
            t = k / s
            series = 1 + (3 - 5 * t**2) / (24 * s) + (81 - 462 * t**2 + 385 * t**4) / (1152 * s**2)
            return np.exp(k**2 / (s + v) - k * np.arcsinh(k / v)) / np.sqrt(2 * np.pi * s) * series


@pytest.mark.parametrize("law", EVERY, ids=str)
def test_the_mass_function_agrees_with_its_formula(law):
    reach = law.tail(40)
    k = np.unique(np.linspace(-reach, reach, 2001).astype(int))
    np.testing.assert_allclose(law.pmf(k), reference(law, k), rtol=2e-12 if law in SMALL else 1e-11)


@pytest.mark.parametrize("law", EVERY, ids=str)
def test_the_mass_function_sums_to_one_and_has_the_stated_variance(law):
    k = np.arange(-law.tail(70), law.tail(70) + 1)
    mass = law.pmf(k)
    assert mass.sum() == pytest.approx(1, abs=1e-12)
    assert (k.astype(float) ** 2 * mass).sum() == pytest.approx(float(law.variance), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(40)])
def test_skellam_is_the_difference_of_two_poisson_variables(variance):
    poisson = stats.poisson.pmf(np.arange(200), float(variance) / 2)
    difference = np.convolve(poisson, poisson[::-1])[199:]
    np.testing.assert_allclose(Skellam(variance).pmf(np.arange(30)), difference[:30], rtol=1e-11)


@pytest.mark.parametrize("bits", [1, 20, 64, 128])
@pytest.mark.parametrize("law", SMALL, ids=str)
def test_the_tail_is_the_first_point_with_less_than_its_probability_beyond(law, bits):
    t = law.tail(bits)
    inside = cumulative(law)
    with mpmath.workdps(DIGITS):
        assert 1 - inside[t] < mpmath.mpf(2) ** -bits
        assert t == 0 or 1 - inside[t - 1] >= mpmath.mpf(2) ** -bits


@pytest.mark.parametrize("law", [DiscreteGaussian(Fraction(13, 4)), DiscreteLaplace(Fraction(5, 2))], ids=str)
def test_the_tail_is_right_where_floats_end(law):
    t = law.tail(1000)
    inside = cumulative(law, digits=400, terms=2500)
    with mpmath.workdps(400):
        assert 1 - inside[t] < mpmath.mpf(2) ** -1000 <= 1 - inside[t - 1]


def test_laws_are_values_that_serve_as_keys():
    assert {DiscreteGaussian(Fraction(3)): 1}[DiscreteGaussian(Fraction(6, 2))] == 1
    assert hash(DiscreteLaplace(Fraction(1, 2))) == hash(DiscreteLaplace(Fraction(2, 4)))


@pytest.mark.parametrize("kind", [DiscreteLaplace, DiscreteGaussian, Skellam, Geometric])
@pytest.mark.parametrize("value", [Fraction(0), Fraction(-1, 2)])
def test_a_law_without_spread_is_refused(kind, value):
    with pytest.raises(TaskError, match=r"above zero\. Nothing was drawn"):
        kind(value)
