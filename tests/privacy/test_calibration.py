"""Scales are rounded up and losses down, exactly in fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import (
    analytic_sigma,
    classical_sigma,
    gaussian_sigma,
    gdp_delta,
    gdp_epsilon,
    laplace_scale,
    rho_for,
)
from crowdml.privacy.losses import ZCDP, Total, exact

POSITIVE = st.fractions(min_value=Fraction(1, 10**6), max_value=10**6)


@given(POSITIVE, POSITIVE)
def test_the_gaussian_sigma_proves_its_rho_exactly_and_wastes_next_to_nothing(
    sensitivity: Fraction, rho: Fraction
) -> None:
    sigma = gaussian_sigma(sensitivity, rho)
    assert sensitivity**2 / (2 * sigma**2) <= rho
    assert sensitivity**2 / (2 * sigma**2) >= rho * (1 - Fraction(1, 2**28))
    assert sigma.denominator & (sigma.denominator - 1) == 0


def test_a_sigma_that_is_rational_is_not_rounded() -> None:
    assert gaussian_sigma(Fraction(2), Fraction(1, 2)) == 2


@given(POSITIVE, POSITIVE)
def test_the_laplace_scale_is_exact(sensitivity: Fraction, epsilon: Fraction) -> None:
    assert laplace_scale(sensitivity, epsilon) * epsilon == sensitivity


@given(st.floats(0.001, 100.0), st.floats(1e-12, 1e-2))
@settings(max_examples=60)
def test_rho_is_rounded_down_and_nearly_the_largest(epsilon: float, delta: float) -> None:
    rho = rho_for(epsilon, delta)
    assert exact(Total.of([ZCDP(rho)]).epsilon(delta)) <= exact(epsilon)
    assert Total.of([ZCDP(rho * (1 + Fraction(1, 10**8)))]).epsilon(delta) > epsilon


@given(st.floats(0.01, 20.0), st.floats(1e-9, 1e-2))
@settings(max_examples=60)
def test_the_analytic_sigma_meets_its_delta_and_a_smaller_one_does_not(epsilon: float, delta: float) -> None:
    sigma = analytic_sigma(epsilon, delta)
    assert gdp_delta(epsilon, 1.0 / sigma) <= delta
    assert gdp_delta(epsilon, 1.0 / (sigma * (1 - 1e-6))) > delta
    assert gdp_epsilon(1.0 / sigma, delta) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.1, 0.02), (1.0, 0.25), (8.0, 2.0), (50.0, 5.0), (2000.0, 50.0)])
def test_the_gaussian_delta_agrees_with_many_digits(epsilon: float, mu: float) -> None:
    with mpmath.workdps(80):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        delta = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
    assert gdp_delta(epsilon, mu) == pytest.approx(float(delta), rel=1e-9)


def test_the_classical_formula_is_refused_where_it_is_not_proved() -> None:
    assert classical_sigma(0.5, 1e-5) == pytest.approx(2 * 4.844805, abs=1e-5)
    with pytest.raises(GuaranteeError, match="proved for epsilon below 1"):
        classical_sigma(1.0, 1e-5)
    assert classical_sigma(10.0, 1e-6, as_published=True) < analytic_sigma(10.0, 1e-6)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_gaussian_noise_needs_a_delta(delta: float) -> None:
    for calibrate in (rho_for, analytic_sigma, classical_sigma):
        with pytest.raises(GuaranteeError, match="delta"):
            calibrate(0.5, delta)


def test_noise_for_an_epsilon_of_zero_is_refused() -> None:
    with pytest.raises(GuaranteeError, match="epsilon"):
        laplace_scale(Fraction(1), Fraction(0))
    with pytest.raises(GuaranteeError, match="rho"):
        gaussian_sigma(Fraction(1), Fraction(0))
    with pytest.raises(GuaranteeError, match="epsilon"):
        rho_for(0.0, 1e-6)
