"""Proportions from noisy counts: projection, shrinkage, and the errors that the privacy review measured."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.errors import UnknownName
from crowdml.features.series import label
from crowdml.models.proportions import RULES, project, proportions, shrink, spread

SCATS = Path(os.environ.get("CROWDML_DATA", "")) / "traffic_scats_boroondara_2006.npz"
EDGES = (5, 30, 60, 150)


def laplace(epsilon: float, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Discrete Laplace noise for counts of a batch of public size, and its variance: review, section 3."""
    alpha = np.exp(-epsilon / 2)
    return rng.geometric(1 - alpha, shape) - rng.geometric(1 - alpha, shape), 2 * alpha / (1 - alpha) ** 2


def test_the_projection_of_the_review():
    assert project([0.6, 0.7, -0.2]).tolist() == pytest.approx([0.45, 0.55, 0])


@given(arrays(np.float64, (3, 5), elements=st.floats(-50, 50)), arrays(np.float64, 5, elements=st.floats(0.01, 1)))
def test_a_projection_is_on_the_simplex_and_no_other_point_of_it_is_nearer(q, other):
    p = project(q)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(axis=-1), 1, atol=1e-9)
    other = other / other.sum()
    assert (((q - p) ** 2).sum(-1) <= ((q - other) ** 2).sum(-1) + 1e-9).all()
    np.testing.assert_allclose(project(p), p, atol=1e-12)


def test_shrinkage_is_the_formula():
    counts = np.array([[10, 20, 2], [14, 14, 4], [22, 8, 2], [18, 14, 0]])
    variance, batch = 9.0, 32
    q = counts / batch
    tau = np.maximum(q.var(axis=0, ddof=1) - variance / batch**2, 0)
    assert tau.min() == 0
    assert tau.max() > 0
    np.testing.assert_allclose(spread(counts, batch, variance), tau)
    kept = tau / (tau + variance / batch**2)
    np.testing.assert_allclose(shrink(counts, batch, variance), project(q.mean(0) + kept * (q - q.mean(0))))


def test_the_spread_is_found_through_the_noise():
    rng = np.random.default_rng(1)
    counts = rng.multinomial(64, rng.dirichlet([2, 2, 2]), 1)[0] + rng.integers(-9, 10, (20_000, 3))
    noise, variance = laplace(0.5, counts.shape, rng)
    np.testing.assert_allclose(spread(counts + noise, 64, variance), counts.var(axis=0) / 64**2, rtol=0.1)


def test_counts_without_noise_are_their_own_proportions_whatever_the_rule():
    counts = np.array([[10, 20, 2], [14, 14, 4], [31, 1, 0]])
    for rule in RULES:
        np.testing.assert_allclose(proportions(counts, 32, 0.0, rule), counts / 32, atol=1e-4)


@pytest.mark.parametrize("counts", [np.full((1, 3), -40), np.zeros((4, 3)), np.zeros((0, 3)), np.full((2, 3), 10**6)])
@pytest.mark.parametrize("rule", RULES)
def test_whatever_the_noise_did_proportions_are_proportions(counts, rule):
    q = proportions(counts, 8, 800.0, rule)
    assert q.shape == counts.shape
    if rule != "raw":
        assert (q >= 0).all()
        np.testing.assert_allclose(q.sum(axis=1), 1)


def test_the_rule_follows_the_noise():
    rng = np.random.default_rng(2)
    counts = np.array([rng.multinomial(32, each) for each in rng.dirichlet([1, 1, 1], 90)])
    for epsilon, rule in ((0.05, "shrink"), (3.0, "project")):
        noise, variance = laplace(epsilon, counts.shape, rng)
        ours = proportions(counts + noise, 32, variance)
        np.testing.assert_array_equal(ours, proportions(counts + noise, 32, variance, rule))
        other = proportions(counts + noise, 32, variance, "shrink" if rule == "project" else "project")
        assert abs(ours - counts / 32).sum(1).mean() < abs(other - counts / 32).sum(1).mean()


def test_an_unknown_rule_is_refused_with_those_that_exist():
    with pytest.raises(UnknownName, match="auto, project, shrink, clip, raw"):
        proportions(np.zeros((1, 2)), 8, 1.0, "guess")  # pyright: ignore[reportArgumentType]


MEASURED = {  # review, section 6: clip, project, shrink towards one mean of all 40 sensors, the true mean of all
    (0.1, 8): (1.335, 1.447, 1.267, 1.267),
    (0.1, 32): (0.978, 1.073, 0.905, 0.954),
    (0.1, 128): (0.528, 0.512, 0.403, 0.546),
    (1.0, 8): (0.644, 0.530, 0.736, 1.267),
    (1.0, 32): (0.234, 0.197, 0.226, 0.954),
    (1.0, 128): (0.071, 0.066, 0.066, 0.546),
}


@pytest.mark.skipif(not SCATS.is_file(), reason="set CROWDML_DATA to the folder with the SCATS counts")
@pytest.mark.parametrize(("epsilon", "batch"), MEASURED)
def test_the_errors_that_the_review_measured_come_out_again(epsilon, batch):
    """And where noise rules, to shrink towards the mean of one device, as devices do, is better than any of them."""
    with np.load(SCATS) as stored:
        labels = label(stored["flow"][:40].reshape(40, -1), EDGES)
    batches = labels.shape[1] // batch
    labels = labels[:, : batches * batch].reshape(40, batches, batch)
    counts = (labels[..., None] == np.arange(5)).sum(axis=2)
    noise, variance = laplace(epsilon, counts.shape, np.random.default_rng(1))
    noisy = counts + noise

    def error(found) -> float:
        return float(abs(np.reshape(found, counts.shape) - counts / batch).sum(-1).mean())

    pooled = noisy.reshape(-1, 5)
    found = [error(proportions(pooled, batch, variance, rule)) for rule in ("clip", "project", "shrink")]
    found.append(error(np.broadcast_to((counts / batch).mean((0, 1)), counts.shape)))
    assert found == pytest.approx(MEASURED[epsilon, batch], abs=0.03)
    if epsilon == 0.1:
        assert error([proportions(each, batch, variance) for each in noisy]) < min(found)
