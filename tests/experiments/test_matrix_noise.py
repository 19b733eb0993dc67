"""Correlated noise for a trusted server: factorisations, what they cost, what they save, and who may not use them."""

import math

import jax
import numpy as np
import pytest

from crowdml.errors import GuaranteeError, TaskError
from crowdml.experiments.published.matrix_noise import (
    KINDS,
    banded,
    factorise,
    independent,
    require_trusted,
    square_root,
    tree,
)
from crowdml.privacy.sensitivity import Observer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 2, 7, 16, 33])
def test_every_factorisation_gives_prefix_sums(kind, rounds):
    made = factorise(kind, rounds)
    np.testing.assert_allclose(made.decode @ made.encode, np.tril(np.ones((rounds, rounds))), atol=1e-9)
    np.testing.assert_allclose(np.cumsum(made.increments, axis=0), made.decode, atol=1e-12)


@pytest.mark.parametrize(("rounds", "gain"), [(60, 2.5), (300, 4.5), (1000, 7.2)])
def test_the_square_root_saves_what_the_review_says(rounds, gain):
    """Root mean square noise of prefix sums at equal loss, one participation."""
    assert independent(rounds).error / square_root(rounds).error == pytest.approx(gain, abs=0.06)


def test_a_tree_saves_less_than_the_square_root_and_more_than_nothing():
    assert square_root(300).error < tree(300).error < independent(300).error
    assert tree(8).sensitivity() == pytest.approx(2.0)  # four nodes above each round but the last
    assert independent(100).error == pytest.approx(math.sqrt(101 / 2))


def test_sensitivity_of_one_device_is_the_longest_column_and_more_for_those_who_come_back():
    made = banded(64, 8)
    column = made.encode[:, 5]
    assert made.sensitivity() == pytest.approx(np.linalg.norm(column))
    assert made.sensitivity(4, separation=8) == pytest.approx(2 * made.sensitivity())
    assert made.sensitivity(4, separation=7) == pytest.approx(4 * made.sensitivity())
    rng = np.random.default_rng(1)
    for _ in range(20):  # no pattern of four rounds, eight apart, moves C x further
        rounds = np.cumsum(rng.integers(8, 15, 4))
        signs = rng.choice([-1.0, 1.0], 4)
        assert np.linalg.norm(made.encode[:, rounds] @ signs) <= made.sensitivity(4, separation=8) + 1e-12
        near = np.sort(rng.choice(64, 4, replace=False))
        assert np.linalg.norm(made.encode[:, near] @ signs) <= made.sensitivity(4) + 1e-12


def test_loss_and_deviation_are_inverse_and_the_noise_has_the_covariance_of_the_factorisation():
    made = square_root(12)
    sigma = made.sigma(2.0, 0.1)
    assert float(made.loss(2.0, sigma).rho) == pytest.approx(0.1)
    drawn = np.asarray(made.noise(jax.random.PRNGKey(5), 40_000, sigma, observer=Observer.DEVICES))
    sums = np.cumsum(drawn, axis=0)
    np.testing.assert_allclose(sums @ sums.T / 40_000, sigma**2 * made.decode @ made.decode.T, rtol=0.05, atol=2.0)
    plain = independent(12)
    assert sums[-1].std() < 0.75 * math.sqrt(12) * plain.sigma(2.0, 0.1)


@pytest.mark.parametrize(("observer", "word"), [(Observer.AGGREGATE, "masks"), (Observer.ANYONE, "on devices")])
def test_under_masks_and_on_devices_correlated_noise_is_refused(observer, word):
    with pytest.raises(GuaranteeError, match=word):
        require_trusted(observer)
    with pytest.raises(GuaranteeError, match=word):
        square_root(4).noise(jax.random.PRNGKey(1), 3, 1.0, observer=observer)


def test_an_unknown_factorisation_and_senseless_bands_are_refused():
    with pytest.raises(TaskError, match="square-root"):
        factorise("cubic", 4)
    with pytest.raises(TaskError, match="bands"):
        banded(4, 5)
    with pytest.raises(TaskError, match="participations"):
        square_root(4).sensitivity(0)
