"""Conversations with `admm`: a device and a server, events by hand."""

import numpy as np
import pytest
from admm_bench import admm_task, contribution, heard
from bench import device, samples, sensed, server

from crowdml.arrays import Samples
from crowdml.errors import LeakError, TaskError
from crowdml.messages import encode
from crowdml.price import Price
from crowdml.privacy.door import Door
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Release, Rows, Stamp
from crowdml.protocols import admm, find
from crowdml.protocols.admm import Centre, Update, plan
from crowdml.wire.states import pack_state, unpack_state

TASK = admm_task()
BATCH = samples(1, classes=2)
CENTRE = Centre(np.zeros(4, np.float32), np.int32(0))


def local_task(**changes):
    """The local variant: no masks, all the noise on each update."""
    return admm_task(**{"masking": "", "mechanism": "discrete-gaussian", **changes})


# The device


def test_a_device_takes_part_when_it_has_a_batch_and_says_nothing_yet():
    answer = device(admm.protocol, TASK).hears(sensed(BATCH))
    assert answer.effects == ["CheckOut"]
    assert answer.passages == ()


def test_a_device_says_one_vector_a_round_and_keeps_nothing_for_the_next():
    bench = device(admm.protocol, local_task())
    bench.hears(sensed(BATCH))
    answer = bench.hears(CENTRE)
    assert answer.kinds == ["admm/update/1"]
    assert answer.messages[0].update.value.shape == (4,)
    assert [passage.row for passage in answer.passages] == ["update"]
    assert bench.state is None
    assert bench.hears(CENTRE).kinds == []


def test_what_leaves_under_masks_has_no_bytes_of_its_own():
    door = Door(admm.mechanisms(TASK), Silence())
    said = admm.Update.masked(door.masked("update", Private(np.zeros((1, 4)), Rows(0, 5), _rows=False)))
    with pytest.raises(LeakError, match="no bytes of its own"):
        encode(said)
    with pytest.raises(LeakError, match="under masks"):
        door.release("update", Private(np.zeros((1, 4)), Rows(0, 5), _rows=False))


def test_r1_the_same_batch_and_centre_say_the_same_whatever_was_said_before():
    first = contribution(TASK, BATCH, [0.5, 0, 0, -0.5])
    contribution(TASK, BATCH, [9.0, 9, 9, 9])
    assert np.array_equal(contribution(TASK, BATCH, [0.5, 0, 0, -0.5]), first)


def test_an_update_is_where_fixed_gradient_steps_from_the_centre_end():
    fixed, centre = plan(TASK), np.array([0.5, 0, 0, -0.5])
    moved, x = np.zeros(4), BATCH.x.astype(float)
    for _ in range(8):
        chance = 1 / (1 + np.exp(-x @ (centre + moved)))
        moved -= fixed.rate * (x.T @ (chance - BATCH.y) + 2.0 * moved)
    said = contribution(TASK, BATCH, centre) * float(fixed.grid.step)
    np.testing.assert_allclose(said, moved, atol=float(fixed.grid.step))


@pytest.mark.parametrize("entry", [np.nan, np.inf, -np.inf, 3e38, 1e9])
def test_no_publication_makes_an_update_that_is_not_finite_or_longer_than_its_reach(entry):
    row = plan(TASK).table["update"]
    said = contribution(TASK, BATCH, np.full(4, entry, np.float32))
    assert np.abs(said).max() <= row.limit


def test_a_centre_beyond_its_ball_is_brought_to_it_on_the_device_too():
    """A server that publishes what it likes gains nothing: the loss stays where the bound is proved."""
    task, there = admm_task(more="radius = 0.5"), np.array([0.3, 0, -0.4, 0])
    assert np.array_equal(contribution(task, BATCH, 10 * there), contribution(task, BATCH, there))


def test_a_sample_that_is_too_long_is_brought_to_the_bound_and_a_broken_one_counts_as_zero():
    long = Samples(BATCH.x * 50, BATCH.y)
    assert np.abs(contribution(TASK, long, np.zeros(4)) - contribution(TASK, BATCH, np.zeros(4))).max() <= 1
    broken, zero = BATCH.x.copy(), BATCH.x.copy()
    broken[2, 1], zero[2] = np.nan, 0
    said = contribution(TASK, Samples(broken, BATCH.y), np.zeros(4))
    assert np.array_equal(said, contribution(TASK, Samples(zero, BATCH.y), np.zeros(4)))


# The server


def test_the_server_moves_to_the_mean_of_a_cohort_and_publishes_it():
    bench = server(admm.protocol, TASK)
    step = float(plan(TASK).grid.step)
    answer = bench.hears(heard(np.array([5, 10, 0, -5]) * 1000, devices=5))
    np.testing.assert_allclose(answer.published.weights, np.array([1, 2, 0, -1]) * 1000 * step, rtol=1e-6)
    assert answer.published.version == 1


