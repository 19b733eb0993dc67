"""The perceptron: against autodiff for every activation and top, clipped without rows, and quiet on bad input."""

import hashlib
import itertools
import warnings
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from crowdml.arrays import Samples
from crowdml.errors import TaskError
from crowdml.models import Mlp, make_model

D = 5
HEADS = [("softmax", 4), ("squared", 4), ("squared", None)]
MODELS = [
    *(Mlp(D, c, (7, 6), 3, each, top) for each, (top, c) in itertools.product(("relu", "tanh", "sigmoid"), HEADS)),
    Mlp(D, 3, (4,), 1),
    Mlp(D, 2, (6, 5, 4, 3), 2, "tanh"),
]
B = 8
"""Rows of a batch, the same everywhere: each model is compiled once."""
CLIP = 1e-3
NASTY = [0.0, -0.0, 1.0, -1.0, 1e-30, 1000.0, -1000.0, 1e14, 1e18, -1e30, 3e38, -3e38, np.inf, -np.inf, np.nan]
by_model = pytest.mark.parametrize("model", MODELS, ids=repr)
by_type = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def draw(model, seed, b=B, dtype=np.float64, spread=1.0):
    rng = np.random.default_rng(seed)
    weights = (model.start() + spread * 0.5 * rng.normal(size=model.shape)).astype(dtype)
    x = rng.normal(size=(b, D)).astype(dtype)
    y = rng.integers(0, model.classes, b) if model.classes else rng.uniform(-1, 1, b).astype(dtype)
    return weights, x, y


@dataclass(frozen=True)
class Said:
    """Everything that a model computes on a batch."""

    rows: Any
    plain: Any
    clipped: Any
    losses: Any
    guess: Any
    mistakes: Any
    cells: Any


def say(model, w, x, y, clip):
    samples = Samples(x, y)
    sums = model.gradient_sum(w, samples), model.clipped_sum(w, samples, clip)
    said = model.losses(w, samples), model.predict(w, x), model.mistakes(w, samples), model.label_cells(samples)
    return (model.gradients(w, samples), *sums, *said)


compiled = lru_cache(maxsize=None)(lambda model: jax.jit(partial(say, model)))


