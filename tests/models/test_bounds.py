"""The bounds that privacy rests on: never passed, nearly reached, and no NaN for any weights or samples."""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from crowdml.arrays import Samples
from crowdml.errors import TaskError
from crowdml.models import LeastSquares, Linear, Logistic, SmoothSvm, Softmax, Svm

D, C = 4, 3
MODELS = [
    Softmax(D, C),
    Logistic(D),
    Svm(D),
    SmoothSvm(D),
    SmoothSvm(D, width=0.05),
    Linear(D),
    Linear(D, width=3.0, bound=2.0),
    Svm(D, bias=True),
    SmoothSvm(D, width=0.25, bias=True),
    Logistic(D, bias=True),
    Softmax(D, C, bias=True),
    Linear(D, width=2.0, bias=True),
]
NORMS = ["l1", "l2"]
CLIP = 1e-3
NASTY = [0.0, -0.0, 1.0, -1.0, 1e-30, 1000.0, -1000.0, 1e18, -1e30, 1e30, 3e38, -3e38, np.inf, -np.inf, np.nan]
by_model = pytest.mark.parametrize("model", MODELS, ids=repr)
by_norm = pytest.mark.parametrize("norm", NORMS)
compiled = {model: jax.jit(lambda w, x, y, m=model: m.gradients(w, Samples(x, y))) for model in MODELS}
clipped = {
    model: jax.jit(lambda w, x, y, m=model: m.clipped_sum(w, Samples(x, y), CLIP))
    for model in [*MODELS, LeastSquares(D)]
}


def size(gradients, norm):
    """Norm of each row, in float64."""
    rows = np.asarray(gradients, np.float64).reshape(len(gradients), -1)
    return np.abs(rows).sum(1) if norm == "l1" else np.sqrt((rows**2).sum(1))


def labels(model):
    return list(range(model.classes)) if model.classes else [-model.bound, 0.0, model.bound]


def worst_samples(model, norm, radius):
    """Vertices of the ball and points inside its faces, both signs, with every label."""
    corners = np.concatenate([np.eye(D), -np.eye(D)])
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=D)))
    inside = np.random.default_rng(0).normal(size=(30, D))
    x = np.concatenate([corners, signs, inside])
    x = radius * x / size(x, norm)[:, None]
    rows, ys = zip(*itertools.product(x, labels(model)), strict=True)
    return Samples(np.array(rows), np.array(ys))


def worst_weights(model):
    """Zero, small, at the kinks, and huge, with entries of one sign and of both."""
    rng = np.random.default_rng(1)
    yield np.zeros(model.shape)
    for scale in (0.3, 1.0, 3.0, 30.0, 1000.0, 1e10, 1e29):
        yield np.full(model.shape, scale)
        for _ in range(6):
            yield scale * rng.normal(size=model.shape)
            yield scale * rng.choice([-1.0, 1.0], size=model.shape)


@by_model
@by_norm
@pytest.mark.parametrize("radius", [1.0, 0.125])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_gradient_never_passes_its_bound_and_comes_within_a_tenth_of_it(model, norm, radius, dtype):
    samples = worst_samples(model, norm, radius)
    samples = Samples(samples.x.astype(dtype), samples.y)
    found = max(size(model.gradients(w.astype(dtype), samples), norm).max() for w in worst_weights(model))
    bound = model.gradient_bound(norm, radius)
    assert found <= bound * (1 + 1e-6)
    assert found >= 0.9 * bound


@by_model
@by_norm
def test_replacing_one_sample_moves_the_sum_of_a_batch_by_at_most_twice_the_bound_and_can_do_it(model, norm):
    samples, bound = worst_samples(model, norm, 1.0), model.gradient_bound(norm, 1.0)
    rng = np.random.default_rng(2)
    largest = 0.0
    for weights in worst_weights(model):
        rows = model.gradients(weights, samples).reshape(len(samples), -1)
        first, second = rows[rng.integers(len(rows), size=(2, 4000))]
        largest = max(largest, size(first - second, norm).max())
    assert largest <= 2 * bound * (1 + 1e-6)
    assert largest >= 0.9 * 2 * bound


@pytest.mark.parametrize("b", [1, 4, 20])
def test_h1_replacing_a_sample_moves_the_mean_softmax_gradient_by_4_over_b_in_l1(b):
    """Review H1: |x|_1 <= 1 gives 4/b, uniformly in w, and a pair of neighbours attains it."""
    model = Softmax(2, 4)
    weights = np.zeros((2, 4))
    weights[0] = [50.0, -50.0, -50.0, -50.0]  # x = e_0 is surely class 0
    weights[1] = [-50.0, -50.0, 50.0, -50.0]  # x = e_1 is surely class 2
    others = Samples(np.tile([[0.5, 0.5]], (b - 1, 1)), np.zeros(b - 1, int))

    def mean(x, y):
        batch = Samples(np.concatenate([[x], others.x]), np.concatenate([[y], others.y]))
        return model.gradients(weights, batch).sum(0) / b

    moved = np.abs(mean([1.0, 0.0], 1) - mean([0.0, 1.0], 3)).sum()
    assert moved == pytest.approx(4 / b, rel=1e-9)
    assert moved <= 2 * model.gradient_bound("l1", 1.0) / b * (1 + 1e-12)


