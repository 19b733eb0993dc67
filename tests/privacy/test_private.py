"""What is private stays inside: no way out but the door, and each refusal says what to do instead."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.arrays import Samples
from crowdml.errors import LeakError
from crowdml.privacy.private import RECEIVED, Masked, Private, Release, Rows, Stamp

SECRET = 0.123456789


def private(count=4):
    return Private(Samples(np.full((count, 2), SECRET), np.arange(count)), Rows(0, count))


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format, "{!s}".format])
def test_no_text_of_a_private_value_shows_it(show):
    text = show(private())
    assert "0.12345" not in text
    assert "hidden" in text
    assert "rows 0 to 3" in text


@pytest.mark.parametrize("pack", [pickle.dumps, copy.copy, copy.deepcopy, lambda value: pickle.dumps({"in": [value]})])
def test_a_private_value_is_neither_pickled_nor_copied(pack):
    with pytest.raises(LeakError, match=r"never pickled or copied out: it stays where it was sensed"):
        pack(private())


def test_a_private_value_decides_no_branch():
    with pytest.raises(LeakError, match=r"decides no branch.*must not depend on its samples"):
        _ = 1 if private() else 2
    with pytest.raises(LeakError, match=r"decides no branch"):
        _ = not private().map(lambda batch: batch.x.sum() > 0)


@pytest.mark.parametrize("cast", [np.asarray, np.array, np.sum, lambda value: np.add(value, 1)])
def test_a_private_value_is_no_array(cast):
    with pytest.raises(LeakError, match=r"is not an array.*`map`.*`ctx.release`"):
        cast(private())


@pytest.mark.parametrize("use", [float, int, len, list, jnp.asarray, lambda p: p + 1, lambda p: p[0], lambda p: p < 1])
def test_a_private_value_is_no_number_and_no_sequence(use):
    with pytest.raises((TypeError, LeakError)) as caught:
        use(private())
    assert "0.12345" not in str(caught.value)


def test_mapping_keeps_the_part_and_the_value_hidden():
    mapped = private().map(lambda batch: batch.x.sum(1))
    assert mapped.part == Rows(0, 4)
    assert "0.12345" not in repr(mapped)


def test_a_value_that_was_mapped_cannot_be_split_since_its_rows_may_have_mixed():
    mixed = private().map(lambda batch: batch.x - batch.x.mean(0))
    with pytest.raises(LeakError, match=r"rows 0 to 3 cannot be split: its rows may have mixed.*Split the batch first"):
        mixed.split(2)
    with pytest.raises(LeakError, match="Split the batch first, then map each part"):
        private().split(2)[1].map(lambda batch: batch).split(1)


@given(st.integers(0, 12), st.integers(0, 12))
def test_splitting_gives_disjoint_parts_that_make_up_the_whole(first, second):
    whole = Private(Samples(np.arange(12)[:, None], np.arange(12)), Rows(0, 12))
    head, tail = whole.split(first)
    assert (head.part, tail.part) == (Rows(0, first), Rows(first, 12))
    assert head._value.y.tolist() == list(range(first))
    if second <= 12 - first:
        middle, rest = tail.split(second)
        assert (middle.part, rest.part) == (Rows(first, first + second), Rows(first + second, 12))
        assert rest._value.y.tolist() == list(range(first + second, 12))


@pytest.mark.parametrize("first", [-1, 5])
def test_more_rows_than_there_are_cannot_be_split_off(first):
    with pytest.raises(ValueError, match=f"Cannot split {first} rows off a part of 4"):
        private().split(first)


@pytest.mark.parametrize("stamp", [(), (None,), ("this step",), (object(),), (True,)])
def test_a_release_made_by_hand_is_refused(stamp):
    with pytest.raises(LeakError, match=r"made by the door alone: call `ctx.release\(row, private\)`"):
        Release(np.ones(3), *stamp)


def test_post_processing_a_release_keeps_its_stamp():
    stamp = Stamp("a step")
    doubled = Release(np.arange(3), stamp).map(lambda value: 2 * value)
    assert doubled.value.tolist() == [0, 2, 4]
    assert doubled._stamp is stamp


def test_a_release_that_was_pickled_has_lost_its_stamp():
    stamp = Stamp("a step")
    again = pickle.loads(pickle.dumps(Release(np.arange(3), stamp)))
    assert again._stamp is not stamp
    assert again._stamp is not RECEIVED


# What leaves under masks


def masked():
    return Masked(np.full(3, 123_456_789, np.int32), RECEIVED)


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format, "{!s}".format])
def test_no_text_of_a_masked_value_shows_it(show):
    assert show(masked()) == "Masked(hidden)"


@pytest.mark.parametrize("pack", [pickle.dumps, copy.copy, copy.deepcopy, lambda value: pickle.dumps({"in": [value]})])
def test_a_masked_value_is_neither_pickled_nor_copied(pack):
    with pytest.raises(LeakError, match=r"never pickled or copied out: it leaves under masks alone"):
        pack(masked())


@pytest.mark.parametrize("cast", [np.asarray, np.array, np.sum, lambda value: np.add(value, 1)])
def test_a_masked_value_is_no_array(cast):
    with pytest.raises(LeakError, match=r"nobody reads one device's share"):
        cast(masked())


@pytest.mark.parametrize(
    "use", [float, int, len, list, lambda m: m + 1, lambda m: m[0], lambda m: m < 1, lambda m: m.value]
)
def test_a_masked_value_answers_nothing(use):
    with pytest.raises((TypeError, AttributeError, LeakError)) as refusal:
        use(masked())
    assert "123456789" not in str(refusal.value)


def test_a_masked_value_decides_no_branch():
    with pytest.raises(LeakError, match=r"decides no branch"):
        _ = 1 if masked() else 2


def test_a_masked_value_is_made_by_the_door_alone():
    for stamp in (None, "this step"):
        with pytest.raises(LeakError, match=r"made by the door alone: call `ctx.masked\(row, private\)`"):
            Masked(np.zeros(3), stamp)
