"""Simulated cohorts: the compiled rounds are real rounds without their masks, and nobody is in one twice."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from bench import masked_text
from masked_crowd import Crowd as MaskedCrowd

from crowdml.arrays import Samples
from crowdml.datasets.populations import Population, by_user, drawn, iid
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import masked_steps, total
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find, sgd
from crowdml.secagg import server as masks
from crowdml.secagg.terms import terms_of
from crowdml.sim import compiled, events
from crowdml.sim.layout import Holding, Rounds, lay_out, meet
from crowdml.sim.world import World
from crowdml.task import parse
from crowdml.turn import check_in, first_turn, server_turn

SEED = 7


def make(devices=12, each=10, passes=1, **changes):
    rng = np.random.default_rng(3)
    n = devices * each
    y = rng.integers(0, 3, n).astype(np.int32)
    x = rng.normal(size=(n, 4)).astype(np.float32) + np.eye(3, 4, dtype=np.float32)[y]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return parse(masked_text(**changes)), Holding(x, y, iid(n, devices, 5), passes)


def play(task, holding, seeds, *, dropout=0.0, **settings):
    laid = [meet(task, holding, seed, dropout=dropout) for seed in seeds]
    return compiled.run(task, holding, laid, list(seeds), **settings)


def by_hand(task, holding, laid, rounds, *, survivors):
    """Rounds with the handlers as devices run them, in NumPy, and a real cohort's masks around what they say."""
    protocol = find(task)
    terms, batch = terms_of(task, protocol.mechanisms(task)), protocol.batch(task)
    start = first_turn(protocol, task)
    state, offered = start.state, start.published
    for number in range(rounds):
        crowd = MaskedCrowd(terms, task.masking.cohort, seed=number, round=number + 1)
        said = {}
        for place, one in enumerate(crowd.ids):
            device, trip, first = (int(each[number, place]) for each in (laid.device, laid.trip, laid.first))
            rows = holding.rows(np.array(device), first + np.arange(batch))
            noise = SeededSource(stream(SEED, device, trip).reshape(2))
            batch_ = Samples(holding.x[rows], holding.y[rows])
            message = check_in(protocol, task, batch_, offered, noise=noise, me=one).message
            said[one] = {name: np.asarray(each).astype(np.int64) for name, each in masked_steps(message).items()}
        crowd.vectors = said
        alive = [one for one, there in zip(crowd.ids, survivors[number], strict=True) if there]
        gone = [one for one in crowd.ids if one not in alive]
        if len(alive) < task.masking.minimum:
            continue
        crowd.go_to("summed", missing=gone)
        sums = masks.sums(terms, crowd.server)
        for name in sums:
            np.testing.assert_array_equal(sums[name], sum(said[one][name] for one in alive))  # the masks cancel
        heard = total("sgd/total/1", sums, devices=np.int32(len(alive)), version=np.int32(offered.version))
        turn = server_turn(protocol, task, state, heard)
        state, offered = turn.state, turn.published
    return state


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_compiled_round_is_a_real_one_without_its_masks(dropout):
    task, holding = make(devices=24)
    laid = meet(task, holding, SEED, dropout=dropout)
    assert 5 in laid.alive.sum(1) or not dropout  # a round that is summed without one of its devices
    (run,) = play(task, holding, [SEED], dropout=dropout)
    real = by_hand(task, holding, laid, len(laid), survivors=laid.alive)
    assert int(run.state.steps) == int(real.steps) > 0
    assert int(run.state.counted) == int(real.counted)
    np.testing.assert_array_equal(run.state.labels, real.labels)  # integers, and the same noise
    np.testing.assert_allclose(run.state.weights, real.weights, atol=2e-4)  # a few grid steps apart: NumPy and JAX
    assert abs(int(run.state.errors) - int(real.errors)) <= 1


def test_a_round_with_too_few_survivors_leaves_the_model_and_is_paid_for():
    task, holding = make(devices=60)
    laid = meet(task, holding, SEED, dropout=0.35)
    summed = laid.alive.sum(1) >= task.masking.minimum
    assert 0 < summed.sum() < len(laid)
    points = list(range(1, len(laid) + 1))
    (run,) = play(task, holding, [SEED], dropout=0.35, points=points)
    assert int(run.state.steps) == summed.sum()
    assert int(run.state.counted) == laid.alive[summed].sum()
    before = np.concatenate([np.zeros_like(run.weights[:1]), run.weights[:-1]])
    moved = np.abs(run.weights - before).reshape(len(laid), -1).max(1) > 0
    np.testing.assert_array_equal(moved, summed)
    assert len(run.schedule) == len(laid) * task.masking.cohort  # all of them drew