def test_relaxation_and_momentum_are_the_servers_own():
    task = admm_task(more="relaxation = 2.0\nmomentum = 0.5")
    bench, step = server(admm.protocol, task), float(plan(task).grid.step)
    ones = heard(np.full(4, 5000), devices=5)
    assert bench.hears(ones).published.weights[0] == pytest.approx(2000 * step)
    assert bench.hears(ones).published.weights[0] == pytest.approx((2000 + 3000) * step)
    assert plan(task).table["update"].loss == plan(TASK).table["update"].loss


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.3), (0.05, 0.0), (0.05, 0.3)])
def test_the_consensus_step_minimises_11_for_l1_l2_and_the_elastic_net(l1, l2):
    task = admm_task(model=f'kind = "logistic"\nl1 = {l1}\nl2 = {l2}')
    fixed = plan(task)
    z = np.array([0.3, -0.02, 0.0, 1.5])
    found = admm.consensus(np, z, fixed)
    t = fixed.shrinkage

    def value(w):
        return t * (l1 * np.abs(w).sum() + l2 / 2 * (w * w).sum()) + ((w - z) ** 2).sum() / 2

    assert t > 0
    for direction in np.random.default_rng(1).normal(size=(200, 4)):
        assert value(found) <= value(found + 1e-3 * direction)
    if l1:
        assert found[1] == 0


def test_bounded_delay_an_answer_to_an_old_centre_moves_nothing():
    bench = server(admm.protocol, admm_task(more="delay = 1"))
    fresh = np.full(4, 5000)
    bench.hears(heard(fresh, 5, version=0))
    second = bench.hears(heard(fresh, 5, version=0))
    assert second.published.version == 2
    third = bench.hears(heard(fresh, 5, version=0))
    assert third.published.version == 2
    assert np.array_equal(third.published.weights, second.published.weights)


def test_partial_barrier_of_the_local_variant_closes_a_round_when_enough_updates_are_there():
    task = local_task(more="barrier = 3")
    bench, step = server(admm.protocol, task), float(plan(task).grid.step)
    update = Update(Release(np.full(4, 300, np.int32), Stamp("heard")), np.int32(0))
    assert [bench.hears(update).published.version for _ in range(3)] == [0, 0, 1]
    assert bench.state.weights[0] == pytest.approx(300 * step)
    assert [int(bench.hears(update).published.version) for _ in range(3)] == [1, 1, 2]


def test_the_task_stops_after_its_rounds():
    bench = server(admm.protocol, admm_task(stop="[stop]\nsteps = 2"))
    assert bench.hears(heard(np.zeros(4, int), 5)).stopped == []
    assert bench.hears(heard(np.zeros(4, int), 5)).stopped == ["2 rounds have been added up"]


def test_the_servers_state_survives_its_bytes():
    bench = server(admm.protocol, TASK)
    bench.hears(heard(np.arange(4) * 777, 5))
    again = unpack_state(bench.state, pack_state(bench.state))
    assert np.array_equal(again.weights, bench.state.weights)
    assert int(again.rounds) == 1


# What a task may say


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": 'kind = "svm"'}, "plain hinge is not smooth"),
        ({"model": 'kind = "least-squares"', "labels": 'kind = "number"'}, "squared loss has no bound"),
        ({"more": "local_rate = 0.9"}, "stable up to 1 / (L + rho)"),
        ({"more": "barrier = 3"}, "masking.minimum is the barrier"),
        ({"stop": "[stop]\nerror = 0.1"}, "nobody counts errors"),
        ({"masking": "", "mechanism": "discrete-laplace"}, 'needs "discrete-gaussian"'),
        ({"model": 'kind = "logistic"\nl1 = -1'}, "0 or more"),
        ({"rho": "0.0"}, "protocol.rho"),
    ],
)
def test_a_task_that_admm_cannot_keep_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(TaskError) as refusal:
        find(admm_task(**changes))
    assert sentence in str(refusal.value)


def test_as_published_is_not_for_devices():
    with pytest.raises(TaskError, match="private duals"):
        find(admm_task().with_(as_published=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": 'kind = "smooth-svm"\nwidth = 0.5'},
        {"model": 'kind = "linear"\nwidth = 0.5', "labels": 'kind = "number"'},
        {"model": 'kind = "softmax"', "labels": 'classes = ["a", "b", "c"]'},
        {"masking": "", "mechanism": "discrete-gaussian"},
    ],
)
def test_every_smooth_loss_has_a_price_that_all_uses_together_keep(changes):
    task = admm_task(**changes)
    assert Price.of(find(task), task).sample_epsilon(task.privacy.uses) <= 1.0
    assert Price.of(find(task), task).sample_epsilon(task.privacy.uses) > 0.98


def test_masks_promise_less_if_everyone_else_colludes():
    price = Price.of(find(TASK), TASK)
    assert price.sample_epsilon(3, alone=True) > price.sample_epsilon(3)
    assert price.device_epsilon(3) > price.sample_epsilon(3)


def test_the_grid_is_written_into_the_task_and_read_again():
    settled = admm.protocol.settle(TASK)
    assert settled.privacy.grid == plan(TASK).grid.step
    assert plan(settled).table == plan(TASK).table
