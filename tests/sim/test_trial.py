"""A trial is a value: it can be pickled, and gives the same bits wherever it is run."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench import masked_text, task_text

from crowdml.datasets.populations import drawn, iid
from crowdml.errors import DataError, TaskError
from crowdml.sim.layout import spread_out
from crowdml.sim.trial import Deal, Trial, laid_out, run_trial
from crowdml.sim.world import Delay
from crowdml.task import parse
from crowdml.turn import Tamper

ALONE, MASKED = parse(task_text()), parse(masked_text())
RNG = np.random.default_rng(3)
Y = RNG.integers(0, 3, 240).astype(np.int32)
X = RNG.normal(size=(240, ALONE.features.dimension)).astype(np.float32)
X /= np.linalg.norm(X, axis=1, keepdims=True)


def loud(row: str, steps: Any) -> Any:
    return 3 * steps


def test_a_pickled_trial_is_the_same_trial():
    trial = Trial(ALONE, Deal("by_class", 12), 5, 2, Delay("uniform", 9.0), points=(3, 8), liars={2: Tamper(say=loud)})
    again = pickle.loads(pickle.dumps(trial))
    assert again == trial
    np.testing.assert_array_equal(run_trial(again, X, Y).weights, run_trial(trial, X, Y).weights)


@pytest.mark.parametrize("task", [ALONE, MASKED], ids=["alone", "masked"])
def test_what_a_trial_gives_back_can_be_pickled(task: Any):
    run = run_trial(Trial(task, Deal("iid", 24), 5, points=3), X, Y)
    again = pickle.loads(pickle.dumps(run))
    np.testing.assert_array_equal(again.weights, run.weights)
    np.testing.assert_array_equal(again.schedule.samples, run.schedule.samples)


def test_a_trial_in_another_process_gives_the_same_bits():
    trial = Trial(ALONE, iid(240, 12, 1), 5, points=3)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(run_trial, trial, X, Y).result()
    here = run_trial(trial, X, Y)
    np.testing.assert_array_equal(there.weights, here.weights)
    np.testing.assert_array_equal(there.schedule.time, here.schedule.time)


def test_rows_are_dealt_out_by_the_trial_s_seed():
    laid = laid_out(Trial(ALONE, Deal("iid", 12), 5), Y)
    np.testing.assert_array_equal(laid.population.rows, spread_out("iid", Y, 12, 5).rows)  # pyright: ignore
    other = laid_out(Trial(ALONE, Deal("iid", 12), 6), Y)
    assert (laid.population.rows != other.population.rows).any()  # pyright: ignore


def test_a_drawn_crowd_of_any_size_runs_too():
    run = run_trial(Trial(ALONE, drawn(240, 500, 10, 3), 5, points=2), X, Y)
    assert run.heard == len(run.schedule) == 500 * (10 // 4)


def test_who_had_read_the_weights_when_a_run_ended_has_paid():
    task = parse(task_text() + "[stop]\nsteps = 20\n")
    trial = Trial(task, iid(240, 12, 1), 5, delay=Delay("constant", 30.0))
    for engine in ("compiled", "events"):
        run = run_trial(replace(trial, engine=engine), X, Y)
        assert (run.heard, len(run.schedule.heard)) == (20, 20)
        assert len(run.schedule) > 20
        assert (run.schedule.version < 20).all()


def test_devices_that_lie_move_the_model_alike_on_both_engines():
    liars = {device: Tamper(say=loud) for device in range(6)}
    fast, slow = (
        run_trial(Trial(ALONE, iid(240, 12, 1), 5, engine=engine, points=3, liars=liars), X, Y)
        for engine in ("compiled", "events")
    )
    np.testing.assert_allclose(fast.weights, slow.weights, rtol=0, atol=1e-5)
    honest = run_trial(Trial(ALONE, iid(240, 12, 1), 5, points=3), X, Y)
    assert np.abs(fast.model - honest.model).max() > 1e-3


def test_a_trial_on_rows_of_another_shape_is_refused():
    with pytest.raises(DataError, match=r"wants features\.dimension = "):
        run_trial(Trial(ALONE, Deal("iid", 12), 5), X[:, :2], Y)
    with pytest.raises(TaskError, match="engine 'steam'"):
        run_trial(Trial(ALONE, Deal("iid", 12), 5, engine="steam"), X, Y)
