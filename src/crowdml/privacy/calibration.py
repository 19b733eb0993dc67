"""Calibration: how much noise a loss asks for. Scales are rounded up, losses down.

`laplace_scale`, `gaussian_sigma` and `rho_for` are for the ledger: what they return is exact and proves the loss.
`analytic_sigma`, `classical_sigma` and `gdp_epsilon` speak of continuous Gaussian noise, which no device draws:
planning and as-published runs only (discrete noise at the analytic sigma misses its delta).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from crowdml.errors import GuaranteeError
from crowdml.privacy.losses import ZCDP, Filter, Renyi, Total, _conversion, exact

BITS = 30  # of a rounded scale or rho: one part in a billion


def _positive(**settings: Fraction | float) -> None:
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise GuaranteeError(f"{name} is {value}, and no finite noise gives that. Use a number above 0.")


def _probability(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise GuaranteeError(
            f"delta is {delta!r}, and Gaussian noise needs one between 0 and 1, far below 1 / samples (as 1e-6). "
            "For delta = 0 use discrete Laplace noise."
        )


def _exponent(value: Fraction) -> int:
    """The power of two just below a positive fraction, or the next one down."""
    return value.numerator.bit_length() - value.denominator.bit_length() - 1


def rho_for(epsilon: Fraction | float, delta: float) -> Fraction:
    """The largest rho, but for one part in a billion, such that rho-zCDP is (epsilon, delta)-DP. Rounded down.

    A filter of this budget allows a release that costs it: `Filter.of(epsilon, delta).allows(Total(), ZCDP(rho))`.
    """
    budget = exact(epsilon)
    _positive(epsilon=budget)
    _probability(delta)
    filter_ = Filter.of(budget, delta)
    order, divergence = filter_.order, filter_.divergence
    if order is None or divergence is None or divergence <= 0:
        raise GuaranteeError(f"no zCDP loss is known to be ({epsilon}, {delta})-DP. Raise epsilon or delta.")
    largest = divergence / order
    unit = Fraction(2) ** (_exponent(largest) - BITS)
    rho = math.floor(largest / unit) * unit
    while exact(Total.of([ZCDP(rho)]).epsilon(delta)) > budget:  # the float conversion has its own safety margin
        rho -= unit
    return rho


def laplace_scale(sensitivity: Fraction, epsilon: Fraction) -> Fraction:
    """b = sensitivity / epsilon, exact: noise with P(z) ~ exp(-|z| / b) on an integer query of this L1 sensitivity."""
    _positive(sensitivity=sensitivity, epsilon=epsilon)
    return Fraction(sensitivity) / Fraction(epsilon)


def gaussian_sigma(sensitivity: Fraction, rho: Fraction) -> Fraction:
    """sigma with sensitivity^2 / (2 sigma^2) <= rho, exact in fractions, for an L2 sensitivity.

    The square root is rounded up, by at most one part in 2^30, to a fraction whose denominator is a power of two.
    """
    _positive(sensitivity=sensitivity, rho=rho)
    variance = Fraction(sensitivity) ** 2 / (2 * Fraction(rho))
    shift = max(0, BITS + 1 - _exponent(variance) // 2)
    scaled = math.ceil(variance * 4**shift)
    return Fraction(math.isqrt(scaled - 1) + 1, 2**shift)


_COARSE = (320, 384, 448, 512, 768, 1024, 2048, 4096)
ORDERS = (*range(2, 33), *range(34, 65, 2), *range(68, 129, 4), *range(144, 257, 16), *_COARSE)
"""Orders of the divergences that a Skellam release is charged with: any epsilon from 0.01 finds one near its best."""


def _ceiling(value: Fraction, bits: int = BITS) -> Fraction:
    """Rounded up by at most one part in 2^bits, to a multiple of a power of two."""
    unit = Fraction(2) ** (_exponent(value) - bits)
    return math.ceil(value / unit) * unit


def round_down(value: Fraction, bits: int = BITS) -> Fraction:
    """A loss to spend at the most, down by at most one part in 2^bits to a multiple of a power of two: a short text."""
    unit = Fraction(2) ** (_exponent(value) - bits)
    return math.floor(value / unit) * unit


@lru_cache(maxsize=1024)
def skellam_loss(l2: Fraction, l1: Fraction, variance: Fraction, least: Fraction | None = None) -> Renyi:
    """What Skellam noise of this variance proves for an integer query of these sensitivities (Agarwal, Kairouz, Liu
    2021): at integer orders a,

        a l2^2 / (2 v) + min(((2a - 1) l2^2 + 6 l1) / (4 v^2), 3 l1 / (2 v)),

    in any dimension; each value rounded up. The sum of independent shares is one Skellam variable of their variance.
    `least`: the variance of the entries with least noise, where `l2` weighs each by its own: v beyond the first term.
    """
    _positive(l2=l2, l1=l1, variance=variance)
    square, v, small = Fraction(l2) ** 2, Fraction(variance), Fraction(least or variance)

    def at(order: int) -> Fraction:
        excess = min(((2 * order - 1) * square + 6 * l1) / (4 * small * small), 3 * l1 / (2 * small))
        return _ceiling(order * square / (2 * v) + excess)

    return Renyi(ORDERS, tuple(at(order) for order in ORDERS))


@lru_cache(maxsize=256)
def skellam_variance(l2: Fraction, l1: Fraction, epsilon: Fraction, delta: float, uses: int = 1) -> Fraction:
    """The least variance, rounded up, such that `uses` releases with Skellam noise of it are (epsilon, delta)-DP.

    A filter of that budget whose order was chosen for this plan allows all of them, one after the other.
    """
    _positive(l2=l2, l1=l1, epsilon=epsilon)
    _probability(delta)
    budget = exact(epsilon)

    def is_enough(variance: Fraction) -> bool:
        plan = Total.of([skellam_loss(l2, l1, variance)]).scaled(uses)
        return exact(plan.epsilon(delta)) <= budget and Filter.of(budget, delta, plan).allows(Total(), plan)

    least = min(sum(_conversion(float(order), delta)) for order in ORDERS)  # of noise without end
    if not least < budget:
        raise GuaranteeError(
            f"epsilon is {float(budget):g}, and at delta = {delta:g} no Skellam noise is known to give less than "
            f"{least:.3g}. Raise epsilon or delta."
        )
    high = _ceiling(Fraction(l2) ** 2 / (2 * rho_for(budget, delta) / uses), 8)
    while not is_enough(high):
        high *= 2
    low = high / 2
    while is_enough(low):
        low, high = low / 2, low
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _log_phi(x: float) -> float:
    """ln of the normal distribution function; its asymptotic series (relative error below 1e-13) far to the left."""
    if x > -30.0:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
    square = 1.0 / (x * x)
    series = 1.0 - square * (1.0 - 3.0 * square * (1.0 - 5.0 * square * (1.0 - 7.0 * square * (1.0 - 9.0 * square))))
    return -0.5 * x * x - math.log(-x) - 0.5 * math.log(2.0 * math.pi) + math.log(series)


def gdp_delta(epsilon: float, mu: float) -> float:
    """delta of continuous Gaussian noise with mu = sensitivity / sigma (Balle and Wang 2018).

    Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu). Planning only.
    """
    _positive(mu=mu)
    upper, lower = _log_phi(mu / 2.0 - epsilon / mu), _log_phi(-mu / 2.0 - epsilon / mu)
    return math.exp(upper) * -math.expm1(min(0.0, epsilon + lower - upper))


def _first(is_enough: Callable[[float], bool], high: float) -> float:
    """The least x >= 0 that is enough, rounded up to a float; once x is enough, more is too."""
    while not is_enough(high):
        high *= 2.0
    low = 0.0
    while low < (middle := (low + high) / 2.0) < high:
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high * (1.0 + 1e-12)


def gdp_epsilon(mu: float, delta: float) -> float:
    """epsilon at delta of mu-GDP (Dong, Roth, Su 2022), as continuous Gaussian noise has: planning only.

    mu of several Gaussian releases is the root of the sum of their mu^2.
    """
    _probability(delta)
    return _first(lambda epsilon: gdp_delta(epsilon, mu) <= delta, 1.0)


def analytic_sigma(epsilon: float, delta: float) -> float:
    """The least sigma of continuous Gaussian noise at sensitivity 1 (Balle and Wang 2018): planning only.

    Never a charge: at this sigma the discrete Gaussian has a larger delta (up to three times at epsilon = 8).
    """
    _positive(epsilon=epsilon)
    _probability(delta)
    return _first(lambda sigma: sigma > 0.0 and gdp_delta(epsilon, 1.0 / sigma) <= delta, 1.0)


def classical_sigma(epsilon: float, delta: float, *, as_published: bool = False) -> float:
    """sqrt(2 ln(1.25 / delta)) / epsilon, at sensitivity 1: the formula of most papers, proved for epsilon < 1 only."""
    _positive(epsilon=epsilon)
    _probability(delta)
    if epsilon >= 1.0 and not as_published:
        raise GuaranteeError(
            f"the classical Gaussian formula is proved for epsilon below 1, and epsilon is {epsilon:g} (its "
            "noise is too small from about 8 on). Use gaussian_sigma(sensitivity, rho_for(epsilon, delta)); to redo a "
            "paper, pass as_published=True."
        )
    return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon
