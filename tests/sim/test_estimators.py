"""Every protocol as an estimator, for classes and for numbers; its settings by name; tasks from files."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import GridSearchCV

from crowdml import Crowd, CrowdRegressor, PrivacyWarning, find_task
from crowdml.datasets import blobs, load
from crowdml.errors import FitError
from crowdml.protocols import PROTOCOLS
from crowdml.task import shipped_text

DATA = blobs(rows=300, features=4, classes=2, seed=5)
X, Y = DATA.x_train, DATA.y_train
LEARNING = ("sgd", "gram", "admm", "local_updates")
SMALL: Any = {"devices": 10, "bounds": (-1, 1), "seed": 1}


@pytest.mark.parametrize("protocol", LEARNING)
def test_every_protocol_learns_classes_at_the_price_that_was_asked_for(protocol: str):
    crowd = Crowd(protocol=protocol, epsilon=20.0, masking=True, **SMALL).fit(X, Y)
    assert crowd.score(DATA.x_test, DATA.y_test) > 0.8
    assert 19.9 < crowd.epsilon_sample_ <= 20.0
    assert crowd.decision_function(X).shape == Y.shape
    assert ((crowd.decision_function(X) > 0) == crowd.predict(X)).all()


@pytest.mark.parametrize("protocol", LEARNING)
def test_every_protocol_learns_numbers(protocol: str):
    x, y = load_diabetes(return_X_y=True)
    crowd = CrowdRegressor(
        protocol=protocol, epsilon=100.0, masking=True, devices=40, bounds=(-0.14, 0.2), target=(25, 346), seed=1
    ).fit(x, y)
    assert crowd.score(x, y) > 0.2
    assert crowd.history_["R²"][-1] == pytest.approx(crowd.score(x, y), abs=1e-3)
    assert (crowd.verdict_.level, dict(crowd.verdict_.numbers)["r2"]) == ("learned", crowd.scores_[0])
    said = x @ crowd.coef_ if protocol == "gram" else None
    assert said is None or np.corrcoef(said, crowd.predict(x))[0, 1] > 0.9


def test_a_table_with_columns_of_all_sizes_is_learned_without_a_choice():
    x, y = load_breast_cancer(return_X_y=True)
    with pytest.warns(PrivacyWarning, match="bounds were taken from X"):
        crowd = Crowd(protocol="gram", epsilon=4.0, devices=39, seed=1).fit(x[::2], y[::2], evaluate=(x[1::2], y[1::2]))
    assert crowd.scores_[0] == crowd.score(x[1::2], y[1::2]) > 0.9
    assert crowd.verdict_.level == "learned"
    beside = crowd.baselines(x[::2], y[::2], test=(x[1::2], y[1::2]))
    assert beside["constant"] == np.mean(y[1::2])
    assert beside["no_privacy"] > crowd.scores_[0] > beside["constant"]


def test_public_bounds_scale_and_clip_columns_and_need_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crowd = Crowd(protocol="gram", epsilon=8.0, **{**SMALL, "bounds": (X.min(0), 1)}).fit(X, Y)
        bare = Crowd(protocol="gram", epsilon=8.0, **{**SMALL, "bounds": False}).fit(X, Y)
    far = np.where(X.max(0) == X, 50.0, X)
    assert (crowd.predict(far) == crowd.predict(np.minimum(far, 1))).all()
    assert (crowd.weights_ != bare.weights_).any()


def test_numbers_outside_public_bounds_are_clipped_counted_and_told():
    with pytest.warns(UserWarning, match=rf"{(X > 0).sum():,} of {X.size:,} numbers lie outside their bounds"):
        Crowd(protocol="gram", **{**SMALL, "bounds": (-1, 0)}).fit(X, Y)


def test_numbers_without_a_target_are_bounded_by_themselves_with_a_warning():
    with pytest.warns(PrivacyWarning, match="target was taken from y"):
        crowd = CrowdRegressor(protocol="gram", epsilon=50.0, **SMALL).fit(X, 100 + X[:, 0])
    assert 99 < crowd.predict(X).mean() < 101


def test_settings_of_a_protocol_are_parameters_by_name():
    crowd = Crowd(protocol="sgd", batch=6, step=0.5, update="momentum", settings={"buffer": 12}, **SMALL)
    assert crowd.get_params()["step"] == 0.5
    for each in (crowd, clone(crowd), copy.deepcopy(crowd), Crowd(**crowd.get_params())):
        each.fit(X, Y)
        assert {**each.task_.protocol, "step": float(each.task_.protocol["step"]["c"])} == {
            "kind": "sgd", "batch": 6, "step": 0.5, "update": "momentum", "buffer": 12
        }  # fmt: skip
    assert "step=0.5" in repr(crowd)
    assert clone(crowd).set_params(step=0.25, devices=7).get_params()["step"] == 0.25


def test_settings_can_be_searched():
    search = GridSearchCV(Crowd(protocol="gram", **SMALL), {"positive": [False, True], "epsilon": [4.0]}, cv=2).fit(
        X, Y
    )
    assert search.best_params_["epsilon"] == 4.0
    assert "positive" in search.best_estimator_.get_params()


def test_a_name_that_is_also_a_parameter_is_given_in_settings():
    crowd = Crowd(protocol="admm", settings={"delay": 3}, masking=True, **SMALL).fit(X, Y)
    assert crowd.task_.protocol["delay"] == 3


def test_without_a_number_each_device_holds_ten_rows_or_a_batch():
    assert Crowd(protocol="gram", bounds=(-1, 1), seed=1).fit(X, Y).study_.population.devices == 30
    assert Crowd(bounds=(-1, 1), batch=50, seed=1).fit(X, Y).study_.population.devices == 6


def test_people_are_devices():
    crowd = Crowd(protocol="gram", bounds=(-1, 1), seed=1).fit(X, Y, groups=np.arange(len(Y)) % 12)
    assert crowd.study_.population.devices == 12


def test_several_trials_give_an_interval_and_the_first_ones_model():
    crowd = Crowd(protocol="gram", trials=3, **SMALL).fit(X, Y, evaluate=(DATA.x_test, DATA.y_test))
    assert len(crowd.scores_) == 3
    assert crowd.interval_ == (min(crowd.scores_), max(crowd.scores_))
    assert crowd.scores_[0] == crowd.score(DATA.x_test, DATA.y_test)
    assert clone(crowd).set_params(trials=1).fit(X, Y).score(DATA.x_test, DATA.y_test) == crowd.scores_[0]


def test_a_task_from_a_file_runs_as_an_estimator(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(shipped_text("digits012"))
    digits = load("digits012", normalise="none")
    names = np.array(find_task("digits012").labels.classes)
    crowd = Crowd.from_task(file, seed=1).fit(digits.x_train - 0.5, names[digits.y_train])
    assert crowd.task_ == find_task("digits012")
    assert crowd.study_.population.devices == 15
    assert set(crowd.predict(digits.x_test - 0.5)) <= set(names)
    assert clone(crowd).get_params()["task"] == crowd.task_
    with pytest.raises(FitError, match="y holds '7'; the task's classes are 0, 1, 2"):
        Crowd.from_task(file, seed=1).fit(digits.x_train, np.full(len(digits.x_train), "7"))


def test_a_task_that_learns_classes_is_no_regressor():
    with pytest.raises(FitError, match="learns classes: use Crowd"):
        CrowdRegressor.from_task("digits012", seed=1).fit(np.ones((30, 64)), np.arange(30.0))


def test_a_score_does_not_depend_on_the_rows_beside_it():
    crowd = CrowdRegressor(epsilon=None, **SMALL, target=(-1, 1)).fit(X, X[:, 0])
    alone = np.concatenate([crowd.predict(X[place : place + 1]) for place in range(40)])
    np.testing.assert_allclose(alone, crowd.predict(X)[:40], rtol=1e-12)


def test_an_svm_has_no_probabilities():
    assert not hasattr(Crowd(model="svm"), "predict_proba")
    assert not hasattr(Crowd(protocol="gram"), "predict_proba")
    assert hasattr(Crowd(), "predict_proba")


def test_estimators_know_every_protocol_of_ours():
    assert {*LEARNING, "proportions", "secprobe"} == set(PROTOCOLS.ours)


TWO = np.random.default_rng(1).uniform(0, 1, (60, 3)), np.arange(60) % 2


def test_numbers_of_numpy_are_settings_as_pythons_own_are():
    x, y = TWO
    given = {"epsilon": np.float32(4), "batch": np.int64(10), "trials": np.float64(1), "passes": np.int64(2)}
    asked = {"epsilon": 4.0, "batch": 10, "trials": 1, "passes": 2}
    one, other = (Crowd(**each, bounds=(0, 1), seed=1).fit(x, y) for each in (given, asked))
    assert one.task_ == other.task_
    assert np.array_equal(one.weights_, other.weights_)


@pytest.mark.parametrize(
    ("parameters", "fitting", "why"),
    [
        ({"mechanism": 3}, {}, "mechanism = 3: say its name, or None"),
        ({"model": 3}, {}, "model = 3: say its name, or a table, or None"),
        ({"bounds": (np.nan, 1)}, {}, "give .low, high., finite numbers"),
        ({}, {"groups": [None] * 30 + ["a"] * 30}, r"groups\[0\] names no device \(30 of 60 do not\)"),
        ({}, {"groups": np.zeros((60, 2))}, r"groups says whose \(60, 2\) rows are, and X has 60"),
        ({}, {"evaluate": (TWO[0][:5], TWO[1][:4])}, r"evaluate\[1\] has shape \(4,\), and there are 5 rows"),
    ],
)
def test_what_no_crowd_takes_is_refused_in_a_sentence(parameters: Any, fitting: Any, why: str):
    with pytest.raises(FitError, match=why):
        Crowd(**{"bounds": (0, 1), **parameters}).fit(*TWO, **fitting)


def test_a_delta_that_no_device_accepts_is_said():
    with pytest.warns(PrivacyWarning, match=r"delta = 0.5 is above 1e-05: .* no device accepts one as large"):
        Crowd(delta=0.5, bounds=(0, 1), seed=1).fit(*TWO)
