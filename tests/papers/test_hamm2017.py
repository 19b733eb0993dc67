"""Hamm, Luken & Xie 2017 at the paper's sizes where that is minutes, against the paper and the privacy review."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from crowdml.experiments.hamm2017 import (
    ACTIVE,
    ALL,
    LIVE_EPSILON,
    SERVER_BATCH,
    Case,
    _case,
    cell,
    cost_of,
    learn,
    over_http,
    simulated,
    softmax_task,
)
from crowdml.experiments.published.local_updates import BY_RATE, GAUSSIAN
from crowdml.experiments.registry import listing
from crowdml.models import make_model
from crowdml.protocols import settled

READY = {line.id for line in listing() if line.state == "ready"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("hamm2017/fig2" not in READY, reason="MNIST is not in $CROWDML_DATA"),
]


@pytest.fixture(scope="module")
def case() -> Case:
    return _case(False, 1, 1)


def test_fig2_low_noise_ends_near_0_95_with_the_largest_rate(case: Case) -> None:
    _, told = learn(case, cell(case, 10.0, 1e-3, GAUSSIAN), 1)
    assert told[0, -1] == pytest.approx(0.95, abs=0.02)


def test_fig2_noise_on_the_weights_ends_at_chance_and_noise_times_the_step_does_not(case: Case) -> None:
    _, literal = learn(case, cell(case, 0.1, 10.0, GAUSSIAN), 1)
    _, scaled = learn(case, cell(case, 0.1, 10.0, GAUSSIAN, falling=BY_RATE), 1)
    assert literal[0, -1] < 0.2
    assert 0.55 < scaled[0, -1] < 0.9
    assert cost_of(case, cell(case, 0.1, 10.0, GAUSSIAN)).device == pytest.approx(0.70, abs=0.005)
    assert cost_of(case, cell(case, 0.1, 10.0, GAUSSIAN, falling=BY_RATE)).device > 1000


@pytest.mark.skipif(os.name != "posix", reason="a server in a process of its own")
def test_devices_eighty_of_them_over_http_learn_and_pay_what_their_task_says(case: Case) -> None:
    data = case.sound
    held = len(data.y_train) // ALL
    task = settled(
        softmax_task(data, batch=held // 25, server_batch=SERVER_BATCH, rounds=100, held=held, epsilon=LIVE_EPSILON)
    )
    model = make_model("softmax", data.features, len(data.classes))
    rounds, told, played = over_http(task, data, model, devices=ALL, seed=5)
    assert played.summary.devices == ALL
    assert played.summary.epsilon_sample <= LIVE_EPSILON * (1 + 1e-9)
    assert rounds[-1] >= 60
    assert told[-1] > 0.8
    assert np.isfinite(played.weights).all()


def test_devices_the_crowd_ends_near_0_82_and_one_device_below_it(case: Case) -> None:
    data = case.sound
    model = make_model("softmax", data.features, len(data.classes))
    held = len(data.y_train) // ALL
    task = softmax_task(data, batch=100, server_batch=SERVER_BATCH, rounds=100, held=held, epsilon=None)
    rounds, crowd = simulated(task, data, model, devices=ALL, active=ACTIVE, passes=5, seed=3)
    lone = softmax_task(data, batch=100, server_batch=1, rounds=25, held=held, epsilon=None)
    own = replace(data, x_train=data.x_train[:held], y_train=data.y_train[:held])
    trips, alone = simulated(lone, own, model, devices=1, active=1, passes=5, seed=3)
    assert (rounds[-1], trips[-1]) == (100, 25)
    assert crowd[-1] == pytest.approx(0.82, abs=0.02)
    assert alone[-1] < crowd[-1] - 0.02
