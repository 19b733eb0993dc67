"""`crowdml.simulate`: a task on anyone's rows, as the command line runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from crowdml import Deal, find_task, simulate
from crowdml.datasets import blobs, load
from crowdml.errors import CrowdmlError, DataError
from crowdml.features import normalise
from crowdml.sim.studies import trial_seeds
from crowdml.task import StopRule

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml

DATA = blobs(rows=200, features=64, classes=3, seed=1)
TASK = find_task("activity").with_(stop=StopRule())
X, Y = DATA.x_train, DATA.y_train


def weights(**settings):
    return simulate(TASK, X, Y, **{"devices": 5, "seed": 1, "engine": "events", "points": 1, **settings}).runs[0].model


def test_the_command_line_and_python_run_the_same_study():
    told = crowdml("simulate", "digits012", "--trials", "2", "--seed", "7", "--json", "-").json
    data = load("digits012", normalise="l2")
    test = (data.x_test, data.y_test)
    study = simulate("digits012", data.x_train, data.y_train, test=test, trials=2, seed=7)
    assert told["accuracy"] == study.scores.mean()
    assert told["devices"] == study.population.devices == 15
    assert told["epsilon_device"] == study.planned.device


def test_names_of_classes_are_as_good_as_their_numbers():
    assert (weights() == simulate(TASK, X, np.array(TASK.labels.classes)[Y], devices=5, seed=1, engine="events",
                                  points=1).runs[0].model).all()  # fmt: skip


def test_an_array_says_whose_each_row_is():
    whose = np.array(["ann", "bob", "cyd", "dan"])[np.arange(len(Y)) % 4]
    study = simulate(TASK, X, Y, devices=whose, seed=1, engine="events", points=1)
    assert study.population.devices == 4
    assert (whose[study.population.held_by(1)] == "bob").all()


def test_without_a_number_every_device_has_one_check_in():
    study = simulate(TASK, X, Y, seed=1, engine="events", points=1)
    assert study.population.devices == study.check_ins == len(Y) // 20


def test_rows_outside_the_ball_are_shrunk_onto_it_as_on_a_device():
    far = simulate(TASK, X * 1000, Y, devices=5, seed=1, engine="events", points=1).runs[0].model
    near = simulate(TASK, normalise(X, "l2"), Y, devices=5, seed=1, engine="events", points=1).runs[0].model
    np.testing.assert_allclose(far, near, atol=1e-4)


def test_a_seed_repeats_all_trials_and_each_can_be_run_alone():
    both = simulate(TASK, X, Y, devices=5, trials=2, seed=3, engine="events", points=1)
    second = simulate(TASK, X, Y, devices=5, seed=trial_seeds(3, 2)[1:], engine="events", points=1)
    assert (both.runs[1].model == second.runs[0].model).all()
    assert (both.runs[0].model != both.runs[1].model).any()
    fresh = simulate(TASK, X, Y, devices=5, engine="events", points=1)
    assert (weights(seed=fresh.seed) == fresh.runs[0].model).all()


def test_other_ways_to_deal_rows_out():
    study = simulate(TASK, X, Y, devices=Deal("by_class", 5), seed=1, engine="events", points=1)
    assert all(len(np.unique(Y[study.population.held_by(each)])) <= 2 for each in range(5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"X": X[:, :3]}, "takes rows of 64 numbers, and X has 3 columns"),
        ({"X": X[0]}, r"X has shape \(64,\): give a table"),
        ({"y": Y[:-1]}, "give one label for each row"),
        ({"y": np.array(["sleeping"] * len(Y))}, r"y\[0\] is 'sleeping'; .* still, on foot, in vehicle"),
        ({"y": np.where(Y == 2, 7, Y)}, r"y\[\d+\] is 7; .* 3 classes"),
        ({"y": Y + 0.5}, r"y\[0\] is"),
        ({"devices": ["me"]}, "says whose 1 rows are"),
        ({"devices": 0}, "0 devices"),
        ({"devices": len(Y) + 1}, f"{len(Y) + 1} devices"),
        ({"trials": 0}, "trials = 0"),
        ({"task": "nothing.toml"}, "nothing.toml"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(changes, said):
    with pytest.raises(CrowdmlError, match=said):
        simulate(**{"task": TASK, "X": X, "y": Y, "devices": 5, "seed": 1, **changes})


def test_a_study_without_test_rows_has_no_scores():
    study = simulate(TASK, X, Y, devices=5, seed=1, engine="events", points=1)
    with pytest.raises(DataError, match="test="):
        _ = study.scores
