"""Plans fixed in advance, with the traps of the accounting library; and the exact delta of discrete noise."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import mpmath
import pytest
from oracles import discrete_gaussian_delta, discrete_laplace_delta, laplace_epsilon_pld, pure_epsilon_pld

from crowdml.errors import GuaranteeError, MissingExtra
from crowdml.privacy.accounting import Neighbours, Sampler, gaussian_epsilon_pld, gaussian_epsilon_rdp
from crowdml.privacy.calibration import gaussian_sigma, gdp_epsilon, laplace_scale, rho_for
from crowdml.privacy.losses import ZCDP, Loss, Pure, Total, exact

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
STEPS = (1, 2, 5, 40)  # sensitivity in grid steps: the coarser the grid, the further from continuous noise


def mpmath_hockey_stick(log_weight: Any, shift: int, epsilon: float, reach: int) -> float:
    with mpmath.workdps(50):
        weights = {z: mpmath.exp(log_weight(mpmath.mpf(z))) for z in range(-reach - shift, reach + shift + 1)}
        total = sum(weights[z] for z in range(-reach, reach + 1))
        grown = mpmath.exp(mpmath.mpf(epsilon))
        excess = (weights[z] - grown * weights[z - shift] for z in range(-reach, reach + shift + 1))
        return float(sum(e for e in excess if e > 0) / total)


@pytest.mark.parametrize(("epsilon", "sigma", "shift"), [(1.0, 4.2, 1), (8.0, 0.6, 1), (0.1, 30.0, 3), (3.0, 2.0, 2)])
def test_the_exact_delta_of_the_discrete_gaussian_agrees_with_fifty_digits(
    epsilon: float, sigma: float, shift: int
) -> None:
    expected = mpmath_hockey_stick(lambda z: -((z / sigma) ** 2) / 2, shift, epsilon, int(20 * sigma) + 5)
    assert discrete_gaussian_delta(epsilon, sigma=sigma, shift=shift) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "scale", "shift"), [(0.5, 1.0, 1), (0.05, 10.0, 1), (1.0, 1.5, 3)])
def test_the_exact_delta_of_the_discrete_laplace_agrees_with_fifty_digits(
    epsilon: float, scale: float, shift: int
) -> None:
    expected = mpmath_hockey_stick(lambda z: -abs(z) / scale, shift, epsilon, int(100 * scale))
    assert discrete_laplace_delta(epsilon, scale=scale, shift=shift) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("sensitivity", STEPS)
def test_the_exact_delta_of_the_discrete_gaussian_never_exceeds_what_the_ledger_claims(
    epsilon: float, sensitivity: int
) -> None:
    """Issue: exact hockey-stick sums in one dimension over a grid of (epsilon, step); any shift up to the bound."""
    for delta in (1e-3, 1e-6, 1e-9):
        rho = rho_for(epsilon, delta)
        sigma = gaussian_sigma(Fraction(sensitivity), rho)
        claimed = Total.of([ZCDP(rho)])
        assert claimed.epsilon(delta) <= epsilon
        for shift in sorted({1, (sensitivity + 1) // 2, sensitivity}):
            assert discrete_gaussian_delta(epsilon, sigma=sigma, shift=shift) <= delta
        for other in (1e-12, 1e-8, 1e-5, 1e-2):  # the same noise, read at another delta
            at = claimed.epsilon(other)
            assert discrete_gaussian_delta(at, sigma=sigma, shift=sensitivity) <= other


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("sensitivity", STEPS)
def test_the_exact_delta_of_the_discrete_laplace_is_zero_at_the_epsilon_of_the_ledger(
    epsilon: float, sensitivity: int
) -> None:
    loss = Pure(exact(epsilon))
    scale = laplace_scale(Fraction(sensitivity), loss.epsilon)
    for shift in range(1, sensitivity + 1):
        assert discrete_laplace_delta(epsilon, scale=scale, shift=shift) <= 1e-15  # float64 of an exact zero
        for delta in (1e-9, 1e-6, 1e-3):
            at = Total.of([loss]).epsilon(delta)
            assert discrete_laplace_delta(at, scale=scale, shift=shift) <= delta
    # tight: a little less epsilon, and there is a delta
    assert discrete_laplace_delta(0.99 * epsilon, scale=scale, shift=sensitivity) > 1e-4 * epsilon


@pytest.mark.parametrize("releases", [1, 10, 100])
@pytest.mark.parametrize("sensitivity", [1, 5])
def test_composed_discrete_noise_never_costs_more_than_the_ledger_says(releases: int, sensitivity: int) -> None:
    """The library's own distributions of discrete noise, composed: a gradient and two counts, so many times."""
    distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    delta, rho, pure = 1e-6, Fraction(1, 200), Fraction(1, 20)
    losses: list[Loss] = [ZCDP(rho), Pure(pure), Pure(pure)]
    sigma = float(gaussian_sigma(Fraction(sensitivity), rho))
    gradient = distributions.from_discrete_gaussian_mechanism(
        sigma, sensitivity, value_discretization_interval=1e-3
    ).self_compose(releases)
    count = distributions.from_discrete_laplace_mechanism(
        1 / float(laplace_scale(Fraction(sensitivity), pure)), sensitivity, value_discretization_interval=1e-3
    ).self_compose(2 * releases)
    exact_epsilon = gradient.compose(count).get_epsilon_for_delta(delta)
    claimed = Total.of(losses).scaled(releases).epsilon(delta)
    assert exact_epsilon <= claimed
    assert exact_epsilon >= 0.6 * claimed  # the ledger is not absurdly loose either


