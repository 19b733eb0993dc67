"""Local updates: what one unit can do to a release, what the server makes of it, and what is refused."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_bench import MASKS, local_task, make_batch, publication, said

from crowdml.arrays import Samples
from crowdml.datasets.populations import iid
from crowdml.errors import GuaranteeError, TaskError
from crowdml.messages import SERVER, total
from crowdml.price import Price
from crowdml.privacy.losses import Total
from crowdml.privacy.mechanisms import GridGaussian, GridLaplace, SkellamSum
from crowdml.privacy.private import Release, Rows, Stamp
from crowdml.privacy.sensitivity import Adjacency
from crowdml.protocol import Context, Publish, Stop, advance
from crowdml.protocols import find
from crowdml.protocols.local_updates import Update, plan, releases, stability_of
from crowdml.sim.studies import simulate
from crowdml.sim.world import Delay

STAMP = Stamp("a test")
NETWORK = 'kind = "mlp"\nhidden = [4]'


def steps_of(task, batch, weights, **more):
    """What leaves, in grid steps, without noise."""
    return said(task, batch, publication(weights), **more).update.value.astype(np.float64)


def replaced(batch, place, other):
    x, y = batch.x.copy(), batch.y.copy()
    x[place], y[place] = other.x[place], other.y[place]
    return Samples(x, y)


# --- what a unit can move (L3, L5) ---


LOSSES = {
    "softmax": {},
    "logistic": {"model": 'kind = "logistic"', "labels": 'classes = ["a", "b"]'},
    "smooth-svm": {"model": 'kind = "smooth-svm"\nwidth = 0.5', "labels": 'classes = ["a", "b"]'},
    "huber": {"model": 'kind = "linear"\nwidth = 1.0', "labels": 'kind = "number"'},
}
RATES = {
    "constant": "rate = { c = 0.5 }",
    "path": 'rate = { schedule = "1/sqrt(t)", c = 0.5, counter = "path" }',
    "steps": 'rate = { schedule = "1/t", c = 0.5, counter = "steps" }',
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_one_sample_moves_a_convex_update_by_its_stability_at_most(loss, rate, steps):
    task = local_task(**LOSSES[loss], protocol=f"minibatch = 2\nlocal_steps = {steps}\n{RATES[rate]}")
    fixed = plan(task)
    assert fixed.stable
    bound = float(fixed.table["update"].sensitivity.bound)
    rng, worst = np.random.default_rng(1), 0.0
    for seed in range(30):
        one, other = make_batch(task, seed), make_batch(task, 1000 + seed)
        weights = rng.normal(size=fixed.model.shape) * rng.choice([0.1, 1, 10])
        for place in range(6):
            parted = steps_of(task, one, weights) - steps_of(task, replaced(one, place, other), weights)
            worst = max(worst, float(np.linalg.norm(parted)))
    assert worst <= bound


def test_the_stability_is_reached_by_two_samples_that_pull_in_opposite_ways():
    """Logistic, far on the wrong side: |slope| is near 1 in every step, so 2 eta / B_d is what one step parts."""
    task = local_task(
        dimension=2, model='kind = "logistic"', labels='classes = ["a", "b"]', batch=2,
        protocol="minibatch = 2\nlocal_steps = 4\nrate = { c = 0.1 }",
    )  # fmt: skip
    weights = np.array([0.0, 900.0])
    one, other = (
        Samples(np.array([[side * math.sqrt(0.96), -0.2], [0, 0]], np.float32), np.array([1, 0])) for side in (1, -1)
    )
    fixed = plan(task)
    parted = np.linalg.norm(steps_of(task, one, weights) - steps_of(task, other, weights)) * float(fixed.grid.step)
    claimed = stability_of(fixed.settings, fixed.model, 1.0, 0.0)
    assert claimed == pytest.approx(2 / 2)
    assert 0.95 * claimed < parted <= claimed


@pytest.mark.parametrize("counter", ["rounds", "check-ins"])
@pytest.mark.parametrize("count", [-3, -2, -1, 0, 2**31 - 1])
def test_no_number_that_a_server_publishes_has_a_sample_move_an_update_further(counter, count):
    """Rates c / t with t below zero would climb the loss: from a saddle between two labels one sample decides where."""
    task = local_task(
        dimension=1, model='kind = "logistic"', labels='classes = ["a", "b"]', batch=100,
        protocol=f'local_steps = 12\nrate = {{ schedule = "1/t", c = 7.9, counter = "{counter}" }}',
    )  # fmt: skip
    fixed, labels = plan(task), np.arange(100) % 2
    assert fixed.stable
    public = publication(np.zeros(1), count, count)
    one, other = (
        said(task, Samples(np.ones((100, 1), np.float32), y), public).update.value.astype(np.int64)
        for y in (labels, np.where(np.arange(100) == 0, 1, labels))
    )
    assert np.linalg.norm(one - other) <= fixed.table["update"].sensitivity.bound


@pytest.mark.parametrize(("l2", "expected"), [(0.01, 1.991024), (0.1, 1.912358), (1.0, 1.302643), (0.0, 2.0)])
def test_a_device_moves_its_weights_as_far_as_the_review_says(l2, expected):
    """Section 5: eta = 0.1, S_d = 10, |x| <= 1, slope at most 1: Delta2 of w is 2 C H."""
    penalty = f"\nl2 = {l2}" if l2 else ""
    task = local_task(
        model='kind = "logistic"' + penalty, labels='classes = ["a", "b"]', unit="device",
        protocol="local_steps = 10\nrate = { c = 0.1 }",
    )  # fmt: skip
    fixed = plan(task)
    reach, _ = fixed.reach(np, 1)
    assert 2 * fixed.clip * float(reach) == pytest.approx(expected, abs=1e-6)


def test_a_sample_of_a_smooth_convex_loss_moves_them_as_far_as_the_review_says():
    """Section 5: C = 1, B = 100, eta = 0.1, each sample in one step: 2 C eta / B_d = 0.002."""
    task = local_task(
        model='kind = "logistic"', labels='classes = ["a", "b"]', batch=1000,
        protocol="minibatch = 100\nlocal_steps = 10\nrate = { c = 0.1 }",
    )  # fmt: skip
    fixed = plan(task)
    reach, _ = fixed.reach(np, 1)
    assert stability_of(fixed.settings, fixed.model, 1.0, 0.0) * float(reach) == pytest.approx(0.002)


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e6]))
@settings(max_examples=40, deadline=None)
def test_whatever_a_network_did_its_update_is_no_longer_than_the_clip(seed, scale):
    task = local_task(model=NETWORK, unit="device", protocol="local_steps = 3\nclip = 0.5\nrate = { c = 2.0 }")
    fixed, rng = plan(task), np.random.default_rng(seed)
    weights = rng.normal(size=fixed.model.shape) * scale
    row = fixed.table["update"]
    moved = steps_of(task, make_batch(task, seed), weights)
    assert np.linalg.norm(moved) <= row.clip
    assert row.clip * float(fixed.grid.step) == pytest.approx(0.5, rel=2e-3)


def test_bad_samples_and_bad_publications_leave_no_trace_but_zeros():
    task = local_task(model=NETWORK, unit="device", protocol="local_steps = 2\nclip = 1.0\nrate = { c = 1.0 }")
    batch = make_batch(task)
    x = batch.x.copy()
    x[0, 0], x[1, 1] = np.nan, np.inf
    weights = plan(task).model.start().astype(float)
    assert np.isfinite(steps_of(task, Samples(x, batch.y), weights)).all()
    weights[:3] = [np.nan, np.inf, 1e30]
    assert np.isfinite(steps_of(task, batch, weights)).all()


# --- what it costs (L8) ---


def test_a_device_pays_the_epsilon_of_the_task_for_all_its_check_ins():
    task = local_task(unit="device", uses=5, samples=12, epsilon=4.0)
    assert releases(task, plan(task).settings) == 10
    priced = Price.of(find(task), task)
    assert priced.device_epsilon(10) == pytest.approx(4.0, rel=1e-6)
    assert priced.device_epsilon(1) < 1.2
    row = plan(task).table["update"]
    assert row.sensitivity.adjacency is Adjacency.REPLACE_DEVICE
    assert row.loss == row.device_loss


def test_a_sample_pays_for_the_check_ins_that_use_it_and_the_device_for_more():
    task = local_task(uses=4, epsilon=4.0)
    priced = Price.of(find(task), task)
    assert priced.sample_epsilon(4) == pytest.approx(4.0, rel=1e-6)
    assert priced.device_epsilon(4) > 2 * priced.sample_epsilon(4)


def test_a_sample_of_a_network_pays_what_its_device_pays():
    task = local_task(model=NETWORK, protocol="clip = 1.0\nlocal_steps = 2\nrate = { c = 1.0 }")
    row = plan(task).table["update"]
    assert not plan(task).stable
    assert row.loss == row.device_loss
    assert "as far as all samples" in find(task).remarks(task)[0]


@pytest.mark.parametrize("why", ["clip = 0.5", "rate = { c = 50.0 }"], ids=["clip", "rate"])
def test_a_clip_below_the_slope_and_long_steps_void_stability(why):
    """L5: clipping breaks nonexpansiveness, and so does a step beyond 2 / L."""
    rate = "" if why.startswith("rate") else "rate = { c = 0.5 }\n"
    task = local_task(protocol=f"minibatch = 2\nlocal_steps = 3\n{rate}{why}")
    assert not plan(task).stable


def test_one_step_has_no_path_that_a_sample_could_bend():
    task = local_task(protocol="rate = { c = 50.0 }")
    assert plan(task).stable
    assert stability_of(plan(task).settings, plan(task).model, 1.0, 0.0) == pytest.approx(2 * math.sqrt(2) / 6)


@pytest.mark.parametrize(
    ("mechanism", "protocol", "rest", "kind"),
    [
        ("discrete-gaussian", "rate = { c = 1.0 }", "", GridGaussian),
        ("discrete-laplace", "rate = { c = 1.0 }\nupdate_clip = 1.0", "", GridLaplace),
        ("skellam", "rate = { c = 1.0 }", MASKS, SkellamSum),
    ],
    ids=["gaussian", "laplace", "skellam"],
)
def test_the_noise_of_a_device_is_calibrated_to_twice_its_clip(mechanism, protocol, rest, kind):
    task = local_task(unit="device", mechanism=mechanism, protocol=protocol, rest=rest)
    row = plan(task).table["update"]
    assert isinstance(row, kind)
    assert row.whole
    assert row.sensitivity.bound == 2 * row.clip
    assert Total.of([row.device_loss]).epsilon(1e-6) == pytest.approx(2.0, rel=1e-5)


def test_a_sum_of_several_contributions_promises_nothing_to_a_device():
    row = plan(local_task(unit="device")).table["update"]
    assert isinstance(row, GridGaussian)
    with pytest.raises(GuaranteeError, match="moves by as many times"):
        replace(row, whole=False)
    assert replace(row, whole=False, covers=Rows(0, 1)).device_loss == row.loss


# --- the server (Algorithm 1) ---


def fold(task, state, *updates):
    """The server's state after these (value in units of the grid, version, count)."""
    step = None
    for value, version, count in updates:
        message = Update(Release(np.asarray(value, np.int32), STAMP), np.int32(version), np.int32(count))
        step = advance(find(task).server, task, state, message, Context(me=SERVER))
        state = step.state
    assert step is not None
    return state, step


