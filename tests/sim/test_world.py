"""The world of a simulation: delays have their distributions, and who is away says nothing."""

import itertools

import numpy as np
import pytest
from audits import ALARM, FIVE_SIGMA, correlation
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crowdml.errors import TaskError
from crowdml.sim.world import CHECK_IN, CHECK_OUT, REQUEST, SENSED, Delay, World, uniform

MANY = 100_000
LAWS = {"uniform": stats.uniform(0, 50.0), "exponential": stats.expon(0, 50.0), "pareto": stats.lomax(2, scale=50.0)}


def test_random_numbers_are_even_and_stay_inside():
    numbers = uniform(3, np.arange(MANY), 5, REQUEST)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > ALARM


def test_random_numbers_of_other_seeds_devices_trips_and_legs_are_independent():
    base = uniform(3, np.arange(MANY), 5, REQUEST)
    others = [uniform(4, np.arange(MANY), 5, REQUEST), uniform(3, np.arange(1, MANY + 1), 5, REQUEST),
              uniform(3, np.arange(MANY), 6, REQUEST), uniform(3, np.arange(MANY), 5, CHECK_OUT),
              uniform(3, 5, np.arange(MANY), REQUEST)]  # fmt: skip
    assert max(correlation(base, other) for other in others) < FIVE_SIGMA + 0.4
    assert all(not np.array_equal(base, other) for other in others)


def test_a_random_number_does_not_depend_on_how_it_is_asked_for():
    whole = uniform(9, np.arange(50), np.arange(50), CHECK_IN)
    assert [float(uniform(9, k, k, CHECK_IN)[0]) for k in range(50)] == whole.tolist()


@pytest.mark.parametrize("kind", LAWS)
def test_delays_have_their_distribution(kind):
    delays = Delay(kind, 50.0).of(uniform(1, np.arange(MANY), 0, REQUEST))
    assert stats.kstest(delays, LAWS[kind].cdf).pvalue > ALARM
    if kind != "pareto":  # whose variance is infinite
        assert abs(delays.mean() - LAWS[kind].mean()) < FIVE_SIGMA * LAWS[kind].std() / np.sqrt(MANY)
    assert delays.min() >= 0
    assert delays.max() <= Delay(kind, 50.0).largest


def test_a_constant_delay_is_constant():
    assert set(Delay("constant", 7.0).of(np.array([0.1, 0.9]))) == {7.0}


@pytest.mark.parametrize(
    ("text", "delay"), [("100", Delay("uniform", 100)), ("exponential:2.5", Delay("exponential", 2.5))]
)
def test_a_delay_reads_as_it_is_written(text, delay):
    assert Delay.parse(text) == delay


@pytest.mark.parametrize("text", ["soon", "normal:3", "uniform:", "-1", "nan", "exponential:inf", ""])
def test_a_delay_that_makes_no_sense_is_refused(text):
    with pytest.raises(TaskError, match="delay"):
        Delay.parse(text)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [({"devices": 0}, "at least 1"), ({"samples": 0}, "at least 1"), ({"failing": 1.0, "retry": 1.0}, "failing = 1.0"),
     ({"away": -0.1}, "away = -0.1"), ({"leaving": 1.5}, "leaving = 1.5"), ({"failing": 0.5}, "failing needs retry")],
)  # fmt: skip
def test_a_world_that_cannot_be_is_refused(settings_, words):
    with pytest.raises(TaskError, match=words):
        World(**{"devices": 3, "samples": 4, **settings_})


# Away


def is_away(world, seed, device, time):
    """By the definition: each device has a cycle of its own, and is away for the last share of it."""
    from crowdml.sim.world import PERIOD, PHASE

    cycle = (world.cycle or 10.0 * world.devices) * (0.5 + uniform(seed, device, 0, PERIOD))
    return (time / cycle + uniform(seed, device, 0, PHASE)) % 1.0 >= 1 - world.away


