"""Label proportions by hand: what a device says and to whom, what it keeps of its peers, and what the server counts."""

from __future__ import annotations

import numpy as np
import pytest
from bench import device, sensed, server
from hypothesis import given
from hypothesis import strategies as st
from proportions_task import histogram, street

from crowdml.arrays import Samples
from crowdml.errors import TaskError
from crowdml.messages import decode
from crowdml.price import Price
from crowdml.privacy.private import RECEIVED, Release
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find, proportions
from crowdml.protocols.proportions import Counted, Proportions, mechanisms, near, plan

TASK = street()
PROTOCOL = find(TASK)
OFFER = Counted(np.zeros(3, np.int64), np.int32(0))


def batch(labels: list[int]) -> Samples:
    return Samples(np.zeros((len(labels), 3), np.float32), np.array(labels, np.int32))


LABELS = batch([0, 0, 1, 2, 2, 2, -1, 0])


def letter(place: int, number: int, counts: tuple[int, ...] = (1, 2, 3)) -> Proportions:
    return Proportions(Release(np.array(counts, np.int32), RECEIVED), np.int32(place), np.int32(number))


def test_a_device_says_its_counts_once_in_one_envelope_to_its_nearest_and_to_who_has_it_among_theirs():
    one = device(PROTOCOL, TASK)
    assert one.hears(sensed(LABELS), place=2).effects == ["CheckOut"]
    said = one.hears(OFFER, place=2, trip=7)
    assert [sorted(envelope.to) for envelope in said.envelopes] == [["@0", "@1", "@3", "@4"]]
    (message,) = said.messages
    assert message.counts.value.tolist() == [3, 1, 3]
    assert (message.place, message.batch) == (2, 7)
    assert one.hears(OFFER, place=2, trip=7).kinds == []
    assert [passage.row for passage in one.ledger] == ["counts"]


def test_a_sample_without_a_class_is_counted_nowhere_and_the_batch_has_its_public_size_all_the_same():
    one = device(PROTOCOL, TASK)
    one.hears(sensed(batch([-1] * 8)), place=0)
    assert one.hears(OFFER, place=0).messages[0].counts.value.tolist() == [0, 0, 0]


def test_a_device_keeps_what_its_nearest_said_once_and_ignores_strangers_repeats_and_older_batches():
    one = device(PROTOCOL, TASK)
    before = one.state
    one.hears(letter(4, 1), place=1)
    one.hears(letter(1, 1), place=1)
    assert np.array_equal(one.state.counts, before.counts)
    one.hears(letter(2, 1), place=1)
    one.hears(letter(2, 1, (9, 9, 9)), place=1)
    one.hears(letter(0, 8, (4, 0, 0)), place=1)
    one.hears(letter(0, 2, (5, 0, 0)), place=1)  # the ring has room for six: 8 stands where 2 would
    assert one.state.batches[:, 1:3].tolist() == [[-1, 8], [1, -1]]
    assert one.state.counts[0, 2].tolist() == [4, 0, 0]
    assert one.state.counts[1, 1].tolist() == [1, 2, 3]


def test_what_was_heard_in_any_order_and_however_often_is_kept_the_same():
    letters = [letter(place, number, (place, number, 1)) for place in (0, 2) for number in range(9)]

    @given(st.permutations([*range(18), 3, 7, 16]))
    def in_any_order(order: list[int]) -> None:
        one = device(PROTOCOL, TASK)
        for each in order:
            one.hears(letters[each], place=1)
        assert one.state.batches.tolist() == [[6, 7, 8, 3, 4, 5]] * 2
        assert one.state.counts[0, 0].tolist() == [0, 6, 1]

    in_any_order()


def test_the_nearest_are_along_great_circles_and_of_equals_the_first_in_the_list():
    assert near(TASK, 2).tolist() == [[1, 2], [0, 2], [1, 0], [2, 4], [3, 2]]
    everybody = street(5, peers=4)
    heaped = everybody.with_(places=tuple(type(p)(p.name, p.lat, everybody.places[0].lon) for p in everybody.places))
    assert near(heaped, 4).tolist() == [[other for other in range(5) if other != place] for place in range(5)]
    dated = everybody.with_(
        places=tuple(
            type(p)(p.name, p.lat, lon) for p, lon in zip(everybody.places, (179, -179, 170, -170, 0), strict=True)
        )
    )
    assert near(dated, 1).ravel().tolist() == [1, 0, 0, 1, 2]  # across the date line