def on_both(model, weights, x, y, clip=CLIP):
    """On NumPy, where nothing may warn, and compiled by JAX."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield Said(*say(model, weights, x, y, clip))
    with jax.enable_x64(weights.dtype == np.float64):
        yield Said(*map(np.asarray, compiled(model)(weights, x, y, np.asarray(clip, weights.dtype))))


def forward(model, weights, x):
    """By the book, from the flat weights: no guard, no helper of the model."""
    at, a = 0, x
    widths = (model.dimension, *model.hidden, model.classes or 1)
    for layer, (into, out) in enumerate(itertools.pairwise(widths)):
        a = a @ weights[at : at + into * out].reshape(into, out) + weights[at + into * out : at + (into + 1) * out]
        at += (into + 1) * out
        if layer < len(model.hidden):
            a = {"relu": jax.nn.relu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid}[model.activation](a)
    return a


def textbook(model, weights, x, y):
    scores = forward(model, weights, x)
    if model.top == "softmax":
        return -jax.nn.log_softmax(scores)[y]
    return 0.5 * ((scores - (y if model.classes is None else jax.nn.one_hot(y, model.classes))) ** 2).sum()


def lengths(rows):
    return np.sqrt((np.asarray(rows, np.float64) ** 2).sum(-1))


@by_model
@by_type
def test_losses_and_gradients_by_hand_equal_the_textbook_and_its_autodiff(model, dtype):
    part = 1e-5 if dtype == np.float32 else 1e-12
    with jax.enable_x64(dtype == np.float64):
        both = jax.jit(jax.vmap(jax.value_and_grad(partial(textbook, model)), (None, 0, 0)))
        for spread in (0.0, 1.0, 5.0):
            weights, x, y = draw(model, seed=1, dtype=dtype, spread=spread)
            losses, rows = map(np.asarray, both(weights, x, y))
            assert rows.dtype == dtype
            for said in on_both(model, weights, x, y):
                assert said.rows.dtype == said.losses.dtype == dtype
                np.testing.assert_allclose(said.rows, rows, rtol=10 * part, atol=part * np.abs(rows).max())
                np.testing.assert_allclose(said.losses, losses, rtol=10 * part, atol=10 * part)


@by_model
@by_type
def test_the_sums_are_those_of_the_rows_plain_and_clipped(model, dtype):
    weights, x, y = draw(model, seed=2, dtype=dtype)
    x[3, 0], x[4, 1], y[5] = np.nan, -np.inf, 99
    part = 1e-5 if dtype == np.float32 else 1e-12
    for clip in (1e-3, 0.5, 1e5):
        for said in on_both(model, weights, x, y, clip):
            rows = said.rows.astype(np.float64)
            shrunk = rows * np.minimum(1, clip / np.maximum(lengths(rows), 1e-300))[:, None]
            assert said.plain.dtype == said.clipped.dtype == dtype
            assert said.plain.shape == said.clipped.shape == model.shape
            np.testing.assert_allclose(said.plain, rows.sum(0), rtol=1e-4, atol=part * np.abs(rows).sum())
            np.testing.assert_allclose(said.clipped, shrunk.sum(0), rtol=1e-4, atol=part * np.abs(shrunk).sum())
    assert model.clipped_sum(weights, Samples(x, y), np.float64(clip)).dtype == dtype


@settings(max_examples=30, deadline=None)
@given(model=st.sampled_from(MODELS), seed=st.integers(0, 2**32 - 1), spread=st.floats(0.01, 10))
def test_numpy_and_jax_agree(model, seed, spread):
    weights, x, y = draw(model, seed, dtype=np.float32, spread=spread)
    ours, theirs = on_both(model, weights, x, y)
    clear = np.ones(B, bool)
    if model.activation == "relu":  # a unit within rounding of its kink may fall on either side of it
        a = x.astype(np.float64)
        for matrix, biases in model.layers(weights.astype(np.float64))[:-1]:
            z = a @ matrix + biases
            clear &= (np.abs(z) > 1e-4 * spread).all(1)
            a = np.maximum(z, 0)
    part = 1e-4 * max(1.0, float(np.abs(ours.rows).max()))
    assert np.abs(ours.rows - theirs.rows)[clear].max(initial=0) <= part
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4, atol=1e-5 * max(1.0, float(ours.losses.max())))
    assert (ours.cells == theirs.cells).all()


@pytest.mark.parametrize("model", MODELS[::4], ids=repr)
def test_it_compiles_over_a_crowd_and_over_steps(model):
    trials = [draw(model, seed=seed, dtype=np.float32) for seed in range(3)]
    stacked = [jnp.stack([jnp.asarray(trial[i]) for trial in trials]) for i in range(3)]
    run = jax.jit(jax.vmap(lambda w, x, y: say(model, w, x, y, 0.5)))
    crowd = run(*stacked)
    for index, trial in enumerate(trials):
        for out, alone in zip(crowd, say(model, *trial, 0.5), strict=True):
            np.testing.assert_allclose(out[index], alone, rtol=1e-3, atol=1e-3)

    @jax.jit
    def walk(w, xs, ys):
        return jax.lax.scan(lambda c, s: (c - 0.01 * model.clipped_sum(c, Samples(*s), 0.5), None), w, (xs, ys))[0]

    walked = trials[0][0]
    for _, x, y in trials:
        walked = walked - 0.01 * model.clipped_sum(walked, Samples(x, y), 0.5)
    np.testing.assert_allclose(walk(stacked[0][0], *stacked[1:]), walked, rtol=1e-3, atol=1e-3)


@by_model
def test_shapes_types_and_mistakes_are_those_promised(model):
    weights, x, y = draw(model, seed=5, b=200, dtype=np.float32)
    samples = Samples(x, y)
    assert model.gradients(weights, samples).shape == (200, *model.shape)
    assert model.gradients(weights, samples[:0]).shape == (0, *model.shape)
    assert model.losses(weights, samples).shape == (200,)
    assert model.label_cells(samples).shape == (200, model.cells)
    assert model.label_cells(samples).sum() == 200
    guess = model.predict(weights, x)
    assert guess.dtype == (np.int32 if model.classes else np.float32)
    wrong = guess != y if model.classes else np.abs(guess - y) > model.tolerance
    assert (model.mistakes(weights, samples) == wrong).all()
    assert model.mistakes(weights, samples).dtype == np.int32
    assert 0 < wrong.sum() < 200
    assert not model.convex
    assert model.smoothness(1.0) is None


finite_or_not = st.one_of(st.sampled_from(NASTY), st.floats(width=32))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), model=st.sampled_from(MODELS))
def test_no_weights_and_no_sample_make_anything_nan_infinite_or_longer_than_the_clip(data, model):
    element = data.draw(st.sampled_from([finite_or_not, st.floats(-3, 3, width=32)]))
    weights = data.draw(hnp.arrays(np.float32, model.shape, elements=element, fill=st.floats(-1, 1, width=32)))
    x = data.draw(hnp.arrays(np.float32, (B, D), elements=finite_or_not))
    y = np.full(B, -99.0)  # one label that counts: the sum is this sample's own share
    y[0] = data.draw(st.sampled_from([0, 1, -1, 7, 2**30, np.nan, 0.5]))
    for said in on_both(model, weights, x, y):
        for each in (said.rows, said.plain, said.losses, said.guess):
            assert np.isfinite(each).all()
        assert (said.rows[~np.isfinite(x).all(1)] == 0).all()
        assert lengths(said.clipped) <= CLIP * (1 + 1e-5)  # false for NaN


@by_model
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_sample_with_one_broken_entry_adds_nothing_and_leaves_the_others_alone(model, broken):
    weights, x, y = draw(model, seed=3, dtype=np.float32)
    weights[:2] = 0  # a zero weight would hide the entry from a careless guard, and so would a saturated unit
    bad, ignored = x.copy(), y.copy()
    bad[1, 0], ignored[1] = broken, 99
    for ours, theirs in zip(
        on_both(model, weights, bad, y, 0.1), on_both(model, weights, x, ignored, 0.1), strict=True
    ):
        assert (ours.rows[1] == 0).all()
        assert ours.guess[1] == 0  # scores 0: class 0, or the number 0
        for name in ("rows", "plain", "clipped"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6)


@by_model
def test_a_label_out_of_range_contributes_nothing(model):
    few = [-1, 0.5] if model.classes else [-1.001, 1.001]
    weights, x, _ = draw(model, seed=4, dtype=np.float32)
    y = np.array([1, *itertools.islice(itertools.cycle([*few, 99, np.nan, np.inf]), B - 1)], np.float32)
    for said in on_both(model, weights, x, y, 1e6):
        for nothing in (said.rows, said.losses, said.mistakes, said.cells):
            assert not nothing[1:].any()
        assert said.cells[0].sum() == 1
        np.testing.assert_allclose(said.clipped, said.rows[0], rtol=1e-5, atol=1e-6)


@by_model
def test_broken_weights_give_finite_results_and_do_not_pass_for_a_perfect_model(model):
    weights, x, y = draw(model, seed=6, dtype=np.float32)
    for entry, place in itertools.product((np.nan, np.inf, 3e38), (0, -1, slice(None))):
        broken = weights.copy()
        broken[place] = entry
        for said in on_both(model, broken, x, y):
            for each in (said.rows, said.plain, said.clipped, said.losses):
                assert np.isfinite(each).all()
            assert said.mistakes.any()


def test_the_first_weights_are_the_same_bits_everywhere():
    """SHA-256 of "crowdml/mlp/1", 0, seed, block: worked out here once more, by hand."""
    block = hashlib.sha256(b"crowdml/mlp/1\0" + (1).to_bytes(8, "little") + bytes(8)).digest()
    first = int.from_bytes(block[:4], "little") >> 8
    start = Mlp(50, 10, (75, 75), 1).start()
    assert start[0] == np.float32(first * 2.0**-23 - 1) * np.float32(np.sqrt(6 / 50))
    assert start.dtype == np.float32
    assert hashlib.sha256(start.astype("<f4").tobytes()).hexdigest() == (
        "c27148e8342df6c8dbef75479157ec116d340e9e20d9f19de7dd1e2b584f2ef1"
    )
    small = Mlp(2, 2, (2,), 7, "tanh").start()
    assert [float(each).hex() for each in small[:3]] == [
        "-0x1.0514c80000000p-8",
        "0x1.4044680000000p-4",
        "-0x1.e426060000000p-1",
    ]


def test_the_first_weights_fill_their_range_and_biases_are_zero():
    for activation, reach in (("relu", np.sqrt(6 / 200)), ("tanh", np.sqrt(6 / 300))):
        model = Mlp(200, 10, (100,), 5, activation)
        (first, zeros), (last, more) = model.layers(model.start())
        assert not zeros.any()
        assert not more.any()
        assert 0.999 * reach < np.abs(first).max() <= reach
        assert np.abs(first.mean()) < 0.01 * reach
        assert first.std() == pytest.approx(reach / np.sqrt(3), rel=0.01)
        assert 0.99 * np.sqrt(6 / 110) < np.abs(last).max() <= np.sqrt(6 / 110)
    assert (Mlp(5, 3, (4,), 1).start() != Mlp(5, 3, (4,), 2).start()).any()


def test_a_few_steps_learn_what_no_linear_model_can():
    rng = np.random.default_rng(8)
    x = rng.uniform(-1, 1, (400, 2)).astype(np.float32)
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).astype(np.int32)
    for activation in ("relu", "tanh", "sigmoid"):
        model = Mlp(2, 2, (16,), 1, activation)
        weights = model.start()
        for _ in range(600):
            weights = weights - np.float32(0.02) * model.clipped_sum(weights, Samples(x, y), 1.0)
        assert model.mistakes(weights, Samples(x, y)).mean() < 0.1, activation


def test_a_task_names_it_with_its_units():
    assert make_model("mlp", 50, 10, hidden=[75, 75]) == Mlp(50, 10, (75, 75), 1)
    assert make_model("mlp", 50, 10, hidden=[75, 75]).shape == (50 * 75 + 75 + 75 * 75 + 75 + 75 * 10 + 10,)
    made = make_model("mlp", 3, None, hidden=[4], activation="tanh", seed=9, bound=2.0, bins=4, tolerance=0)
    assert made == Mlp(3, None, (4,), 9, "tanh", "squared", 0, 2.0, 4)
    assert made.cells == 4


@pytest.mark.parametrize(
    ("classes", "given", "sentence"),
    [
        (4, {}, "hidden = None is not a list of the units"),
        (4, {"hidden": []}, "hidden = [] is not a list"),
        (4, {"hidden": 75}, "hidden = 75 is not a list"),
        (4, {"hidden": [75, 0]}, "hidden = [75, 0] is not a list"),
        (4, {"hidden": [7.5]}, "hidden = [7.5] is not a list"),
        (4, {"hidden": [True]}, "hidden = [True] is not a list"),
        (4, {"hidden": [5], "activation": "gelu"}, "activation = 'gelu': choose one of relu, tanh, sigmoid"),
        (4, {"hidden": [5], "top": "hinge"}, "top = 'hinge': choose one of softmax, squared"),
        (None, {"hidden": [5], "top": "softmax"}, "top = 'softmax' needs classes"),
        (1, {"hidden": [5]}, "at least 2 classes, not 1"),
        (4, {"hidden": [5], "seed": -1}, "seed = -1 is not a whole number"),
        (4, {"hidden": [5], "bins": 5}, "no setting 'bins'. Its settings are hidden, activation, top, seed"),
        (None, {"hidden": [5], "bins": 0}, "bins = 0 is not"),
        (None, {"hidden": [5], "bound": -1.0}, "bound = -1.0 is not"),
        (4, {"hidden": [10_000, 10_000]}, "weights; at most 10,000,000"),
    ],
)
def test_a_wrong_perceptron_is_refused_with_a_sentence(classes, given, sentence):
    with pytest.raises(TaskError) as refusal:
        make_model("mlp", 5, classes, **given)
    assert sentence in str(refusal.value)


def test_no_bound_holds_for_it_and_it_says_what_to_do():
    with pytest.raises(TaskError, match=r"protocol\.clip"):
        Mlp(5, 3, (4,), 1).gradient_bound("l2", 1.0)
    with pytest.raises(TaskError, match="'l1' or 'l2'"):
        Mlp(5, 3, (4,), 1).gradient_bound("linf", 1.0)
