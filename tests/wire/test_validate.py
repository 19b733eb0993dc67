"""Validation: the task decides what arrives, never the bytes."""

from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.arrays import Array, Integers
from crowdml.messages import Public, decode, encode, message
from crowdml.privacy.door import Door
from crowdml.privacy.grid import COUNTS
from crowdml.privacy.mechanisms import GridLaplace
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Release, Rows
from crowdml.protocol import Field
from crowdml.wire.problems import Problem
from crowdml.wire.validate import decode_message, validate


@message("test/wired/1")
class Wired:
    counts: Release[Integers]
    single: Release[Integers]
    maybe: Release[Integers] | None
    weights: Public[Array]
    version: Public[Integers]


KIND = "test/wired/1"
FIELDS = {
    "counts": Field("<i4", (3,), -100, 100),
    "single": Field("<i4", (), -100, 100),
    "weights": Field("<f4", (2, 2), -10, 10),
    "version": Field("<i4", (), 0, 2**31 - 1),
}
EXPECTED = {KIND: FIELDS}
WITH_MAYBE = {KIND: {**FIELDS, "maybe": Field("<i4", (1,), 0, 5)}}


def released(value: Any) -> Release[Any]:
    array = np.asarray(value, np.int32)[None]
    table = {"row": GridLaplace(1000, Fraction(1), COUNTS, Rows(0, 1), "a sum")}
    return Door(table, Silence()).release("row", Private(array.astype(float), Rows(0, 1)))


WEIGHTS = np.array([[0.5, -1], [2, 3]], np.float32)
MESSAGE = Wired(released([1, -2, 3]), released(4), None, WEIGHTS, 7)
BODY = encode(MESSAGE)
PLAIN = msgpack.unpackb(BODY)


def refused(body: bytes, expected: Any = EXPECTED, kind: str = KIND) -> Problem:
    with pytest.raises(Problem) as caught:
        decode_message(kind, body, expected)
    assert caught.value.status in (400, 413, 422)
    return caught.value


