"""Masked rounds on NumPy, device after device: the same rounds as the compiled ones, and `gram`."""

from __future__ import annotations

import numpy as np
import pytest
from bench import masked_text
from tasks import MOMENTS, toml

from crowdml.arrays import Samples
from crowdml.datasets.populations import iid
from crowdml.protocols import gram
from crowdml.second_moments import moment_rows
from crowdml.sim import compiled, events
from crowdml.sim.layout import Holding, meet
from crowdml.sim.studies import simulate
from crowdml.task import parse

SEED = 7
GRAM = parse(toml(MOMENTS))


def crowd(dimension, classes, devices, each, passes=1):
    rng = np.random.default_rng(3)
    y = rng.integers(0, classes, devices * each).astype(np.int32)
    x = rng.normal(size=(len(y), dimension)).astype(np.float32) + 4 * np.eye(classes, dimension, dtype=np.float32)[y]
    return Holding(x / np.linalg.norm(x, axis=1, keepdims=True), y, iid(len(y), devices, 5), passes)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rounds_on_numpy_are_the_compiled_ones(dropout):
    task, holding = parse(masked_text()), crowd(4, 3, 24, 10)
    laid = meet(task, holding, SEED, dropout=dropout)
    (there,) = compiled.run(task, holding, [laid], [SEED], points=[1])
    here = events.run_rounds(task, holding, laid, seed=SEED, points=[1])
    assert int(here.state.steps) == int(there.state.steps) > 0
    np.testing.assert_array_equal(here.state.labels, there.state.labels)  # integers, with the same noise
    np.testing.assert_allclose(here.weights, there.weights, atol=2e-4)
    np.testing.assert_array_equal(here.points, there.points)
    for name in ("device", "trip", "samples", "version"):
        np.testing.assert_array_equal(getattr(here.schedule, name), getattr(there.schedule, name))


def test_the_sum_is_that_of_the_survivors_and_everybody_who_was_there_has_paid():
    holding = crowd(64, 10, 70, 20)
    laid = meet(GRAM, holding, SEED, dropout=0.2)
    run = events.run_rounds(GRAM, holding, laid, seed=SEED, noise=False)
    fixed = gram.plan(GRAM)
    exact = sum(
        fixed.mechanism.moments(moment_rows(fixed, Samples(holding.x[rows], holding.y[rows])))
        for rows in (holding.rows(device, np.arange(20)) for device in laid.device[0][laid.alive[0]])
    )
    np.testing.assert_array_equal(run.state.moments, exact)
    assert int(run.state.devices) == laid.alive.sum() < 70
    assert len(run.schedule) == 70
    assert run.stopped.sentence == "1 cohort has been added up"


def test_a_round_with_too_few_survivors_is_abandoned_and_paid_for():
    holding = crowd(64, 10, 70, 20)
    run = events.run_rounds(GRAM, holding, meet(GRAM, holding, SEED, dropout=0.6), seed=SEED)
    assert int(run.state.rounds) == 0
    assert not run.model.any()
    assert len(run.schedule) == 70
    assert run.stopped is None


def test_a_task_with_gram_is_simulated_with_its_price():
    holding = crowd(64, 10, 70, 20)
    study = simulate(GRAM, holding.x, holding.y, devices=holding.population, seed=[SEED, SEED + 1])
    assert study.accuracy(holding.x, holding.y).shape == (2, 1)
    assert study.accuracy(holding.x, holding.y).min() > 0.5
    assert study.planned.sample == pytest.approx(10, rel=1e-3)
    assert study.planned.sample < study.planned.sample_alone
    assert (study.rounds, study.abandoned, study.check_ins) == (1, 0, 70)
    assert study.uses == 1
