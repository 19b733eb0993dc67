"""The world of a live fleet in the simulator: who reads which publication, and which samples serve when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench import masked_text, task_text
from test_simulated_rounds import crowd

from crowdml.datasets.populations import iid
from crowdml.errors import TaskError
from crowdml.pace import AT_WORK
from crowdml.protocols import find
from crowdml.sim.fleet import fleet_world
from crowdml.sim.layout import lay_out
from crowdml.sim.trial import Trial, laid_out, run_trial
from crowdml.sim.world import Delay
from crowdml.task import parse

SEED = 7
TASK = parse(task_text(batch=5, epsilon="{ gradient = 1.0 }"))


def fleet(devices: int, each: int, passes: int = 1, batch: int = 5):
    """The schedule of a fleet whose devices hold `each` samples."""
    counts = np.full(devices, each * passes)
    world = fleet_world(counts, batch, passes)
    return lay_out(world, seed=SEED, batch=batch, capacity=world.capacity(10 * batch))


def test_devices_of_a_fleet_all_read_what_the_whole_group_before_them_led_to():
    laid = fleet(30, 10)
    np.testing.assert_array_equal(laid.version, np.repeat([0, 30], 30))
    np.testing.assert_array_equal(np.sort(laid.device[:30]), np.arange(30))


def test_no_more_devices_than_a_fleet_has_at_work_read_the_same_publication():
    laid = fleet(300, 5)
    assert np.unique(laid.version).tolist() == [0, AT_WORK, 2 * AT_WORK]
    assert laid.stalest == AT_WORK - 1


def test_rows_of_a_file_wait_for_the_device_however_many_there_are():
    laid = fleet(2, 5 * 25)
    assert laid.dropped == 0
    assert len(laid) == 2 * 25


def test_a_batch_serves_as_often_as_it_may_before_a_device_takes_the_next():
    laid = fleet(3, 10, passes=2)
    mine = laid.only(laid.device == 1)
    rows = mine.samples % 10
    np.testing.assert_array_equal(rows, np.array([[0], [0], [5], [5]]) + np.arange(5))
    assert mine.trip.tolist() == [0, 1, 2, 3]


def test_both_engines_run_a_fleet_to_the_same_bits():
    holding = crowd(4, 3, 12, 10, passes=2)
    trial = Trial(TASK, holding.population, SEED, passes=2, world="fleet")
    one, other = (run_trial(replace(trial, engine=engine), holding.x, holding.y) for engine in ("compiled", "events"))
    np.testing.assert_array_equal(one.weights, other.weights)
    np.testing.assert_array_equal(one.schedule.samples, other.schedule.samples)
    np.testing.assert_array_equal(one.schedule.version, np.repeat([0, 12, 24, 36], 12))


def test_cohorts_of_a_fleet_read_the_totals_of_those_that_were_under_way_with_them():
    task = parse(masked_text())
    devices = 2 * task.masking.cohort
    each = 3 * find(task).batch(task)
    laid = laid_out(Trial(task, iid(devices * each, devices, 3), SEED, world="fleet"), np.zeros(devices * each, int))
    assert laid.engine == "events"
    np.testing.assert_array_equal(laid.layout.read, np.arange(6))


@pytest.mark.parametrize(
    ("more", "said"),
    [({"world": "city"}, "the only one with a name"), ({"world": "fleet", "delay": Delay(size=1.0)}, "leave out")],
)
def test_a_world_without_a_name_or_beside_a_delay_is_refused(more, said: str):
    with pytest.raises(TaskError, match=said):
        laid_out(Trial(TASK, iid(60, 6, 3), SEED, **more), np.zeros(60, int))