@by_model
def test_a_gradient_changes_no_faster_with_the_weights_than_its_smoothness_and_nearly_as_fast(model):
    bound = model.smoothness(1.0)
    if bound is None:
        pytest.skip("the plain hinge jumps at its kink")
    samples, rng = worst_samples(model, "l2", 1.0), np.random.default_rng(4)
    fastest = 0.0
    tame = [weights for weights in worst_weights(model) if np.abs(weights).max() < 1e3]  # 1e-4 is a step there
    for weights in tame + [0.1 * rng.normal(size=model.shape) for _ in range(40)]:
        for row in samples.x[:: len(labels(model))]:  # along the sample is where it changes fastest
            sample = np.append(row, 1.0) if model.shape[0] == D + 1 else row
            step = 1e-4 * (np.outer(sample, rng.normal(size=model.shape[1])) if weights.ndim == 2 else sample)
            moved = size(model.gradients(weights + step, samples) - model.gradients(weights, samples), "l2")
            fastest = max(fastest, moved.max() / np.sqrt((step**2).sum()))
    assert fastest <= bound * (1 + 1e-6)
    assert fastest >= (0.9 if not isinstance(model, Softmax) else 0.6) * bound


def test_g5_the_smoothed_hinge_is_as_smooth_as_its_public_width_says_and_the_plain_one_is_not():
    assert SmoothSvm(5, width=0.25).smoothness(1.0) == 4
    assert Svm(5).smoothness(1.0) is None
    assert Logistic(5).smoothness(1.0) == 0.25
    assert Linear(5).smoothness(2.0) == 4


def test_g4_the_squared_loss_has_no_bound_and_says_what_to_use_instead():
    with pytest.raises(TaskError, match="Use 'linear'"):
        LeastSquares(5).gradient_bound("l2", 1.0)
    sample = Samples(np.array([[1.0]]), np.array([1.0]))
    lengths = [abs(float(LeastSquares(1).gradients(np.array([size]), sample)[0, 0])) for size in (1.0, 10.0, 1e6)]
    assert lengths == [0.0, 18.0, pytest.approx(2e6, rel=1e-5)]


def test_the_bounds_are_those_of_the_review():
    assert Softmax(5, 10).gradient_bound("l1", 1.0) == 2
    assert Softmax(5, 10).gradient_bound("l2", 1.0) == math.sqrt(2)
    for model in (Logistic(5), Svm(5), SmoothSvm(5), Linear(5)):
        assert model.gradient_bound("l1", 1.0) == model.gradient_bound("l2", 1.0) == 1
    assert Linear(5, width=0.5).gradient_bound("l2", 2.0) == 1


def test_a_bias_is_one_feature_more_in_every_bound():
    for make in (Logistic, Svm, SmoothSvm):
        model = make(5, bias=True)
        assert model.shape == (6,)
        assert model.gradient_bound("l1", 2.0) == 3
        assert model.gradient_bound("l2", 2.0) == math.sqrt(5)
    assert Logistic(5, bias=True).smoothness(2.0) == pytest.approx(5 / 4)
    assert SmoothSvm(5, width=0.25, bias=True).smoothness(2.0) == pytest.approx(20)


def test_a_bias_moves_with_a_zero_row_and_not_with_a_broken_one():
    model = Svm(2, bias=True)
    samples = Samples(np.array([[0.0, 0.0], [np.nan, 0.0], [3.0, 4.0]]), np.array([1, 1, 0]))
    rows = model.gradients(np.array([0.0, 0.0, 0.5]), samples)
    assert rows.tolist() == [[0, 0, -1], [0, 0, 0], [3, 4, 1]]
    assert model.predict(np.array([0.0, 0.0, 0.5]), samples.x).tolist() == [1, 0, 1]
    share = model.clipped_sum(np.array([0.0, 0.0, 0.5]), samples[2:], 1.0)
    np.testing.assert_allclose(share, np.array([3, 4, 1]) / math.sqrt(26))


finite_or_not = st.one_of(st.sampled_from(NASTY), st.floats(width=32))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), model=st.sampled_from(MODELS))
def test_no_weights_and_no_sample_make_a_gradient_nan_infinite_or_longer_than_its_bound(data, model):
    weights = data.draw(hnp.arrays(np.float32, model.shape, elements=finite_or_not))
    x = data.draw(hnp.arrays(np.float32, (3, D), elements=finite_or_not))
    y = np.array(data.draw(st.lists(st.sampled_from([*labels(model), -1, 7, 2**30]), min_size=3, max_size=3)))
    samples = Samples(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_numpy = model.gradients(weights, samples)
        losses, guess = model.losses(weights, samples), model.predict(weights, x)
        model.mistakes(weights, samples)
        model.label_cells(samples)
    assert not np.isnan(losses).any()
    assert not np.isnan(guess).any()
    on_jax = np.asarray(compiled[model](jnp.asarray(weights), jnp.asarray(x), jnp.asarray(y)))
    for gradients in (on_numpy, on_jax):
        assert np.isfinite(gradients).all()
        for norm in NORMS:
            usable = np.isfinite(x).all(1)
            lengths = size(np.where(usable[:, None], x, 0), norm)
            bounds = [model.gradient_bound(norm, max(1e-37, length)) for length in lengths]
            assert (size(gradients, norm) <= np.array(bounds) * (1 + 1e-6)).all()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), model=st.sampled_from([*MODELS, LeastSquares(D)]))
