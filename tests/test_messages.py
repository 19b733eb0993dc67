"""What may travel: each leak is tried, and refused with words that teach."""

import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.arrays import Array, Integers, Samples
from crowdml.errors import LeakError, ProtocolError
from crowdml.messages import KINDS, OURS, SERVER, Public, decode, encode, inspect, masked_steps, message, seal, total
from crowdml.privacy.door import Door
from crowdml.privacy.grid import COUNTS
from crowdml.privacy.mechanisms import GridLaplace, SkellamSum
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.private import RECEIVED, Masked, Private, Release, Rows, Stamp
from crowdml.protocols import PROTOCOLS, sgd
from crowdml.secagg.messages import KINDS as SECAGG

TABLE = {"note": GridLaplace(100, Fraction(1), COUNTS, Rows(0, 3), "a sum")}
HERE, THERE = "device 1", frozenset({"server"})


@message("test/note/1")
class Note:
    note: Release[Integers]
    maybe: Release[Integers] | None
    remark: Public[Any]


def batch():
    return Private(np.arange(6.0).reshape(3, 2), Rows(0, 3))


def a_door(noise=None):
    return Door(TABLE, noise or Silence())


def sealed(body, door):
    return seal(b"t" * 32, HERE, THERE, 1, body, door)


# Declaring


@pytest.mark.parametrize("kind", [int, float, Array, np.ndarray, list[int], Samples, Private[Array], dict[str, Any]])
def test_a_field_of_a_plain_type_is_refused_at_import(kind):
    with pytest.raises(LeakError, match=r"Bare.count is declared .*depends on a sample.*Release\[...\].*Public\[...\]"):
        message("test/bare/1")(type("Bare", (), {"__annotations__": {"count": kind}}))
    assert "test/bare/1" not in KINDS


@pytest.mark.parametrize(
    "kind",
    [Release, tuple[Release[Integers]], list[Release[Integers]], Private[Release[Integers]], Release[Integers] | int],
)
def test_a_field_that_only_looks_like_a_release_is_refused_at_import(kind):
    with pytest.raises(LeakError, match=r"Odd.count is declared"):
        message("test/odd/1")(type("Odd", (), {"__annotations__": {"count": kind}}))
    assert "test/odd/1" not in KINDS


def test_two_messages_cannot_share_a_kind():
    with pytest.raises(ProtocolError, match=r"Two messages call themselves 'test/note/1': Note and Note"):
        message("test/note/1")(type("Note", (), {"__annotations__": {"a": Public[int]}}))


def test_kinds_of_our_own_begin_with_a_word_that_no_plugin_may_take():
    """A device may meet a plug-in before it has imported the protocol whose kinds it takes."""
    for name in PROTOCOLS.ours:
        assert PROTOCOLS[name].name == name  # imported, so that its messages are declared
    ours = [kind for kind, cls in KINDS.items() if cls.__module__.startswith("crowdml.")]
    assert {kind.split("/")[0] for kind in [*ours, *SECAGG]} == OURS - {"crowdml"}


