"""Conversations with `sgd`: a device and a server, events by hand."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from bench import device, samples, sensed, server, task_text
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.arrays import Samples
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import SERVER, encode
from crowdml.price import Price
from crowdml.privacy.losses import Pure
from crowdml.privacy.private import Release, Rows, Stamp
from crowdml.privacy.sensitivity import L2
from crowdml.protocol import Context, Sensed, Woken, advance
from crowdml.protocols import find, sgd
from crowdml.protocols.sgd import Gradient, Params, plan, tally
from crowdml.task import parse
from crowdml.wire.states import pack_state, unpack_state

TASK = parse(task_text())
BATCH = samples(1)
PARAMS = Params(np.full((4, 3), 0.25, np.float32) * np.arange(3, dtype=np.float32), np.int32(7))


def task(**changes):
    return parse(task_text(**changes))


def gradient(steps, errors=None, labels=None, version=0):
    """A check-in as the server hears it."""
    stamp = Stamp("heard")

    def heard(value):
        return None if value is None else Release(np.asarray(value, np.int32), stamp)

    return Gradient(heard(steps), heard(errors), heard(labels), np.int32(version))


# The device


def test_a_device_checks_out_when_its_buffer_is_full_and_says_nothing():
    answer = device(sgd.protocol, TASK).hears(sensed(BATCH))
    assert answer.effects == ["CheckOut"]
    assert answer.passages == ()


def test_a_device_answers_a_publication_with_one_check_in():
    bench = device(sgd.protocol, TASK)
    bench.hears(sensed(BATCH))
    answer = bench.hears(PARAMS, sender=SERVER)
    assert answer.kinds == ["sgd/gradient/1"]
    assert answer.envelopes[0].to == frozenset({SERVER})
    assert answer.envelopes[0].task == TASK.hash
    (said,) = answer.messages
    assert said.version == 7
    assert said.gradient.value.shape == (4, 3)
    assert said.gradient.value.dtype == np.int32


def test_a_repeated_publication_is_answered_once_and_charged_once():
    bench = device(sgd.protocol, TASK)
    bench.hears(sensed(BATCH))
    assert bench.hears(PARAMS).kinds == ["sgd/gradient/1"]
    assert bench.hears(PARAMS).kinds == []
    assert [passage.row for passage in bench.ledger] == ["gradient", "errors", "labels"]


def test_a_publication_that_nobody_asked_for_is_not_answered():
    assert device(sgd.protocol, TASK).hears(PARAMS).effects == []


def test_a_device_forgets_its_samples_when_it_has_answered():
    bench = device(sgd.protocol, TASK)
    bench.hears(sensed(BATCH))
    bench.hears(PARAMS)
    assert bench.state is None


def test_what_a_device_says_is_the_sum_of_its_gradients_its_mistakes_and_its_labels():
    bench = device(sgd.protocol, TASK)
    bench.hears(sensed(BATCH))
    (said,) = bench.hears(PARAMS).messages
    model, grid = plan(TASK).model, plan(TASK).grid
    np.testing.assert_allclose(
        grid.decode(said.gradient.value),
        model.gradients(PARAMS.weights, BATCH).sum(0),
        atol=5 * float(grid.step),  # each of five samples was truncated
    )
    assert said.errors.value.tolist() == [int(model.mistakes(PARAMS.weights, BATCH).sum())]
    assert said.labels.value.tolist() == np.bincount(BATCH.y, minlength=3).tolist()


def test_a_clip_of_the_task_shortens_every_gradient_and_the_noise_with_it():
    clipped = TASK.with_(protocol={**TASK.protocol, "clip": Fraction(1, 4)})
    bench = device(sgd.protocol, clipped)
    bench.hears(sensed(BATCH))
    (said,) = bench.hears(PARAMS).messages
    each = plan(TASK).model.gradients(PARAMS.weights, BATCH)
    size = np.linalg.norm(each, axis=(1, 2), keepdims=True)
    assert size.min() > 0.25  # or nothing would be shown
    grid = plan(clipped).grid
    np.testing.assert_allclose(
        grid.decode(said.gradient.value), (each * (0.25 / size)).sum(0), atol=5 * 2 * float(grid.step)
    )
    wide, narrow = (plan(each).table["gradient"] for each in (TASK, clipped))
    ratio = float(narrow.sigma * plan(clipped).grid.step / (wide.sigma * plan(TASK).grid.step))
    assert ratio == pytest.approx(0.25 / math.sqrt(2), rel=1e-2)
    assert narrow.loss == wide.loss


def test_a_clip_above_the_models_own_bound_changes_nothing_and_one_of_zero_is_refused():
    loose = TASK.with_(protocol={**TASK.protocol, "clip": Fraction(5)})
    assert plan(loose).table == plan(TASK).table
    with pytest.raises(TaskError, match=r"protocol.clip"):
        plan(TASK.with_(protocol={**TASK.protocol, "clip": Fraction(0)}))


def test_held_out_samples_pay_for_the_error_count_and_the_others_for_the_gradient():
    bench = device(sgd.protocol, task(held_out=2))
    bench.hears(sensed(BATCH))
    answer = bench.hears(PARAMS)
    assert [(p.row, p.part) for p in answer.passages] == [
        ("gradient", Rows(2, 5)),
        ("errors", Rows(0, 2)),
        ("labels", Rows(0, 5)),
    ]
    other = Samples(np.concatenate([BATCH.x[:2], -BATCH.x[2:]]), BATCH.y)
    again = device(sgd.protocol, task(held_out=2))
    again.hears(sensed(other))
    first, second = answer.messages[0], again.hears(PARAMS).messages[0]
    assert first.errors.value.tolist() == second.errors.value.tolist()  # it saw the first two alone
    assert first.gradient.value.tolist() != second.gradient.value.tolist()


@pytest.mark.parametrize(
    ("epsilon", "rows"),
    [("{ gradient = 1.0 }", ["gradient"]), ("{ gradient = 1.0, labels = 0.5 }", ["gradient", "labels"]),
     ("{ gradient = 1.0, errors = 0.5 }", ["gradient", "errors"])],
)  # fmt: skip
def test_counts_without_a_price_in_the_task_do_not_leave(epsilon, rows):
    bench = device(sgd.protocol, task(epsilon=epsilon))
    bench.hears(sensed(BATCH))
    answer = bench.hears(PARAMS)
    assert [passage.row for passage in answer.passages] == rows
    (said,) = answer.messages
    assert (said.errors is None, said.labels is None) == ("errors" not in rows, "labels" not in rows)


def test_a_newer_batch_takes_the_place_of_one_that_waits():
    bench = device(sgd.protocol, TASK)
    bench.hears(sensed(samples(3)))
    bench.hears(sensed(BATCH))
    (said,) = bench.hears(PARAMS).messages
    assert said.labels.value.tolist() == np.bincount(BATCH.y, minlength=3).tolist()


def test_nobody_hears_what_is_not_theirs():
    with pytest.raises(ProtocolError, match=r"Nobody here hears Woken; this role hears Sensed, Params"):
        device(sgd.protocol, TASK).hears(Woken("tick"))
    with pytest.raises(ProtocolError, match=r"Nobody here hears Sensed; this role hears Gradient"):
        server(sgd.protocol, TASK).hears(sensed(BATCH))


# The server


def scaled(value, batch=5):
    """Steps of the grid whose mean over the batch is `value` in every entry."""
    return np.full((4, 3), round(value * batch / float(plan(TASK).grid.step)), np.int32)


def test_a_server_starts_from_zero_weights_and_publishes_them():
    bench = server(sgd.protocol, TASK)
    assert bench.published.weights.tolist() == np.zeros((4, 3)).tolist()
    assert int(bench.published.version) == 0


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("1/sqrt(t)", [2, 2 / math.sqrt(2), 2 / math.sqrt(3)]), ("1/t", [2, 1, 2 / 3]), ("constant", [2, 2, 2])],
)
def test_the_step_falls_as_its_schedule_says(schedule, rates):
    bench = server(sgd.protocol, task(schedule=schedule))
    at = 0.0
    for count, rate in enumerate(rates, start=1):
        after = bench.hears(gradient(scaled(0.125), [0], [0, 0, 0])).published
        at -= rate * 0.125
        np.testing.assert_allclose(after.weights, at, rtol=1e-5)
        assert int(after.version) == count


def test_weights_are_projected_to_the_ball_of_the_task():
    bench = server(sgd.protocol, task(radius=1.5))
    after = bench.hears(gradient(scaled(1.0), [0], [0, 0, 0])).published.weights
    assert np.linalg.norm(after) == pytest.approx(1.5, rel=1e-6)
    assert np.all(after < 0)
    small = bench.hears(gradient(scaled(-0.25), [0], [0, 0, 0])).published.weights
    assert np.linalg.norm(small) < 1.5  # inside, nothing is scaled


def test_adagrad_divides_by_the_root_of_all_squares():
    bench = server(sgd.protocol, task(update="adagrad", radius=1000.0))
    first = bench.hears(gradient(scaled(0.125), [0], [0, 0, 0])).published.weights
    np.testing.assert_allclose(first, -2.0, rtol=1e-5)
    second = bench.hears(gradient(scaled(0.125), [0], [0, 0, 0])).published.weights
    np.testing.assert_allclose(second, -2.0 - 2 / math.sqrt(2), rtol=1e-5)


def test_rmsprop_forgets_old_squares():
    bench = server(sgd.protocol, task(update="rmsprop", schedule="constant", radius=1000.0))
    first = bench.hears(gradient(scaled(0.125), [0], [0, 0, 0])).published.weights
    np.testing.assert_allclose(first, -2 / math.sqrt(0.1), rtol=1e-5)
    second = bench.hears(gradient(scaled(0.125), [0], [0, 0, 0])).published.weights
    np.testing.assert_allclose(second - first, -2 / math.sqrt(0.19), rtol=1e-5)


def test_averaging_publishes_the_last_weights_and_models_their_mean():
    averaged, plain = task(update="average"), server(sgd.protocol, TASK)
    bench = server(sgd.protocol, averaged)
    seen = []
    for value in (0.125, -0.5, 0.25):
        said = bench.hears(gradient(scaled(value), [0], [0, 0, 0])).published
        np.testing.assert_array_equal(
            said.weights, plain.hears(gradient(scaled(value), [0], [0, 0, 0])).published.weights
        )
        seen.append(said.weights)
    np.testing.assert_allclose(sgd.model_weights(averaged, bench.state), np.mean(seen, axis=0), rtol=1e-5)
    np.testing.assert_array_equal(sgd.model_weights(TASK, plain.state), seen[-1])


def test_the_server_adds_the_regulariser_and_the_device_never_sees_it():
    plain, regular = device(sgd.protocol, TASK), device(sgd.protocol, task(model="l2 = 0.5"))
    bodies = []
    for bench in (plain, regular):
        bench.hears(sensed(BATCH))
        bodies.append(bench.hears(PARAMS).envelopes[0].body)
    assert bodies[0] == bodies[1]
    bench = server(sgd.protocol, task(model="l2 = 0.5", schedule="constant"))
    bench.hears(gradient(scaled(-0.25), [0], [0, 0, 0]))  # weights 0.5
    after = bench.hears(gradient(scaled(0.0), [0], [0, 0, 0])).published.weights
    np.testing.assert_allclose(after, 0.5 - 2 * 0.5 * 0.5, atol=1e-6)


def test_a_task_stops_after_its_number_of_check_ins():
    bench = server(sgd.protocol, task(stop="[stop]\nsteps = 3"))
    said = [bench.hears(gradient(scaled(0.1), [9], [0, 0, 0])).stopped for _ in range(3)]
    assert said == [[], [], ["3 check-ins have arrived"]]


def test_counts_beyond_32_bits_add_up_and_do_not_wrap():
    bench = server(sgd.protocol, TASK)
    bench.hears(gradient(scaled(0.0), [1], [1, 2, 3]))
    most = np.iinfo(np.int32).max
    for _ in range(3):
        bench.hears(gradient(scaled(0.0), [most], [most, 0, -most]))
    assert int(bench.state.errors) == 1 + 3 * most
    assert bench.state.labels.tolist() == [1 + 3 * most, 2, 3 - 3 * most]


def test_a_snapshot_whose_counts_have_32_bits_is_read_as_the_same_counts():
    state = server(sgd.protocol, TASK).state
    before = replace(state, errors=np.int32(-7), labels=np.array([1, -2, 3], np.int32))
    after = unpack_state(state, pack_state(before))
    assert (int(after.errors), after.labels.tolist()) == (-7, [1, -2, 3])
    assert after.errors.dtype == after.labels.dtype == np.int64


def test_a_task_stops_when_its_noisy_error_is_low_enough():
    bench = server(sgd.protocol, task(stop="[stop]\nerror = 0.2"))
    errors = [5, 0, -1, 0, 0]  # noisy counts of 5 samples each: 1.0, 0.5, 0.27, 0.2
    said = [bench.hears(gradient(scaled(0.1), [count], [0, 0, 0])).stopped for count in errors]
    assert said == [[], [], [], ["the crowd's error is at most 0.2"], ["the crowd's error is at most 0.2"]]


def test_stopping_by_an_error_that_nobody_counts_is_refused():
    with pytest.raises(TaskError, match=r"stop.error = 0.2.*privacy.epsilon.errors"):
        find(task(stop="[stop]\nerror = 0.2", epsilon="{ gradient = 1.0 }"))


def test_the_server_s_effects_have_one_structure_whatever_the_values():
    bench = server(sgd.protocol, task(stop="[stop]\nerror = 0.2\nsteps = 2"))
    shapes = {tuple(bench.hears(gradient(scaled(v), [count], [1, 2, 3])).effects) for v, count in ((0.1, 9), (-9, -50))}
    assert shapes == {("Publish", "Stop", "Stop")}


def test_the_server_has_no_door():
    with pytest.raises(ProtocolError, match="There is no door in this step, so nothing can leave as 'gradient'"):
        advance(sgd.device, TASK, sensed(BATCH).batch, PARAMS, Context(me=SERVER))


# Progress, eq. (14)


def test_progress_of_the_crowd_is_what_its_counts_add_up_to():
    bench = server(sgd.protocol, TASK)
    for errors, labels in (([3], [2, 2, 1]), ([1], [0, 5, 0])):
        bench.hears(gradient(scaled(0.1), errors, labels))
    state = bench.state
    shown = tally(TASK, state)
    assert (shown.check_ins, *rates(shown.errors)) == (2, 0.4)
    assert rates(shown.labels) == pytest.approx((0.2, 0.7, 0.1))
    alpha = math.exp(-0.5)  # errors at epsilon 0.5: scale 2
    assert math.sqrt(shown.errors.variance) / shown.errors.samples == pytest.approx(
        math.sqrt(2 * 2 * alpha) / (1 - alpha) / 10
    )
    alpha = math.exp(-0.25)  # labels at epsilon 0.5: scale 4
    assert math.sqrt(shown.labels.variance) / shown.labels.samples == pytest.approx(
        math.sqrt(2 * 2 * alpha) / (1 - alpha) / 10
    )


def rates(noisy):
    return tuple(count / noisy.samples for count in noisy.counts)


def test_progress_counts_check_ins_and_their_held_out_samples():
    held_out = task(held_out=2)
    state = replace(server(sgd.protocol, held_out).state, counted=3, errors=3, labels=np.array([3, 6, 6]))
    shown = tally(held_out, state)
    assert rates(shown.errors) == (0.5,)  # three check-ins with two held-out samples each
    assert rates(shown.labels) == pytest.approx((0.2, 0.4, 0.4))


def test_progress_before_any_check_in_and_without_counts():
    shown = tally(TASK, server(sgd.protocol, TASK).state)
    assert (shown.check_ins, shown.errors.counts, shown.errors.samples) == (0, (0,), 0)
    uncounted = task(epsilon="{ gradient = 1.0 }")
    shown = tally(uncounted, server(sgd.protocol, uncounted).state)
    assert (shown.errors, shown.labels) == (None, None)


# Price


def test_a_held_out_sample_and_a_used_one_do_not_pay_for_each_other():
    """H5: with a held-out split the total is max(gradient, errors) + labels."""
    prices = {
        "norm": "l1",
        "mechanism": "discrete-laplace",
        "epsilon": "{ gradient = 1.0, errors = 0.25, labels = 0.5 }",
    }
    assert Price.of(sgd.protocol, task(**prices)).sample_epsilon() == 1.75
    assert Price.of(sgd.protocol, task(**prices, held_out=2)).sample_epsilon() == 1.5
    dear = {**prices, "epsilon": "{ gradient = 1.0, errors = 2.0, labels = 0.5 }"}
    assert Price.of(sgd.protocol, task(**dear, held_out=2)).sample_epsilon() == 2.5


def test_the_price_of_a_check_in_is_what_its_passages_add_up_to():
    prices = {"norm": "l1", "mechanism": "discrete-laplace", "held_out": 2}
    priced = task(**prices)
    bench = device(sgd.protocol, priced)
    bench.hears(sensed(samples(1, norm=1)))
    bench.hears(PARAMS)
    each = [
        sum((p.mechanism.loss.epsilon for p in bench.ledger if p.part.start <= row < p.part.stop), Fraction(0))
        for row in range(5)
    ]
    assert float(max(each)) == Price.of(sgd.protocol, priced).sample_epsilon()
    assert Price.of(sgd.protocol, priced).device().pure == sum(p.mechanism.device_loss.epsilon for p in bench.ledger)
    assert all(isinstance(p.mechanism.loss, Pure) for p in bench.ledger)


# Neighbours: the whole protocol, not the formula (review, section 7; R1, R3)

AWFUL = [np.nan, np.inf, 1e30, -1e30, 1e-42]


@st.composite
def neighbouring_batches(draw, norm):
    first = samples(draw(st.integers(0, 10**6)), norm=norm)
    x, y = first.x.copy(), first.y.copy()
    row = draw(st.integers(0, 4))
    new = samples(draw(st.integers(0, 10**6)), count=1, norm=norm).x[0]
    kind = draw(st.sampled_from(["other", "vertex", "opposite", "awful", "huge"]))
    if kind == "vertex":
        new = np.eye(4, dtype=np.float32)[draw(st.integers(0, 3))]
    elif kind == "opposite":
        new = -x[row]
    elif kind == "awful":
        new = np.full(4, draw(st.sampled_from(AWFUL)), np.float32)
    elif kind == "huge":
        new = np.float32(1e6) * new
    x[row], y[row] = new, draw(st.sampled_from([0, 1, 2, -1, 99]))
    return first, Samples(x, y)


def conversation(chosen, batches, weights):
    """Two check-ins of one device, with whatever it carried over, without noise."""
    bench = device(sgd.protocol, chosen)
    answers = []
    for batch, read in zip(batches, weights, strict=True):
        answers.append(bench.hears(sensed(batch)))
        answers.append(bench.hears(Params(read, np.int32(1))))
    return answers


CHOICES = [
    (norm, mechanism, held_out)
    for norm, mechanism in (("l2", "discrete-gaussian"), ("l1", "discrete-laplace"))
    for held_out in (0, 2)
]


@pytest.mark.parametrize(("norm", "mechanism", "held_out"), CHOICES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_neighbours_move_every_release_of_two_steps_by_at_most_its_sensitivity(norm, mechanism, held_out, data):
    chosen = task(norm=norm, mechanism=mechanism, held_out=held_out)
    first, second = data.draw(neighbouring_batches(1 if norm == "l1" else 2))
    later = samples(99, norm=1 if norm == "l1" else 2)
    size = data.draw(st.sampled_from([0.0, 1.0, 1e4, 1e30]))
    weights = [np.float32(size) * np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32) for seed in (1, 2)]
    one, other = (conversation(chosen, (batch, later), weights) for batch in (first, second))
    assert [a.effects for a in one] == [a.effects for a in other]  # R3: the shape of the transcript is public
    assert [[len(e.body) for e in a.envelopes] for a in one] == [[len(e.body) for e in a.envelopes] for a in other]
    assert [[(p.row, p.part) for p in a.passages] for a in one] == [
        [(p.row, p.part) for p in a.passages] for a in other
    ]
    assert one[3].envelopes[0].body == other[3].envelopes[0].body  # R1: nothing private was carried over
    table = sgd.mechanisms(chosen)
    said, also = one[1].messages[0], other[1].messages[0]
    for row, mechanism_ in table.items():
        moved = (getattr(said, row).value.astype(float) - getattr(also, row).value).ravel()
        norm_ = 2 if isinstance(mechanism_.sensitivity, L2) else 1
        assert np.linalg.norm(moved, norm_) <= mechanism_.sensitivity.bound


@pytest.mark.parametrize(("norm", "mechanism"), [("l2", "discrete-gaussian"), ("l1", "discrete-laplace")])
def test_some_neighbours_move_every_release_nearly_by_its_sensitivity(norm, mechanism):
    """The constants are tight: weights that settle on a wrong class, samples near a vertex with opposite signs."""
    chosen = task(norm=norm, mechanism=mechanism)
    weights = np.zeros((4, 3), np.float32)
    weights[1, 0] = 1e8
    x = np.zeros((5, 4), np.float32)
    x[:, :2] = 0.999, 0.001
    batches = []
    for sign, label in ((1, 2), (-1, 2)):
        changed = x.copy()
        changed[0, 0] *= sign
        batches.append(Samples(changed, np.array([label, 0, 0, 0, 0])))
    batches.append(Samples(x, np.array([0, 0, 0, 0, 0])))
    said = [conversation(chosen, [batch], [weights])[1].messages[0] for batch in batches]
    table = sgd.mechanisms(chosen)
    for row, mechanism_ in table.items():
        norm_ = 2 if isinstance(mechanism_.sensitivity, L2) else 1
        moved = [
            np.linalg.norm((getattr(a, row).value.astype(float) - getattr(b, row).value).ravel(), norm_)
            for a in said
            for b in said
        ]
        goal = mechanism_.sensitivity.bound
        assert 0.9 * goal <= max(moved) <= goal, row


def test_the_version_in_a_check_in_is_the_one_that_was_read():
    bench = device(sgd.protocol, TASK)
    bench.hears(sensed(BATCH))
    assert bench.hears(Params(PARAMS.weights, np.int32(41))).messages[0].version == 41
    assert len(encode(Params(PARAMS.weights, np.int32(41)))) > 4 * 12


def test_sensing_hands_over_a_private_batch():
    event = sensed(BATCH)
    assert isinstance(event, Sensed)
    assert event.batch.part == Rows(0, 5)


def test_the_tally_has_the_sums_and_the_variance_of_their_noise_so_that_differences_are_windows():
    bench = server(sgd.protocol, TASK)
    bench.hears(gradient(np.zeros((4, 3)), [2], [1, 0, 3]), sender="a")
    one = sgd.tally(TASK, bench.state)
    bench.hears(gradient(np.zeros((4, 3)), [-1], [0, 5, 0]), sender="b")
    two = sgd.tally(TASK, bench.state)
    assert (one.check_ins, two.check_ins) == (1, 2)
    assert one.errors is not None
    assert two.errors is not None
    assert two.labels is not None
    assert (one.errors.counts, two.errors.counts, two.labels.counts) == ((2,), (1,), (1, 5, 3))
    assert two.errors.samples == 2 * one.errors.samples
    assert two.errors.variance == pytest.approx(2 * one.errors.variance)


def test_a_task_that_lets_no_counts_out_tallies_its_check_ins_alone():
    silent = task(epsilon="{ gradient = 1.0 }")
    bench = server(sgd.protocol, silent)
    bench.hears(gradient(np.zeros((4, 3))), sender="a")
    assert (sgd.tally(silent, bench.state).errors, sgd.tally(silent, bench.state).labels) == (None, None)
