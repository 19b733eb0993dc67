"""Rounds among stragglers: partial barrier, bounded delay, who joins and leaves; handlers as in `cohorts`."""

import numpy as np
import pytest
from admm_bench import admm_task

from crowdml.datasets import iid
from crowdml.errors import TaskError
from crowdml.sim import cohorts
from crowdml.sim.crowd import Holding
from crowdml.sim.stragglers import Pace, lay_out, run, synchronous

CROWD = 12


def laid(pace=None, **more):
    given = {"seed": 3, "barrier": 4, "delay": None, "rounds": 60, **more}
    return lay_out(pace or Pace(), CROWD, **given)


def holding():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return Holding(x, (x[:, 0] > 0).astype(np.int32), iid(60, CROWD, 1), 3)


def test_a_round_closes_with_as_many_different_devices_as_the_barrier_says_and_time_goes_on():
    found = laid()
    assert found.device.shape == (60, 4)
    assert all(len(set(cohort)) == 4 for cohort in found.device.tolist())
    assert (np.diff(found.time) >= 0).all()
    assert (found.staleness >= 0).all()


@pytest.mark.parametrize("delay", [1, 3, 6])
def test_bounded_delay_no_device_is_left_out_for_tau_rounds(delay):
    """With as few overdue devices as fit into a cohort, everybody is in one of any tau + n/s rounds."""
    found = laid(delay=delay, rounds=90)
    for name in range(CROWD):
        rounds = np.flatnonzero((found.device == name).any(1))
        assert np.diff(rounds).max() <= delay + CROWD // 4
    assert found.time[-1] >= laid(rounds=90).time[-1]


def test_a_device_that_left_takes_no_part_and_one_that_joins_late_reads_the_centre_of_then():
    pace = Pace(joining=10.0, leaving=0.3, horizon=20.0)
    found = laid(pace, rounds=80)
    for name in range(CROWD):
        mine = found.time[(found.device == name).any(1)]
        assert (mine >= pace.joins(3, name)).all()
        assert (mine < pace.leaves(3, name)).all()


def test_the_layout_depends_on_its_seed_alone():
    assert np.array_equal(laid().device, laid().device)
    assert not np.array_equal(laid().device, laid(seed=4).device)


def test_everybody_in_every_round_is_what_the_synchronous_engine_computes():
    task = admm_task(masking=f"[masking]\ncohort = {CROWD}\nminimum = {CROWD}", more="momentum = 0.5")
    ours = run(task, holding(), synchronous(CROWD, 3), [5], noise=False)[0].weights
    (theirs,) = cohorts.run(task, holding(), [5], rounds=3, points=[1, 2, 3], noise=False)
    np.testing.assert_allclose(ours, theirs.weights, atol=1e-4)


def test_a_cohort_smaller_than_the_task_allows_is_refused():
    task = admm_task(masking=f"[masking]\ncohort = {CROWD}\nminimum = {CROWD}")
    with pytest.raises(TaskError, match=r"smaller than masking\.minimum"):
        run(task, holding(), laid(), [1])
    with pytest.raises(TaskError, match="s at most n"):
        laid(barrier=13)