def test_no_weights_and_no_sample_make_a_clipped_share_nan_or_longer_than_the_clip(data, model):
    weights = data.draw(hnp.arrays(np.float32, model.shape, elements=finite_or_not))
    x = data.draw(hnp.arrays(np.float32, (1, D), elements=finite_or_not))
    y = np.array([data.draw(st.sampled_from([*labels(model), -1, 7, 2**30, np.nan]))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_numpy = model.clipped_sum(weights, Samples(x, y), CLIP)
    on_jax = clipped[model](jnp.asarray(weights), jnp.asarray(x), jnp.asarray(y))
    for share in (on_numpy, on_jax):
        assert size([share], "l2")[0] <= CLIP * (1 + 1e-5)  # false for NaN


@by_model
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_sample_with_one_broken_entry_counts_as_the_zero_sample_and_leaves_the_others_alone(model, broken):
    rng = np.random.default_rng(3)
    weights = rng.normal(size=model.shape).astype(np.float32)
    weights.flat[: model.shape[-1]] = 0  # a zero weight would hide the entry from a careless guard
    x = rng.normal(size=(3, D)).astype(np.float32)
    y = np.array([labels(model)[-1]] * 3)
    bad, zero = x.copy(), x.copy()
    bad[1, 0], zero[1] = broken, 0
    y = np.where([False, model.shape[0] == D + 1, False], 99, y)  # a bias sees a zero row: nothing is left to compare
    for xp in (np, jnp):
        w, y_there = xp.asarray(weights), xp.asarray(y)
        ours, theirs = Samples(xp.asarray(bad), y_there), Samples(xp.asarray(zero), y_there)
        for compute in (model.gradients, model.losses, model.mistakes):
            np.testing.assert_array_equal(compute(w, ours), compute(w, theirs))
        assert (np.asarray(model.gradients(w, ours))[1] == 0).all()


@by_model
def test_a_label_out_of_range_contributes_nothing(model):
    few = [-1, 0.5] if model.classes else [-model.bound * 1.001, model.bound * 1.001]
    for xp in (np, jnp):
        samples = Samples(xp.ones((6, D)), xp.asarray([*few, 99, np.nan, np.inf, 1]))
        w = xp.asarray(np.ones(model.shape))
        for nothing in (model.gradients(w, samples), model.losses(w, samples), model.mistakes(w, samples)):
            assert (np.asarray(nothing)[:5] == 0).all()
        assert np.asarray(model.label_cells(samples)).sum(1).tolist() == [0] * 5 + [1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_h10_a_published_weight_of_1000_gives_no_nan(dtype):
    """Review H10 and R6: exp(1000) overflows, and nan would tell which samples have a large such feature."""
    model = Softmax(3, 4)
    weights = np.zeros((3, 4), dtype)
    weights[0, 1] = 1000
    samples = Samples(np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0]], dtype), np.array([0, 1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = model.gradients(weights, samples)
        losses = model.losses(weights, samples)
    np.testing.assert_allclose(gradients[0], np.outer([1, 0, 0], [-1, 1, 0, 0]), atol=1e-6)
    np.testing.assert_allclose(gradients[1], 0, atol=1e-6)
    np.testing.assert_allclose(gradients[2], np.outer([0, 1, 0], [0.25, 0.25, -0.75, 0.25]), atol=1e-6)
    np.testing.assert_allclose(losses, [1000, 0, math.log(4)], atol=1e-4)
    jitted = jax.jit(lambda w, x, y: model.gradients(w, Samples(x, y)))
    np.testing.assert_allclose(jitted(weights, samples.x, samples.y), gradients, atol=1e-6)


@by_model
@pytest.mark.parametrize("entry", [np.nan, np.inf, -np.inf, 3e38])
def test_broken_weights_give_finite_results_and_do_not_pass_for_a_perfect_model(model, entry):
    weights = np.full(model.shape, entry, np.float32)
    samples = worst_samples(model, "l2", 1.0)
    for xp in (np, jnp):
        there = Samples(xp.asarray(samples.x, dtype=xp.float32), xp.asarray(samples.y))
        w = xp.asarray(weights)
        assert np.isfinite(model.gradients(w, there)).all()
        assert np.isfinite(model.losses(w, there)).all()
        assert np.asarray(model.mistakes(w, there)).sum() > 0
