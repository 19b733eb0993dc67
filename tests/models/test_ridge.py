"""The server's solver: exact without noise, treated eigenvalues with it, and intervals from public rows."""

import math

import numpy as np
import pytest

from crowdml.models.ridge import clean, error_interval, predict, solve, solve_each


def noisy_symmetric(rng, size, deviation):
    half = np.triu(rng.normal(size=(size, size)) * deviation / math.sqrt(2), 1)
    return half + half.T + np.diag(rng.normal(size=size) * deviation)


def made(seed=1, size=200, samples=4000):
    rng = np.random.default_rng(seed)
    spread = np.arange(1, size + 1) ** -0.7
    h = rng.normal(size=(samples, size)) * spread
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    truth = rng.normal(size=(size, 3))
    return rng, h, (h @ truth).argmax(axis=1)


def test_without_noise_it_is_plain_ridge_regression():
    rng, h, _ = made(size=20)
    truth = rng.normal(size=(20, 2))
    assert np.allclose(solve(h.T @ h, h.T @ (h @ truth), 0.0), truth, atol=0.05)


def test_several_rules_solve_the_same_moments_as_each_does_alone():
    rng, h, _ = made(size=20)
    gram, cross = h.T @ h, h.T @ rng.normal(size=(len(h), 2))
    rules = (0.1, 0.35, 2.0)
    found = solve_each(gram, cross, 3.0, rules)
    assert all(np.array_equal(weights, solve(gram, cross, 3.0, c)) for weights, c in zip(found, rules, strict=True))
    assert np.linalg.norm(found[0]) > np.linalg.norm(found[2])


def test_treated_eigenvalues_are_nearer_to_what_the_matrix_is_along_their_vectors():
    rng, h, _ = made()
    gram = h.T @ h
    deviation = 12.0
    noisy = gram + noisy_symmetric(rng, len(gram), deviation)
    values, vectors = clean(noisy, deviation)
    along = np.einsum("ij,ik,kj->j", vectors, gram, vectors)
    untreated = np.linalg.eigvalsh(noisy).clip(min=0.0)
    assert np.abs(values - along).mean() < 0.5 * np.abs(untreated - along).mean()
    assert (values >= 0).all()


def test_the_public_rule_learns_through_noise_that_plain_inversion_does_not_survive():
    rng, h, y = made(samples=20_000)
    labels = np.eye(3)[y]
    deviation = 12.0
    gram = h.T @ h + noisy_symmetric(rng, 200, deviation)
    cross = h.T @ labels + rng.normal(size=(200, 3)) * deviation
    ruled = (predict(solve(gram, cross, deviation), h, 3) != y).mean()
    plain = (predict(np.linalg.solve(gram, cross), h, 3) != y).mean()
    assert ruled < 0.75 * plain


def test_a_prediction_is_the_largest_score_or_the_number_itself():
    weights = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert predict(weights, np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]]), 2).tolist() == [0, 1, 0]
    assert predict(weights[:, :1], np.array([[2.0, 1.0]]), None).tolist() == [2.0]


def test_an_interval_of_an_error_is_wilsons():
    low, high = error_interval(50, 1000)
    assert (low, high) == pytest.approx((0.0381, 0.0653), abs=2e-4)
    assert error_interval(0, 100)[0] == 0