def begin(task):
    return find(task).server.start(task, Context(me=SERVER)).state


def test_the_server_moves_when_enough_check_ins_of_this_round_are_there():
    task = local_task(dimension=1, unit="device", protocol="rate = { c = 0.5 }\nserver_batch = 3")
    unit = plan(task).grid.step
    give = lambda size: np.full(3, int(Fraction(size) / unit))  # noqa: E731
    state, _ = fold(task, begin(task), (give(1), 0, 1), (give(2), 0, 1))
    assert int(state.rounds) == 0
    assert not state.weights.any()
    state, step = fold(task, state, (give(3), 0, 1))
    assert int(state.rounds) == 1
    assert int(state.taken) == 3
    np.testing.assert_allclose(state.weights, -0.5 * 2.0)  # H = 0.5, the mean is 2
    assert next(effect for effect in step.effects if isinstance(effect, Publish)).message.version == 1


def test_a_check_in_of_an_old_round_counts_for_nothing_and_stands_in_for_nobody():
    """L9: Algorithm 1 counts what it drops, so it may average over one check-in, or none."""
    task = local_task(dimension=1, unit="device", protocol="rate = { c = 0.5 }\nserver_batch = 2")
    give = np.full(3, 100)
    state, _ = fold(task, begin(task), (give, 0, 1), (give, 0, 1))
    before = state.weights.copy()
    state, _ = fold(task, state, (give, 0, 1), (give, 0, 1), (give, 0, 1), (give, 1, 2))
    np.testing.assert_array_equal(state.weights, before)
    assert int(state.heard) == 1
    state, _ = fold(task, state, (give, 1, 2))
    assert int(state.rounds) == 2
    assert int(state.taken) == 4


