"""The samples that wait: b to B, stop at B, oldest first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.arrays import Samples, finite_samples
from crowdml.buffer import Buffer
from crowdml.privacy.private import Private, Rows


def fill(buffer, serials):
    return [buffer.add(serial, np.full(3, float(serial)), serial % 2) for serial in serials]


def test_a_batch_is_ready_from_b_samples_on():
    buffer = Buffer(3, 10)
    fill(buffer, range(2))
    assert not buffer.ready
    fill(buffer, [2])
    assert buffer.ready


def test_collection_stops_at_capacity_and_goes_on_when_a_batch_was_taken():
    buffer = Buffer(2, 4)
    assert fill(buffer, range(6)) == [True] * 4 + [False] * 2
    assert buffer.full
    assert len(buffer) == 4
    assert buffer.take()[0] == (0, 1)
    assert not buffer.full
    assert fill(buffer, [6, 7, 8]) == [True, True, False]
    assert buffer.take()[0] == (2, 3)
    assert buffer.take()[0] == (6, 7)


def test_the_oldest_leave_first_and_a_batch_is_private_with_all_its_rows():
    buffer = Buffer(3, 8)
    fill(buffer, [5, 3, 9, 4])
    serials, batch = buffer.take()
    assert serials == (5, 3, 9)
    assert isinstance(batch, Private)
    assert batch.part == Rows(0, 3)
    assert isinstance(batch._value, Samples)
    assert batch._value.x[:, 0].tolist() == [5, 3, 9]
    assert len(buffer) == 1


def test_nothing_is_taken_before_a_batch_is_there():
    buffer = Buffer(3, 8)
    fill(buffer, [0, 1])
    with pytest.raises(ValueError, match="2 samples wait, and a batch has 3"):
        buffer.take()
    assert len(buffer) == 2


@pytest.mark.parametrize(("batch", "capacity"), [(0, 5), (6, 5), (-1, 5), (1, 0)])
def test_a_buffer_that_holds_no_batch_is_refused(batch, capacity):
    with pytest.raises(
        ValueError, match=f"batches of {batch} must hold at least {batch} samples; {capacity} is too few"
    ):
        Buffer(batch, capacity)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_becomes_the_zero_sample_and_is_counted_like_any_other(bad):
    buffer = Buffer(2, 4)
    assert buffer.add(0, np.array([1.0, bad]), 1)
    assert buffer.add(1, np.array([1.0, 2.0]), 0)
    serials, batch = buffer.take()
    assert serials == (0, 1)
    assert batch._value.x.tolist() == [[0.0, 0.0], [1.0, 2.0]]
    whole = finite_samples(np.array([[1.0, bad], [1.0, 2.0]]), np.array([1, 0]))
    np.testing.assert_array_equal(whole.x, batch._value.x)


@given(st.integers(1, 6), st.integers(0, 20), st.lists(st.sampled_from(["add", "take"]), max_size=80))
def test_no_sample_is_given_twice_and_none_out_of_turn(size, spare, events):
    buffer = Buffer(size, size + spare)
    kept, taken, serial = [], [], 0
    for event in events:
        if event == "add":
            if buffer.add(serial, np.zeros(1), 0):
                kept.append(serial)
            serial += 1
        elif buffer.ready:
            serials, batch = buffer.take()
            assert len(serials) == size == len(batch._value)
            taken.extend(serials)
        assert len(buffer) <= size + spare
    assert taken == kept[: len(taken)]
