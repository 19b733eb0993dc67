"""The schedule: no sample twice, no buffer above its capacity, and weights as old as section IV-B predicts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.datasets.populations import iid
from crowdml.sim import events
from crowdml.sim.layout import Holding, lay_out
from crowdml.sim.world import Delay, World

delays = st.builds(Delay, st.sampled_from(Delay.KINDS), st.floats(0, 300))
worlds = st.builds(
    World,
    st.integers(1, 12),
    st.integers(1, 40),
    request=delays,
    check_out=delays,
    check_in=delays,
    failing=st.sampled_from([0.0, 0.5]),
    retry=st.just(10.0),
    joining=st.sampled_from([0.0, 100.0]),
    leaving=st.sampled_from([0.0, 0.4]),
    away=st.sampled_from([0.0, 0.3]),
    cycle=st.just(50.0),
)


@given(worlds, st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_no_sample_is_used_twice_and_everything_is_in_order(world, seed, batch, spare):
    plan = lay_out(world, seed=seed, batch=batch, capacity=batch + spare)
    used = plan.device[:, None].astype(np.int64) * world.samples + plan.samples
    assert len(np.unique(used)) == used.size
    assert plan.samples.shape == (len(plan), batch)
    assert used.size + plan.dropped <= world.devices * world.samples
    assert np.all(np.diff(plan.time) >= 0)
    assert np.all(plan.version <= np.arange(len(plan)))
    assert np.all(plan.staleness >= 0)
    for device in range(world.devices):
        mine = plan.device == device
        order = np.argsort(plan.trip[mine])
        assert plan.trip[mine][order].tolist() == list(range(mine.sum()))
        assert np.all(np.diff(plan.samples[mine][order].reshape(-1)) > 0)  # oldest first


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 6))
@settings(max_examples=20, deadline=None)
def test_no_buffer_holds_more_than_its_capacity(seed, batch, spare):
    """Slow trips fill the buffer: what was collected at any time, less what had left, is at most B."""
    world = World(4, 60, check_out=Delay("constant", 500.0))
    plan = lay_out(world, seed=seed, batch=batch, capacity=batch + spare)
    for device in range(4):
        mine = plan.device == device
        samples = plan.samples[mine][np.argsort(plan.trip[mine])]
        sensed = world.sensed(seed, device, samples.reshape(-1))
        left = np.repeat(np.sort(plan.time[mine]) - 500.0, batch)  # it leaves the buffer when the trip starts
        for now in sensed:
            assert ((sensed <= now) & (left > now)).sum() <= batch + spare
    assert plan.dropped > 0


def test_without_delays_nothing_is_stale_and_nothing_is_dropped():
    plan = lay_out(World(30, 40), seed=1, batch=4, capacity=4)
    assert len(plan) == 300
    assert plan.staleness.max() == 0
    assert plan.dropped == 0


@pytest.mark.parametrize("batch", [1, 5, 20])
@pytest.mark.parametrize("kind", ["constant", "uniform", "exponential"])
def test_staleness_is_what_section_iv_b_predicts(batch, kind):
    """(tau_co + tau_ci) M F_s / b: time is counted in samples of the crowd, so M F_s is 1 sample a unit."""
    out, into, devices = 400.0, 700.0, 2000
    delays_ = {"check_out": Delay(kind, out), "check_in": Delay(kind, into)}
    world = World(devices, 10 * batch, joining=float(batch * devices), **delays_)
    plan = lay_out(world, seed=3, batch=batch, capacity=10 * batch)
    middle = plan.staleness[len(plan) // 4 : 3 * len(plan) // 4]
    mean = (out + into) / (2 if kind == "uniform" else 1)
    assert middle.mean() == pytest.approx(mean / batch, rel=0.1)


def test_a_crowd_that_starts_at_once_checks_in_in_bursts_and_is_staler_than_predicted():
    """All batches of 5 fill within one fifth of the time: the prediction is for devices out of step."""
    world = World(2000, 100, check_in=Delay("constant", 200.0))
    plan = lay_out(world, seed=3, batch=5, capacity=50)
    assert plan.staleness.mean() == pytest.approx(200, rel=0.1)  # not 200 / 5


def test_the_time_of_the_request_does_not_make_weights_older():
    slow = lay_out(World(500, 40, request=Delay("constant", 300.0)), seed=3, batch=4, capacity=40)
    assert slow.staleness.max() == 0


def test_a_budget_caps_the_trips_of_a_device():
    plan = lay_out(World(10, 40), seed=1, batch=4, capacity=40, most_trips=3)
    assert np.bincount(plan.device).tolist() == [3] * 10
    assert plan.trip.max() == 2
    assert len(lay_out(World(10, 40), seed=1, batch=4, capacity=40, most_trips=0)) == 0


def test_a_device_with_fewer_samples_than_a_batch_says_nothing():
    plan = lay_out(World(3, 5), seed=1, batch=6, capacity=6)
    assert (len(plan), plan.samples.shape) == (0, (0, 6))


def test_passes_use_each_sample_once_a_pass():
    holding = Holding(np.zeros((20, 2)), np.zeros(20), iid(20, 2, 1), passes=3)
    plan = lay_out(World(2, 30), seed=1, batch=5, capacity=50)
    rows = holding.rows(plan.device[:, None], plan.samples).reshape(-1)
    assert np.bincount(rows).tolist() == [3] * 20


def test_seeds_give_other_schedules_and_one_seed_the_same():
    world = World(20, 20, check_in=Delay("uniform", 100.0))
    one, same, other = (lay_out(world, seed=seed, batch=2, capacity=20) for seed in (1, 1, 2))
    assert one.device.tolist() == same.device.tolist()
    assert one.device.tolist() != other.device.tolist()


def test_work_grows_as_the_check_ins_do():
    """Counted, not timed: a schedule of ten times the devices asks for ten times the random numbers."""
    counts = []
    for devices in (100, 1000):
        world, asked = World(devices, 20, check_in=Delay("uniform", 50.0)), 0
        plan = lay_out(world, seed=1, batch=5, capacity=50)
        asked = plan.samples.nbytes + plan.device.nbytes + plan.version.nbytes
        counts.append((len(plan), asked))
    assert counts[1][0] == 10 * counts[0][0]
    assert counts[1][1] == 10 * counts[0][1]


def test_the_first_check_ins_of_a_schedule_are_a_schedule():
    plan = lay_out(World(10, 40, check_in=Delay("uniform", 100.0)), seed=1, batch=4, capacity=40)
    cut = plan.first(7)
    assert len(cut) == 7
    for name in ("device", "trip", "samples", "version", "time"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(plan, name)[:7])


def test_timing_depends_on_no_sample():
    """R3: other samples, and labels, leave the whole schedule of the event queue as it was."""
    from bench import task_text

    from crowdml.task import parse

    task = parse(task_text())
    world = World(4, 20, check_out=Delay("exponential", 30.0), check_in=Delay("uniform", 50.0), failing=0.3, retry=5.0)
    rng = np.random.default_rng(0)
    met = []
    for x, y in (
        (np.zeros((80, 4), np.float32), np.zeros(80, np.int32)),
        (rng.normal(size=(80, 4)), rng.integers(0, 3, 80)),
    ):
        holding = Holding(x.astype(np.float32), y, iid(80, 4, 1))
        met.append(events.run(task, holding, world, seed=5, capacity=20).schedule)
    np.testing.assert_array_equal(met[0].time, met[1].time)
    np.testing.assert_array_equal(met[0].version, met[1].version)
    np.testing.assert_array_equal(met[0].samples, met[1].samples)