@given(st.floats(0.01, 0.95), st.floats(1, 1e4), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_device_is_never_awake_while_it_is_away(away, cycle, seed):
    world = World(50, 10, away=away, cycle=cycle)
    devices = np.repeat(np.arange(50), 40)
    times = np.tile(np.linspace(0, 12 * cycle, 40), 50)
    woken = world.awake(seed, devices, times)
    assert np.all(woken >= times)
    assert not is_away(world, seed, devices, woken + 1e-9 * cycle).any()  # a return may round to just before itself
    here = ~is_away(world, seed, devices, times)
    np.testing.assert_array_equal(woken[here], times[here])
    assert np.all(woken - times <= away * 1.5 * cycle * (1 + 1e-9))
    np.testing.assert_allclose(world.awake(seed, devices, woken), woken, rtol=1e-12)


def test_devices_are_away_for_their_share_of_the_time():
    world = World(2000, 10, away=0.3, cycle=100.0)
    times = 5000 * uniform(5, np.arange(MANY), 1, REQUEST)
    devices = np.arange(MANY) % 2000
    assert (world.awake(1, devices, times) > times).mean() == pytest.approx(0.3, abs=0.02)


def test_everybody_is_awake_by_default():
    times = np.linspace(0, 10, 5)
    assert World(3, 4).awake(1, np.arange(5) % 3, times) is times


# Sensing, joining, leaving, failing


def test_a_device_senses_one_sample_every_m_units_in_order():
    world = World(100, 50)
    times = world.sensed(3, 7, np.arange(50))
    assert np.all(np.diff(times) > 0)
    assert np.all(np.floor(times / 100) == np.arange(50))
    assert np.isinf(world.sensed(3, 7, 50)[0])
    assert world.horizon == 5000


def test_devices_join_evenly_and_some_leave():
    world = World(5000, 4, joining=1e6, leaving=0.4)
    first = world.sensed(1, np.arange(5000), 0)
    joined = np.sort(first[np.isfinite(first)])
    assert (
        stats.kstest(World(5000, 4, joining=1e6).sensed(1, np.arange(5000), 0), stats.uniform(0, 1e6 + 5000).cdf).pvalue
        > 1e-4
    )
    assert len(joined) < 5000
    gone = np.isfinite(world.left(1, np.arange(5000)))
    assert gone.mean() == pytest.approx(0.4, abs=0.04)
    assert stats.kstest(world.left(1, np.arange(5000))[gone], stats.uniform(0, world.horizon).cdf).pvalue > ALARM


def test_a_failed_check_out_is_tried_again_until_it_works():
    world = World(10, 10, failing=0.4, retry=7.0)
    answered, _, _ = world.trip(2, np.arange(MANY), 0, np.zeros(MANY))
    tries = answered / 7.0
    assert np.all(tries == np.round(tries))
    for failures in range(4):
        share = 0.6 * 0.4**failures
        assert abs((tries == failures).mean() - share) < FIVE_SIGMA * np.sqrt(share / MANY)


def test_the_legs_of_a_trip_follow_one_another():
    world = World(
        10, 10, request=Delay("uniform", 5.0), check_out=Delay("exponential", 9.0), check_in=Delay("constant", 2.0)
    )
    answered, received, arrived = world.trip(2, np.arange(MANY), 0, np.full(MANY, 100.0))
    assert np.all((answered >= 100) & (answered <= received) & (received < arrived))
    np.testing.assert_allclose(arrived - received, 2.0)
    assert correlation(answered, received - answered) < FIVE_SIGMA


def test_two_seeds_share_no_arrival_time_whatever_the_devices_are_called():
    everyone = np.arange(1024)
    drawn = [uniform(seed, everyone, 0, SENSED) for seed in (0, 1, 2, 3)]
    for one, other in itertools.combinations(drawn, 2):
        assert not np.intersect1d(one, other).size
