"""A simulated crowd that only counts: by the devices' own handlers, unmasked and in cohorts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tasks import COUNTS, toml

from crowdml.cli.counting import counts
from crowdml.datasets.populations import iid
from crowdml.errors import DataError, TaskError
from crowdml.protocols import find
from crowdml.sim.layout import Holding
from crowdml.sim.studies import simulate
from crowdml.sim.trial import Trial, run_trial
from crowdml.task import Task, parse

BUDGET = {"budget": {"epsilon": 0.5, "samples": 60}}
LOCAL = parse(toml(COUNTS, privacy=BUDGET))
MASKED = parse(
    toml(
        COUNTS,
        privacy={"mechanism": "skellam", "delta": 1e-6, **BUDGET},
        masking={"cohort": 10, "minimum": 7, "colluders": 1},
    )
)
X = np.zeros((4000, 1), np.float32)
Y = np.random.default_rng(1).choice(3, 4000, p=[0.6, 0.3, 0.1]).astype(np.int32)


@pytest.mark.parametrize(
    ("task", "dropout"), [(LOCAL, 0.0), (MASKED, 0.0), (MASKED, 0.2)], ids=["local", "masked", "dropout"]
)
def test_without_noise_the_counts_are_those_of_the_samples_that_were_given(task: Task, dropout: float):
    people, ticks = iid(4000, 40, 1), list[int]()
    run = run_trial(Trial(task, people, 3, dropout=dropout, noise=False), X, Y, ticks.append)
    tally: Any = find(task).progress(task, run.state)
    told = run.schedule.heard
    rows = Holding(X, Y, people).rows(told.device[:, None], told.samples)
    assert list(tally.labels.counts) == np.bincount(Y[rows].reshape(-1), minlength=3).tolist()
    assert rows.size == tally.labels.samples <= 40 * 60
    assert (rows.size < 40 * 60) == bool(dropout)
    assert np.bincount(run.schedule.device).tolist() == [6] * 40  # who vanished has paid all the same
    assert sum(ticks) == (24 if task.masking else 240) == run.heard


@pytest.mark.parametrize("task", [LOCAL, MASKED], ids=["local", "masked"])
def test_noise_is_as_large_as_its_variance_says_and_repeats_under_a_seed(task: Task):
    study = simulate(task, X, Y, devices=iid(4000, 40, 1), seed=range(20))
    found = [counts(study, trial, Y) for trial in range(20)]
    off = np.array([np.asarray(noisy.counts) - true for noisy, true in found])
    variance = found[0][0].variance
    assert 0.5 < (off**2).mean() / variance < 1.7  # 60 draws: five standard deviations either way
    assert abs(off.mean()) < 5 * (variance / off.size) ** 0.5
    again = simulate(task, X, Y, devices=iid(4000, 40, 1), seed=[7])
    assert counts(again, 0, Y)[0] == found[7][0]


def test_a_task_stops_after_its_steps():
    task = parse(toml(COUNTS, privacy=BUDGET, stop={"steps": 7}))
    study = simulate(task, X, Y, devices=40, seed=[1])
    noisy, true = counts(study, 0, Y)
    assert (study.check_ins, noisy.samples, int(true.sum())) == (7, 70, 70)


def test_who_holds_too_little_gives_nothing_and_single_check_ins_do_not_vanish():
    with pytest.raises(DataError, match="gives 5 at most, so nobody would check in"):
        simulate(LOCAL, X[:200], Y[:200], devices=40, seed=[1])
    with pytest.raises(TaskError, match=r"has no \[masking\]"):
        simulate(LOCAL, X, Y, devices=40, seed=[1], dropout=0.1)