def test_a_message_cannot_be_changed_after_it_was_made():
    note = Note(a_door().release("note", batch()), None, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        note.remark = 3


# Sealing


def test_a_release_of_this_step_travels():
    door = a_door()
    envelope = sealed(Note(door.release("note", batch()), None, "hello"), door)
    assert (envelope.kind, envelope.sender, envelope.seq, envelope.to) == ("test/note/1", HERE, 1, THERE)
    assert decode(envelope.kind, envelope.body).note.value.tolist() == [6, 9]


def test_a_release_of_another_step_is_refused():
    door = a_door()
    yesterday = door.release("note", batch())
    with pytest.raises(LeakError, match=r"'note'.*did not come through this device's door in this step.*same bytes"):
        sealed(Note(yesterday, None, 0), a_door())


def test_a_release_that_somebody_sent_us_is_refused():
    door = a_door()
    got = decode("test/note/1", encode(Note(door.release("note", batch()), None, 0)))
    with pytest.raises(LeakError, match=r"stamp says: received"):
        sealed(Note(got.note, None, 0), door)


@pytest.mark.parametrize("stamp", [RECEIVED, Stamp("this step"), Stamp("mine")])
def test_a_release_made_by_hand_with_a_stamp_of_its_own_is_refused(stamp):
    with pytest.raises(LeakError, match="did not come through this device's door"):
        sealed(Note(Release(np.ones(3), stamp), None, 0), a_door())


def test_a_release_that_was_pickled_and_read_again_is_refused():
    door = a_door()
    again = pickle.loads(pickle.dumps(door.release("note", batch())))
    with pytest.raises(LeakError, match="did not come through this device's door"):
        sealed(Note(again, None, 0), door)


def test_what_was_computed_from_a_release_of_this_step_travels():
    door = a_door()
    halves = door.release("note", batch()).map(lambda total: total // 2)
    assert decode("test/note/1", sealed(Note(halves, None, 0), door).body).note.value.tolist() == [3, 4]


@dataclasses.dataclass(frozen=True)
class Inside:
    deep: Any


HIDING = {
    "itself": lambda p: p,
    "a tuple": lambda p: (1, (2, p)),
    "a list": lambda p: [p],
    "a set": lambda p: {p},
    "a dict": lambda p: {"a": {"b": p}},
    "a key": lambda p: {p: 1},
    "a dataclass": lambda p: Inside((p,)),
    "a mapped value": lambda p: [p.map(lambda rows: rows.sum())],
    "samples": lambda p: Samples(p, 0),
}


@pytest.mark.parametrize("where", HIDING)
@pytest.mark.parametrize("name", ["note", "maybe", "remark"])
def test_a_private_value_anywhere_in_a_message_is_refused(where, name):
    door = a_door()
    fields = {"note": door.release("note", batch()), "maybe": None, "remark": 0, name: HIDING[where](batch())}
    with pytest.raises(LeakError, match=rf"test/note/1 field '{name}' holds a Private value.*ctx.release") as caught:
        sealed(Note(**fields), door)
    assert "5." not in str(caught.value)


@pytest.mark.parametrize("where", ["a tuple", "a dict", "a dataclass", "a key"])
def test_an_old_release_hidden_in_a_public_field_is_refused(where):
    old, door = a_door().release("note", batch()), a_door()
    with pytest.raises(LeakError, match="'remark' holds a Release that did not come through"):
        sealed(Note(door.release("note", batch()), None, HIDING[where](old)), door)


def test_a_private_value_inside_a_release_is_refused():
    door = a_door()
    smuggled = door.release("note", batch()).map(lambda _: [batch()])
    with pytest.raises(LeakError, match="'note' holds a Private value"):
        sealed(Note(smuggled, None, 0), door)


def test_an_array_of_objects_is_refused():
    door = a_door()
    hidden = np.empty(1, object)
    hidden[0] = batch()
    with pytest.raises(LeakError, match=r"holds an array of objects.*numbers"):
        sealed(Note(door.release("note", batch()), None, hidden), door)


@pytest.mark.parametrize("thing", [3, "text", {"gradient": 1}, Samples(np.ones((1, 2)), np.ones(1)), Inside(1)])
def test_what_is_no_message_is_not_sealed(thing):
    with pytest.raises(LeakError, match=rf"A {type(thing).__name__} is no message.*@message"):
        sealed(thing, a_door())


def test_a_class_with_the_kind_of_a_message_is_no_message():
    """Its own fields were checked by nobody when it was declared."""

    class Heir(Note):
        aside: Any = batch()

    door = a_door()
    with pytest.raises(LeakError, match="A Heir is no message"):
        sealed(Heir(door.release("note", batch()), None, 1), door)


# Bytes


@given(st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_size_of_a_message_does_not_depend_on_what_was_released(values, label):
    from audits import Stream

    sizes = set()
    for rows in (np.reshape(values, (3, 2)), np.zeros((3, 2))):
        door = a_door(SystemSource(Stream(str(label))))
        released = door.release("note", Private(rows, Rows(0, 3)))
        sizes.add(len(sealed(Note(released, released.map(lambda total: total[0]), 7), door).body))
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "value",
    [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32), np.array([[True]]), np.int32(7),
     np.arange(3, dtype=">i4"), np.arange(6, dtype=np.int16).reshape(2, 3).T],
)  # fmt: skip
def test_arrays_come_back_as_they_were(value):
    door = a_door()
    released = door.release("note", batch()).map(lambda _: value)
    back = decode("test/note/1", sealed(Note(released, None, value), door).body)
    for found in (back.note.value, np.asarray(back.remark)):
        np.testing.assert_array_equal(found, value)
        assert found.shape == np.shape(value)
    assert back.maybe is None
    assert back.note._stamp is RECEIVED


def test_the_bytes_do_not_depend_on_the_order_in_memory():
    stamp = Stamp("here")
    rows, columns = np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))
    assert encode(Note(Release(rows, stamp), None, rows)) == encode(Note(Release(columns, stamp), None, columns))


