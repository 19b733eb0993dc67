"""Cohorts that are under way at the same time: who meets whom, what each reads, and what the server makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from bench import masked_text, task_text
from test_simulated_rounds import crowd

from crowdml.arrays import Samples
from crowdml.datasets.populations import iid
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import summed
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find
from crowdml.sim import compiled, events
from crowdml.sim.cohorts import meet_in_time
from crowdml.sim.trial import Trial, laid_out, run_trial
from crowdml.sim.world import Delay, World
from crowdml.task import find_task, parse
from crowdml.turn import check_in, first_turn, server_turn

SEED = 7
TASK = parse(masked_text())
MASKING = TASK.masking
BATCH = find(TASK).batch(TASK)


@dataclass(frozen=True)
class AllAtOnce(World):
    """Every device has all of its samples when the crowd starts."""

    def sensed(self, seed: int, device: Any, sample: Any) -> Any:
        return np.zeros(1)


def test_without_delays_every_cohort_reads_all_totals_before_it():
    holding = crowd(4, 3, 24, 10)
    laid = meet_in_time(TASK, holding, World(24, 10), SEED)
    np.testing.assert_array_equal(laid.read, np.arange(len(laid)))
    assert laid.alive.sum() == 24 * 10 // BATCH


def overlapping(passes=1, **more):
    holding = crowd(4, 3, 24, 10, passes)
    return holding, meet_in_time(TASK, holding, AllAtOnce(24, 10, request=Delay("uniform", 1.0)), SEED, **more)


def test_a_cohort_whose_shares_are_in_waits_for_the_total_that_is_under_way_and_reads_it():
    _, laid = overlapping()
    np.testing.assert_array_equal(laid.read, np.arange(len(laid)))


def test_cohorts_miss_the_total_of_one_that_waits_for_a_device_which_left():
    _, laid = overlapping(lost=[3])
    assert (laid.read <= np.arange(len(laid))).all()
    assert (laid.read < np.arange(len(laid))).any()


def test_no_device_is_in_two_cohorts_at_once_and_each_batch_serves_as_often_as_it_may():
    _, laid = overlapping(passes=2)
    taken = [(int(d), int(t)) for d, t in zip(laid.device[laid.there], laid.trip[laid.there], strict=True)]
    assert len(set(taken)) == len(taken)
    per_batch: dict[tuple[int, int], int] = {}
    for device, first in zip(laid.device[laid.there], laid.first[laid.there], strict=True):
        per_batch[int(device), int(first)] = per_batch.get((int(device), int(first)), 0) + 1
    assert set(per_batch.values()) <= {1, 2}
    assert 2 in per_batch.values()


def test_the_event_engine_hands_each_cohort_the_weights_that_it_read_bit_for_bit():
    """Device turns on the publication that was read, server turns in the order of the totals: nothing else."""
    holding, laid = overlapping(lost=[3])
    run = events.run_rounds(TASK, holding, laid, seed=SEED)
    protocol = find(TASK)
    first = first_turn(protocol, TASK)
    state, offers = first.state, [first.published]
    for number in range(len(laid)):
        offered, said = offers[laid.read[number]], []
        for place in np.flatnonzero(laid.alive[number]):
            device, trip = int(laid.device[number, place]), int(laid.trip[number, place])
            rows = holding.rows(np.int32(device), laid.first[number, place] + np.arange(BATCH))
            batch = Samples(holding.x[rows], holding.y[rows])
            noise = SeededSource(stream(SEED, np.array([device]), np.array([trip]))[0])
            said.append(check_in(protocol, TASK, batch, offered, noise=noise, me=device, trip=trip).message)
        turn = server_turn(protocol, TASK, state, summed(protocol.masked[1].kind, said, offered.version))
        state, offers = turn.state, [*offers, turn.published]
    np.testing.assert_array_equal(run.weights[-1], protocol.model(TASK, state))
    in_step = events.run_rounds(TASK, holding, replace(laid, read=None), seed=SEED)
    assert (run.weights[-1] != in_step.weights[-1]).any(), "what was read makes a difference"


def test_a_device_that_vanishes_holds_its_cohort_up_for_a_lease_and_is_in_no_sum():
    lease = float(MASKING.lease)
    holding, whole = overlapping()
    _, laid = overlapping(lost=[3])
    row = int(np.flatnonzero((laid.there & (laid.device == 3)).any(1))[0])
    place = int(np.flatnonzero(laid.there[row] & (laid.device[row] == 3))[0])
    assert not laid.alive[row, place]
    assert laid.took[row] > lease > whole.took.max()
    assert (laid.there & (laid.device == 3)).sum() == 1, "and it never comes back"
    run = events.run_rounds(TASK, holding, laid, seed=SEED)
    assert 3 in run.schedule.device, "it has paid"


def test_devices_that_vanish_leave_too_few_and_their_round_is_abandoned_and_paid_for():
    holding, laid = overlapping(dropout=0.9)
    assert not laid.summed.any()
    run = events.run_rounds(TASK, holding, laid, seed=SEED)
    assert int(run.state.steps) == 0
    assert len(run.schedule) == laid.there.sum() > 0


def test_a_window_closes_with_fewer_devices_than_a_full_cohort():
    small = crowd(4, 3, MASKING.cohort - 1, 10)
    laid = meet_in_time(TASK, small, AllAtOnce(small.devices, 10), SEED)
    assert laid.there.sum(1).max() == MASKING.cohort - 1


def test_no_cohort_is_fixed_that_the_task_has_no_use_for():
    stopping = replace(TASK, stop=replace(TASK.stop, steps=2))
    holding = crowd(4, 3, 24, 10)
    laid = meet_in_time(stopping, holding, AllAtOnce(24, 10, request=Delay("uniform", 1.0)), SEED)
    assert laid.summed.sum() == len(laid) == 2


def test_a_fleet_of_one_process_takes_its_devices_one_after_the_other():
    holding = crowd(4, 3, 24, 10)
    laid = meet_in_time(TASK, holding, AllAtOnce(24, 10, work=0.1), SEED)
    assert laid.took.min() >= 4 * MASKING.cohort * 0.1 - 1e-9, "four phases, in each of which every device works"


def test_too_few_devices_for_a_cohort_are_refused():
    holding = crowd(4, 3, MASKING.minimum - 1, 10)
    with pytest.raises(TaskError, match="make no cohort of at least masking"):
        meet_in_time(TASK, holding, AllAtOnce(holding.devices, 10), SEED)


def test_delays_beyond_the_lease_are_refused_in_words():
    holding = crowd(4, 3, 24, 10)
    with pytest.raises(TaskError, match="rounds ended before anybody drew noise: messages take longer than masking"):
        meet_in_time(TASK, holding, AllAtOnce(24, 10, request=Delay("constant", 1e6)), SEED)


def test_the_compiled_engine_refuses_cohorts_that_overlap():
    holding, laid = overlapping()
    with pytest.raises(ProtocolError, match="under way at the same time"):
        compiled.run(TASK, holding, [laid], [SEED])


def test_a_masked_trial_with_a_delay_has_overlapping_cohorts():
    holding = crowd(4, 3, 24, 10)
    trial = Trial(TASK, holding.population, SEED, delay=Delay("uniform", 20.0))
    laid = laid_out(trial, holding.y)
    assert laid.engine == "events"
    assert (laid.layout.read < np.arange(len(laid.layout))).any()
    assert run_trial(trial, holding.x, holding.y).heard == laid.layout.length
    in_step = laid_out(replace(trial, delay=Delay()), holding.y)
    assert in_step.layout.read is None, "and without one it keeps step"


@pytest.mark.parametrize("name", ["digits", "admm-adult", "gram-mnist", "traffic"])
def test_every_protocol_holds_ten_batches_where_its_task_does_not_say(name: str):
    task = find_task(name)
    assert find(task).capacity(task) == 10 * find(task).batch(task)


def test_a_simulated_buffer_holds_what_a_live_one_holds():
    """Sixty samples come while the first batch is on its way: ten batches of four wait, and the others are lost."""
    task = parse(task_text(batch=4, epsilon="{ gradient = 1.0 }"))
    world = World(1, 64, request=Delay("constant", 80.0))
    laid = laid_out(Trial(task, iid(64, 1, 3), SEED, world=world), np.zeros(64, np.int32)).layout
    assert laid.dropped == 64 - 4 - 40
