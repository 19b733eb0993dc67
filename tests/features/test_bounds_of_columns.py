"""Public bounds of columns: what a device, the simulator, validation and exported models make of a row."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crowdml.device.rows import Faults, samples_of
from crowdml.errors import TaskError
from crowdml.features import into_ball, outside, prepared, prepared_numbers
from crowdml.features.bounds import bounds_of
from crowdml.protocols import find
from crowdml.server.validation import _predictions as predictions
from crowdml.server.validation import read_rows
from crowdml.sim.estimator import CrowdRegressor
from crowdml.sim.studies import _rows as simulated_rows
from crowdml.sim.studies import inside, simulate
from crowdml.suggest import Shape, suggest
from crowdml.task import Bound, Features, Labels, Task, find_task, from_canonical, parse, shipped_text

LOW, HIGH = (Fraction(0), Fraction(-10), Fraction(5)), (Fraction(1000), Fraction(10), Fraction(5))
FEATURES = Features(3, Bound("l2"), low=LOW, high=HIGH)
BALL = Features(3, Bound("l2", Fraction(2)), low=LOW, high=HIGH)


def test_each_column_is_scaled_to_its_bounds_so_that_none_swallows_the_others():
    assert prepared(BALL, np.array([[0, -10, 5]]))[0] == pytest.approx([-1, -1, 0])
    assert prepared(BALL, np.array([[1000, 10, 5]]))[0] == pytest.approx([1, 1, 0])
    assert prepared(BALL, np.array([[750, 0, 9]]))[0] == pytest.approx([0.5, 0, 0])
    assert prepared(FEATURES, np.array([[1000, 10, 5]]))[0] == pytest.approx([0.5**0.5, 0.5**0.5, 0], rel=1e-5)


def test_a_number_outside_the_bounds_is_held_at_them_and_told():
    x = np.array([[2000.0, 0, 5], [500, 0, 5], [500, -11, 4]])
    assert prepared(BALL, x).tolist() == [[1, 0, 0], [0, 0, 0], [0, -1, 0]]
    assert outside(BALL, x).tolist() == [[True, False, False], [False] * 3, [False, True, True]]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_is_the_zero_row(broken: float):
    assert prepared(FEATURES, np.array([[broken, 1, 5], [1000, 10, 5]])).tolist()[0] == [0, 0, 0]


def test_without_bounds_rows_are_brought_into_the_ball_alone():
    x = np.random.default_rng(1).normal(size=(20, 3))
    plain = Features(3, Bound("l1"))
    assert np.array_equal(prepared(plain, x), into_ball(x, "l1"))
    assert not outside(plain, x).any()


def test_no_row_leaves_the_ball_whatever_it_holds():
    x = np.random.default_rng(2).normal(size=(500, 3)) * 10.0 ** np.random.default_rng(3).integers(-20, 20, (500, 1))
    for features, order in ((FEATURES, 2), (Features(3, Bound("l1"), low=LOW, high=HIGH), 1)):
        assert (np.linalg.norm(prepared(features, x).astype(np.float64), order, axis=1) <= 1).all()


def test_a_device_and_the_simulator_prepare_a_row_alike_and_the_owner_hears_what_was_clipped():
    task = replace(find_task("digits012"), features=replace(FEATURES, dimension=3))
    x = np.array([[2000.0, 3, 5], [400, -2, 5], [1, 2, np.nan]])
    faults = Faults()
    on_device = samples_of([(row, 1) for row in x], task, faults)
    assert faults.clipped == 1
    assert faults.counts == {"number": 1}
    assert np.array_equal(inside(task, x), np.stack([sample.x for sample in on_device]))


def test_validation_tries_a_model_on_rows_that_are_prepared_alike():
    task = replace(find_task("digits012"), features=FEATURES)
    weights = np.random.default_rng(4).normal(size=(3, 3)).astype(np.float32)
    x = np.array([[2000.0, 3, 5], [400, -2, 5], [900, 9, 5]])
    expected = find(task).predict(task, weights, prepared(FEATURES, x))
    plain = find(task).predict(task, weights, into_ball(x, "l2"))
    assert predictions(task, weights, x).tolist() == expected.tolist() != plain.tolist()


def test_bounds_are_part_of_a_task_and_without_them_its_hash_is_as_before():
    text = shipped_text("digits012")
    plain = parse(text)
    one = parse(text.replace("[features]", "[features]\nlow = 0.0\nhigh = 16"))
    assert one.features.low == 0
    assert from_canonical(one.canonical) == one
    assert one != plain
    assert b'"low"' not in plain.canonical
    several = parse(text.replace("[features]", f"[features]\nlow = {[0.0] * 64}\nhigh = {[16.0] * 64}"))
    assert from_canonical(several.canonical).features.high == (Fraction(16),) * 64


@pytest.mark.parametrize(
    ("low", "high", "why"),
    [
        (LOW, None, "features.low without features.high"),
        (None, HIGH, "features.high without features.low"),
        (LOW[:2], HIGH, "features.low has 2 numbers: one for all columns, or one for each of features.dimension = 3"),
        (Fraction(2), Fraction(1), "features.low = 2 is above features.high = 1 in column 1"),
    ],
)
def test_bounds_that_are_none_are_refused_by_key(low: object, high: object, why: str):
    with pytest.raises(TaskError, match=why):
        Features(3, Bound("l2"), low=low, high=high)  # pyright: ignore[reportArgumentType]


NUMBER = Labels(kind="number", low=Fraction(180), high=Fraction(220))


def test_a_label_with_bounds_is_the_same_number_on_a_device_in_the_simulator_and_in_validation(tmp_path: Path):
    task = number_task()
    y = np.array([180.0, 205.0, 220.0, 500.0, -3.0])
    x = np.zeros((5, 2))
    assert prepared_numbers(NUMBER, y).tolist() == [-1, 0.25, 1, 1, -1]
    on_device = [sample.y for sample in samples_of(list(zip(x, y, strict=True)), task, Faults())]
    assert on_device == [-1, 0.25, 1, 1, -1]
    assert simulated_rows(task, x, y)[1].tolist() == on_device
    (tmp_path / "own.csv").write_text("".join(f"0,0,{each}\n" for each in y))
    assert read_rows(task, str(tmp_path / "own.csv")).y.tolist() == on_device


def number_task() -> Task:
    return suggest(Shape(2, None, 30, 10), epsilon=4.0, ends=(Fraction(180), Fraction(220)))


def test_a_task_with_bounds_of_its_labels_reads_back_and_one_without_keeps_its_hash():
    task = number_task()
    assert from_canonical(task.canonical) == task
    assert task.labels.ends == (180, 220)
    plain = task.with_(labels=Labels(kind="number"))
    assert b"high" not in plain.canonical
    assert plain.labels.ends == (-1, 1)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"kind": "number", "low": Fraction(1)}, "labels.low without labels.high"),
        ({"kind": "number", "low": Fraction(1), "high": Fraction(1)}, "labels.low = 1 is not below labels.high = 1"),
        ({"kind": "number", "low": Fraction(0), "high": Fraction(2), "bound": Fraction(2)}, "labels.bound = 2 beside"),
        ({"classes": ("a", "b"), "low": Fraction(0), "high": Fraction(2)}, 'are for labels.kind = "number"'),
    ],
)
def test_bounds_of_a_label_that_make_no_sense_are_refused(labels: dict[str, Any], why: str):
    with pytest.raises(TaskError) as refused:
        Labels(**labels)
    assert why in str(refused.value)


def test_a_number_far_from_zero_is_learned_as_well_as_one_around_it():
    chance = np.random.default_rng(3)
    x = chance.uniform(-1, 1, (400, 2))
    y = 200 + 20 * (0.8 * x[:, 0] - 0.1 * x[:, 1])
    task = number_task().with_(features=Features(2, Bound("l2"), low=Fraction(-1), high=Fraction(1)))
    study = simulate(task, x, y, devices=30, test=(x, y), seed=1)
    around = simulate(number_task().with_(features=task.features, labels=Labels(kind="number")),
                      x, (y - 200) / 20, devices=30, test=(x, (y - 200) / 20), seed=1)  # fmt: skip
    assert study.scores[0] == pytest.approx(around.scores[0], abs=1e-4)
    assert study.distance(study.test.x, study.test.y)[0, -1] == pytest.approx(
        20 * around.distance(around.test.x, around.test.y)[0, -1], rel=1e-3
    )
    crowd = CrowdRegressor.from_task(task, devices=30, seed=1).fit(x, y)
    assert crowd.score(x, y) == pytest.approx(study.scores[0], abs=1e-4)


def test_bounds_from_rows_are_numbers_that_a_task_can_hold_and_no_row_lies_outside():
    rows = np.array([[1e-310, -2e-40, 0.0, 1.23456], [-1e-45, -1e-31, 0.0, 9.87654]])
    low, high = bounds_of(rows)
    assert low == (-Fraction(1, 10**30), -Fraction(1, 10**30), 0, Fraction("1.234"))
    assert high == (Fraction(1, 10**30), 0, 0, Fraction("9.877"))
