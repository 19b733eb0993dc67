"""Every number of the privacy review, sections 0 and 2, that accounting, calibration or a discrete law must give.

Each test names the row or the rule that it covers. Numbers of the review that come from a trained model, or from a
sampler in floating point (R5's 79 %), are not here.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from oracles import (
    allows,
    discrete_gaussian_delta,
    discrete_laplace_delta,
    laplace_epsilon_pld,
    laplace_epsilon_rdp,
    pure_epsilon_pld,
)

from crowdml.privacy.accounting import Neighbours, Sampler, gaussian_epsilon_pld, gaussian_epsilon_rdp
from crowdml.privacy.calibration import (
    analytic_sigma,
    classical_sigma,
    gaussian_sigma,
    gdp_epsilon,
    laplace_scale,
    rho_for,
)
from crowdml.privacy.laws import DiscreteLaplace
from crowdml.privacy.losses import ZCDP, Filter, Pure, Total, Unbounded, exact, group
from crowdml.privacy.mechanisms import CountLaplace, RandomisedResponse
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1

FOUR = ((0.1, 1e-3), (1.0, 1e-5), (1.0, 1e-6), (10.0, 1e-6))


def zcdp_sigma(epsilon: float, delta: float) -> float:
    """sigma over sensitivity as the ledger would charge one release."""
    return float(gaussian_sigma(Fraction(1), rho_for(epsilon, delta)))


# Section 0, rules


@pytest.mark.parametrize(("epsilon", "delta"), [(8.0, 3.01e-6), (2.0, 1.10e-6), (1.0, 1.02e-6)])
def test_R9_the_discrete_gaussian_misses_its_delta_at_the_analytic_sigma(epsilon: float, delta: float) -> None:
    found = discrete_gaussian_delta(epsilon, sigma=analytic_sigma(epsilon, 1e-6), shift=1)
    assert found == pytest.approx(delta, abs=0.005e-6)
    assert found > 1e-6
    assert discrete_gaussian_delta(epsilon, sigma=zcdp_sigma(epsilon, 1e-6), shift=1) <= 1e-6


@pytest.mark.parametrize(
    ("epsilon", "delta", "sigma"),
    [(0.1, 1e-6, 39.46392), (1.0, 1e-6, 4.530877), (1.0, 1e-5, 4.04513), (10.0, 1e-6, 0.569936)],
)
def test_R9_the_price_of_charging_one_release_as_zcdp(epsilon: float, delta: float, sigma: float) -> None:
    assert zcdp_sigma(epsilon, delta) == pytest.approx(sigma, rel=2e-7 if sigma > 1 else 1e-6)
    assert 1.05 <= zcdp_sigma(epsilon, delta) / analytic_sigma(epsilon, delta) <= 1.09


def test_R9_stored_pairs_allow_10_releases_where_zcdp_allows_1162() -> None:
    cost = ZCDP(rho_for(0.1, 1e-6))
    assert allows(Total(), Total.of([cost]).scaled(1162), 4.0, 1e-5)
    assert not allows(Total(), Total.of([cost]).scaled(1163), 4.0, 1e-5)
    by_pairs = min(exact(4.0) / exact(0.1), exact(1e-5) / exact(1e-6))
    assert by_pairs == 10


def test_R9_the_same_1162_releases_pass_one_after_the_other() -> None:
    cost, total, keeper = ZCDP(rho_for(0.1, 1e-6)), Total(), Filter.of(4.0, 1e-5)
    count = 0
    while keeper.allows(total, cost):
        total, count = total + cost, count + 1
    assert count == 1162


def test_R10_a_sample_epsilon_of_1_on_60_samples_is_155_for_the_device_by_zcdp() -> None:
    device = Total.of([group(ZCDP(rho_for(1.0, 1e-6)), 60)])
    assert device.epsilon(1e-6) == pytest.approx(155, abs=0.5)
    assert gdp_epsilon(60 / analytic_sigma(1.0, 1e-6), 1e-6) == pytest.approx(167, abs=0.5)


def test_R10_one_check_in_of_20_samples_at_0_9_costs_the_device_27_8() -> None:
    device = Total.of([group(ZCDP(rho_for(0.9, 1e-6)), 20)])
    assert device.epsilon(1e-6) == pytest.approx(27.8, abs=0.05)
    assert gdp_epsilon(20 / analytic_sigma(0.9, 1e-6), 1e-6) == pytest.approx(28.9, abs=0.05)


@pytest.mark.parametrize(("honest", "analytic", "zcdp"), [(50, 8.9, 8.7), (100, 13.5, 13.2), (1000, 62.8, 59.4)])
def test_R11_what_a_devices_own_share_of_the_noise_is_worth(honest: int, analytic: float, zcdp: float) -> None:
    assert gdp_epsilon(math.sqrt(honest) / analytic_sigma(1.0, 1e-6), 1e-6) == pytest.approx(analytic, abs=0.05)
    assert Total.of([ZCDP(honest * rho_for(1.0, 1e-6))]).epsilon(1e-6) == pytest.approx(zcdp, abs=0.05)


# Section 0, the table


@pytest.mark.parametrize(("setting", "sigma"), list(zip(FOUR, (17.404396, 3.730632, 4.224679, 0.541087), strict=True)))
def test_row_analytic_sigma(setting: tuple[float, float], sigma: float) -> None:
    assert analytic_sigma(*setting) == pytest.approx(sigma, abs=6e-7)


@pytest.mark.parametrize(("setting", "sigma"), list(zip(FOUR, (37.764795, 4.844805, 5.298803, 0.529880), strict=True)))
def test_row_classical_sigma_which_is_too_small_at_epsilon_10(setting: tuple[float, float], sigma: float) -> None:
    assert classical_sigma(*setting, as_published=True) == pytest.approx(sigma, abs=6e-7)
    assert (classical_sigma(*setting, as_published=True) < analytic_sigma(*setting)) == (setting == FOUR[3])


@pytest.mark.parametrize(("delta", "crossing"), [(1e-3, 7.463), (1e-5, 8.420), (1e-6, 8.782)])
def test_row_where_the_classical_formula_gives_too_little_noise(delta: float, crossing: float) -> None:
    for epsilon, too_small in ((crossing - 0.001, False), (crossing + 0.001, True)):
        assert (classical_sigma(epsilon, delta, as_published=True) < analytic_sigma(epsilon, delta)) == too_small


@pytest.mark.parametrize(("mu", "epsilon"), [(0.5, 2.254085), (1.0, 4.886554), (2.0, 10.997151)])
def test_row_gdp_to_epsilon(mu: float, epsilon: float) -> None:
    assert gdp_epsilon(mu, 1e-6) == pytest.approx(epsilon, abs=6e-7)


def test_row_a_hundred_releases_of_a_tenth() -> None:
    one, delta = 0.1, 1e-6
    assert Total.of([Pure(exact(one))]).scaled(100).epsilon(0.0) == 10.0
    advanced = math.sqrt(2 * 100 * math.log(1 / delta)) * one + 100 * one * math.expm1(one)
    assert advanced == pytest.approx(6.3082, abs=6e-5)
    assert laplace_epsilon_rdp(one, releases=100, delta=delta) == pytest.approx(4.9842, abs=6e-5)
    assert laplace_epsilon_pld(one, releases=100, delta=delta) == pytest.approx(4.6927, abs=6e-5)
    assert pure_epsilon_pld(one, releases=100, delta=delta) == pytest.approx(4.7746, abs=6e-5)
    assert Total.of([Pure(exact(one))]).scaled(100).epsilon(delta) < advanced


def test_row_twenty_releases_within_a_total_of_1() -> None:
    """sigma over sensitivity: basic, advanced (half of delta for each kind), zCDP, Renyi, exact."""
    releases, delta = 20, 1e-6
    basic = (1 / releases, delta / releases)
    assert analytic_sigma(*basic) == pytest.approx(82.555, abs=6e-4)
    assert classical_sigma(*basic) == pytest.approx(116.737, abs=6e-4)
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        spent = math.sqrt(2 * releases * math.log(2 / delta)) * middle + releases * middle * math.expm1(middle)
        low, high = (middle, high) if spent <= 1.0 else (low, middle)
    advanced = (low, delta / 2 / releases)
    assert analytic_sigma(*advanced) == pytest.approx(105.236, abs=6e-4)
    assert classical_sigma(*advanced) == pytest.approx(148.322, abs=6e-4)
    # the plain conversion of 2016: epsilon = rho + 2 sqrt(rho ln(1 / delta))
    rho = (math.sqrt(math.log(1 / delta) + 1.0) - math.sqrt(math.log(1 / delta))) ** 2
    assert math.sqrt(releases / (2 * rho)) == pytest.approx(23.926, abs=6e-4)
    # the conversion that our zCDP ledger uses is the Renyi one
    assert zcdp_sigma(1.0, delta) * math.sqrt(releases) == pytest.approx(20.263, abs=6e-4)
    assert analytic_sigma(1.0, delta) * math.sqrt(releases) == pytest.approx(18.8933, abs=6e-5)


def test_row_twenty_releases_agree_with_the_accountants() -> None:
    plan = {"releases": 20, "delta": 1e-6, "neighbours": Neighbours.ADD_OR_REMOVE_ONE}
    assert gaussian_epsilon_rdp(20.263, **plan) == pytest.approx(1.0, abs=1e-3)
    assert gaussian_epsilon_pld(18.8933, **plan) == pytest.approx(1.0, abs=1e-3)


def test_row_poisson_batches() -> None:
    plan = {"releases": 1000, "delta": 1e-5, "sampler": Sampler.POISSON, "rate": 0.01}
    add, replace = Neighbours.ADD_OR_REMOVE_ONE, Neighbours.REPLACE_ONE
    assert gaussian_epsilon_rdp(1.0, **plan, neighbours=add) == pytest.approx(2.1014, abs=6e-5)
    assert gaussian_epsilon_pld(1.0, **plan, neighbours=add) == pytest.approx(1.8282, abs=6e-5)
    assert gaussian_epsilon_pld(1.0, **plan, neighbours=replace) == pytest.approx(2.8434, abs=6e-5)


def test_traps_a_multiplier_of_1_under_both_neighbours() -> None:
    plan = {"releases": 1, "delta": 1e-5}
    add = gaussian_epsilon_pld(1.0, **plan, neighbours=Neighbours.ADD_OR_REMOVE_ONE)
    replace = gaussian_epsilon_pld(1.0, **plan, neighbours=Neighbours.REPLACE_ONE)
    assert add == pytest.approx(4.377178, abs=6e-7)
    assert replace == pytest.approx(9.997256, abs=6e-7)


@pytest.mark.parametrize(("arrives", "epsilon"), [(0.9, 1.0585), (0.7, 1.2123), (0.5, 1.4547)])
def test_row_dropouts_take_their_noise_with_them(arrives: float, epsilon: float) -> None:
    assert gdp_epsilon(1 / (analytic_sigma(1.0, 1e-6) * math.sqrt(arrives)), 1e-6) == pytest.approx(epsilon, abs=6e-5)


# Section 2: Crowd-ML 2015


def test_H1_laplace_scale() -> None:
    """4 / (b epsilon): b=20, epsilon=10 / b=20, epsilon=1 / b=1, epsilon=0.1."""
    for batch, epsilon, scale in ((20, 10, "0.02"), (20, 1, "0.2"), (1, "0.1", "40")):
        assert laplace_scale(Fraction(4, batch), Fraction(epsilon)) == Fraction(scale)


@pytest.mark.parametrize(
    ("epsilon", "delta", "batch", "uses", "sigma"),
    [
        (10.0, 1e-6, 20, 1, 0.0765212),
        (1.0, 1e-6, 20, 1, 0.5974598),
        (1.0, 1e-6, 20, 5, 1.3359608),
        (1.0, 1e-5, 1, 1, 10.5518197),
    ],
)
def test_gaussian_sigma_of_a_softmax_gradient(
    epsilon: float, delta: float, batch: int, uses: int, sigma: float
) -> None:
    """sigma = analytic(epsilon, delta) * 2 sqrt(2) / b; k uses: times sqrt(k)."""
    found = analytic_sigma(epsilon, delta) * 2 * math.sqrt(2) / batch * math.sqrt(uses)
    assert found == pytest.approx(sigma, abs=6e-8)


def test_H2_five_passes_cost_five_times_epsilon() -> None:
    assert Total.of([Pure(Fraction(10))]).scaled(5).epsilon(0.0) == 50.0
    assert pure_epsilon_pld(10.0, releases=5, delta=1e-6) == pytest.approx(50.0, abs=0.05)


def test_H3_label_triggered_sampling_has_no_epsilon() -> None:
    assert Total.of([Pure(Fraction(1)), Unbounded()]).epsilon(1e-6) == math.inf


def test_H5_the_published_counts_are_over_noised_twice() -> None:
    """e^(-epsilon/2 |z|) on a count of sensitivity 1 is epsilon/2-DP, and exactly that."""
    epsilon = 1.0
    published = Fraction(2)
    assert discrete_laplace_delta(epsilon / 2, scale=published, shift=1) <= 1e-15
    assert discrete_laplace_delta(epsilon / 2 - 0.01, scale=published, shift=1) > 0


def test_H5_all_label_counts_together_cost_epsilon_and_no_C_is_needed() -> None:
    """Replace-one moves two cells by 1: the largest log-ratio over both cells is 2 / scale = epsilon_y."""
    row = CountLaplace(L1(Fraction(2)), Fraction(1), covers=Rows(0, 20), promise="labels")
    log_pmf = np.log(DiscreteLaplace(row.scale).pmf(np.arange(-30, 31)))
    one_cell = np.abs(np.diff(log_pmf)).max()  # a shift by one
    assert 2 * one_cell == pytest.approx(1.0, abs=1e-12)
    assert row.loss == Pure(Fraction(1))


def test_H5_the_exact_total_of_the_published_noise() -> None:
    """epsilon_g + epsilon_e / 2 + max over pairs of labels (epsilon_j + epsilon_k) / 2, from the laws as published."""
    gradient, errors, labels = Fraction(8), Fraction(1), [Fraction(1, 10), Fraction(3, 10), Fraction(2, 10)]

    def largest_log_ratio(epsilon: Fraction) -> float:
        pmf = DiscreteLaplace(laplace_scale(Fraction(2), epsilon)).pmf(np.arange(-30, 31))  # e^(-epsilon/2 |z|)
        return float(np.abs(np.diff(np.log(pmf))).max())

    pairs = [largest_log_ratio(a) + largest_log_ratio(b) for a, b in itertools.combinations(labels, 2)]
    total = float(gradient) + largest_log_ratio(errors) + max(pairs)
    assert total == pytest.approx(8 + 1 / 2 + (0.3 + 0.2) / 2, abs=1e-12)
    assert total < gradient + errors + sum(labels)


def test_H6_the_noise_of_a_gradient_has_a_factor_C() -> None:
    """E|z|^2 = 32 D C / (b epsilon)^2: two squared scales a coordinate, D C coordinates."""
    features, classes, batch, epsilon = 50, 10, 20, 10
    scale = laplace_scale(Fraction(4, batch), Fraction(epsilon))
    assert 2 * scale**2 * features * classes == Fraction(32 * features * classes, (batch * epsilon) ** 2)


def test_H7_randomised_response_keeps_a_label_more_often_than_the_paper() -> None:
    def keep(epsilon: str) -> float:
        return float(RandomisedResponse(10, Fraction(epsilon), covers=Rows(0, 1), promise="labels").keep)

    assert keep("5") == pytest.approx(0.943, abs=6e-4)
    assert keep("5/2") == pytest.approx(0.575, abs=6e-4)  # eq. (16) spends half of its epsilon


def test_H8_a_device_of_60_samples_pays_60_times_epsilon() -> None:
    assert group(Pure(Fraction(10)), 60) == Pure(Fraction(600))


@pytest.mark.parametrize(
    ("sensitivity", "alpha", "zero", "variance"),
    [(2, 0.606531, 0.244919, 7.835396), (1, 0.367879, 0.462117, 1.841347)],
    ids=["published count, and sound labels", "sound error count"],
)
def test_discrete_laplace_at_epsilon_1(sensitivity: int, alpha: float, zero: float, variance: float) -> None:
    """P(z) = (1 - alpha) / (1 + alpha) alpha^|z|."""
    scale = laplace_scale(Fraction(sensitivity), Fraction(1))
    law = DiscreteLaplace(scale)
    z = np.arange(-200, 201)
    pmf = law.pmf(z)
    assert math.exp(-1 / scale) == pytest.approx(alpha, abs=6e-7)
    assert pmf[200] == pytest.approx(zero, abs=6e-7)
    assert pmf[201] / pmf[200] == pytest.approx(alpha, abs=6e-7)
    assert (pmf * z**2).sum() == pytest.approx(variance, abs=6e-7)
    assert law.variance == pytest.approx(variance, abs=6e-7)


def test_opendp_maps_our_scales_to_the_same_losses() -> None:
    """`make_laplace(scale=.02).map(.2)` and `make_gaussian(scale=4.224679).map(1.)`."""
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l1_distance(T=float)
    laplace = dp.m.make_laplace(*space, scale=float(laplace_scale(Fraction(4, 20), Fraction(10))))
    assert laplace.map(0.2) == pytest.approx(10.0, rel=1e-9)
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    gaussian = dp.m.make_gaussian(*space, scale=4.224679)
    assert gaussian.map(1.0) == pytest.approx(0.0280145, abs=6e-8)
    assert float(Fraction(1) / (2 * Fraction("4.224679") ** 2)) == pytest.approx(0.0280145, abs=6e-8)