def test_an_old_check_in_may_count_by_its_age_instead():
    task = local_task(dimension=1, unit="device", protocol='rate = { c = 0.5 }\nstale = "weigh"')
    unit = float(plan(task).grid.step)
    state, _ = fold(task, begin(task), (np.zeros(3), 0, 1), (np.zeros(3), 1, 2), (np.zeros(3), 2, 3))
    state, _ = fold(task, state, (np.full(3, 100), 0, 1))
    np.testing.assert_allclose(state.weights, -0.5 * 100 * unit / 2, rtol=1e-6)  # three rounds old: 1 / sqrt(4)


@pytest.mark.parametrize("optimiser", ["average", "momentum", "adam"])
def test_the_server_s_optimiser_is_what_it_says(optimiser):
    task = local_task(
        dimension=1, unit="device",
        protocol=f'rate = {{ c = 0.5 }}\noptimiser = "{optimiser}"\nserver_rate = 0.1\nmomentum = 0.8',
    )  # fmt: skip
    unit = float(plan(task).grid.step)
    state, weights, velocity, squares = begin(task), np.zeros(3), np.zeros(3), np.zeros(3)
    rng = np.random.default_rng(0)
    for number in range(5):
        value = rng.integers(-500, 500, 3)
        state, _ = fold(task, state, (value, number, number + 1))
        mean = 0.5 * value * unit
        if optimiser == "momentum":
            velocity = 0.8 * velocity + mean
            step = velocity
        elif optimiser == "adam":
            velocity, squares = 0.9 * velocity + 0.1 * mean, 0.99 * squares + 0.01 * mean**2
            step = velocity / (1 - 0.9 ** (number + 1)) / (np.sqrt(squares / (1 - 0.99 ** (number + 1))) + 1e-6)
        else:
            step = mean
        weights = weights - 0.1 * step
    np.testing.assert_allclose(state.weights.reshape(-1), weights, rtol=2e-4)