# dp-accounting traps (review, section 0)


def test_replace_one_doubles_the_sensitivity_whichever_accountant_is_asked() -> None:
    """Review, section 0: `PLDAccountant` doubles it itself; `RdpAccountant` does not, so we do."""
    for multiplier in (1.0, 4.0):
        replace = {"releases": 1, "delta": 1e-5, "neighbours": Neighbours.REPLACE_ONE}
        add = {"releases": 1, "delta": 1e-5, "neighbours": Neighbours.ADD_OR_REMOVE_ONE}
        for account in (gaussian_epsilon_pld, gaussian_epsilon_rdp):
            assert account(multiplier, **replace) == pytest.approx(account(multiplier / 2, **add), rel=1e-3)
        assert gaussian_epsilon_pld(multiplier, **replace) == pytest.approx(gdp_epsilon(2 / multiplier, 1e-5), rel=1e-3)
        assert gaussian_epsilon_rdp(multiplier, **replace) >= gaussian_epsilon_pld(multiplier, **replace)


def test_renyi_accounting_refuses_poisson_batches_under_replace_one() -> None:
    with pytest.raises(GuaranteeError, match="gaussian_epsilon_pld"):
        gaussian_epsilon_rdp(
            1.0, releases=10, delta=1e-5, neighbours=Neighbours.REPLACE_ONE, sampler=Sampler.POISSON, rate=0.01
        )


def test_the_library_itself_still_refuses_it() -> None:
    """If it ever learns it, ours can too."""
    library, rdp = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    assert not accountant.supports(library.PoissonSampledDpEvent(0.01, library.GaussianDpEvent(1.0)))


@pytest.mark.parametrize("sampler", [Sampler.SHUFFLED, Sampler.CONSECUTIVE])
@pytest.mark.parametrize("account", [gaussian_epsilon_pld, gaussian_epsilon_rdp])
def test_shuffled_and_consecutive_batches_are_never_accounted_as_poisson(account: Any, sampler: Sampler) -> None:
    with pytest.raises(GuaranteeError, match="Chua et al"):
        account(1.0, releases=10, delta=1e-5, neighbours=Neighbours.ADD_OR_REMOVE_ONE, sampler=sampler, rate=0.01)


@pytest.mark.parametrize(
    ("sampler", "rate"), [(Sampler.EVERYTHING, 0.01), (Sampler.POISSON, 0.0), (Sampler.POISSON, 2.0)]
)
def test_a_rate_that_does_not_fit_its_sampler_is_refused(sampler: Sampler, rate: float) -> None:
    with pytest.raises(GuaranteeError, match="rate"):
        gaussian_epsilon_pld(1.0, releases=1, delta=1e-5, neighbours=Neighbours.REPLACE_ONE, sampler=sampler, rate=rate)


@pytest.mark.parametrize(("multiplier", "releases", "delta"), [(0.0, 1, 1e-5), (1.0, 0, 1e-5), (1.0, 1, 0.0)])
def test_a_plan_that_makes_no_sense_is_refused(multiplier: float, releases: int, delta: float) -> None:
    with pytest.raises(GuaranteeError, match="plan"):
        gaussian_epsilon_pld(multiplier, releases=releases, delta=delta, neighbours=Neighbours.REPLACE_ONE)


def test_any_pure_mechanism_costs_at_least_what_laplace_costs_and_at_most_the_ledger() -> None:
    for releases in (1, 10, 50):
        any_pure = pure_epsilon_pld(0.1, releases=releases, delta=1e-6)
        assert laplace_epsilon_pld(0.1, releases=releases, delta=1e-6) <= any_pure + 1e-4
        assert any_pure <= Total.of([Pure(Fraction(1, 10))]).scaled(releases).epsilon(1e-6) + 1e-4


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["dp_accounting", *(name for name in sys.modules if name.startswith("dp_accounting."))]:
        monkeypatch.setitem(sys.modules, name, None)  # how Python marks a module that cannot be imported
    with pytest.raises(MissingExtra, match=r"crowdml\[sim\]"):
        pure_epsilon_pld(0.1, releases=1, delta=1e-6)


def test_importing_the_accounting_of_a_device_imports_no_heavy_library() -> None:
    code = (
        "import sys, crowdml.privacy.losses, crowdml.privacy.calibration, crowdml.privacy.accounting\n"
        "heavy = {'scipy', 'dp_accounting', 'mpmath', 'jax', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
