"""Losses, gradients and predictions: against autodiff, across NumPy and JAX, and under compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.arrays import Outer, Samples
from crowdml.errors import TaskError
from crowdml.models import KINDS, LeastSquares, Linear, Logistic, SmoothSvm, Softmax, Svm, make_model, sample_gradients

MODELS = [
    Softmax(5, 4),
    Logistic(5),
    Svm(5),
    SmoothSvm(5),
    SmoothSvm(5, width=0.05),
    Linear(5),
    Linear(5, width=0.25, bound=2.0, bins=4),
    LeastSquares(5),
    Svm(5, bias=True),
    SmoothSvm(5, width=0.2, bias=True),
    Logistic(5, bias=True),
]
by_model = pytest.mark.parametrize("model", MODELS, ids=repr)


def draw(model, seed, b=12, dtype=np.float64, spread=1.0):
    rng = np.random.default_rng(seed)
    weights = (spread * rng.normal(size=model.shape)).astype(dtype)
    x = rng.normal(size=(b, model.dimension)).astype(dtype)
    y = rng.integers(0, model.classes, b) if model.classes else rng.uniform(-model.bound, model.bound, b).astype(dtype)
    return weights, x, y


def scores(model, weights, x):
    return x @ weights[:-1] + weights[-1] if getattr(model, "bias", False) else x @ weights


def autodiff(model):
    def loss(w, one_x, one_y):
        return model.losses(w, Samples(one_x[None], one_y[None]))[0]

    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))


def on_jax(weights, x, y):
    return jnp.asarray(weights), Samples(jnp.asarray(x), jnp.asarray(y))


@by_model
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_by_hand_equal_those_of_autodiff(model, dtype):
    gradients, tolerance = autodiff(model), 1e-5 if dtype == np.float32 else 1e-12
    for spread in (0.1, 1.0, 20.0):
        weights, x, y = draw(model, seed=1, b=200, dtype=dtype, spread=spread)
        with jax.enable_x64(dtype == np.float64):
            expected = gradients(*(jnp.asarray(v) for v in (weights, x, y)))
            assert expected.dtype == dtype
            compiled = model.gradients(*on_jax(weights, x, y))
        for ours in (compiled, model.gradients(weights, Samples(x, y))):
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance * np.abs(x).max())


@pytest.mark.parametrize("bias", [False, True])
def test_the_factors_of_softmax_gradients_are_finite_and_multiply_to_them(bias):
    model = Softmax(5, 4, bias=bias)
    weights, x, y = draw(model, seed=3, dtype=np.float32)
    x[1, 2], x[4, 0], x[6], y[8] = np.nan, np.inf, 3e38, 9
    gradients = model.gradients(weights, Samples(x, y))
    assert not gradients[[1, 4, 6, 8]].any()
    for rows in (model.gradient_factors(weights, Samples(x, y)), sample_gradients(model, *on_jax(weights, x, y))):
        assert isinstance(rows, Outer)
        assert rows.shape == gradients.shape
        assert np.isfinite(rows.left).all()
        np.testing.assert_allclose(rows.left[:, :, None] * rows.right[:, None, :], gradients, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows.sum(0), gradients.sum(0), rtol=1e-5, atol=1e-5)


def test_gradients_have_factors_only_where_compiled_code_gains_by_them():
    softmax, linear = Softmax(5, 4), Linear(5)
    weights, x, y = draw(softmax, seed=3, dtype=np.float32)
    assert sample_gradients(softmax, weights, Samples(x, y)).shape == (12, 5, 4)
    for model, samples in ((softmax, (weights, x, y)), (softmax, (weights, x[:7], y[:7])), (linear, draw(linear, 3))):
        rows = sample_gradients(model, *on_jax(*samples))
        assert isinstance(rows, Outer) == (model is softmax and len(samples[1]) == 12)


@by_model
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_sum_of_gradients_is_their_sum(model, dtype):
    weights, x, y = draw(model, seed=6, b=50, dtype=dtype)
    y[5] = 99
    one_by_one = model.gradients(weights, Samples(x, y)).sum(0)
    for found in (model.gradient_sum(weights, Samples(x, y)), model.gradient_sum(*on_jax(weights, x, y))):
        np.testing.assert_allclose(found, one_by_one, rtol=1e-4, atol=1e-4)
    assert model.gradient_sum(weights, Samples(x, y)).dtype == dtype


@by_model
def test_losses_equal_the_textbook_formula(model):
    weights, x, y = draw(model, seed=2)
    z = scores(model, weights, x)
    if isinstance(model, Softmax):
        expected = np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]
    elif isinstance(model, Logistic):
        expected = np.log(1 + np.exp(-(2 * y - 1) * z))
    elif isinstance(model, Svm):
        expected = np.maximum(0, 1 - (2 * y - 1) * z)
    elif isinstance(model, SmoothSvm):
        short, h = np.maximum(0, 1 - (2 * y - 1) * z), model.width
        expected = np.where(short <= h, short**2 / (2 * h), short - h / 2)
    elif isinstance(model, LeastSquares):
        expected = (z - y) ** 2
    else:
        r = np.abs(z - y)
        expected = np.where(r <= model.width, r**2 / 2, model.width * (r - model.width / 2))
    np.testing.assert_allclose(model.losses(weights, Samples(x, y)), expected, rtol=1e-12, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(model=st.sampled_from(MODELS), seed=st.integers(0, 2**32 - 1), spread=st.floats(0.01, 100))
def test_numpy_and_jax_agree_to_1e_5(model, seed, spread):
    weights, x, y = draw(model, seed, b=8, dtype=np.float32, spread=spread)
    ours, theirs = (weights, Samples(x, y)), on_jax(weights, x, y)
    # a score within rounding of a kink or a tie may fall on either side of it
    z = scores(model, weights.astype(np.float64), x.astype(np.float64))
    if isinstance(model, Svm | SmoothSvm):
        clear = np.abs((2 * y - 1) * z - 1) > 1e-3
    elif isinstance(model, Linear):
        clear = np.abs(np.abs(z - y) - model.tolerance) > 1e-3
    else:
        clear = np.abs(z) > 1e-3 if z.ndim == 1 else np.diff(np.sort(z, axis=1))[:, -1] > 1e-3
    scale = np.abs(x).sum(1).max() * max(1.0, np.abs(weights).max())
    scale = scale**2 if isinstance(model, LeastSquares) else scale  # its loss grows with the square
    for compute in (model.gradients, model.losses):
        apart = np.abs(compute(*ours) - np.asarray(compute(*theirs)))[clear]
        assert apart.max(initial=0) <= 1e-5 * max(1.0, scale)
    assert (model.mistakes(*ours) == np.asarray(model.mistakes(*theirs)))[clear].all()
    assert (model.label_cells(ours[1]) == np.asarray(model.label_cells(theirs[1]))).all()


@by_model
def test_a_compiled_and_vectorised_gradient_equals_the_plain_one(model):
    weights, x, y = draw(model, seed=3, b=24, dtype=np.float32)
    plain = model.gradients(weights, Samples(x, y))
    batches = jnp.asarray(x).reshape(6, 4, -1), jnp.asarray(y).reshape(6, 4)

    @jax.jit
    def whole(w, xs, ys):
        return jax.vmap(lambda one_x, one_y: model.gradients(w, Samples(one_x, one_y)))(xs, ys)

    @jax.jit
    def stepwise(w, xs, ys):
        return jax.lax.scan(lambda c, s: (c, model.gradients(c, Samples(s[0], s[1]))), w, (xs, ys))[1]

    for compiled in (whole, stepwise):
        out = np.asarray(compiled(jnp.asarray(weights), *batches)).reshape(plain.shape)
        np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-5)


@by_model
def test_many_trials_with_weights_of_their_own_run_at_once(model):
    trials = [draw(model, seed=seed, dtype=np.float32) for seed in range(3)]
    stacked = [jnp.stack([jnp.asarray(t[i]) for t in trials]) for i in range(3)]
    for name in ("gradients", "mistakes", "losses"):
        compute = getattr(model, name)
        run = jax.jit(jax.vmap(lambda w, x, y, f=compute: f(w, Samples(x, y))))
        for out, (weights, x, y) in zip(run(*stacked), trials, strict=True):
            np.testing.assert_allclose(out, compute(weights, Samples(x, y)), rtol=1e-5, atol=1e-5)


@by_model
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_keep_the_floating_type_of_the_weights(model, dtype):
    weights, x, y = draw(model, seed=4, dtype=np.float64)
    samples = Samples(x, y)
    weights = weights.astype(dtype)
    assert model.gradients(weights, samples).dtype == dtype
    assert model.losses(weights, samples).dtype == dtype
    assert model.predict(weights, x).dtype == (np.int32 if model.classes else dtype)
    assert model.mistakes(weights, samples).dtype == np.int32
    assert model.label_cells(samples).dtype == np.int32


@by_model
def test_shapes_are_those_promised(model):
    weights, x, y = draw(model, seed=5, b=7)
    samples = Samples(x, y)
    assert model.gradients(weights, samples).shape == (7, *model.shape)
    assert model.losses(weights, samples).shape == model.mistakes(weights, samples).shape == (7,)
    assert model.predict(weights, x).shape == (7,)
    assert model.label_cells(samples).shape == (7, model.cells)
    assert model.gradients(weights, samples[:0]).shape == (0, *model.shape)


@by_model
def test_a_mistake_is_a_prediction_that_differs_from_the_label(model):
    weights, x, y = draw(model, seed=6, b=300)
    guess = model.predict(weights, x)
    wrong = guess != y if model.classes else np.abs(guess - y) > model.tolerance
    assert (model.mistakes(weights, Samples(x, y)) == wrong).all()
    assert 0 < wrong.sum() < 300


def test_before_the_first_step_every_class_ties_and_the_lowest_is_predicted():
    x, y = np.ones((4, 3)), np.array([0, 1, 2, 3])
    for xp in (np, jnp):
        samples = Samples(xp.asarray(x), xp.asarray(y))
        assert model_mistakes(Softmax(3, 4), xp.zeros((3, 4)), samples) == [0, 1, 1, 1]
        assert model_mistakes(Logistic(3), xp.zeros(3), samples[:2]) == [0, 1]


def model_mistakes(model, weights, samples):
    return [int(m) for m in model.mistakes(weights, samples)]


def test_each_known_label_has_exactly_one_cell():
    samples = Samples(np.zeros((6, 2)), np.array([0, 1, 2, 3, -1, 4]))
    cells = Softmax(2, 4).label_cells(samples)
    assert (cells[:4] == np.eye(4)).all()
    assert (cells[4:] == 0).all()


def test_numbers_fall_into_equal_public_bins_ends_included():
    y = np.array([-2.0, -1.01, -1e-9, 0.0, 0.99, 1.0, 2.0, 2.01, np.nan, np.inf])
    cells = Linear(1, bound=2.0, bins=4).label_cells(Samples(np.zeros((10, 1)), y))
    assert cells[:7].argmax(1).tolist() == [0, 0, 1, 2, 2, 3, 3]
    assert cells.sum(1).tolist() == [1] * 7 + [0] * 3


def test_at_the_kink_the_gradient_is_a_subgradient():
    """Any slope between those on the two sides will do; ours is one of them, and no sum of both."""
    hinge = Svm(1).gradients(np.array([1.0]), Samples(np.array([[1.0]]), np.array([1])))
    assert -1 <= hinge[0, 0] <= 0
    huber = Linear(1).gradients(np.array([1.0]), Samples(np.array([[1.0]]), np.array([0.0])))
    assert huber[0, 0] == 1


def test_every_kind_can_be_made_by_its_name():
    assert sorted(KINDS) == ["cnn", "least-squares", "linear", "logistic", "mlp", "smooth-svm", "softmax", "svm"]
    assert make_model("softmax", 50, 10) == Softmax(50, 10)
    assert make_model("logistic", 50, 2) == Logistic(50)
    assert make_model("svm", 50, 2) == Svm(50)
    assert make_model("smooth-svm", 50, 2, width=0.1) == SmoothSvm(50, width=0.1)
    assert make_model("svm", 50, 2, bias=True) == Svm(50, bias=True)
    assert make_model("smooth-svm", 50, 2, bias=True, width=0.1) == SmoothSvm(50, width=0.1, bias=True)
    assert make_model("logistic", 50, 2, bias=True).shape == (51,)
    assert make_model("least-squares", 50, None) == LeastSquares(50)
    assert make_model("linear", 50, None, width=0.5, tolerance=0) == Linear(50, width=0.5, tolerance=0)
    assert make_model("softmax", 50, 10).shape == (50, 10)
    assert make_model("svm", 50, 2).shape == (50,)


@pytest.mark.parametrize(
    ("arguments", "settings", "sentence"),
    [
        (
            ("forest", 3, 2),
            {},
            "there is no model 'forest'. The kinds are cnn, least-squares, linear, logistic, mlp, smooth-svm",
        ),
        (("softmax", 3, None), {}, "at least 2 classes, not None"),
        (("softmax", 3, 1), {}, "at least 2 classes, not 1"),
        (("svm", 3, 4), {}, "exactly 2 classes, not 4"),
        (("linear", 3, 4), {}, "predicts a number, but 4 classes"),
        (("softmax", 0, 4), {}, "dimension = 0"),
        (("softmax", 3, 4), {"width": 1.0}, "no setting 'width'. Its settings are bias"),
        (("linear", 3, None), {"depth": 1}, "Did you mean 'width'? Its settings are width, tolerance, bound, bins"),
        (("linear", 3, None), {"width": 0.0}, "width = 0.0 is not"),
        (("smooth-svm", 3, 2), {"width": 0.0}, "width = 0.0 is not"),
        (("svm", 3, 2), {"width": 1.0}, "no setting 'width'. Its settings are bias"),
        (("svm", 3, 2), {"bias": 1}, "bias = 1 is not true or false"),
        (("linear", 3, None), {"bias": 1}, "bias = 1 is not true or false"),
        (("linear", 3, None), {"width": float("nan")}, "width = nan is not"),
        (("linear", 3, None), {"bound": "one"}, "bound = 'one' is not"),
        (("linear", 3, None), {"bins": 2.5}, "bins = 2.5 is not"),
    ],
)
def test_a_wrong_model_is_refused_with_a_sentence(arguments, settings, sentence):
    with pytest.raises(TaskError) as refusal:
        make_model(*arguments, **settings)
    assert sentence in str(refusal.value)


@by_model
def test_a_bound_is_refused_for_an_unknown_norm_or_an_unbounded_radius(model):
    with pytest.raises(TaskError, match="'l1' or 'l2'"):
        model.gradient_bound("linf", 1.0)
    for radius in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(TaskError, match="positive, finite"):
            model.gradient_bound("l2", radius)


def clipped_one_by_one(model, weights, samples, clip):
    """The same with every gradient written down, in float64."""
    rows = model.gradients(weights, samples).astype(np.float64)
    lengths = np.sqrt((rows.reshape(len(rows), -1) ** 2).sum(1)).reshape(-1, *[1] * (rows.ndim - 1))
    return (rows * np.minimum(1, clip / np.maximum(lengths, 1e-300))).sum(0)


@by_model
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("clip", [1e-3, 0.3, 1.0, 1e4])
def test_the_clipped_sum_is_the_sum_of_clipped_gradients(model, dtype, clip):
    weights, x, y = draw(model, seed=7, b=50, dtype=dtype)
    x[3, 0], x[4, 1], y[5] = np.nan, -np.inf, 99
    expected = clipped_one_by_one(model, weights, Samples(x, y), clip)
    tolerance = {"rtol": 1e-4, "atol": 1e-4 * clip} if dtype == np.float32 else {"rtol": 1e-9, "atol": 1e-12}
    with jax.enable_x64(dtype == np.float64):
        for found in (model.clipped_sum(weights, Samples(x, y), clip), model.clipped_sum(*on_jax(weights, x, y), clip)):
            assert found.dtype == dtype
            assert found.shape == model.shape
            np.testing.assert_allclose(found, expected, **tolerance)
    assert model.clipped_sum(weights, Samples(x, y), np.float64(clip)).dtype == dtype


@by_model
def test_a_crowd_clips_at_once_as_each_device_does_alone(model):
    trials = [draw(model, seed=seed, dtype=np.float32) for seed in range(3)]
    stacked = [jnp.stack([jnp.asarray(t[i]) for t in trials]) for i in range(3)]
    run = jax.jit(jax.vmap(lambda w, x, y: model.clipped_sum(w, Samples(x, y), 0.5)))
    for out, (weights, x, y) in zip(run(*stacked), trials, strict=True):
        np.testing.assert_allclose(out, model.clipped_sum(weights, Samples(x, y), 0.5), rtol=1e-4, atol=1e-5)


@by_model
def test_a_convex_model_starts_from_zero(model):
    assert model.convex
    assert model.start().dtype == np.float32
    assert model.start().shape == model.shape
    assert not model.start().any()