def test_what_a_run_costs_is_a_check_in_for_everyone_who_was_there():
    task, holding = make(devices=15, each=10, passes=2, cohort=6, minimum=5)
    laid = meet(task, holding, SEED)
    (run,) = play(task, holding, [SEED])
    assert len(run.schedule) == laid.there.sum()
    trips = np.bincount(run.schedule.device, minlength=15)
    assert trips.max() <= 4  # two batches in each of two passes
    np.testing.assert_array_equal(np.unique(run.schedule.version), np.arange(len(laid)))
    seen = {
        (int(d), int(s)) for d, row in zip(run.schedule.device, run.schedule.samples, strict=True) for s in row % 10
    }
    assert len(seen) == 15 * 10


def test_a_stop_ends_the_run_and_what_comes_after_costs_nothing():
    task, holding = make(devices=60, stop="[stop]\nsteps = 3")
    (run,) = play(task, holding, [SEED], points=[1, 2, 3, 4, 5])
    assert run.stopped.sentence == "3 cohorts have been added up"
    assert int(run.state.steps) == 3
    assert len(run.schedule) == 3 * task.masking.cohort
    np.testing.assert_array_equal(run.weights[2], run.weights[-1])
    assert np.abs(run.weights[1] - run.weights[2]).max() > 0


def test_the_crowd_s_own_error_stops_it_too():
    task, holding = make(devices=60, epsilon="{ gradient = 1.0, errors = 8.0 }", stop="[stop]\nerror = 1.0")
    (run,) = play(task, holding, [SEED])
    assert run.stopped.sentence == "the crowd's error is at most 1"
    assert int(run.state.steps) <= 3


# Who meets whom