def test_the_regulariser_shrinks_the_weights_as_the_device_s_steps_do():
    """What the server makes of one noise-free check-in is where the device got to."""
    task = local_task(
        model='kind = "softmax"\nl2 = 0.1', unit="device", mechanism="none",
        protocol='local_steps = 4\nrate = { schedule = "1/sqrt(t)", c = 0.5, counter = "path" }',
    )  # fmt: skip
    fixed, batch = plan(task), make_batch(task)
    start = np.random.default_rng(2).normal(size=fixed.model.shape).astype(np.float32)
    at = start.astype(float)
    for step in range(4):
        slope = fixed.model.gradient_sum(at, batch) / 6 + 0.1 * at
        at = at - 0.5 / math.sqrt(2 * 4 + step + 1) * slope
    message = said(task, batch, publication(start), trip=2)
    assert int(message.count) == 9
    state = replace(begin(task), weights=start)
    after = advance(find(task).server, task, state, message, Context(me=SERVER)).state
    np.testing.assert_allclose(after.weights, at, atol=1e-5)


@pytest.mark.parametrize(
    ("counter", "count"), [("rounds", 8), ("check-ins", 41), ("trips", 6), ("steps", 1), ("path", 16)]
)
def test_steps_follow_any_of_the_four_counters(counter, count):
    task = local_task(
        unit="device", protocol=f'local_steps = 3\nrate = {{ schedule = "1/t", c = 1.0, counter = "{counter}" }}'
    )
    weights = np.zeros(plan(task).model.shape)
    message = said(task, make_batch(task), publication(weights, version=7, taken=40), trip=5)
    assert int(message.count) == count
    moving = counter in ("steps", "path")
    np.testing.assert_allclose(plan(task).rates(np, count), [1 / (count + moving * step) for step in range(3)])


def test_weights_that_are_not_finite_stop_the_task_and_the_last_good_ones_stay():
    task = local_task(unit="device", protocol="rate = { c = 1e29 }")
    state = begin(task)
    after, step = fold(task, state, (np.full(9, 100), 0, 1))
    np.testing.assert_array_equal(after.weights, state.weights)
    assert int(after.rounds) == 0
    (stop,) = [effect for effect in step.effects if isinstance(effect, Stop)]
    assert bool(stop.when)
    assert "no longer finite" in stop.rule.sentence
    np.testing.assert_array_equal(step.effects[0].message.weights, state.weights)


