"""A trusted server's noisy mean: what a device can move, what it costs, and that a mean of too few is never let out."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from local_bench import MASKS, local_task
from scipy import stats

from crowdml.datasets.populations import iid
from crowdml.errors import GuaranteeError, TaskError
from crowdml.experiments.published.trusted_mean import GAMMA, GAUSSIAN, TrustedMean, calibrate, run
from crowdml.privacy.losses import ZCDP, Pure
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.sim.layout import Holding

QUIET = TrustedMean(1.0, 20, 6, 1e-12)
KEYS = [jax.random.key(number) for number in range(3)]


def draws(mechanism: TrustedMean, count: int) -> np.ndarray:
    return np.asarray(jax.vmap(mechanism.noise)(jax.random.split(KEYS[0], count)))


# --- what a device can move ---


def test_one_of_enough_devices_moves_the_mean_by_its_sensitivity_at_most_and_can_reach_it():
    rng = np.random.default_rng(1)
    for asked in (20, 25):
        others = rng.normal(size=(asked, 6)).astype(np.float32)
        there, worst = np.ones(asked, bool), 0.0
        for size in (0.1, 1.0, 1e6, np.inf):
            one, other = others.copy(), others.copy()
            one[3, 0], other[3, 0], one[3, 1:], other[3, 1:] = size, -size, 0, 0
            means = [np.asarray(QUIET.release(each, there, KEYS[1])[0]) for each in (one, other)]
            assert np.isfinite(means).all()
            worst = max(worst, float(np.linalg.norm(means[0] - means[1])))
        assert worst <= QUIET.sensitivity * (1 + 1e-6)
        assert worst == pytest.approx(2 / asked, rel=1e-5)


@pytest.mark.parametrize("missing", [1, 19, 20])
def test_l9_a_mean_of_fewer_than_b_s_is_never_let_out_and_nothing_is_divided_by_zero(missing):
    updates = np.ones((20, 6), np.float32)
    mean, enough = QUIET.release(updates, np.arange(20) >= missing, KEYS[1])
    assert not bool(enough)
    np.testing.assert_array_equal(mean, np.zeros(6))
    assert bool(QUIET.release(updates, np.ones(20, bool), KEYS[1])[1])


@pytest.mark.parametrize("observer", [Observer.ANYONE, Observer.AGGREGATE])
def test_who_does_not_trust_the_server_gets_no_such_promise(observer):
    with pytest.raises(GuaranteeError, match="has to be trusted"):
        replace(QUIET, observer=observer)
    assert "as long as the server is trusted" in QUIET.promise
    assert QUIET.adjacency is Adjacency.REPLACE_DEVICE


# --- how much noise ---


@pytest.mark.slow
def test_l2_the_radius_of_l2_gamma_noise_is_the_sound_one_of_the_review():
    """Section 5: d = 510, S = 0.2, epsilon = 1: mean radius 102, and not the 204 that is printed."""
    mechanism = calibrate(GAMMA, clip=1.0, least=10, length=510, epsilon=1.0, delta=0.0, rounds=1)
    assert mechanism.sensitivity == pytest.approx(0.2)
    radii = np.linalg.norm(draws(mechanism, 4000), axis=1)
    assert radii.mean() == pytest.approx(102, rel=0.005)
    assert stats.kstest(radii, stats.gamma(510, scale=0.2).cdf).pvalue > 1e-4
    assert mechanism.loss == Pure(mechanism.loss.epsilon)
    assert float(mechanism.loss.epsilon) == pytest.approx(1.0)


@pytest.mark.slow
def test_l2_gamma_noise_points_everywhere_alike():
    drawn = draws(calibrate(GAMMA, clip=1.0, least=1, length=3, epsilon=1.0, delta=0.0, rounds=1), 20_000)
    ways = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    np.testing.assert_allclose(ways.T @ ways / len(ways), np.eye(3) / 3, atol=0.01)
    assert stats.kstest(ways[:, 0], stats.uniform(-1, 2).cdf).pvalue > 1e-4  # Archimedes: a sphere's height is even


def test_gaussian_noise_has_the_deviation_that_its_loss_asks_for():
    mechanism = calibrate(GAUSSIAN, clip=0.5, least=4, length=8, epsilon=1.0, delta=1e-6, rounds=3)
    assert draws(mechanism, 20_000).std() == pytest.approx(mechanism.scale, rel=0.01)
    assert isinstance(mechanism.loss, ZCDP)
    assert float(mechanism.loss.rho) == pytest.approx((0.25 / mechanism.scale) ** 2 / 2)
    assert mechanism.scale / mechanism.sensitivity == pytest.approx(4.530877 * math.sqrt(3), rel=1e-4)  # review, R9


def test_noise_is_a_b_s_th_of_what_one_device_would_add():
    one, twenty = (calibrate(GAUSSIAN, clip=1.0, least=n, length=8, epsilon=1.0, delta=1e-6, rounds=1) for n in (1, 20))
    assert one.scale == pytest.approx(20 * twenty.scale)


# --- a run ---


def crowd(devices: int = 60) -> Holding:
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, devices * 12).astype(np.int32)
    x = (0.2 * rng.normal(size=(len(y), 3)) + np.eye(3)[y]).astype(np.float32)
    return Holding(x / np.linalg.norm(x, axis=1, keepdims=True), y, iid(len(y), devices, 1))


TASK = local_task(mechanism="none", unit="device", protocol="local_steps = 4\nclip = 1.0\nrate = { c = 2.0 }")


@pytest.mark.parametrize("law", [GAUSSIAN, pytest.param(GAMMA, marks=pytest.mark.slow)])
def test_a_trusted_server_learns_at_its_price_and_loses_the_rounds_that_too_few_reach(law):
    holding = crowd()
    found = run(TASK, holding, 1, cohort=20, least=17, epsilon=8.0, law=law, dropout=0.15)
    assert len(found.weights) == 6  # two batches each, in three rounds of twenty
    assert found.rounds == 2
    assert 7.99 < found.epsilon <= 8.0
    np.testing.assert_array_equal(found.released, found.heard >= 17)
    assert 0 < found.released.sum() < 6
    for before, after, released in zip(found.weights[:-1], found.weights[1:], found.released[1:], strict=True):
        assert np.array_equal(before, after) is not bool(released)
    right = ((holding.x @ found.weights[-1]).argmax(1) == holding.y).mean()
    assert right > 0.8


@pytest.mark.parametrize(
    ("task", "changes", "why"),
    [
        (local_task(), {}, r"privacy\.mechanism"),
        (local_task(mechanism="none", rest=MASKS), {}, "without"),
        (local_task(mechanism="none"), {}, r"protocol\.clip is missing"),
        (TASK, {"least": 21}, "at least 21 of 20"),
        (TASK, {"least": 0}, "at least 0 of 20"),
        (TASK, {"cohort": 61}, "make no round of 61"),
        (TASK, {"law": "laplace"}, "law = 'laplace'"),
    ],
)
def test_what_a_trusted_server_cannot_run_is_refused(task, changes, why):
    with pytest.raises(TaskError, match=why):
        run(task, crowd(), 1, **{"cohort": 20, "least": 10, "epsilon": 1.0, **changes})


@pytest.mark.parametrize("changes", [{"least": 0}, {"scale": 0.0}, {"clip": math.inf}])
def test_a_mean_without_a_bound_or_without_noise_is_none(changes):
    with pytest.raises(GuaranteeError):
        replace(QUIET, **changes)
