"""Rows with the task's noise: what the same three calls give on every channel."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from bench import masked_text, task_text

from crowdml.errors import TaskError
from crowdml.privacy.private import Rows
from crowdml.privacy.rows import Promise, count_row, noise_norm, pin_grid, stable_row, sum_row, worth
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.task import parse

COVERS = Rows(0, 5)
CHANNELS = ("discrete-laplace", "discrete-gaussian", "skellam", "none")
on_each = pytest.mark.parametrize("mechanism", CHANNELS)


def task_on(mechanism, **privacy):
    text = masked_text() if mechanism == "skellam" else task_text()
    task = parse(text)
    epsilon = {"sent": Fraction(1), "counted": Fraction(1)}
    settings = {"mechanism": mechanism, "epsilon": epsilon, "budget": None, "grid": None, **privacy}
    return task.with_(privacy=replace(task.privacy, **settings))


def summed(task, **more):
    return sum_row(task, "sent", bound=2.0, shape=(2, 3), covers=COVERS, promise="a sum", **more)


def counted(task, cells=3, **more):
    return count_row(task, "counted", cells=cells, covers=COVERS, promise="how often", **more)


def stable(task, **more):
    return stable_row(
        task, "sent", stability=0.5, device_stability=2.5, float_error=Fraction(0), shape=(2, 3), covers=COVERS,
        promise="a vector", **more,
    )  # fmt: skip


def test_a_sum_has_the_noise_of_its_task():
    kinds = {mechanism: summed(task_on(mechanism)).kind for mechanism in CHANNELS}
    assert kinds == {each: each for each in CHANNELS}


def test_counts_have_laplace_noise_or_a_share_whatever_noise_the_sums_have():
    kinds = [counted(task_on(mechanism)).kind for mechanism in CHANNELS]
    assert kinds == ["count-laplace", "count-laplace", "skellam-count", "none"]


def test_a_replaced_sample_moves_one_count_by_one_and_several_by_two():
    for mechanism in ("discrete-laplace", "skellam"):
        assert [counted(task_on(mechanism), cells).sensitivity.bound for cells in (1, 2, 9)] == [1, 2, 2]


def test_a_stable_vector_has_gaussian_noise_or_a_share_and_refuses_laplace():
    assert stable(task_on("discrete-gaussian")).kind == "gaussian-stable"
    assert stable(task_on("skellam")).kind == "skellam-stable"
    with pytest.raises(TaskError, match='needs "discrete-gaussian" noise'):
        stable(task_on("discrete-laplace"))


@on_each
def test_who_may_look_follows_from_the_channel(mechanism):
    seen = Observer.AGGREGATE if mechanism == "skellam" else Observer.ANYONE
    assert summed(task_on(mechanism)).observer is counted(task_on(mechanism)).observer is seen


@on_each
def test_a_clip_is_no_shorter_than_the_bound_and_its_noise_can_be_drawn(mechanism):
    row = summed(task_on(mechanism))
    if mechanism != "none":
        assert 2.0 <= row.clipped * row.grid.step < 2.01
        assert row.law.is_drawable


@pytest.mark.parametrize("mechanism", CHANNELS[:3])
def test_all_uses_together_cost_the_epsilon_of_the_task(mechanism):
    task = task_on(mechanism, uses=4)
    for row in (summed(task), counted(task)):
        assert 0.98 <= row.total(4).epsilon(task.privacy.delta) <= 1 + 1e-9


def test_the_owner_reads_which_noise_there_is():
    promise = Promise.blurred("a sum")
    assert summed(task_on("discrete-laplace")).promise == promise.alone == "a sum, blurred with noise"
    assert summed(task_on("skellam")).promise == promise.summed
    assert summed(task_on("none")).promise == promise.plain
    assert counted(task_on("skellam")).promise == "about how often, over a cohort"


def test_a_task_that_protects_devices_takes_one_contribution_of_each():
    task = task_on("discrete-gaussian", unit="device")
    assert summed(task, whole=True, releases=1).sensitivity.adjacency is Adjacency.REPLACE_DEVICE


def test_shares_of_a_schedule_cost_the_epsilon_of_the_task_together():
    shares = [Fraction(1, 2**trip) for trip in range(4)]
    for mechanism in ("discrete-laplace", "discrete-gaussian"):
        task = task_on(mechanism)
        row = summed(task, whole=True, releases=4, shares=shares)
        assert (row.scheduled, row.check_ins) == (True, 4)
        assert 0.98 <= row.total(4).epsilon(task.privacy.delta) <= 1 + 1e-9
    assert worth(shares, 2, 1) == Fraction(3, 2)
    assert worth(shares, 2, 2) == Fraction(5, 4)
    assert worth(None, 7, 2) == 7


def test_the_norm_of_a_bound_is_that_of_the_noise():
    assert [noise_norm(task_on(mechanism)) for mechanism in CHANNELS] == ["l1", "l2", "l2", "l2"]


def test_a_grid_is_pinned_once_and_a_task_without_noise_has_none():
    task = task_on("discrete-gaussian")
    pinned = pin_grid(task, summed(task).grid)
    assert pinned.privacy.grid == summed(task).grid.step
    assert pin_grid(pinned, counted(task).grid) is pinned
    assert pin_grid(task_on("none"), summed(task).grid).privacy.grid is None
    assert summed(pinned) == summed(task)
    assert math.log2(pinned.privacy.grid).is_integer()


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_is_no_length_is_refused(bound):
    with pytest.raises(TaskError, match="has the bound"):
        sum_row(parse(task_text()), "gradient", bound=bound, shape=(3,), covers=Rows(0, 5), promise="it")


def test_a_row_without_a_price_is_refused_by_its_name():
    with pytest.raises(TaskError, match=r"row 'gradent' has no price: privacy.epsilon names gradient, errors, labels"):
        sum_row(parse(task_text()), "gradent", bound=1.0, shape=(3,), covers=Rows(0, 5), promise="it")


def test_noise_for_a_sample_is_not_sold_to_a_device():
    device = parse(task_text())
    device = device.with_(privacy=replace(device.privacy, unit="device"))
    covers = Rows(0, 5)
    with pytest.raises(TaskError, match='hides a "sample"'):
        count_row(device, "labels", cells=3, covers=covers, promise="it")
    with pytest.raises(TaskError, match='hides a "sample"'):
        sum_row(device, "gradient", bound=1.0, shape=(3,), covers=covers, promise="it", whole=True)
    with pytest.raises(TaskError, match='hides a "sample"'):
        stable_row(device, "gradient", stability=0.1, device_stability=0.5, float_error=Fraction(0), shape=(3,),
                   covers=covers, promise="it")  # fmt: skip


def test_shares_under_masks_are_refused_and_an_epsilon_of_a_count_holds_there():
    task = task_on("skellam")
    for row in (lambda **more: summed(task, whole=True, **more), lambda **more: stable(task, **more)):
        with pytest.raises(TaskError, match=r"row 'sent' has `shares`, and under masks the server hears a sum"):
            row(releases=1, shares=[Fraction(1)])
    whole, half = counted(task), counted(task, epsilon=Fraction(1, 2))
    assert half.variance > 3 * whole.variance
    assert half == counted(task_on("skellam", epsilon={"counted": Fraction(1, 2)}))