def test_a_message_as_expected_is_decoded_as_it_was_encoded():
    got = decode_message(KIND, BODY, EXPECTED)
    assert isinstance(got.counts, Release)
    np.testing.assert_array_equal(got.counts.value, [1, -2, 3])
    assert got.single.value.shape == ()
    assert got.maybe is None
    np.testing.assert_array_equal(got.weights, WEIGHTS)
    assert got.version == 7
    assert encode(got) == BODY
    validate(MESSAGE, EXPECTED)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype": ({"counts": ["<i8", [3], bytes(24)]}, "must have dtype '<i4', and has '<i8'"),
    "floats for integers": ({"counts": ["<f4", [3], bytes(12)]}, "must have dtype '<i4'"),
    "big-endian integers": ({"counts": [">i4", [3], bytes(12)]}, "must have dtype '<i4'"),
    "objects": ({"counts": ["|O", [3], bytes(24)]}, "must have dtype '<i4'"),
    "another shape": ({"counts": ["<i4", [4], bytes(16)]}, "must have shape [3], and has [4]"),
    "the same size in another shape": ({"weights": ["<f4", [4], bytes(16)]}, "must have shape [2, 2]"),
    "a shape that is too large": ({"counts": ["<i4", [2**31, 2**31], bytes(12)]}, "must have shape"),
    "too few bytes": ({"counts": ["<i4", [3], bytes(11)]}, "must have 12 bytes, and has 11"),
    "too many bytes": ({"counts": ["<i4", [3], bytes(16)]}, "must have 12 bytes, and has 16"),
    "a number above": ({"counts": ["<i4", [3], np.array([0, 101, 0], "<i4").tobytes()]}, "between -100 and 100"),
    "a number below": ({"counts": ["<i4", [3], np.array([0, -101, 0], "<i4").tobytes()]}, "between -100 and 100"),
    "not a number": ({"weights": ["<f4", [2, 2], np.array([0, np.nan, 0, 0], "<f4").tobytes()]}, "between -10 and 10"),
    "infinity": ({"weights": ["<f4", [2, 2], np.array([0, np.inf, 0, 0], "<f4").tobytes()]}, "between -10 and 10"),
    "minus infinity": ({"weights": ["<f4", [2, 2], np.array([-np.inf] * 4, "<f4").tobytes()]}, "between -10 and 10"),
    "a field that this task does not have": ({"maybe": ["<i4", [1], bytes(4)]}, "is not part of this task"),
    "nothing where something must be": ({"counts": None}, "must not be nil"),
    "no version": ({"version": None}, "must not be nil"),
    "a float version": ({"version": 7.0}, "must be a whole number"),
    "a true version": ({"version": True}, "must be a whole number"),
    "a version below 0": ({"version": -1}, "between 0 and 2147483647"),
    "a version that is too large": ({"version": 2**64 - 1}, "between 0 and 2147483647"),
    "a version in a list": ({"version": ["<i4", [], bytes(4)]}, "must be a whole number"),
    "a list of one": ({"counts": ["<i4"]}, "must be [dtype, shape, bytes]"),
    "a list of four": ({"counts": ["<i4", [3], bytes(12), 1]}, "has 4 entries"),
    "a field too many": ({"zzz": 1}, "expected a map of 5 keys"),
    "text for bytes": ({"counts": ["<i4", [3], "0" * 12]}, "must be bytes"),
    "a negative shape": ({"counts": ["<i4", [-1], bytes(12)]}, "must lie between 0 and"),
    "a shape of floats": ({"counts": ["<i4", [3.0], bytes(12)]}, "must be a whole number"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_field_is_as_the_task_says_or_the_message_is_refused(case):
    change, words = CASES[case]
    assert words in refused(msgpack.packb({**PLAIN, **change}) or b"").detail


def test_nil_where_the_task_has_a_field_is_a_wrong_message_and_no_malformed_one():
    """Review 2, network gap 3: the table of problems says so of a field that is not as the task says."""
    for name in ("counts", "single", "version", "weights"):
        assert refused(msgpack.packb({**PLAIN, name: None}) or b"").slug == "wrong-message"


def test_a_single_release_is_an_array_even_so():
    assert "must be a list" in refused(msgpack.packb({**PLAIN, "single": 4}) or b"").detail


def test_a_field_that_the_task_has_must_be_there():
    refused(BODY, WITH_MAYBE)
    with_maybe = Wired(released([1, 2, 3]), released(4), released([5]), WEIGHTS, 7)
    assert decode_message(KIND, encode(with_maybe), WITH_MAYBE).maybe.value.tolist() == [5]
    with pytest.raises(Problem, match="is not part of this task"):
        validate(with_maybe, EXPECTED)


def test_a_kind_that_the_task_does_not_hear_is_refused():
    assert refused(BODY, kind="test/unheard/1").slug == "wrong-kind"
    assert refused(BODY, {}).slug == "wrong-kind"
    assert refused(BODY, {"no/such/1": FIELDS}, kind="no/such/1").slug == "wrong-kind"


def test_keys_in_another_order_are_refused():
    refused(msgpack.packb(dict(reversed(PLAIN.items()))) or b"")


def test_validate_looks_at_decoded_arrays_too():
    for wrong in (
        WEIGHTS.astype(np.float64),
        WEIGHTS[0],
        WEIGHTS * np.float32(100),
        WEIGHTS * np.float32(np.nan),
        None,
        "x",
    ):
        with pytest.raises(Problem) as caught:
            validate(Wired(released([1, 2, 3]), released(4), None, wrong, 7), EXPECTED)
        assert (caught.value.status, caught.value.extra) == (422, {"field": "weights"})
    validate(Wired(released([1, 2, 3]), released(4), None, WEIGHTS, np.int32(7)), EXPECTED)


@given(st.binary(max_size=200))
def test_no_bytes_are_decoded_but_those_of_the_message(body):
    refused(body)


@given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_mutated_body_is_decoded_within_bounds_or_refused(at, change):
    mutated = bytearray(BODY)
    mutated[at] ^= change
    try:
        got = decode_message(KIND, bytes(mutated), EXPECTED)
    except Problem:
        return
    assert encode(got) == bytes(mutated)
    assert np.abs(got.counts.value).max() <= 100
    assert got.counts.value.dtype == np.int32
    assert got.weights.shape == (2, 2)
    assert np.isfinite(got.weights).all()


@given(st.integers(0, len(BODY) - 1))
def test_a_truncated_body_is_refused(length):
    refused(BODY[:length])


@given(st.sampled_from(sorted(PLAIN)), st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=20), lambda inner: st.lists(inner, max_size=4), max_leaves=8))  # fmt: skip
@settings(max_examples=300)
def test_any_other_value_in_a_field_is_decoded_as_it_is_or_refused(name, value):
    body = msgpack.packb({**PLAIN, name: value}) or b""
    try:
        got = decode_message(KIND, body, EXPECTED)
    except Problem:
        assert refused(body).slug in ("malformed", "wrong-message")
    else:
        assert encode(got) == body == encode(decode(KIND, body))
