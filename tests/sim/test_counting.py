"""A simulated crowd that only counts: by the devices' own handlers, unmasked and in cohorts."""

from __future__ import annotations

import numpy as np
import pytest

from crowdml.datasets.populations import iid
from crowdml.errors import DataError, TaskError
from crowdml.sim.counting import counts, held, turns
from crowdml.sim.estimator import simulate
from crowdml.task import Task, parse

TEXT = """
name = "moods"
[features]
dimension = 1
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
classes = ["bad", "fair", "good"]
[model]
kind = "histogram"
[protocol]
kind = "proportions"
batch = 10
[privacy]
{privacy}
budget = {{ epsilon = 0.5, samples = 60 }}
"""
LOCAL = parse(TEXT.format(privacy='mechanism = "discrete-laplace"\nepsilon = { counts = 0.5 }'))
MASKED = parse(
    TEXT.format(privacy='mechanism = "skellam"\nepsilon = { counts = 0.5 }\ndelta = 1e-6')
    + "[masking]\ncohort = 10\nminimum = 7\ncolluders = 1\n"
)


def crowd(task: Task, rows: int = 4000, devices: int = 40):
    y = np.random.default_rng(1).choice(3, rows, p=[0.6, 0.3, 0.1]).astype(np.int32)
    return held(task, np.zeros((rows, 1), np.float32), y, iid(rows, devices, 1))


@pytest.mark.parametrize(
    ("task", "dropout"), [(LOCAL, 0.0), (MASKED, 0.0), (MASKED, 0.2)], ids=["local", "masked", "dropout"]
)
def test_without_noise_the_counts_are_those_of_the_samples_that_were_given(task: Task, dropout: float):
    ticks: list[int] = []
    found = counts(task, crowd(task), 3, dropout=dropout, noise=False, tick=ticks.append)
    assert list(found.noisy.counts) == found.true.tolist()
    assert found.true.sum() == found.noisy.samples <= 40 * 60
    assert (found.noisy.samples < 40 * 60) == bool(dropout)
    assert found.trips.tolist() == [6] * 40  # who vanished has paid all the same
    assert sum(ticks) == turns(task, crowd(task), 3, dropout)


@pytest.mark.parametrize("task", [LOCAL, MASKED], ids=["local", "masked"])
def test_noise_is_as_large_as_its_variance_says_and_repeats_under_a_seed(task: Task):
    found = [counts(task, crowd(task), seed) for seed in range(20)]
    off = np.array([np.asarray(each.noisy.counts) - each.true for each in found])
    variance = found[0].noisy.variance
    assert 0.5 < (off**2).mean() / variance < 1.7  # 60 draws: five standard deviations either way
    assert abs(off.mean()) < 5 * (variance / off.size) ** 0.5
    assert counts(task, crowd(task), 7).noisy == found[7].noisy


def test_a_task_stops_after_its_steps():
    text = TEXT.format(privacy='mechanism = "discrete-laplace"\nepsilon = { counts = 0.5 }') + "[stop]\nsteps = 7\n"
    found = counts(parse(text), crowd(LOCAL), 1)
    assert (found.sums, found.noisy.samples, int(found.trips.sum())) == (7, 70, 7)


def test_who_holds_too_little_gives_nothing_and_what_learns_more_than_counts_is_refused():
    with pytest.raises(DataError, match="gives 5 at most, so nobody would check in"):
        crowd(LOCAL, rows=200, devices=40)
    with pytest.raises(TaskError, match=r"crowdml\.sim\.counting\.counts"):
        simulate(LOCAL, np.zeros((10, 1), np.float32), np.zeros(10, np.int32), lambda seed: iid(10, 1, seed), seeds=[1])
    with pytest.raises(TaskError, match="has no cohorts to vanish from"):
        counts(LOCAL, crowd(LOCAL), 1, dropout=0.1)
