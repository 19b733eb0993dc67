"""Mailboxes on the wire: one encoding, bounded, and letters that prove themselves who wrote them."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_vectors import SPEC

from crowdml.wire.keys import Key
from crowdml.wire.letters import (
    MOST_LETTER_BYTES,
    MOST_LETTERS,
    Letter,
    Mailbox,
    few,
    open_held,
    open_mailbox,
    pack_held,
)
from crowdml.wire.problems import Problem

VECTORS = json.loads((SPEC / "vectors" / "letters.json").read_text(encoding="utf-8"))
parts = st.tuples(st.integers(1, 2**62), st.binary(min_size=32, max_size=32), st.binary(max_size=300))
boxes = st.lists(parts, max_size=20, unique_by=lambda part: part[0]).map(
    lambda found: Mailbox(2**62 + 5, tuple(Letter(*each) for each in sorted(found)))
)
GOOD = msgpack.unpackb(bytes.fromhex(VECTORS["encoded"]))


@given(boxes)
def test_a_mailbox_comes_back_as_it_was_sent(box):
    assert open_mailbox(box.encode()) == box


@pytest.mark.parametrize(
    "changes",
    [
        {"last": -1},
        {"last": "9"},
        {"last": 6},  # before its only letter
        {"letters": None},
        {"letters": [[7, GOOD["letters"][0][1]]]},
        {"letters": [[0, *GOOD["letters"][0][1:]]]},
        {"letters": [GOOD["letters"][0], GOOD["letters"][0]]},
        {"letters": [[7, b"short", b""]]},
        {"letters": [[7, GOOD["letters"][0][1], "text"]]},
        {"letters": [[at, bytes(32), b""] for at in range(1, MOST_LETTERS + 2)], "last": 1000},
        {"more": 1},
    ],
)
def test_what_is_no_mailbox_is_refused(changes):
    with pytest.raises(Problem):
        open_mailbox(bytes(msgpack.packb({**GOOD, **changes}) or b""))


def test_keys_in_another_order_and_bytes_after_the_end_are_refused():
    packed = bytes(msgpack.packb(GOOD) or b"")
    for data in (packed + b"\xc0", packed[:-1], bytes(msgpack.packb(dict(reversed(GOOD.items()))) or b"")):
        with pytest.raises(Problem):
            open_mailbox(data)


def test_the_vectors_are_read_and_the_letter_in_them_is_from_its_sender():
    row = VECTORS["letter"]
    box = open_mailbox(bytes.fromhex(VECTORS["encoded"]))
    (letter,) = box.letters
    signed = letter.open()
    assert (box.last, letter.index, letter.key.hex()) == (VECTORS["last"], row["index"], row["key"])
    assert Key.from_secret(bytes.fromhex(row["secret"])).id == signed.envelope.sender == row["sender"]
    assert sorted(signed.envelope.to) == row["to"]
    assert open_mailbox(bytes.fromhex(VECTORS["empty"])) == Mailbox(VECTORS["last"])


@pytest.mark.parametrize("place", [0, 63, 64, 200, -1])
def test_a_letter_that_somebody_touched_is_nobodys(place):
    row = VECTORS["letter"]
    data = bytearray.fromhex(row["signed"])
    data[place] ^= 1
    with pytest.raises(Problem):
        Letter(7, bytes.fromhex(row["key"]), bytes(data)).open()


def test_a_letter_is_not_from_a_key_that_is_not_its_senders_nor_from_one_that_anybody_could_sign_for():
    signed = bytes.fromhex(VECTORS["letter"]["signed"])
    for key in (Key.from_secret(bytes([22]) * 32).public, bytes(32), bytes([1]) + bytes(31)):
        with pytest.raises(Problem, match="not signed by the key of its sender"):
            Letter(7, key, signed).open()


@given(st.lists(st.integers(0, MOST_LETTER_BYTES * 3 // 2), max_size=400))
def test_an_answer_has_the_first_letters_and_as_many_as_fit(sizes):
    letters = [Letter(at, bytes(32), _Sized(size)) for at, size in enumerate(sizes, 1)]  # pyright: ignore[reportArgumentType]
    found = few(letters)
    assert found == tuple(letters[: len(found)])
    assert len(found) <= MOST_LETTERS
    assert len(found) <= 1 or sum(map(len, (each.signed for each in found))) <= MOST_LETTER_BYTES
    if len(found) < min(len(letters), MOST_LETTERS):
        assert sum(sizes[: len(found) + 1]) > MOST_LETTER_BYTES
    assert bool(found) == bool(letters)


class _Sized:
    """Bytes of this length, without them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def test_who_stands_where_has_one_encoding():
    row = VECTORS["held"]
    data, held = bytes.fromhex(row["encoded"]), dict(row["places"])
    assert open_held(data) == held
    assert pack_held(held) == data
    name = row["places"][0][1]
    for bad in ({}, {"held": None}, {"held": [[1]]}, {"held": [[2, name], [1, name]]}, {"held": [[1, "x" * 32]]},
                {"held": [[4096, name]]}, {"held": [], "more": 1}):  # fmt: skip
        with pytest.raises(Problem):
            open_held(msgpack.packb(bad) or b"")