def test_the_server_adds_up_what_it_relays_and_says_how_noisy_it_is():
    one = server(PROTOCOL, TASK)
    assert one.published.counts.tolist() == [0, 0, 0]
    one.hears(letter(0, 0))
    answer = one.hears(letter(1, 0, (-4, 5, 7)))
    assert answer.published.counts.tolist() == [-3, 7, 10]
    assert int(answer.published.version) == 2
    tally = PROTOCOL.progress(TASK, one.state)
    assert tally is not None
    assert tally.labels is not None
    assert (tally.check_ins, tally.labels.counts, tally.labels.samples) == (2, (-3, 7, 10), 16)
    assert tally.labels.variance == pytest.approx(2 * 7.835396, rel=1e-6)
    assert PROTOCOL.model(TASK, one.state).sum() == pytest.approx(1)


def test_devices_learn_from_their_windows_and_their_peers_and_go_on_when_peers_are_silent():
    rng = np.random.default_rng(5)
    task = street(3, peers=2, epsilon=8.0)
    levels = rng.choice([2.0, 30.0, 90.0], size=(6, 8), p=[0.5, 0.3, 0.2])
    x = np.repeat(levels[..., None], 3, axis=2) + rng.normal(size=(6, 8, 3))
    y = np.searchsorted([10, 50], levels, side="right").astype(np.int32)
    kept = proportions.Kept(x.astype(np.float32), y, np.arange(6))
    silent = device(PROTOCOL, task)
    alone = PROTOCOL.learn(task, silent.state, kept, 1)
    for number in range(6):
        counts = np.bincount(y[number], minlength=3)
        silent.hears(letter(0, number, tuple(counts)), place=1)
        silent.hears(letter(2, number, tuple(counts)), place=1)
    together = PROTOCOL.learn(task, silent.state, kept, 1)
    from crowdml.models.clusters import predict

    for voters in (alone, together):
        assert (predict(voters, x.reshape(-1, 3)) == y.ravel()).mean() > 0.9
    assert (np.asarray(together.labels) >= 0).all()
    assert (np.asarray(alone.labels)[1:] == -1).all()


def test_a_count_costs_epsilon_whoever_hears_it_and_its_scale_is_two_over_epsilon():
    row = mechanisms(street(epsilon=0.1))["counts"]
    assert (row.sensitivity.bound, row.scale) == (2, 20)
    assert row.noise_variance == pytest.approx(799.8334, rel=1e-6)
    assert Price.of(PROTOCOL, street(epsilon=0.1)).sample_epsilon(1) == pytest.approx(0.1)


def test_the_same_bytes_leave_for_the_same_noise_whatever_the_windows_hold():
    def said(x: float) -> bytes:
        one = device(PROTOCOL, TASK, SeededSource(stream(3, 1, 0)))
        one.hears(sensed(Samples(np.full((8, 3), x, np.float32), LABELS.y)), place=2)
        return one.hears(OFFER, place=2).envelopes[0].body

    assert said(0.0) == said(9e9)


def test_a_crowd_that_only_counts_tells_the_server_and_under_masks_only_its_sum():
    alone, masked = histogram(), histogram(masked=True)
    labels = Samples(np.zeros((20, 1), np.float32), np.array([0] * 12 + [2] * 8, np.int32))
    one = device(find(alone), alone)
    one.hears(sensed(labels))
    (envelope,) = one.hears(OFFER).envelopes
    assert envelope.to == {"server"}
    assert decode(envelope.kind, envelope.body).counts.value.tolist() == [12, 0, 8]
    assert {row.observer.value for row in find(masked).mechanisms(masked).values()} == {"aggregate"}
    assert Price.of(find(masked), masked).sample_epsilon() <= 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protocol": {"peers": 5}}, "protocol.peers = 5"),
        ({"model": {"kind": "softmax"}}, "model.kind"),
        ({"model": {"k": 1}}, "model.k = 1"),
        ({"protocol": {"peers": 0}}, "histogram"),
        ({"protocol": {"batch": 0}}, "protocol.batch = 0"),
        ({"as_published": True}, "as_published"),
    ],
)
def test_a_task_that_cannot_run_is_refused_by_the_name_of_its_key(changes, says):
    with pytest.raises(TaskError, match=says):
        plan(street().with_(**changes))


def test_masks_and_peers_exclude_each_other():
    masked = histogram(masked=True)
    with pytest.raises(TaskError, match="peers = 2"):
        plan(masked.with_(protocol={"peers": 2}, model={"kind": "clusters"}))
