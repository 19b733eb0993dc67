"""SecProbe as published: its formulas, what its noise does not cover, how it chooses (privacy review, section 4)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crowdml.errors import TaskError
from crowdml.experiments.published import secprobe
from crowdml.experiments.published.secprobe import Network, Published, learn, noise_of, odds, slope
from crowdml.ratings import rate_numbers

NUMBER, CLASSES = Network(5, 4, None), Network(5, 4, 3)
KEY = jax.random.PRNGKey(3)


def rows(net: Network, count: int, seed: int = 1):
    chance = np.random.default_rng(seed)
    x = chance.random((count, net.dimension)).astype(np.float32)
    y = 0.1 + 0.8 * chance.random(count) if net.classes is None else chance.integers(0, net.classes, count)
    return jnp.asarray(x), jnp.asarray(y.astype(np.float32 if net.classes is None else np.int32))


def crowd(net: Network, devices: int, held: int):
    made = [rows(net, held, seed) for seed in range(devices)]
    return np.stack([x for x, _ in made]), np.stack([y for _, y in made])


PLAN = Published(rounds=6, iterations=2, uploads=4, keep=4, epsilon=None, minibatch=8)


# --- the functional mechanism ---


@pytest.mark.parametrize(("net", "delta"), [(Network(9, 80, None), 840), (Network(9, 128, 10), 42_240),
                                            (Network(9, 50, 10), 6750)])  # fmt: skip
def test_z4_the_noise_has_the_scale_of_the_lemmas(net, delta):
    assert net.sensitivity == delta


def test_z5_no_sample_has_coefficients_beyond_half_of_the_lemma_and_one_reaches_it():
    """At h = 1 and y = 1: |1 - 2y| / 4 for each unit and 1 / 16 for each ordered pair; replacing a sample is twice."""
    b = NUMBER.hidden
    h = jnp.ones((1, b))
    coefficients = b * abs(1 - 2 * 1.0) / 4 + b * b / 16
    assert 2 * coefficients == NUMBER.sensitivity
    ones = (jnp.zeros((5, b)).at[0].set(1.0), jnp.zeros((b, 1)))
    assert (NUMBER.units(ones, jnp.eye(5)[:1]) == h).all()
    assert (NUMBER.units((100 * ones[0], ones[1]), jnp.eye(5)[:1]) == h).all()  # held at 1


@pytest.mark.parametrize("net", [NUMBER, CLASSES], ids=["number", "classes"])
def test_the_slope_is_that_of_the_cut_loss_with_noisy_coefficients(net):
    x, y = rows(net, 8)
    weights, noise = net.start(1), noise_of(net, 50.0, KEY)

    def loss(last):
        linear, square = noise
        return net.loss((weights[0], last), x, y) + (linear * last).sum() + jnp.einsum(
            "pc,pqc,qc->", last, square, last
        )  # fmt: skip

    np.testing.assert_allclose(slope(net, weights, x, y, noise)[1], jax.grad(loss)(weights[1]), rtol=1e-4)


@pytest.mark.parametrize("net", [NUMBER, CLASSES], ids=["number", "classes"])
def test_cutting_the_loss_changes_little_near_zero_and_nothing_in_its_first_two_orders(net):
    x, y = rows(net, 8)
    small = (net.start(1)[0], 0.01 * net.start(1)[1])
    exact, cut = (jax.grad(replace(net, truncated=each).loss)(small, x, y)[1] for each in (False, True))
    np.testing.assert_allclose(cut, exact, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("net", [NUMBER, CLASSES], ids=["number", "classes"])
def test_z1_no_noise_is_in_the_hidden_layers_gradient_and_one_sample_is_read_off_it(net):
    x, y = rows(net, 1)
    weights = net.start(2)
    weights = (0.2 * weights[0], weights[1])
    quiet = slope(net, weights, x, y, None)
    noisy = slope(net, weights, x, y, noise_of(net, 1.0, KEY))
    assert np.array_equal(quiet[0], noisy[0])
    assert not np.allclose(quiet[1], noisy[1])
    left = np.linalg.svd(np.asarray(noisy[0]))[0][:, 0]
    assert abs(left @ np.asarray(x[0])) / np.linalg.norm(x[0]) == pytest.approx(1, abs=1e-5)


def test_z1_a_hidden_layer_that_stays_is_not_trained():
    x, y = crowd(NUMBER, 4, 16)
    told = learn(NUMBER, replace(PLAN, train_hidden=False), x, y, rows(NUMBER, 9), 5)
    assert np.array_equal(told.hidden[-1], NUMBER.start(5)[0])
    assert not np.array_equal(told.last[-1], NUMBER.start(5)[1])
    assert not np.array_equal(learn(NUMBER, PLAN, x, y, rows(NUMBER, 9), 5).hidden[-1], NUMBER.start(5)[0])


def test_z2_noise_that_is_drawn_once_stays_over_all_rounds_and_that_of_an_iteration_does_not():
    x, y = crowd(NUMBER, 4, 16)
    same = np.repeat(x[:1], 4, axis=0), np.repeat(y[:1], 4, axis=0)
    ends = [
        learn(NUMBER, replace(PLAN, rounds=1, iterations=each, uploads=1, keep=1, epsilon=1.0, noise=noise, rate=1e-3),
              *same, rows(NUMBER, 9), 5).last[-1] - NUMBER.start(5)[1]
        for noise in ("once", "iteration") for each in (1, 8)
    ]  # fmt: skip
    quiet = [
        learn(NUMBER, replace(PLAN, rounds=1, iterations=each, uploads=1, keep=1, rate=1e-3), *same, rows(NUMBER, 9), 5)
        .last[-1] - NUMBER.start(5)[1]
        for each in (1, 8)
    ]  # fmt: skip
    once, often = ((ends[place] - quiet[place % 2]) for place in (1, 3))
    assert np.linalg.norm(once) > 1.5 * np.linalg.norm(often)


def test_z3_a_claim_per_epoch_is_paid_233_times_at_the_papers_parameters():
    plan = Published(152, 100, 30, 30)
    assert plan.epochs(8333, 30) == 234  # 15,200 minibatches of 128, rounded up; the review has 233
    sound = replace(plan, train_hidden=False, noise="iteration")
    assert sound.total(8333, 30) == 234
    assert replace(sound, epsilon=None).total(8333, 30) is None


def test_z1_z2_there_is_no_total_where_a_hidden_layer_is_trained_or_one_noise_is_kept():
    """Two batches under one noise differ by what no noise is in."""
    plan = Published(152, 100, 30, 30)
    for trained in (True, False):
        for noise in ("once", "iteration"):
            bounded = not trained and noise == "iteration"
            found = replace(plan, train_hidden=trained, noise=noise).total(8333, 30)
            assert (found is not None) == bounded, (trained, noise)


def test_weights_stay_finite_where_the_perturbed_loss_has_no_minimum():
    x, y = crowd(NUMBER, 4, 16)
    told = learn(NUMBER, replace(PLAN, iterations=200, epsilon=0.001), x, y, rows(NUMBER, 9), 5)
    assert np.isfinite(told.last).all()
    assert abs(told.last).max() > 1000
    assert abs(told.last).max() <= secprobe.LARGEST


# --- scores and choices ---


def test_z6_the_score_is_eq_6_with_min_and_lies_within_one_of_zero():
    y = jnp.asarray([0.1, 0.5, 1.0])
    assert secprobe.relative_score(y, y) == 1
    assert secprobe.relative_score(30 * y, y) == secprobe.relative_score(3 * y, y) == pytest.approx(-1)
    assert secprobe.relative_score(0 * y, y) == 0
    assert float(secprobe.relative_score(1.5 * y, y)) == pytest.approx(0.5)
    assert float(secprobe.relative_error(1.5 * y, y)) == pytest.approx(0.5)
    said = jnp.asarray([0.3, 0.2, 5.0])
    assert float(secprobe.relative_score(said, y)) == pytest.approx(rate_numbers(said, y, 0.05).mean())


def test_z8_the_chances_of_the_first_draw():
    scores = np.array([0.9, 0.8, 0.5])
    np.testing.assert_allclose(odds(scores, 1.0, 1, 0.5), [0.388326, 0.351372, 0.260303], atol=1e-6)
    np.testing.assert_allclose(odds(scores, 1.0, 15, 0.5), [0.337036, 0.334797, 0.328167], atol=1e-6)
    assert (NUMBER.reach, CLASSES.reach) == (1.0, 0.5)


@pytest.mark.parametrize(("selection", "share"), [(1.0, (0.4, 0.55)), (1000.0, (0.0, 0.01)), (None, (0.0, 0.0))])
def test_z8_as_printed_liars_are_averaged_nearly_as_often_as_others(selection, share):
    x, y = crowd(NUMBER, 4, 16)
    lying = np.array([False, True, False, True])
    plan = replace(PLAN, rounds=200, iterations=1, keep=2, selection=selection, rate=1e-4)
    told = learn(NUMBER, plan, x, y, rows(NUMBER, 50), 5, liars=lying)
    assert share[0] <= lying[told.chosen].mean() <= share[1]


def test_m_of_n_are_drawn_anew_in_each_round_and_k_of_them_averaged_once_each():
    x, y = crowd(NUMBER, 6, 16)
    told = learn(NUMBER, replace(PLAN, rounds=40, uploads=3, keep=2), x, y, rows(NUMBER, 9), 5)
    assert told.chosen.shape == (40, 2)
    assert (told.chosen[:, 0] != told.chosen[:, 1]).all()
    assert set(told.chosen.ravel()) == set(range(6))


def test_r3_a_participant_leaves_when_its_error_is_small_and_the_number_of_its_uploads_tells():
    x, y = crowd(NUMBER, 4, 16)
    y = np.stack([np.full(16, 0.55), *np.tile([0.05, 0.9], (3, 8))]).astype(np.float32)
    told = learn(NUMBER, replace(PLAN, rounds=20, iterations=300, leave_at=0.15, rate=0.02), x, y, rows(NUMBER, 9), 5)
    assert told.present.tolist() == sorted(told.present, reverse=True)
    assert (told.present[0], told.present[-1]) == (4, 3)
    assert set(told.chosen[-1]) == {-1, 1, 2, 3}
    everybody = learn(NUMBER, replace(PLAN, rounds=10, leave_at=100.0), x, y, rows(NUMBER, 9), 5, looks=[1, 10])
    assert everybody.present.tolist() == [4] + [0] * 9
    assert np.array_equal(everybody.last[0], everybody.last[1])  # nobody is left: the last model stays


def test_averaging_everybody_is_the_mean_of_what_each_would_have_alone():
    x, y = crowd(CLASSES, 3, 16)
    plan = replace(PLAN, rounds=1, uploads=3, keep=3)
    one = [
        learn(
            CLASSES, replace(plan, uploads=1, keep=1), x[place : place + 1], y[place : place + 1], rows(CLASSES, 9), 5
        )
        for place in range(3)
    ]
    told = learn(CLASSES, plan, x, y, rows(CLASSES, 9), 5)
    np.testing.assert_allclose(told.last[0], np.mean([each.last[0] for each in one], axis=0), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_run_is_refused():
    x, y = crowd(NUMBER, 4, 16)
    with pytest.raises(TaskError, match="K = 5 of M = 4 uploads of N = 4"):
        learn(NUMBER, replace(PLAN, keep=5), x, y, rows(NUMBER, 9), 5)
    with pytest.raises(TaskError, match="minibatch = 17: a participant holds 16"):
        learn(NUMBER, replace(PLAN, minibatch=17), x, y, rows(NUMBER, 9), 5)
