"""Baselines of local updates: each learns, and each says what it costs."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crowdml.datasets import load
from crowdml.errors import TaskError
from crowdml.experiments.federated import (
    Average,
    Csdp,
    Dssgd,
    Recipe,
    accuracy,
    alone,
    centralised,
    csdp_for,
    learn,
    shares,
)
from crowdml.models import make_model
from crowdml.privacy.calibration import rho_for

DEVICES = 60
PLAN = Recipe(rounds=40, cohort=10, local_steps=5, minibatch=5, rate=2.0)


@cache
def digits():
    data = load("digits", normalise="l2")
    model = make_model("softmax", data.features, len(data.classes))
    x, y = shares(data.x_train, data.y_train, DEVICES, 1)
    return data, model, x, y


def score(weights):
    data, model, *_ = digits()
    return accuracy(model, weights, data.x_test, data.y_test)


def learned(rule, plan=PLAN, seed=1):
    _, model, x, y = digits()
    return score(learn(model, x, y, plan, rule, seed)[-1])


def test_averaging_is_near_what_one_place_learns_and_above_devices_alone():
    _, model, x, y = digits()
    together, one_place = learned(Average()), score(centralised(model, x, y, PLAN))
    lonely = np.mean([score(each) for each in alone(model, x, y, PLAN)])
    assert one_place > 0.88
    assert abs(together - one_place) < 0.04
    assert lonely < together - 0.05


def test_csdp_learns_under_generous_noise_less_under_more_and_as_averaging_without():
    free = learned(Csdp(clip=1e9, sigma=0.0))
    assert free == learned(Average())
    plenty = learned(csdp_for(20.0, 1e-5, PLAN, DEVICES, clip=1.0))
    little = learned(csdp_for(0.3, 1e-5, PLAN, DEVICES, clip=1.0))
    assert little < 0.6 < plenty


def test_csdp_is_charged_for_every_round_of_a_device_and_not_for_luck():
    """40 rounds of 10 among 60: at most 7 each. rho = 7 (2 C)^2 / 2 sigma^2, whoever was drawn."""
    assert PLAN.uses(DEVICES) == 7
    met = PLAN.cohorts(DEVICES, 5)
    assert np.bincount(met.ravel()).max() <= 7
    odd = Recipe(rounds=9, cohort=25, local_steps=1, minibatch=1, rate=1.0)  # ten of sixty sit out each pass
    assert odd.uses(DEVICES) == 5
    assert np.bincount(odd.cohorts(DEVICES, 5).ravel()).max() <= 5
    assert all(len(set(each)) == len(each) for each in [*met, *odd.cohorts(DEVICES, 5)])
    rule = Csdp(clip=0.5, sigma=2.0)
    assert float(rule.loss(PLAN, DEVICES).rho) == pytest.approx(7 * 1.0**2 / (2 * 4))
    made = csdp_for(2.0, 1e-5, PLAN, DEVICES, clip=0.5)
    assert made.epsilon(PLAN, DEVICES, 1e-5) == pytest.approx(2.0, rel=1e-6)
    assert float(made.loss(PLAN, DEVICES).rho) == pytest.approx(float(rho_for(2.0, 1e-5)))


def test_csdp_clips_the_update_of_a_device():
    moved = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)))
    assert float(jnp.linalg.norm(Csdp(0.25, 1.0).device(moved, jax.random.PRNGKey(1)))) == pytest.approx(0.25)
    short = moved * 1e-3
    np.testing.assert_array_equal(Csdp(0.25, 1.0).device(short, jax.random.PRNGKey(1)), short)


def test_correlated_noise_serves_devices_that_come_once_and_costs_more_for_those_who_return():
    once = Recipe(rounds=6, cohort=10, local_steps=5, minibatch=5, rate=2.0)
    plain, rooted = (csdp_for(4.0, 1e-5, once, DEVICES, clip=1.0, correlated=kind)
                     for kind in ("independent", "square-root"))  # fmt: skip
    assert rooted.sigma > plain.sigma  # its rounds have more, and sums over rounds less
    sums = [np.cumsum(rule.noise(6, 4000, 1), axis=0)[-1].std() for rule in (plain, rooted)]
    assert sums[1] < sums[0]
    returning = csdp_for(4.0, 1e-5, PLAN, DEVICES, clip=1.0, correlated="square-root")
    assert returning.sigma > 2 * csdp_for(4.0, 1e-5, PLAN, DEVICES, clip=1.0).sigma


def test_dssgd_learns_from_a_tenth_of_the_entries():
    assert learned(Dssgd(share=0.1)) > 0.8
    moved = jnp.asarray(np.random.default_rng(1).normal(size=(50, 2)))
    sent = np.asarray(Dssgd(share=0.1, bound=10.0).device(moved, jax.random.PRNGKey(1)))
    assert (sent != 0).sum() == 10
    assert abs(sent[sent != 0]).min() >= abs(np.asarray(moved)[sent == 0]).max()


def test_dssgds_epsilon_is_of_one_entry_and_a_device_pays_for_all_of_them():
    rule = Dssgd(share=0.1, per_parameter=10.0)
    assert rule.uploaded(640) == 64
    assert rule.epsilon(PLAN, DEVICES, 640) == pytest.approx(10.0 * 64 * 7)
    assert Dssgd(share=0.1).epsilon(PLAN, DEVICES, 640) == math.inf


def test_noisy_dssgd_uploads_no_more_than_its_share_within_its_bound_and_learns_at_a_huge_epsilon():
    rule = Dssgd(share=0.2, bound=0.01, per_parameter=1000.0)
    moved = jnp.asarray(np.random.default_rng(1).normal(size=(50, 2)))
    sent = np.asarray(rule.device(moved, jax.random.PRNGKey(1)))
    assert 0 < (sent != 0).sum() <= 20
    assert abs(sent).max() <= 0.01
    strong = Recipe(rounds=40, cohort=10, local_steps=5, minibatch=5, rate=2.0, server_rate=10.0)
    assert learned(rule, strong) > 0.6


def test_what_does_not_fit_is_refused():
    _, model, x, y = digits()
    with pytest.raises(TaskError, match="cohort"):
        learn(model, x, y, Recipe(1, 61, 1, 1, 1.0), Average(), 1)
    with pytest.raises(TaskError, match="minibatch"):
        learn(model, x, y, Recipe(1, 1, 1, 1000, 1.0), Average(), 1)
