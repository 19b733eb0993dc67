"""Receipts and the chain: each check-in has its place, and nobody but the server says so."""

import dataclasses
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import LARGEST_RECEIPT, Receipt, chain_next, chain_start, open_receipt, sign_receipts

SERVER, OTHER = Key.from_secret(b"\x01" * 32), Key.from_secret(b"\x02" * 32)
TASK, DEVICE = b"\x07" * 32, OTHER.id
RECEIPT = Receipt(TASK, DEVICE, 3, 12, b"\x08" * 32, b"\x09" * 32).sign(SERVER)
DATA = RECEIPT.encode()


def test_a_receipt_travels_unchanged_and_verifies():
    assert open_receipt(DATA) == RECEIPT
    assert open_receipt(DATA).verify(SERVER.public)
    assert list(msgpack.unpackb(DATA)) == ["chain", "device", "hash", "index", "path", "seq", "signature", "task"]


def test_a_receipt_verifies_with_the_servers_key_alone():
    assert not RECEIPT.verify(OTHER.public)
    assert not dataclasses.replace(RECEIPT, signature=b"").verify(SERVER.public)


@pytest.mark.parametrize("change", [{"seq": 4}, {"index": 13}, {"task": b"\x06" * 32}, {"device": SERVER.id},
                                    {"hash": b"\x07" * 32}, {"chain": b"\x07" * 32}])  # fmt: skip
def test_a_changed_receipt_does_not_verify(change):
    assert not dataclasses.replace(RECEIPT, **change).verify(SERVER.public)


def test_a_receipt_answers_one_check_in():
    assert RECEIPT.answers(TASK, DEVICE, 3, b"\x08" * 32)
    assert not RECEIPT.answers(TASK, DEVICE, 4, b"\x08" * 32)
    assert not RECEIPT.answers(TASK, DEVICE, 3, b"\x07" * 32)


@given(st.binary(max_size=300))
def test_no_bytes_are_a_receipt_but_those_of_one(data):
    with pytest.raises(Problem):
        open_receipt(data)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_mutated_receipt_is_refused_or_does_not_verify(at, change):
    mutated = bytearray(DATA)
    mutated[at] ^= change
    try:
        receipt = open_receipt(bytes(mutated))
    except Problem:
        return
    assert not receipt.verify(SERVER.public)
    assert receipt.encode() == bytes(mutated)


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_receipt_is_refused(length):
    with pytest.raises(Problem):
        open_receipt(DATA[:length])


def test_the_largest_receipt_is_read():
    largest = Receipt(TASK, DEVICE, 2**63 - 1, 2**63 - 1, TASK, TASK, bytes(20 * 33), bytes(64)).encode()
    assert len(largest) <= LARGEST_RECEIPT
    assert open_receipt(largest).encode() == largest
    longer = dataclasses.replace(open_receipt(largest), path=bytes(21 * 33))
    assert not longer.verify(SERVER.public)
    with pytest.raises(Problem):
        open_receipt(longer.encode())


@pytest.mark.parametrize("together", [1, 2, 3, 4, 5, 7, 8, 13, 64, 255, 256])
def test_every_receipt_of_a_batch_verifies_by_one_signature_and_by_its_own_path_alone(together):
    links = [
        Receipt(TASK, DEVICE, place + 1, place + 5, bytes([place]) * 32, b"\x09" * 32) for place in range(together)
    ]
    found = [open_receipt(data) for data in sign_receipts(TASK, links, SERVER)]
    assert [dataclasses.replace(each, path=b"", signature=b"") for each in found] == links
    assert all(each.verify(SERVER.public) for each in found)
    assert len({each.signature for each in found}) == 1
    assert max(len(each.path) for each in found) == 33 * (together - 1).bit_length()
    for each, other in pairwise(found):
        assert not dataclasses.replace(each, path=other.path).verify(SERVER.public)
        assert not dataclasses.replace(each, path=b"").verify(SERVER.public)


def test_a_node_of_the_tree_is_no_receipt_of_another():
    links = [RECEIPT, dataclasses.replace(RECEIPT, index=13)]
    first, second = (open_receipt(data) for data in sign_receipts(TASK, links, SERVER))
    assert first.path[0] == 1
    assert second.path[0] == 0
    for path in (b"\x00" + first.path[1:], b"\x02" + first.path[1:], first.path[:-1], first.path + second.path):
        assert not dataclasses.replace(first, path=path).verify(SERVER.public)


links = st.lists(st.tuples(st.integers(1, 2**63 - 1), st.binary(min_size=32, max_size=32)), min_size=1, max_size=6)


@given(links, st.data())
def test_every_change_of_the_journal_changes_the_head_of_its_chain(rows, data):
    def head(rows):
        chain = chain_start(TASK)
        for seq, hash_ in rows:
            chain = chain_next(chain, TASK, DEVICE, seq, hash_)
        return chain

    at = data.draw(st.integers(0, len(rows) - 1))
    seq, hash_ = rows[at]
    assert head(rows[:at] + rows[at + 1 :]) != head(rows)
    assert head([*rows[:at], (seq ^ 1, hash_), *rows[at + 1 :]]) != head(rows)
    flipped = bytes([hash_[0] ^ 1]) + hash_[1:]
    assert head([*rows[:at], (seq, flipped), *rows[at + 1 :]]) != head(rows)


def test_two_tasks_have_two_chains():
    assert chain_start(TASK) != chain_start(b"\x06" * 32)
