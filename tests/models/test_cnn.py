"""The convolutional network: against autodiff of a network by the book, clipped, and quiet on bad input."""

from __future__ import annotations

import hashlib
import math
import warnings
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.errors import TaskError
from crowdml.models import Cnn, describe_model, make_model

MODELS = [
    Cnn(36, 3, 5, (2, 3), 3, (4,)),
    Cnn(49, 3, 1, (2,), 5, (4, 3)),  # the last row and column are pooled away
]
B = 6
by_model = pytest.mark.parametrize("model", MODELS, ids=repr)


def draw(model, seed=1, dtype=np.float64):
    chance = np.random.default_rng(seed)
    weights = (model.start() + 0.1 * chance.normal(size=model.shape)).astype(dtype)
    x = chance.normal(size=(B, model.dimension)).astype(dtype) / model.side
    return weights, x, chance.integers(0, model.classes, B)


def by_the_book(model, weights, x):
    """Scores by JAX's own convolution and pooling, from the flat weights: no helper of the model."""
    at, maps = 0, x.reshape(-1, model.side, model.side, 1) * model.side

    def take(*shape):
        nonlocal at
        at += math.prod(shape)
        return weights[at - math.prod(shape) : at].reshape(shape)

    channels = 1
    for filters in model.filters:
        kernel, biases = take(model.size, model.size, channels, filters), take(filters)
        form = ("NHWC", "HWIO", "NHWC")
        answers = jax.lax.conv_general_dilated(maps, kernel, (1, 1), "SAME", dimension_numbers=form) + biases
        pooled = jax.lax.reduce_window(answers, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        maps, channels = jax.nn.relu(pooled), filters
    a = maps.reshape(len(x), -1)
    for units in model.hidden:
        a = jax.nn.relu(a @ take(a.shape[1], units) + take(units))
    scores = a @ take(a.shape[1], model.classes) + take(model.classes)
    assert at == len(weights)
    return scores


@cache
def oracle(model):
    def loss(weights, x, y):
        return -jax.nn.log_softmax(by_the_book(model, weights, x[None])[0])[y]

    return jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0, 0)))


def say(model, w, x, y, clip):
    samples = Samples(x, y)
    sums = model.gradient_sum(w, samples), model.clipped_sum(w, samples, clip)
    return (model.losses(w, samples), model.gradients(w, samples), *sums, model.scores(w, x), model.predict(w, x),
            model.mistakes(w, samples), model.label_cells(samples))  # fmt: skip


compiled = cache(lambda model: jax.jit(partial(say, model)))


@by_model
def test_losses_and_gradients_equal_those_of_autodiff_on_numpy_and_compiled(model):
    weights, x, y = draw(model)
    with jax.enable_x64(True):
        losses, gradients = map(np.asarray, oracle(model)(weights, x, y))
        scores = np.asarray(by_the_book(model, weights, x))
        lengths = np.linalg.norm(gradients, axis=1)
        clip = float(np.median(lengths))
        assert lengths.min() < 0.99 * clip < 1.01 * clip < lengths.max()
        held = gradients * np.minimum(1, clip / lengths)[:, None]
        for said in (say(model, weights, x, y, clip), map(np.asarray, compiled(model)(weights, x, y, clip))):
            found = list(said)
            for got, wanted in zip(found[:5], (losses, gradients, gradients.sum(0), held.sum(0), scores), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)
            assert found[5].tolist() == scores.argmax(1).tolist()
            assert found[6].tolist() == (scores.argmax(1) != y).astype(int).tolist()
            assert found[7].tolist() == np.eye(model.classes)[y].tolist()


@by_model
def test_in_float32_it_keeps_its_type_and_agrees(model):
    weights, x, y = draw(model, dtype=np.float32)
    _, gradients = map(np.asarray, oracle(model)(weights, x, y))
    found = model.gradients(weights, Samples(x, y))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, gradients, rtol=1e-3, atol=1e-4)


@by_model
def test_one_share_of_a_clipped_sum_is_no_longer_than_the_clip(model):
    weights, x, y = draw(model, dtype=np.float32)
    for clip in (1e-3, 0.5, 1e6):
        for row in range(B):
            one = Samples(x[row : row + 1], y[row : row + 1])
            share, whole = model.clipped_sum(weights, one, clip), model.gradient_sum(weights, one)
            assert np.linalg.norm(share.astype(np.float64)) <= clip * (1 + 1e-5)
            np.testing.assert_allclose(share, whole * min(1, clip / np.linalg.norm(whole)), rtol=1e-4, atol=1e-6)


