"""Rounds among stragglers: partial barrier, bounded delay, who joins and leaves; handlers as in `cohorts`."""

import numpy as np
import pytest
from admm_bench import admm_task
from masked_crowd import Crowd as MaskedCrowd

from crowdml.arrays import Samples
from crowdml.datasets import iid
from crowdml.errors import TaskError
from crowdml.experiments.published.stragglers import Pace, lay_out, run, synchronous
from crowdml.messages import masked_steps, total
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import admm
from crowdml.secagg import server as masks
from crowdml.secagg.terms import terms_of
from crowdml.sim import compiled, events
from crowdml.sim.layout import Holding, meet
from crowdml.sim.layout import lay_out as lay_out_check_ins
from crowdml.sim.world import World
from crowdml.turn import check_in, first_turn, server_turn

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
    laid = meet(task, holding(), 5, rounds=3)
    (theirs,) = compiled.run(task, holding(), [laid], [5], points=[1, 2, 3], noise=False)
    np.testing.assert_allclose(ours, theirs.weights, atol=1e-4)


def test_a_cohort_smaller_than_the_task_allows_is_refused():
    task = admm_task(masking=f"[masking]\ncohort = {CROWD}\nminimum = {CROWD}")
    with pytest.raises(TaskError, match=r"smaller than masking\.minimum"):
        run(task, holding(), laid(), [1])
    with pytest.raises(TaskError, match="s at most n"):
        laid(barrier=13)


def test_compiled_rounds_are_real_ones_without_their_masks():
    """Two rounds by hand on NumPy with the same noise, real masks around every update, and one device missing."""
    task = admm_task(masking=f"[masking]\ncohort = {CROWD}\nminimum = {CROWD - 1}")
    terms, who = terms_of(task, admm.mechanisms(task)), holding()
    laid_out = synchronous(CROWD, 2)
    everybody = run(task, who, laid_out, [5])[0].weights
    start = first_turn(admm.protocol, task)
    state, offered = start.state, start.published
    for number in range(2):
        crowd = MaskedCrowd(terms, CROWD, seed=number, round=number + 1)
        said = {}
        for device, name in enumerate(crowd.ids):
            rows = who.rows(np.array(device), np.arange(5))
            noise = SeededSource(stream(5, device, number).reshape(2))
            batch = Samples(who.x[rows], who.y[rows])
            message = check_in(admm.protocol, task, batch, offered, noise=noise, me=name).message
            said[name] = {key: np.asarray(each).astype(np.int64) for key, each in masked_steps(message).items()}
        crowd.vectors = said
        missing = crowd.ids[:1] if number else []
        crowd.go_to("summed", missing=missing)
        sums = masks.sums(terms, crowd.server)
        there = [name for name in crowd.ids if name not in missing]
        np.testing.assert_array_equal(sums["update"], sum(said[name]["update"] for name in there))  # masks cancel
        heard = total("admm/total/1", sums, devices=np.int32(len(there)), version=np.int32(number))
        turn = server_turn(admm.protocol, task, state, heard)
        state, offered = turn.state, turn.published
        if not number:
            np.testing.assert_allclose(state.weights, everybody[0], atol=2e-4)  # NumPy and JAX: a few grid steps
    assert state.rounds == 2


def test_the_local_variant_runs_on_the_event_queue_and_compiled_alike():
    task = admm_task(masking="", mechanism="discrete-gaussian", more="barrier = 3", uses=1)
    crowd, world = Holding(holding().x, holding().y, iid(60, CROWD, 1), 1), World(CROWD, 5)
    schedule = lay_out_check_ins(world, seed=5, batch=5, capacity=5)
    queued = events.run(task, crowd, world, seed=5, capacity=5, backend="jax")
    (loop,) = compiled.run(task, crowd, [schedule], [5])
    assert int(queued.state.rounds) == CROWD // 3
    np.testing.assert_array_equal(queued.model, loop.model)
    assert queued.model.any()