def test_a_bare_value_in_a_released_field_is_refused():
    bare = sgd.Gradient(np.arange(4), None, None, np.int32(0))  # type: ignore[arg-type]
    with pytest.raises(LeakError, match="did not come through the door"):
        seal(bytes(32), "device", frozenset((SERVER,)), 1, bare, Door({}, Silence()))
    nothing = sgd.Gradient(None, None, None, np.int32(0))  # type: ignore[arg-type]
    with pytest.raises(LeakError, match="did not come through the door"):
        seal(bytes(32), "device", frozenset((SERVER,)), 1, nothing, Door({}, Silence()))


# Under masks

SHARED = {**TABLE, "share": SkellamSum(100, Fraction(4), 3, COUNTS, Rows(0, 3), 2, "a sum over a cohort")}


@message("test/share/1")
class Share:
    share: Masked[Integers]
    maybe: Masked[Integers] | None


@message("test/total/1")
class ShareTotal:
    share: Release[Integers]
    maybe: Release[Integers] | None
    devices: Public[Integers]
    version: Public[Integers]


def a_shared_door():
    return Door(SHARED, Silence())


def test_what_leaves_under_masks_passes_the_seal_s_checks_and_has_no_bytes():
    door = a_shared_door()
    body = Share(door.masked("share", batch()), None)
    inspect(body, door)
    with pytest.raises(LeakError, match="no bytes of its own: the channel puts masks on it"):
        encode(body)
    with pytest.raises(LeakError, match="no bytes of its own"):
        sealed(body, door)
    assert {name: each.tolist() for name, each in masked_steps(body).items()} == {"share": [6, 9]}


def test_a_masked_field_takes_what_came_through_this_step_s_door_and_nothing_else():
    door, other = a_shared_door(), a_shared_door()
    with pytest.raises(LeakError, match=r"holds a Masked that did not come through this device's door"):
        inspect(Share(other.masked("share", batch()), None), door)
    for wrong in (np.zeros(2, np.int32), None, door.release("note", batch())):
        with pytest.raises(LeakError, match=r"field 'share' is a Masked, and holds a .*`ctx.masked"):
            inspect(Share(wrong, None), door)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: [m], lambda m: {"in": (m,)}])
def test_a_masked_value_fits_no_other_field(wrap):
    door = a_shared_door()
    note = door.release("note", batch())
    with pytest.raises(LeakError, match="holds a Masked value and is not declared so"):
        inspect(Note(note, None, wrap(door.masked("share", batch()))), door)
    door = a_shared_door()
    with pytest.raises(LeakError, match="holds a Masked value and is not declared so"):
        inspect(Note(door.masked("share", batch()), None, 1), door)


def test_nobody_hears_what_one_device_said_under_masks():
    with pytest.raises(LeakError, match="nobody hears one device's, only a cohort's total"):
        decode("test/share/1", encode(Note(Release(np.zeros(2, np.int32), RECEIVED), None, 1)))


def test_a_total_is_heard_as_releases_and_says_how_many_survived():
    heard = total("test/total/1", {"share": np.array([6, 9])}, devices=4, version=2)
    assert (heard.share.value.tolist(), heard.maybe, heard.devices, heard.version) == ([6, 9], None, 4, 2)
    assert heard.share._stamp is RECEIVED
    assert decode("test/total/1", encode(heard)).share.value.tolist() == [6, 9]