def test_a_cohort_s_sum_moves_the_server_by_its_mean():
    task = local_task(unit="device", mechanism="skellam", rest=MASKS, protocol="local_steps = 2\nrate = { c = 0.5 }")
    unit = float(plan(task).grid.step)
    heard = total("local/total/1", {"update": np.full(9, 600)}, devices=np.int32(6), version=np.int32(0))
    after = advance(find(task).server, task, begin(task), heard, Context(me=SERVER)).state
    np.testing.assert_allclose(after.weights, -1.0 * 100 * unit)
    assert int(after.taken) == 6


# --- in the simulator ---


def study(protocol: str, rest: str, **more):
    task = local_task(unit="device", samples=60, protocol=protocol, rest=rest)
    batch = make_batch(task, size=300)
    y = batch.y.astype(np.int32)
    return simulate(task, batch.x, y, devices=iid(300, 5, 1), seed=[1], points=2, **more)


@pytest.mark.slow
@pytest.mark.parametrize("stale", ["refuse", "weigh"])
def test_a_study_pays_for_all_check_ins_of_its_last_round(stale):
    """A round is B_s check-ins, and those that were refused are paid for too: both engines count them alike."""
    rule = f'rate = {{ c = 0.3 }}\nserver_batch = 3\nstale = "{stale}"'
    delays = {"delay": Delay("exponential", 30.0)}
    fast = study(rule, "[stop]\nsteps = 4", **delays)
    slow = study(rule, "[stop]\nsteps = 4", engine="events", **delays)
    assert fast.runs[0].stopped == slow.runs[0].stopped
    assert fast.runs[0].stopped.sentence == "4 rounds have been made"
    assert fast.check_ins == slow.check_ins >= 12
    assert (fast.planned, fast.paid) == (slow.planned, slow.paid)
    assert fast.paid.device == fast.planned.device


@pytest.mark.slow
def test_a_study_that_diverges_says_so_and_counts_what_was_paid():
    found = study("rate = { c = 1e29 }\nserver_batch = 3", "")
    assert found.runs[0].stopped.name == "diverged"
    assert found.check_ins == 3
    assert found.paid.device < found.planned.device


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "said_why"),
    [
        ({"protocol": "minibatch = 4\nrate = { c = 1.0 }"}, "Choose a divisor"),
        ({"protocol": 'rate = { c = 1.0, schedule = "adagrad" }'}, "void the price of a sample"),
        ({"model": NETWORK, "protocol": "rate = { c = 1.0 }"}, "clip"),
        ({"unit": "device", "mechanism": "discrete-laplace", "protocol": "rate = { c = 1.0 }"}, "update_clip"),
        ({"model": 'kind = "softmax"\nl2 = 2.0', "protocol": "rate = { c = 1.0 }"}, "overshoots"),
        ({"mechanism": "skellam", "rest": MASKS, "protocol": "server_batch = 2\nrate = { c = 1.0 }"}, "a cohort is"),
        (
            {"mechanism": "skellam", "rest": MASKS, "protocol": 'rate = { c = 1.0, counter = "path" }'},
            'Say "rounds" or "steps"',
        ),
        ({"rest": "[stop]\nerror = 0.1"}, "stop by stop.steps"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(changes, said_why):
    with pytest.raises(TaskError, match=said_why):
        plan(local_task(**changes))


def test_a_device_s_price_needs_to_know_how_many_check_ins_it_covers():
    text = local_task(unit="device")
    with pytest.raises(TaskError, match=r"privacy\.budget is missing"):
        plan(text.with_(privacy=replace(text.privacy, budget=None)))


def test_adagrad_on_a_device_is_sound_where_the_whole_update_is_clipped():
    task = local_task(
        model=NETWORK, unit="device", protocol='local_steps = 3\nclip = 1.0\nrate = { c = 0.1, schedule = "adagrad" }'
    )
    weights = plan(task).model.start()
    assert np.linalg.norm(steps_of(task, make_batch(task), weights)) <= plan(task).table["update"].clip


def test_as_published_is_the_simulator_s():
    with pytest.raises(TaskError, match="hamm2017/fig2"):
        plan(local_task().with_(as_published=True))


def test_the_settled_task_names_its_grid_and_stays_the_same():
    task = local_task()
    settled = find(task).settle(task)
    assert settled.privacy.grid == plan(task).grid.step
    assert plan(settled).table == plan(task).table
    assert find(settled).settle(settled) == settled
