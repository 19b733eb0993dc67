"""A task that nobody wrote: what public rules choose, and that no choice costs more than was asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from crowdml.errors import TaskError
from crowdml.price import Price
from crowdml.privacy.losses import exact
from crowdml.protocols import find, settled
from crowdml.protocols.sgd import plan
from crowdml.shape import pushed
from crowdml.sim.studies import simulate
from crowdml.suggest import Shape, _within, assumed, fits, has_fleet_time, noise_of, outlook, suggest
from crowdml.task import find_task, shipped

SHAPES = {
    "few": Shape(features=4, classes=3, devices=12, held=9),
    "wide": Shape(features=64, classes=10, devices=100, held=14),
    "many": Shape(features=30, classes=2, devices=1500, held=60),
    "numbers": Shape(features=8, classes=None, devices=40, held=20, bound=Fraction(5)),
}
FORMS = [(name, masked) for name, masked in product(("sgd", "gram", "admm", "local_updates"), (False, True))
         if fits(name, SHAPES["few"], masked) is None]  # fmt: skip


@pytest.mark.parametrize(("protocol", "masked"), FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", ["0.1", "1", "4", "10"])
def test_a_sample_pays_at_most_what_was_asked_for_in_all_its_uses(protocol, masked, shape, epsilon):
    task = suggest(SHAPES[shape], protocol=protocol, epsilon=Fraction(epsilon), masked=masked)
    paid = exact(Price.of(find(task), task).sample_epsilon(task.privacy.uses))
    assert Fraction(epsilon) * Fraction(99, 100) < paid <= Fraction(epsilon)


@pytest.mark.parametrize(("protocol", "masked"), FORMS)
def test_a_suggested_task_can_be_published(protocol, masked):
    task = settled(suggest(SHAPES["few"], protocol=protocol, epsilon=1.0, masked=masked))
    assert task.privacy.grid is not None
    assert (task.masking is not None) == masked


@pytest.mark.parametrize("protocol", ["sgd", "admm", "local_updates"])
def test_no_epsilon_is_no_noise(protocol):
    assert suggest(SHAPES["few"], protocol=protocol, epsilon=None).privacy.mechanism == "none"


def test_what_the_caller_says_is_kept():
    task = suggest(SHAPES["wide"], epsilon=1.0, masking={"cohort": 50, "minimum": 45, "colluders": 3}, uses=7,
                   settings={"step": {"c": 0.5}, "batch": 7})  # fmt: skip
    assert (task.masking.cohort, task.masking.minimum, task.masking.colluders) == (50, 45, 3)
    assert (task.privacy.uses, task.protocol["batch"], task.protocol["step"]) == (7, 7, {"c": Fraction(1, 2)})


def test_a_part_of_a_masking_table_is_completed():
    masking = suggest(SHAPES["wide"], epsilon=1.0, masking={"cohort": 50}).masking
    assert masking.cohort == 50
    assert 50 / 2 < masking.minimum < 50


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "gossip"}, "protocol = 'gossip'"),
        ({"protocol": "grem"}, "Did you mean 'gram'"),
        ({"settings": {"rho": 1.0}}, "rho = 1.0: sgd has no such setting"),
        ({"settings": {"radios": 1.0}}, "Did you mean 'radius'"),
        ({"protocol": "proportions"}, "windows of readings"),
        ({"uses": 0}, "passes = 0"),
        ({"masked": True, "mechanism": "discrete-laplace"}, "masking needs mechanism"),
    ],
)
def test_what_cannot_be_is_refused_in_the_callers_words(changes, said):
    with pytest.raises(TaskError, match=said):
        suggest(SHAPES["few"], **{"epsilon": 1.0, **changes})


def test_masks_need_enough_devices():
    assert "at least 4 devices" in fits("sgd", Shape(features=4, classes=2, devices=3, held=9), True)


@pytest.mark.parametrize(("protocol", "masked"), FORMS)
def test_a_crowd_too_small_for_its_price_is_told_before_it_runs(protocol, masked):
    few = Shape(features=30, classes=2, devices=20, held=10)
    task = suggest(few, protocol=protocol, epsilon=0.1, masked=masked)
    told = outlook(task, few)
    assert told is not None
    assert told.noise > 0.25
    assert f"{told.devices:,} such devices" in told.sentence
    assert ("masks" in told.sentence) == (not masked)
    enough = Shape(features=30, classes=2, devices=told.devices + told.devices // 5, held=10)
    if told.devices <= 1000:  # more of them meet in several cohorts
        assert outlook(suggest(enough, protocol=protocol, epsilon=0.1, masked=masked), enough) is None


def test_a_large_crowd_and_one_without_noise_are_told_nothing():
    assert outlook(suggest(SHAPES["many"], epsilon=1.0, masked=True), SHAPES["many"]) is None
    assert outlook(suggest(SHAPES["few"], epsilon=None), SHAPES["few"]) is None


def test_under_masks_a_crowd_has_less_noise_than_without():
    for protocol in ("sgd", "admm", "local_updates"):
        alone, masked = (suggest(SHAPES["wide"], protocol=protocol, epsilon=1.0, masked=each) for each in (False, True))
        assert noise_of(masked, SHAPES["wide"]) < noise_of(alone, SHAPES["wide"]) / 5


def test_public_bounds_stand_in_the_task():
    task = suggest(SHAPES["few"], epsilon=1.0, low=0, high=[1.0, 2.0, 0.5, 4], masked=True)
    assert (task.features.low, task.features.high) == (0, (1, 2, Fraction(1, 2), 4))


def test_a_masked_task_plans_rounds_and_its_price_covers_them():
    task = suggest(SHAPES["wide"], epsilon=1.0, masked=True)
    assert task.privacy.uses == 60
    price = Price.of(find(task), task)
    assert price.sample_epsilon(60) <= 1 < price.sample_epsilon(61)


def test_numbers_take_as_many_rounds_as_noise_lets_weights_go_far():
    crowds = [Shape(features=60, classes=None, devices=devices, held=100) for devices in (20, 150, 1000)]
    tasks = [suggest(crowd, epsilon=1.0, masked=True) for crowd in crowds]
    assert [task.privacy.uses for task in tasks] == [60, 73, 110]
    assert [task.protocol["momentum"] for task in tasks] == [Fraction("0.8"), Fraction("0.8356"), Fraction("0.8909")]
    assert suggest(crowds[2], epsilon=1.0, masked=True, uses=20).protocol["momentum"] == Fraction("0.8")
    assert suggest(crowds[2], epsilon=None, masked=True).privacy.uses == 110
    classes = replace(crowds[2], classes=3)
    assert suggest(classes, epsilon=1.0, masked=True).privacy.uses == 60
    assert suggest(classes, epsilon=1.0, masked=True, uses=300).protocol["momentum"] == Fraction("0.9")


def test_steps_of_the_planned_rounds_go_as_far_as_noise_allows():
    """What all steps add up to is within a tenth of what noise allows, or of what is far without noise."""
    for devices, epsilon in ((300, 1.0), (400, 1.0), (1000, None)):
        shape = Shape(features=60, classes=None, devices=devices, held=100)
        task = suggest(shape, epsilon=epsilon, masked=True)
        uses, momentum = task.privacy.uses, float(task.protocol["momentum"])
        gone = float(task.protocol["step"]["c"]) * pushed(uses, momentum)
        fixed = plan(task)
        noise = math.sqrt(fixed.table["gradient"].noise_variance / (devices * uses)) * float(fixed.grid.step) / 100
        allowed = min(1000.0, 0.15 / noise) if noise else 1000.0
        assert 0.85 * allowed < gone <= 1.001 * allowed


def test_prices_that_add_up_to_more_are_brought_down():
    """Rows of a plug-in may each be priced at the whole: together they cost more."""
    task = suggest(SHAPES["few"], epsilon=1.0, uses=3)
    dear = task.with_(privacy=replace(task.privacy, epsilon={"gradient": Fraction(2)}))
    brought = _within(find(task), dear, SHAPES["few"], ["gradient"], Fraction(1))
    assert Fraction(99, 100) < exact(Price.of(find(brought), brought).sample_epsilon(3)) <= 1


def test_a_model_of_numbers_has_an_intercept_and_one_of_classes_has_none():
    assert suggest(SHAPES["numbers"], epsilon=1.0).model["bias"] is True
    assert "bias" not in suggest(SHAPES["few"], epsilon=1.0).model
    assert suggest(SHAPES["numbers"], protocol="gram", epsilon=1.0).protocol["map"]["constant"] == Fraction(1, 2)


def test_a_step_without_masks_is_no_longer_than_what_is_stable_however_large_epsilon_is():
    shape = Shape(features=64, classes=3, devices=30, held=180)
    task = suggest(shape, epsilon=100.0)
    stable = 2.0  # 1 / L of softmax for rows of length one
    assert task.protocol["step"]["c"] <= stable / shape.rules.clip * 1.001


@pytest.mark.parametrize("protocol", ["sgd", "admm", "gram", "local_updates"])
def test_every_protocol_learns_numbers_whose_mean_is_far_from_zero(protocol):
    chance = np.random.default_rng(1)
    x = chance.uniform(-1, 1, (3000, 4)) / 2
    y = 0.5 + 0.3 * x[:, 0] - 0.4 * x[:, 1] + 0.05 * chance.standard_normal(3000)
    shape = Shape(features=4, classes=None, devices=20, held=100)
    task = suggest(shape, protocol=protocol, epsilon=10.0, masked=True)
    study = simulate(task, x[:2000], y[:2000], devices=20, test=(x[2000:], y[2000:]), seed=1, points=1, engine="events")
    assert study.scores[0] > 0.6


def test_a_simulation_names_the_fleets_world_where_it_has_one():
    assert [name for name in shipped() if not has_fleet_time(find_task(name))] == ["traffic"]
    assert "--world" not in assumed(find_task("traffic"))
    assert "rounds follow one another and messages are never late" in assumed(find_task("robust-digits"))