@pytest.mark.parametrize(("devices", "cohort", "minimum"), [(12, 6, 5), (15, 6, 5), (7, 6, 5), (6, 6, 5), (13, 6, 4)])
def test_no_cohort_holds_a_device_twice_and_no_batch_a_sample(devices, cohort, minimum):
    """Otherwise one sum would hold a sample twice, at twice its sensitivity, and be charged as two."""
    colluders = 0 if minimum == 4 else 1
    minimum = max(minimum, (cohort + colluders) // 2 + 2)
    task, holding = make(devices, 13, passes=3, cohort=cohort, minimum=minimum, colluders=colluders)
    laid = meet(task, holding, SEED)
    for device, there, trip in zip(laid.device, laid.there, laid.trip, strict=True):
        assert len(np.unique(device[there])) == there.sum() >= minimum
        assert len(trip) == cohort
    pairs = list(zip(laid.device[laid.there].tolist(), laid.trip[laid.there].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)  # so no noise is drawn twice from one key
    first = laid.first[laid.there]
    assert set((first % 13).tolist()) <= {0, 5}  # whole batches of five, begun anew in each pass
    samples = (first[:, None] + np.arange(5)) % 13
    assert all(len(np.unique(row)) == 5 for row in samples)


def test_a_device_with_less_than_a_batch_gives_nothing_in_however_many_passes():
    """Two passes over three samples are six, and a batch of five would hold one twice."""
    groups = np.repeat(np.arange(9), [10] * 8 + [3])
    task, holding = make(devices=9)
    holding = Holding(holding.x[: len(groups)], holding.y[: len(groups)], by_user(groups), passes=2)
    laid = meet(task, holding, SEED)
    counts = holding.counts // 2
    assert (counts[np.unique(laid.device[laid.there])] == 10).all()


def test_a_crowd_that_makes_no_cohort_is_refused():
    task, holding = make(devices=4)
    with pytest.raises(TaskError, match=r"make no cohort of at least masking.minimum = 5"):
        meet(task, holding, SEED)
    with pytest.raises(TaskError, match=r"has no \[masking\]: its devices check in one by one"):
        meet(replace(task, masking=None, privacy=replace(task.privacy, mechanism="none")), holding, SEED)


def test_a_small_last_cohort_meets_if_it_is_large_enough():
    task, holding = make(devices=11, each=5)
    laid = meet(task, holding, SEED)
    assert laid.there.sum(1).tolist() == [6, 5]
    task, holding = make(devices=10, each=5)
    assert meet(task, holding, SEED).there.sum(1).tolist() == [6]


def test_who_meets_whom_depends_on_the_seed_and_on_no_sample():
    task, holding = make()
    other = replace(holding, x=-holding.x, y=(holding.y + 1) % 3)
    one, same, another = (meet(task, h, s) for h, s in ((holding, 1), (other, 1), (holding, 2)))
    np.testing.assert_array_equal(one.device, same.device)
    assert (one.device != another.device).any()


# The loop


@pytest.mark.parametrize("apart", [16, 12])
def test_sums_beyond_32_bits_are_added_in_two_parts(apart: int):
    rng = np.random.default_rng(1)
    each = rng.integers(-(2**31), 2**31, (500, 40)).astype(np.int32)
    exact = each.astype(np.int64).sum(0)
    assert np.abs(exact).max() > 2**31
    high, low = compiled._split(jnp.asarray(each), apart)
    found = np.asarray(compiled._whole((high.sum(0), low.sum(0)), apart))
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=65_536 * 2)


def test_the_lower_part_of_a_sum_has_room_for_the_largest_cohort():
    task = parse(masked_text(cohort=2**20, minimum=2**20))
    apart = compiled._low_bits(find(task), task)["gradient"]
    assert apart == 12
    assert task.masking.cohort * (2**apart - 1) < 2**32


def test_a_cohort_of_everyone_is_read_where_it_lies_and_sums_the_same(monkeypatch: pytest.MonkeyPatch):
    task, holding = make(devices=12, each=5, passes=3, batch=5, cohort=12, minimum=12)
    laid = meet(task, holding, SEED)
    assert laid.in_order
    (at_once,) = compiled.run(task, holding, [laid], [SEED])
    monkeypatch.setattr(Rounds, "in_order", False)
    (gathered,) = compiled.run(task, holding, [laid], [SEED])
    assert len(laid) == 3
    np.testing.assert_allclose(at_once.weights, gathered.weights, rtol=1e-5)  # the same integers; the server's floats


@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_how_many_devices_are_computed_side_by_side_changes_no_integer(width: int, monkeypatch: pytest.MonkeyPatch):
    task, holding = make(devices=6, each=5)
    (expected,) = play(task, holding, [1], workers=1, dropout=0.1)
    monkeypatch.setattr(compiled, "_width", lambda *_: width)
    compiled._rounds_loop.cache_clear()
    (found,) = play(task, holding, [1], workers=1, dropout=0.1)
    compiled._rounds_loop.cache_clear()
    np.testing.assert_allclose(found.model, expected.model, atol=1e-6)
    assert (found.model != 0).any()


def test_a_drawn_crowd_senses_the_rows_that_its_hash_names():
    task, dealt = make(devices=6, each=5)
    crowd = drawn(len(dealt.x), 6, 5, seed=3)
    table = np.stack([crowd.held_by(device) for device in range(6)]).astype(np.int32)
    written = Population("iid", table, np.full(6, 5, np.int32), 0)
    runs = [play(task, Holding(dealt.x, dealt.y, each), [1], workers=1)[0].model for each in (crowd, written)]
    np.testing.assert_array_equal(*runs)


def test_noise_is_each_device_s_own_and_another_in_each_run():
    task, holding = make(devices=6, each=5)
    runs = play(task, holding, [1, 1, 2], workers=1)
    np.testing.assert_array_equal(runs[0].weights, runs[1].weights)
    assert np.abs(runs[0].weights - runs[2].weights).max() > 0
    variance = sgd.mechanisms(task)["labels"].variance
    quiet = play(task, holding, [1], noise=False)[0]
    np.testing.assert_array_equal(quiet.state.labels, np.bincount(holding.y[holding.population.rows.reshape(-1)]))
    many = np.stack([run.state.labels for run in play(task, holding, range(200))]) - quiet.state.labels
    assert abs(many.var() / (6 * float(variance)) - 1) < 0.5


def test_a_task_without_noise_runs_in_cohorts_too():
    task, holding = make(mechanism="none")
    (run,) = play(task, holding, [SEED])
    assert int(run.state.steps) == 4
    assert int(run.state.counted) == 24


def test_the_other_engines_refuse_a_masked_task():
    task, holding = make()
    world = World(12, 10)
    schedule = lay_out(world, seed=1, batch=5, capacity=50)
    with pytest.raises(ProtocolError, match=r"is masked: its devices meet in cohorts"):
        compiled.run(task, holding, [schedule], [1])
    with pytest.raises(ProtocolError, match=r"is masked: its devices meet in cohorts"):
        events.run(task, holding, world, seed=1, capacity=50)
