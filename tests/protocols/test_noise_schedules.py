"""Noise that changes over a device's check-ins: each has its own price, and all together cost the task's (L8)."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from local_bench import MASKS, local_task, make_batch, publication, said

from crowdml.arrays import Samples
from crowdml.datasets.populations import iid
from crowdml.device.member import charges_of
from crowdml.errors import GuaranteeError, TaskError
from crowdml.messages import SERVER
from crowdml.price import Price, check_budget
from crowdml.privacy.door import Door
from crowdml.privacy.losses import Total
from crowdml.privacy.mechanisms import GaussianStable, GridGaussian, GridLaplace, Scheduled
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Release, Rows, Stamp
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, Send, Sensed, Stop, advance
from crowdml.protocols import find
from crowdml.protocols.local_updates import ScheduledUpdate, expected, plan
from crowdml.sim import compiled, events
from crowdml.sim.layout import Holding, lay_out
from crowdml.sim.studies import replayed_ledger, simulate
from crowdml.sim.world import Delay, World
from crowdml.turn import check_in

GROWING = 'noise = { schedule = "geometric", ratio = 1.25 }'
SHRINKING = 'noise = { schedule = "geometric", ratio = 0.8 }'
FIXED = 'noise = { schedule = "weights" }'
STEPS = "minibatch = 2\nlocal_steps = 3\n"
CONSTANT_RATE = "rate = { c = 0.5 }\n"
BY_TRIP = 'rate = { schedule = "1/t", c = 0.5, counter = "trips" }\n'
SETTINGS = {
    "growing": STEPS + CONSTANT_RATE + GROWING,
    "shrinking": STEPS + CONSTANT_RATE + SHRINKING,
    "of the weights": STEPS + BY_TRIP + FIXED,
}
KINDS = {
    "gaussian": {"unit": "device"},
    "laplace": {"unit": "device", "mechanism": "discrete-laplace", "protocol": "\nupdate_clip = 1.0"},
    "stable": {"unit": "sample", "uses": 3},
}
TEN = 60  # samples: ten check-ins


def scheduled(kind: str, schedule: str, **changes):
    settings = {"samples": TEN, "epsilon": 4.0, **KINDS[kind], **changes}
    settings["protocol"] = SETTINGS[schedule] + settings.get("protocol", "")
    return local_task(**settings)


def row_of(task) -> Scheduled:
    row = plan(task).table["update"]
    assert isinstance(row, Scheduled)
    return row


def passage(task, trip: int, noise=None):
    weights = publication(np.zeros(plan(task).model.shape))
    said = check_in(find(task), task, make_batch(task), weights, noise=noise or Silence(), me="device", trip=trip)
    door = said.door
    (found,) = door.passages
    return found


# --- what a check-in costs, and all of them (L8) ---


@pytest.mark.parametrize("schedule", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_l8_the_prices_of_a_schedule_s_check_ins_add_up_to_the_task_s_epsilon(kind, schedule):
    task = scheduled(kind, schedule)
    row, trips = row_of(task), range(10 * task.privacy.uses)
    assert len(row.levels) == len(trips)
    prices = [passage(task, trip).priced.loss for trip in trips]
    dearest = sorted(prices, key=lambda loss: Total.of([loss]).epsilon(1e-6), reverse=True)
    times = task.privacy.uses if kind == "stable" else len(trips)
    paid = Total.of(dearest[:times]).epsilon(task.privacy.delta)
    assert 3.96 < paid <= 4.0 * (1 + 1e-9)
    priced = Price.of(find(task), task)
    total = priced.sample_epsilon(times) if kind == "stable" else priced.device_epsilon(times)
    assert total == pytest.approx(paid)
    assert Price.of(find(task), task).sample_epsilon(1) == pytest.approx(Total.of(dearest[:1]).epsilon(1e-6))
    assert len({str(price) for price in prices}) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_in_s_row_has_the_noise_of_all_and_the_sensitivity_of_its_share(kind):
    row = row_of(scheduled(kind, "growing"))
    base = row.row
    for trip in range(len(row.levels)):
        share, here = Fraction(row.levels[trip], row.of), row.at(trip)
        assert float(share) == pytest.approx(1.25**-trip, abs=1 / row.of)
        if isinstance(base, GridLaplace):
            assert isinstance(here, GridLaplace)
            assert here.scale == base.scale
            assert here.epsilon == share * base.epsilon
        elif isinstance(base, GridGaussian):
            assert isinstance(here, GridGaussian)
            assert here.sigma == base.sigma
            assert here.rho == share**2 * base.rho
        else:
            assert isinstance(here, GaussianStable)
            assert here.sigma == base.sigma
            assert share <= here.sensitivity.bound / base.sensitivity.bound <= share + Fraction(1, 100)
            assert here.stability > share * base.stability  # rounding the product with the share is paid
            assert here.device_stability > share * base.device_stability
        assert here.covers == base.covers


def test_a_thousandth_of_the_price_is_not_lost_by_rounding_shares_to_the_grid():
    row = row_of(scheduled("gaussian", "growing"))
    by_hand = sum(float(row.row.rho) * (level / row.of) ** 2 for level in row.levels)
    assert float(row.total(10).zcdp) == pytest.approx(by_hand)
    assert row.total(10) == row.total(100)
    assert row.total(0) == Total()


@pytest.mark.parametrize("schedule", SETTINGS)
@pytest.mark.parametrize("trip", [0, 4, 9, 10, 500])
def test_what_a_device_can_move_is_what_its_check_in_is_priced_for(schedule, trip):
    """All samples replaced: two devices that pull in opposite ways, each at its clip, through the whole turn."""
    two = {"labels": 'classes = ["a", "b"]', "model": 'kind = "logistic"', "protocol": "\nclip = 0.5"}
    task = scheduled("gaussian", schedule, dimension=2, **two)
    weights = np.array([0.0, 900.0])
    one, other = (
        Samples(np.array([[side * math.sqrt(0.96), -0.2]] * 6, np.float32), np.ones(6, int)) for side in (1, -1)
    )
    gave = [said(task, each, publication(weights), trip=trip).update.value.astype(float) for each in (one, other)]
    moved, priced = float(np.linalg.norm(gave[0] - gave[1])), row_of(task).at(trip)
    bound = float(priced.sensitivity.bound)
    assert moved <= bound
    if trip < 10:
        assert moved >= 0.9 * bound
    else:
        assert bound == moved == 0
        assert Total.of([priced.loss, priced.device_loss]).epsilon(1e-6) == 0


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_however_long_a_contribution_is_its_share_is_clipped_to_the_share_of_the_clip(kind):
    row = row_of(scheduled(kind, "growing"))
    for trip, level in enumerate(row.levels):
        value = np.random.default_rng(trip).normal(size=(1, 9)) * 10.0 ** (trip - 3)
        given = row.draw_at(trip, value, Silence()).astype(float)
        assert np.linalg.norm(given, ord=1 if kind == "laplace" else 2) <= level


def test_a_vector_that_is_priced_by_stability_is_given_in_its_share():
    row = row_of(scheduled("stable", "growing"))
    value = np.random.default_rng(1).normal(size=(1, 9)) * float(row.grid.step) * 100
    for trip in (0, 3, 9):
        expected_steps = value[0] / float(row.grid.step) * row.levels[trip] / row.of
        np.testing.assert_allclose(row.draw_at(trip, value, Silence()), expected_steps, rtol=0, atol=0.5 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_does_not_depend_on_the_check_in(kind):
    task = scheduled(kind, "growing", epsilon=1.0)
    row = row_of(task)
    value = np.random.default_rng(1).normal(size=(1, 9)) * float(row.grid.step) * 20
    drawn = []
    for trip in (0, 3, 9, 10):
        with_noise = row.draw_at(trip, value, SeededSource(stream(1, 2, 3)))
        drawn.append(with_noise - row.draw_at(trip, value, Silence()))
    assert np.abs(drawn[0]).max() > 20
    for other in drawn[1:]:
        np.testing.assert_array_equal(drawn[0], other)


def test_a_contribution_that_is_not_finite_is_nothing_and_warns_of_nothing():
    row = row_of(scheduled("gaussian", "growing"))
    bad = np.array([[np.inf, -np.inf, np.nan, 1e300, 0.0, 0.0, 0.0, 0.0, 0.0]])
    for trip in (0, 5, 10):
        with np.errstate(all="raise"):
            np.testing.assert_array_equal(row.draw_at(trip, bad, Silence()), np.zeros(9))


def test_a_scheduled_row_is_not_drawn_without_its_check_in():
    with pytest.raises(GuaranteeError, match="does not name"):
        row_of(scheduled("gaussian", "growing")).draw(np.zeros((1, 9)), Silence())


@pytest.mark.parametrize("levels", [(), (0, 1), (5000, 70000)])
def test_shares_are_above_nothing_and_no_more_than_all(levels):
    row = row_of(scheduled("gaussian", "growing"))
    with pytest.raises(GuaranteeError, match="shares of one contribution"):
        replace(row, levels=levels)


def test_the_ledger_charges_each_check_in_its_own_price():
    task = scheduled("gaussian", "growing")
    row = row_of(task)
    for trip in (0, 7):
        (charge,) = charges_of(task, [passage(task, trip)], 0, "2026-01-01T00:00:00+00:00")
        assert charge.loss == charge.device_loss == row.at(trip).loss
    assert passage(task, 7).priced.loss.rho < passage(task, 0).priced.loss.rho / 20


def test_budgets_hold_the_sum_of_the_schedule():
    task = scheduled("stable", "growing", epsilon=4.0, budget=4.0001)
    assert check_budget(find(task), task).sample_epsilon(3) <= 4.0
    assert Price.of(find(task), task).affordable() == 30
    tight = task.with_(privacy=replace(task.privacy, budget=replace(task.privacy.budget, epsilon=Fraction(15, 4))))
    protocol = find(task)
    with pytest.raises(TaskError, match="a sample pays"):
        check_budget(protocol, tight)
    assert Price.of(protocol, tight).affordable() == 20  # the two dearest uses fit, the third does not
    assert Price.of(protocol, tight).sample_epsilon(2) <= 3.75 < Price.of(protocol, tight).sample_epsilon(3)


def test_later_check_ins_of_growing_noise_leave_the_first_more_of_the_price():
    constant = local_task(unit="device", samples=TEN, epsilon=4.0)
    growing = scheduled("gaussian", "growing")
    even = Price.of(find(constant), constant).device_epsilon(1)
    assert Price.of(find(growing), growing).device_epsilon(1) > 1.5 * even


# --- schedules without an end ---


def endless(task):
    return task.with_(privacy=replace(task.privacy, budget=None))


@pytest.mark.parametrize("schedule", ["growing", "of the weights"])
def test_a_schedule_with_a_finite_total_needs_no_budget(schedule):
    task = endless(scheduled("gaussian", schedule))
    row = row_of(task)
    shares = [level / row.of for level in row.levels]
    assert min(shares) < 2e-4
    assert sum(share**2 for share in shares) == pytest.approx(
        1 / (1 - 1.25**-2) if schedule == "growing" else math.pi**2 / 6, abs=3e-3
    )
    assert 3.96 < Price.of(find(task), task).device_epsilon(10**9) <= 4.0
    assert "A device pays this in all" in find(task).remarks(task)[0]


@pytest.mark.parametrize(
    ("protocol", "changes", "why"),
    [
        (CONSTANT_RATE + SHRINKING, {}, r"protocol\.noise\.ratio = 0\.8: noise that shrinks .* no finite total"),
        (CONSTANT_RATE + FIXED, {}, r"protocol\.rate\.counter = \"rounds\""),
        ('rate = { schedule = "1/sqrt(t)", c = 0.5, counter = "path" }\n' + FIXED, {}, "grows too slowly"),
        (CONSTANT_RATE + 'noise = { schedule = "geometric", ratio = 1.00001 }', {}, r"privacy\.budget\.samples"),
        (CONSTANT_RATE + 'noise = { schedule = "geometric", ratio = 0.5 }', {"samples": 6 * 50}, "hide all"),
        (CONSTANT_RATE + 'noise = { schedule = "geometric", ratio = 1.00001 }', {"samples": 10**7}, "1,666,666 times"),
        (CONSTANT_RATE + 'noise = { schedule = "geometric" }', {}, r"protocol\.noise\.ratio"),
        (CONSTANT_RATE + "noise = { ratio = 2.0 }", {}, r"protocol\.noise\.ratio"),
        (CONSTANT_RATE + 'noise = { schedule = "geometric", ratio = 11 }', {}, r"from 0\.1 to 10"),
        (CONSTANT_RATE + 'noise = { schedule = "step" }', {}, r"protocol\.noise\.schedule"),
        (CONSTANT_RATE + GROWING, {"mechanism": "skellam", "rest": MASKS}, r"protocol\.noise\.schedule.*under masks"),
    ],
)
def test_a_schedule_that_has_no_finite_total_or_makes_no_sense_is_refused_by_its_key(protocol, changes, why):
    task = local_task(unit="device", protocol=protocol, **changes)
    with pytest.raises(TaskError, match=why):
        plan(task if changes else endless(task))


def test_a_device_says_that_it_has_made_its_check_ins():
    task = scheduled("gaussian", "growing")
    protocol, batch = find(task), make_batch(task)
    for trip, over in ((0, False), (8, False), (9, True), (12, True)):
        door = Door(protocol.mechanisms(task), Silence(), trip=trip)
        ctx = Context(me="d", release=door.release, trip=trip)
        waiting = advance(protocol.device, task, None, Sensed(Private(batch, Rows(0, 6))), ctx).state
        step = advance(protocol.device, task, waiting, publication(np.zeros((3, 3))), ctx)
        (stop,) = [effect for effect in step.effects if isinstance(effect, Stop)]
        assert bool(stop.when) is over
        assert any(isinstance(effect, Send) for effect in step.effects)
    assert "10 check-ins" in stop.rule.sentence


# --- the server ---


def hear(task, state, value, *, trip, version=0):
    message = ScheduledUpdate(
        Release(np.asarray(value, np.int32), Stamp("a test")), np.int32(version), np.int32(1), np.int32(trip)
    )
    return advance(find(task).server, task, state, message, Context(me=SERVER)).state


def test_the_server_finds_the_whole_update_of_a_share():
    task = scheduled("gaussian", "growing", dimension=1)
    row, state = row_of(task), find(task).server.start(task, Context(me=SERVER)).state
    unit = float(row.grid.step)
    after = hear(task, state, np.full(3, 300), trip=6)
    share = row.levels[6] / row.of
    np.testing.assert_allclose(after.weights, -1.5 * 300 * unit / share, rtol=1e-5)  # H = 3 * 0.5


def test_the_server_weighs_updates_by_their_noise_and_nothing_stands_in_for_an_update():
    protocol = {"protocol": "\nserver_batch = 2"}
    task = scheduled("gaussian", "growing", dimension=1, **protocol)
    row, state = row_of(task), find(task).server.start(task, Context(me=SERVER)).state
    unit, share = float(row.grid.step), row.levels[6] / row.of
    state = hear(task, state, np.full(3, 100), trip=0)
    state = hear(task, state, np.full(3, 10_000), trip=10)  # after the last: noise alone
    assert int(state.heard) == 1
    state = hear(task, state, np.full(3, 100), trip=6)
    assert int(state.rounds) == 1
    mean = (100 + share**2 * (100 / share)) / (1 + share**2)
    np.testing.assert_allclose(state.weights, -1.5 * mean * unit, rtol=1e-5)
    assert float(state.weighed) == int(state.heard) == 0


def test_the_server_expects_the_check_in_s_number_beside_the_update():
    (kind, fields), *rest = expected(scheduled("gaussian", "growing")).items()
    assert (kind, rest) == ("local/scheduled/1", [])
    assert set(fields) == {"update", "version", "count", "trip"}


# --- in the simulator ---


def crowd(task):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5 * TEN, 3)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return Holding(x, rng.integers(0, 3, 5 * TEN).astype(np.int32), iid(5 * TEN, 5, 1))


LATE = World(5, TEN, request=Delay("uniform", 7.0), check_in=Delay("exponential", 20.0))


def test_an_event_queue_s_devices_pay_check_in_by_check_in():
    task = scheduled("gaussian", "growing")
    run = events.run(task, crowd(task), LATE, seed=3, capacity=40, backend="numpy")
    row = row_of(task)
    for passages in run.passages.values():
        prices = [found.priced.loss for _, (found,) in passages]
        assert prices == [row.at(trip).loss for trip in range(len(prices))]
        assert len(prices) == 10


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "server_batch"), [("growing", 1), ("of the weights", 2)])
def test_both_engines_give_the_same_shares_at_the_same_price(schedule, server_batch):
    task = scheduled("gaussian", schedule, protocol=f"\nserver_batch = {server_batch}")
    laid, holding = lay_out(LATE, seed=3, batch=6, capacity=40), crowd(task)
    for noise in (False, True):
        (fast,) = compiled.run(task, holding, [laid], [3], noise=noise, points=[9], keep_said=True)
        slow = events.run(
            task, holding, LATE, seed=3, capacity=40, noise=noise, points=[9], backend="jax", keep_said=True
        )
        if server_batch == 1:
            np.testing.assert_array_equal(fast.said["update"], slow.said["update"])
            np.testing.assert_array_equal(fast.weights, slow.weights)
        else:  # a compiler may round a product and a sum at once
            assert np.abs(fast.said["update"] - slow.said["update"]).max() <= 1
            np.testing.assert_allclose(fast.weights, slow.weights, rtol=1e-4, atol=1e-4)
    plain = events.run(task, holding, LATE, seed=3, capacity=40, backend="numpy", keep_said=True)
    assert np.abs(plain.said["update"] - slow.said["update"]).max() <= 1
    row = row_of(task)
    for passages in slow.passages.values():
        prices = [found.priced.loss for _, (found,) in passages]
        assert prices == [row.at(trip).loss for trip in range(len(prices))]


@pytest.mark.slow
def test_a_study_s_cost_and_its_replayed_ledger_are_the_schedule_s():
    task = scheduled("stable", "growing", uses=1, budget=1000.0)
    holding = crowd(task)
    study = simulate(task, holding.x, holding.y, devices=holding.population, seed=[1], points=2)
    priced, row = Price.of(find(task), task), row_of(task)
    assert study.planned.device == priced.device_epsilon(10)
    assert study.planned.device < 10 * priced.device_epsilon(1)
    ledger = replayed_ledger(study)
    paid = Total.of(row.at(trip).device_loss for trip in range(10))
    assert ledger.device_total() == paid
    assert ledger.dearest_sample(1e-6)[1].epsilon(1e-6) == pytest.approx(priced.sample_epsilon(1))
