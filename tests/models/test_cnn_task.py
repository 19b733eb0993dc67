"""A task with a convolutional network: compiled and by events it learns pictures where no pixel says anything alone."""

from __future__ import annotations

import numpy as np
import pytest
from tasks import SGD, toml

from crowdml.protocols import check_for_devices, find, sgd
from crowdml.sim.studies import simulate
from crowdml.task import from_canonical, parse

SIDE = 6
TEXT = toml(
    SGD,
    features={"dimension": SIDE * SIDE, "norm": {"kind": "l2", "bound": 1.0}},
    labels={"classes": ["row", "column"]},
    model={"kind": "cnn", "filters": [4], "size": 3, "hidden": [8]},
    protocol={"batch": 10, "step": {"c": 3.0}, "clip": 0.5},
    privacy={"epsilon": {"gradient": 8.0}},
)


def strokes(count: int):
    """Pictures of three pixels in a row or in a column, anywhere: their mean is nearly the same."""
    chance = np.random.default_rng(1)
    x, y = np.zeros((count, SIDE, SIDE), np.float32), chance.integers(0, 2, count).astype(np.int32)
    for picture, label, (at, on) in zip(x, y, chance.integers(0, SIDE - 2, (count, 2)), strict=True):
        turned = picture.T if label else picture
        turned[at + 1, on : on + 3] = 1 / np.sqrt(3)
    return x.reshape(count, -1), y


def test_the_task_survives_its_canonical_form_and_devices_may_take_part():
    task = parse(TEXT)
    again = from_canonical(task.canonical)
    assert sgd.plan(again).model.filters == (4,)
    assert check_for_devices(again) is find(task)
    step = sgd.publish_initial(again, None)
    np.testing.assert_array_equal(step.effects[0].message.weights, sgd.plan(task).model.start())


def test_a_simulated_crowd_learns_under_noise():
    x, y = strokes(8_000)
    study = simulate(parse(TEXT), x, y, devices=40, seed=[3])
    assert study.accuracy(x[:1000], y[:1000])[0][-1] > 0.85
    assert study.planned.sample == pytest.approx(8.0, rel=0.01)


def test_both_engines_take_the_same_steps():
    x, y = strokes(200)
    ends = [
        simulate(parse(TEXT), x, y, devices=4, seed=[3], engine=engine).runs[0].weights[-1]
        for engine in ("compiled", "events")
    ]
    np.testing.assert_allclose(*ends, atol=1e-3)
