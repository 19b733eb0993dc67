"""Masked cohorts of sgd: the table, neighbours through whole steps, and what the server makes of a total."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from bench import masked_text, task_text

from crowdml.arrays import Samples
from crowdml.errors import GuaranteeError, LeakError, TaskError
from crowdml.messages import SERVER, encode, masked_steps, total
from crowdml.price import Price
from crowdml.privacy.calibration import skellam_variance
from crowdml.privacy.losses import Filter, Total, exact
from crowdml.privacy.mechanisms import SkellamCount, SkellamSum, l1_of, root_up
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.sensitivity import Observer
from crowdml.protocol import Context, advance
from crowdml.protocols import find, sgd
from crowdml.secagg.terms import terms_of
from crowdml.task import find_task, parse
from crowdml.turn import check_in, first_turn, server_turn

BATCH, WIDTH, CLASSES = 5, 4, 3


def task_of(**changes):
    return parse(masked_text(**changes))


# The table


@pytest.mark.parametrize("uses", [1, 5])
@pytest.mark.parametrize("epsilon", ["1.0", "10.0", "0.1"])
def test_each_row_s_share_is_what_its_price_asks_over_the_fewest_honest_devices(epsilon, uses):
    text = masked_text(epsilon=f"{{ gradient = {epsilon}, errors = {epsilon}, labels = {epsilon} }}\nuses = {uses}")
    task = parse(text)
    table, honest, price = sgd.mechanisms(task), task.masking.honest, Fraction(epsilon)
    l2 = Fraction(2 * table["gradient"].clip)
    assert honest == 5 - 1
    norms = {
        "gradient": (l2, l1_of(l2, WIDTH * CLASSES)),
        "errors": (Fraction(1), Fraction(1)),
        "labels": (root_up(Fraction(2)), Fraction(2)),
    }
    for name, row in table.items():
        assert isinstance(row, SkellamSum if name == "gradient" else SkellamCount)
        assert row.observer is Observer.AGGREGATE
        assert row.honest == honest
        assert row.variance * honest == skellam_variance(*norms[name], price, 1e-6, uses)
        paid = Total.of([row.loss]).scaled(uses)
        assert exact(paid.epsilon(1e-6)) <= price
        assert paid.epsilon(1e-6) == pytest.approx(float(epsilon), rel=1e-5)
        assert Filter.of(price, 1e-6, paid).allows(Total(), paid)


def test_lengths_and_bounds_are_those_of_what_is_said():
    task = task_of()
    table, terms = sgd.mechanisms(task), terms_of(task, sgd.mechanisms(task))
    said = masked_steps(says(task, batch_of(0)))
    assert {name: each.size for name, each in said.items()} == {name: row.length for name, row in table.items()}
    assert {field.tag: field.length for field in terms.fields} == {name: each.size for name, each in said.items()}
    assert [field.bits for field in terms.fields] == [32, 32, 32]
    assert terms.honest == task.masking.honest
    assert (terms.smallest, terms.largest, terms.survivors, terms.colluders) == (5, 6, 5, 1)
    assert (table["errors"].bound, table["labels"].bound) == (BATCH, BATCH)
    assert table["gradient"].bound == BATCH * table["gradient"].clip


def test_held_out_samples_pay_for_the_count_alone_under_masks_too():
    task = task_of(held_out=2)
    table = sgd.mechanisms(task)
    assert [(row.covers.start, row.covers.stop) for row in table.values()] == [(2, 5), (0, 2), (0, 5)]
    assert Price.of(find(task), task).sample_epsilon() < Price.of(find(task_of()), task_of()).sample_epsilon()


def test_a_cohort_of_a_hundred_needs_a_tenth_of_the_noise_of_devices_on_their_own():
    """Review, section 6: the noise of the mean is that of one device over the root of how many there are, squared."""
    alone = sgd.mechanisms(parse(task_text(epsilon="{ gradient = 1.0 }")))["gradient"]
    cohort = sgd.mechanisms(task_of(cohort=100, minimum=100, colluders=0, epsilon="{ gradient = 1.0 }"))["gradient"]
    one = float(alone.sigma / alone.clip)
    mean = math.sqrt(100 * cohort.variance) / cohort.clip / 100
    assert one / math.sqrt(100) / mean == pytest.approx(10, rel=1e-3)


def test_the_grid_is_written_into_the_published_task_and_makes_the_same_noise():
    task = task_of()
    settled = sgd.protocol.settle(task)
    assert settled.privacy.grid is not None
    assert sgd.mechanisms(settled) == sgd.mechanisms(task)
    coarse = parse(masked_text(epsilon="{ gradient = 1.0 }\ngrid = 0.5"))
    row = sgd.mechanisms(coarse)["gradient"]
    assert row.clip == 3  # sqrt(2) on that grid, rounded up
    assert Total.of([row.loss]).epsilon(1e-6) <= 1
    with pytest.raises(TaskError, match="too fine for this noise"):
        find(parse(masked_text(epsilon="{ gradient = 1.0 }\ngrid = 0.000030517578125")))


def test_a_server_expects_totals_within_the_bound_and_six_deviations():
    task = task_of()
    table, fields = sgd.mechanisms(task), sgd.protocol.expected(task)["sgd/total/1"]
    assert (fields["devices"].low, fields["devices"].high) == (5, 6)
    for name, row in table.items():
        reach = 6 * row.bound + 6 * math.sqrt(6 * row.variance)
        assert (fields[name].dtype, fields[name].shape) == ("<i8", (row.length,))
        assert reach <= fields[name].high == -fields[name].low <= reach + 7
    with pytest.raises(TaskError, match="the simulator runs such a task, a server does not"):
        sgd.protocol.expected(task_of(mechanism="none"))


# Neighbours, through whole steps

EDGES = (np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, 1.0, -1.0)


def batch_of(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return Samples(x / np.linalg.norm(x, axis=1, keepdims=True), rng.integers(0, CLASSES, BATCH).astype(np.int32))


def says(task, batch, weights=None, noise=None):
    protocol = find(task)
    offered = first_turn(protocol, task).published
    if weights is not None:
        offered = dataclasses.replace(offered, weights=weights)
    return check_in(protocol, task, batch, offered, noise=noise or Silence(), me="device").message


def neighbours():
    """The first sample replaced by vertices, opposites, zeros, and what is no number; labels out of range too."""
    others = batch_of(1)
    samples = [(value * np.eye(WIDTH)[k], label) for value in (1.0, -1.0) for k in range(2) for label in range(CLASSES)]
    samples += [(np.array([side, 0.0, 0.0, 0.1]) / np.hypot(1, 0.1), 1) for side in (1.0, -1.0)]  # nearly opposite
    samples += [(np.where(np.arange(WIDTH) == 0, value, 0.0), label) for value in EDGES for label in (0, 2, -1, 99)]
    for x, label in samples:
        with np.errstate(over="ignore", invalid="ignore"):
            yield Samples(
                np.concatenate([x[None].astype(np.float32), others.x[1:]]), np.append(np.int32(label), others.y[1:])
            )


@pytest.mark.parametrize("scale", [0.0, 1.0, 1000.0])
def test_replacing_a_sample_moves_what_a_device_says_by_no_more_than_it_is_charged_for(scale):
    """A softmax that is sure and wrong twice: then gradients are as long as they can be, and nearly opposite."""
    task = task_of()
    table = sgd.mechanisms(task)
    weights = np.zeros((WIDTH, CLASSES), np.float32)
    weights[3, 0] = scale
    with np.errstate(all="ignore"):
        said = [masked_steps(says(task, batch, weights)) for batch in neighbours()]
    for name, row in table.items():
        values = np.stack([each[name] for each in said]).astype(np.int64)
        moved = (values[:, None] - values[None]).reshape(-1, row.length)
        l2 = row.sensitivity.bound if name == "gradient" else root_up(row.sensitivity.bound)
        l1 = l1_of(l2, row.length) if name == "gradient" else row.sensitivity.bound
        assert (moved**2).sum(1).max() <= l2**2, name
        assert np.abs(moved).sum(1).max() <= l1, name
        assert np.abs(values).max() <= row.bound
        if scale == 1000.0 and name == "gradient":
            assert math.sqrt((moved**2).sum(1).max()) >= 0.9 * l2
        if name == "labels":
            assert (moved**2).sum(1).max() == 2


def test_a_step_keeps_nothing_so_a_second_one_is_charged_as_the_first():
    task = task_of()
    protocol = find(task)
    state = protocol.device.start(task, Context(me="device")).state
    assert state is None
    first, again = (masked_steps(says(task, batch_of(4))) for _ in range(2))
    assert all((first[name] == again[name]).all() for name in first)


# What travels


def test_what_a_device_says_under_masks_has_no_bytes_and_no_version():
    message = says(task_of(), batch_of(2), noise=SystemSource())
    assert message.kind == "sgd/masked/1"
    assert [field.name for field in dataclasses.fields(message)] == ["gradient", "errors", "labels"]
    with pytest.raises(LeakError, match="no bytes of its own"):
        encode(message)


def test_counts_without_a_price_are_not_said():
    message = says(task_of(epsilon="{ gradient = 1.0 }"), batch_of(2))
    assert message.errors is None
    assert message.labels is None
    assert list(masked_steps(message)) == ["gradient"]


# The server


def heard(task, sums, devices, version=0):
    return total("sgd/total/1", sums, devices=np.int32(devices), version=np.int32(version))


def test_a_total_is_one_step_along_the_mean_over_the_survivors_samples():
    task = task_of(update="sgd", schedule="constant")
    protocol, row = find(task), sgd.mechanisms(task)["gradient"]
    state = protocol.server.start(task, Context(me=SERVER)).state
    gradient = np.arange(WIDTH * CLASSES, dtype=np.int64) * 1000
    sums = {"gradient": gradient, "errors": np.array([7]), "labels": np.array([10, 8, 9])}
    step = server_turn(protocol, task, state, heard(task, sums, 5))
    mean = gradient.reshape(WIDTH, CLASSES) * float(row.grid.step) / (5 * BATCH)
    np.testing.assert_allclose(step.state.weights, -2.0 * mean, rtol=1e-5)
    assert int(step.state.steps) == 1
    assert int(step.state.counted) == 5
    assert (int(step.state.errors), step.state.labels.tolist()) == (7, [10, 8, 9])
    assert int(step.published.version) == 1


def test_progress_counts_survivors_and_their_noise():
    task = task_of()
    protocol, table = find(task), sgd.mechanisms(task)
    state = protocol.server.start(task, Context(me=SERVER)).state
    sums = {"gradient": np.zeros(12, np.int64), "errors": np.array([7]), "labels": np.array([10, 8, 9])}
    for devices in (5, 6):
        state = advance(protocol.server, task, state, heard(task, sums, devices), Context(me=SERVER)).state
    seen = protocol.progress(task, state)
    assert seen.check_ins == 11
    assert (seen.errors.counts, seen.errors.samples) == ((14,), 11 * BATCH)
    assert seen.errors.variance == pytest.approx(11 * float(table["errors"].variance))
    assert seen.labels.variance == pytest.approx(11 * float(table["labels"].variance))


def test_steps_to_stop_after_are_cohorts():
    task = task_of(stop="[stop]\nsteps = 1")
    protocol = find(task)
    state = protocol.server.start(task, Context(me=SERVER)).state
    sums = {"gradient": np.zeros(12, np.int64), "errors": np.array([7]), "labels": np.array([10, 8, 9])}
    step = server_turn(protocol, task, state, heard(task, sums, 5))
    (stop,) = (effect for effect in step.effects if type(effect).__name__ == "Stop")
    assert stop.rule.sentence == "1 cohort has been added up"
    assert bool(stop.when)


def test_momentum_goes_on_where_the_last_step_went():
    task = task_of(update="momentum", schedule="constant", epsilon="{ gradient = 1.0 }")
    protocol, row = find(task), sgd.mechanisms(task)["gradient"]
    state = protocol.server.start(task, Context(me=SERVER)).state
    sums = {"gradient": np.full(12, 1000, np.int64)}
    unit = 1000 * float(row.grid.step) / 25
    for expected in (1, 1 + 1 + 0.9):
        state = advance(protocol.server, task, state, heard(task, sums, 5), Context(me=SERVER)).state
        np.testing.assert_allclose(state.weights, -2.0 * expected * unit, rtol=1e-5)


def test_the_public_step_knows_that_a_cohort_averages_its_noise():
    few, many = (task_of(cohort=n, minimum=n, colluders=0, epsilon="{ gradient = 1.0 }") for n in (6, 60))
    assert (
        sgd.public_step(parse(task_text(epsilon="{ gradient = 1.0 }"))) < sgd.public_step(few) < sgd.public_step(many)
    )


def test_a_row_that_no_device_could_hold_is_refused():
    with pytest.raises((GuaranteeError, TaskError)):
        find(task_of(epsilon="{ gradient = 0.0000001 }"))
    assert find_task("activity").masking is None
