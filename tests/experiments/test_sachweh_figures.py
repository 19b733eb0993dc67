"""The parts of Sachweh et al.'s figures: where edges come from, what folds hold, what noise is drawn, who votes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crowdml.datasets import made_up_city, traffic
from crowdml.experiments import sachweh
from crowdml.experiments.published.proportions import FOLDS, ONCE
from crowdml.experiments.sachweh import Case, count, exact, folds, learn, published, score, sound
from crowdml.sim import cities

READINGS = made_up_city(places=5, days=7, learned_days=5, seed=11)
CASE = Case(READINGS, trials=4, quick=True)
CITY = CASE.city(traffic.EDGES)


def test_edges_of_equal_bins_come_from_public_readings_alone() -> None:
    louder = replace(READINGS, values=READINGS.values * 3)
    assert Case(louder, 1, quick=True).quantiles == CASE.quantiles
    public = tuple(each * 3 for each in READINGS.public)
    assert Case(replace(READINGS, public=public), 1, quick=True).quantiles != CASE.quantiles


def test_held_out_days_are_in_no_window_and_no_label_that_is_learned_from() -> None:
    values = READINGS.values.copy()
    values[:, READINGS.learned :] = 9999
    other = Case(replace(READINGS, values=values), 1, quick=True).city(traffic.EDGES)
    assert np.array_equal(other.x, CITY.x)
    assert np.array_equal(other.y, CITY.y)
    assert other.x_test.min() == 9999


@pytest.mark.parametrize("quick", [True, False])
def test_every_row_is_tested_in_one_fold_and_counted_in_all_others(quick: bool) -> None:
    case = Case(READINGS, 1, quick)
    rows = len(READINGS.values[0]) - traffic.WIDTH - traffic.HORIZON + 1
    tested, counted = 0, 0
    for city in folds(case, traffic.EDGES):
        assert len(city.y[0]) + len(city.y_test[0]) == rows
        tested, counted = tested + len(city.y_test[0]), counted + len(city.y[0])
    assert tested == rows
    assert counted == rows * sachweh.uses(case)
    assert sachweh.uses(case) == (2 if quick else FOLDS - 1)


def test_p2_noise_of_the_sound_curves_is_that_of_the_tasks_mechanism_anew_in_each_trial() -> None:
    zeros = np.zeros((40, 60, 5), np.int32)
    said = sound(CASE, zeros, 0.1)
    assert said.variance == pytest.approx(799.8334, rel=1e-6)
    assert np.var(said.counts) == pytest.approx(said.variance, rel=0.05)
    assert not np.array_equal(said.counts[0], said.counts[1])
    assert np.array_equal(said.counts, sound(CASE, zeros, 0.1).counts)


def test_without_peers_a_device_predicts_the_same_whatever_is_said() -> None:
    own = count(CITY.y, 16, CITY.classes)
    told = [
        learn(CITY, 2, own, said, batch=16, k=8, many=3, seed=1).accuracy(0)[0]
        for said in (exact(own, "shares"), sound(CASE, own, 0.01))
    ]
    assert told[0] == told[1]


def test_what_peers_say_exactly_is_worth_no_less_than_the_same_under_noise_that_hides_it() -> None:
    own = count(CITY.y, 8, CITY.classes)
    plain, hidden = (
        score(CITY, own, said, batch=8, k=8, seed=1).mean() for said in (exact(own, "shares"), sound(CASE, own, 0.01))
    )
    assert plain > hidden + 0.05


def test_noise_changes_no_length_and_what_is_sent_is_what_the_handlers_send() -> None:
    task = sachweh.make_task(READINGS, traffic.EDGES, batch=32, epsilon=0.1)
    silent = cities.exchange(task, READINGS.values[:, : READINGS.learned], seed=5, noise=False)
    found = sachweh.kilobytes(CASE, 32)
    assert found.said == silent.said.mean() / 1000
    assert found.heard == silent.heard.mean() / 1000
    assert found.raw > 2 * 32 * silent.check_ins[0] / 1000  # the readings, and envelopes around them


def test_p4_each_fold_draws_noise_of_its_own_which_is_why_it_is_charged_for_each() -> None:
    zeros = np.zeros((5, 20, 5), np.int32)
    batches = zeros + 8 * (np.arange(5) == 0)
    for first, second in (
        [sound(CASE, zeros, 0.1, salt=200 + fold) for fold in (0, 1)],
        [published(CASE, batches, 0.1, ONCE, salt=fold) for fold in (0, 1)],
    ):
        assert not np.array_equal(first.counts, second.counts)
