"""What a device adds up, without JAX: slopes against differences, shares held to the clip, bounds with a bias."""

import itertools

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.models import LeastSquares, Linear, Logistic, Mlp, SmoothSvm, Softmax, Svm

ACTIVATIONS, HEADS = ("relu", "tanh", "sigmoid"), [("softmax", 3), ("squared", 3), ("squared", None)]
PERCEPTRONS = [Mlp(4, c, (5, 4), 3, each, top) for each, (top, c) in itertools.product(ACTIVATIONS, HEADS)]
CONVEX = [Softmax(4, 3), Logistic(4), Svm(4, bias=True), SmoothSvm(4), Linear(4), LeastSquares(4)]


def draw(model, rows=30):
    rng = np.random.default_rng(1)
    weights = model.start() + 0.7 * rng.normal(size=model.shape)
    y = rng.integers(0, model.classes, rows) if model.classes else rng.uniform(-1, 1, rows)
    return weights, Samples(rng.normal(size=(rows, 4)) * rng.choice([0.01, 1, 10], (rows, 1)), y)


def lengths(rows):
    return np.sqrt((np.asarray(rows, np.float64).reshape(len(rows), -1) ** 2).sum(1))


@pytest.mark.parametrize("top", HEADS, ids=lambda head: "-".join(map(str, head)))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_perceptrons_gradient_is_the_slope_of_its_loss(activation, top):
    model = Mlp(4, top[1], (5, 4), 3, activation, top[0])
    weights, samples = draw(model)
    found, step = model.gradients(weights, samples), 1e-6
    for index in range(len(weights)):
        beside = np.eye(len(weights))[index] * step
        slope = (model.losses(weights + beside, samples) - model.losses(weights - beside, samples)) / (2 * step)
        near = np.abs(found[:, index] - slope) <= 1e-4 * (1 + np.abs(slope))
        assert near.mean() > 0.95, index  # a sample may lie at a ReLU's kink


@pytest.mark.parametrize("model", [*PERCEPTRONS, *CONVEX], ids=repr)
def test_each_share_of_a_clipped_sum_is_the_gradient_or_as_long_as_the_clip(model):
    weights, samples = draw(model)
    rows = model.gradients(weights, samples)
    clip = float(np.median(lengths(rows)[lengths(rows) > 0]))
    shares = np.stack([model.clipped_sum(weights, samples[i : i + 1], clip) for i in range(30)])
    short = lengths(rows) <= clip
    assert 3 <= short.sum() <= 27
    np.testing.assert_allclose(shares[short], rows[short], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lengths(shares[~short]), clip, rtol=1e-9)
    np.testing.assert_allclose(model.clipped_sum(weights, samples, clip), shares.sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", ["weights", "biases"])
def test_the_length_of_a_gradient_counts_its_weights_and_its_biases(part):
    """x = 0: of the first layer the biases alone move; a large x: the weights outweigh all else."""
    model = Mlp(1, 2, (1,), 1, "tanh", "squared")
    weights = np.array([0.0, 0.5, 1.0, -1.0, 0.0, 0.0])
    sample = Samples(np.array([[0.0 if part == "biases" else 1e4]]), np.array([0]))
    row, share = model.gradients(weights, sample)[0], model.clipped_sum(weights, sample, 1e-2)
    np.testing.assert_allclose(share, row * 1e-2 / np.sqrt((row**2).sum()), rtol=1e-9)


def test_a_slope_whose_square_vanishes_is_clipped_all_the_same():
    """1e14 enters the top and its slope is 1e-25: the square of that is no float32, and the gradient is 1e-11."""
    model = Mlp(1, None, (1,), 1, "relu", "squared")
    weights = np.array([1e14, 0, 0, 1e-25], np.float32)
    sample = Samples(np.ones((1, 1), np.float32), np.zeros(1, np.float32))
    assert lengths(model.gradients(weights, sample))[0] == pytest.approx(1e-11, rel=1e-3)
    assert lengths([model.clipped_sum(weights, sample, 1e-13)])[0] <= 1e-13 * (1 + 1e-5)
    model = LeastSquares(2)
    weights, sample = np.array([0, 1e15], np.float32), Samples(np.array([[0.0, 1e-25]], np.float32), np.ones(1))
    assert lengths([model.clipped_sum(weights, sample, 1e-28)])[0] <= 1e-28 * (1 + 1e-5)


@pytest.mark.parametrize("model", [*PERCEPTRONS, *CONVEX], ids=repr)
def test_what_cannot_be_used_adds_nothing_to_a_clipped_sum(model):
    weights, samples = draw(model)
    x, y = samples.x.copy(), samples.y.astype(float)
    x[1, 2], x[2, 0], x[3, 1], y[4], y[5] = np.nan, np.inf, -np.inf, 99, np.nan
    left = np.r_[0, 6:30]
    found = model.clipped_sum(weights, Samples(x, y), 0.5)
    expected = model.clipped_sum(weights, Samples(x[left], y[left]), 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("make", [Logistic, Svm, SmoothSvm, Linear, lambda d, bias: Softmax(d, 2, bias=bias)])
def test_no_gradient_is_longer_than_its_bound_with_a_bias_and_some_come_near(make, norm):
    model, order = make(3, bias=True), 1 if norm == "l1" else 2
    x = np.concatenate([np.eye(3), -np.eye(3)])
    for radius in (0.1, 1.0, 5.0):
        samples = Samples(radius * x, np.array([0, 1] * 3))
        weights = np.full(4, 50.0) if len(model.shape) == 1 else np.outer(np.full(4, 50.0), [-1, 1])
        rows = np.concatenate([model.gradients(sign * weights, samples) for sign in (1, -1)])
        rows = rows.reshape(len(rows), -1)
        longest, bound = np.linalg.norm(rows, order, axis=1).max(), model.gradient_bound(norm, radius)
        assert 0.9 * bound <= longest <= bound * (1 + 1e-12)