@by_model
@pytest.mark.parametrize("spread", [1.0, 1e3, 1e12, 1e30])
def test_bad_pixels_strange_labels_and_huge_weights_give_nothing_and_no_warning(model, spread):
    weights, x, _ = draw(model, dtype=np.float32)
    weights = (spread * weights.astype(np.float64)).clip(-3e38, 3e38).astype(np.float32)
    x[1, 2], x[2, 0], x[3, 1] = np.nan, np.inf, 1e30
    samples = Samples(x, np.array([0, 1, 2, 0, 7, -1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = say(model, weights, samples.x, samples.y, 0.5)
    for values in (found, [*map(np.asarray, compiled(model)(weights, samples.x, samples.y, 0.5))]):
        assert all(np.isfinite(each).all() for each in values)
        assert not values[1][1:].any()
        assert np.linalg.norm(values[3].astype(np.float64)) <= 0.5 * (1 + 1e-5)
        assert values[6][4:].tolist() == [0, 0]
        assert not values[7][4:].any()


def test_first_weights_are_public_numbers_of_the_seed():
    model = MODELS[0]
    stream = hashlib.sha256(b"crowdml/cnn/1\0" + (5).to_bytes(8, "little") + bytes(8)).digest()
    first = np.frombuffer(stream, "<u4")[:2]
    wanted = ((first >> 8) * 2.0**-23 - 1) * math.sqrt(6 / 9)
    np.testing.assert_allclose(model.start()[:2], wanted, rtol=1e-6)
    assert not np.array_equal(model.start(), Cnn(36, 3, 6, (2, 3), 3, (4,)).start())
    kernels = [kernel for kernel, _ in model.layers(model.start())]
    assert [each.shape for each in kernels] == [(3, 3, 1, 2), (3, 3, 2, 3), (3, 4), (4, 3)]
    for kernel in kernels[:2]:
        assert 0.5 < np.abs(kernel).max() / math.sqrt(6 / math.prod(kernel.shape[:3])) <= 1


def test_the_usual_one_has_two_convolutions_two_poolings_and_a_hidden_layer_of_128():
    model = make_model("cnn", 784, 10)
    assert model.shape == (25 * 16 + 16 + 25 * 16 * 32 + 32 + 7 * 7 * 32 * 128 + 128 + 1280 + 10,)
    assert describe_model("cnn", model) == "cnn 16-32-128-10, filters of 5 by 5, 215,370 weights"
    assert make_model("cnn", 64, 10, filters=[4], size=3, hidden=[8], seed=2) == Cnn(64, 10, 2, (4,), 3, (8,))


@pytest.mark.parametrize(
    ("dimension", "classes", "settings", "why"),
    [
        (63, 3, {}, "features.dimension = 63 is no square"),
        (64, None, {}, "Use 'mlp' to predict a number"),
        (9, 3, {}, "2 poolings leave nothing of a picture of 3 by 3 pixels"),
        (64, 3, {"size": 4}, "size = 4 is not an odd number from 1 to 15"),
        (64, 3, {"size": 17}, "is not an odd number"),
        (64, 3, {"filters": []}, "not a list of the filters"),
        (64, 3, {"filters": [2, 0]}, "not a list of the filters"),
        (64, 3, {"hidden": 128}, "not a list of the units"),
        (64, 3, {"seed": -1}, "seed = -1"),
        (64, 3, {"filter": [2]}, r"no setting 'filter'\. Did you mean 'filters'"),
        (784, 10, {"filters": [10_000, 10_000]}, "at most 10,000,000"),
    ],
)
def test_what_it_cannot_be_is_said(dimension, classes, settings, why):
    with pytest.raises(TaskError, match=why):
        make_model("cnn", dimension, classes, **settings)


def test_its_gradient_has_no_bound():
    with pytest.raises(TaskError, match=r"protocol\.clip"):
        MODELS[0].gradient_bound("l2", 1.0)
    assert not MODELS[0].bounded
    assert not MODELS[0].convex
    assert MODELS[0].smoothness(1.0) is None
