"""Masks are uniform, cancel exactly, and never serve twice (review, section 7: a, b, c, e; G8, G9, G10, G12)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_crowd import MODEL, TASK, Crowd, refused, terms
from scipy import stats

from crowdml.errors import TaskError
from crowdml.secagg import device, masks, ring, server
from crowdml.secagg.masks import Binding
from crowdml.secagg.messages import Masked, decode
from crowdml.secagg.terms import RingField

LENGTH = 250_000  # elements of 32 bits: a million bytes
LONG = (RingField("v", LENGTH, 32, 100, 0),)


def chi_square_of(elements: np.ndarray) -> float:
    """Of the bytes, over 256 cells."""
    counts = np.bincount(np.frombuffer(np.ascontiguousarray(elements).tobytes(), np.uint8), minlength=256)
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


def too_far(freedom: int) -> float:
    """Beyond it with probability 1e-6, either way being one test of many."""
    return float(stats.chi2.isf(1e-6, freedom))


def masked(crowd: Crowd, one: str, tag: str = "v") -> np.ndarray:
    body, at = decode(Masked, crowd.devices[one].sent).body, 0
    for field in crowd.terms.fields:
        if field.tag == tag:
            return ring.from_bytes(body[at : at + field.size], field.bits, field.length).copy()
        at += field.size
    raise AssertionError(tag)


def masked_crowd(fields=LONG, **more) -> Crowd:
    crowd = Crowd(terms(4, survivors=4, colluders=0, fields=fields), 4, **more)
    for vectors in crowd.vectors.values():
        for tag in vectors:
            vectors[tag] = np.full_like(vectors[tag], 7)
    crowd.go_to("mask")
    crowd.tell()
    return crowd


def test_G12_one_masked_message_is_uniform_in_the_ring():
    crowd = masked_crowd()
    for one in crowd.ids:
        assert chi_square_of(masked(crowd, one)) < too_far(255)
        elements = masked(crowd, one)
        assert chi_square_of(elements[1:] - elements[:-1]) < too_far(255)


def test_G12_a_message_of_64_bits_is_uniform_too():
    crowd = masked_crowd((RingField("v", LENGTH // 2, 64, 100, 0),))
    assert chi_square_of(masked(crowd, crowd.ids[0])) < too_far(255)


def test_G9_two_vectors_of_one_message_differ_by_a_uniform_vector():
    crowd = masked_crowd((*LONG, RingField("w", LENGTH, 32, 100, 0)))
    one = crowd.ids[0]
    assert chi_square_of(masked(crowd, one, "v") - masked(crowd, one, "w")) < too_far(255)


def test_G9_messages_of_two_rounds_differ_by_a_uniform_vector():
    first, second = masked_crowd(), masked_crowd(round=2)
    one = first.ids[0]
    assert first.keys[one].public == second.keys[one].public
    assert chi_square_of(masked(first, one) - masked(second, one)) < too_far(255)


def test_G9_the_same_keys_in_another_round_cohort_or_task_give_another_mask():
    """Even if a device's fresh keys were not fresh: the key of a mask is bound to all of these."""
    secret = hashlib.sha256(b"a pair").digest()
    low, high = "a" * 32, "b" * 32
    bindings = [
        Binding(TASK, 1, bytes(32)),
        Binding(TASK, 2, bytes(32)),
        Binding(TASK, 1, bytes(31) + b"\1"),
        Binding(bytes(32), 1, bytes(32)),
    ]
    keys = {masks.pair_key(secret, binding.salt, low, high, tag) for binding in bindings for tag in ("v", "w")}
    keys |= {masks.self_key(secret, binding.salt, low, tag) for binding in bindings for tag in ("v", "w")}
    assert len(keys) == 16
    first, second = sorted(keys)[:2]
    vector = np.zeros(LENGTH, "<u4")
    masks.add_stream(vector, [(first, 1), (second, -1)])
    assert chi_square_of(vector) < too_far(255)


def test_G8_pairwise_masks_do_not_vanish_and_cancel_in_the_sum():
    """Without its self-mask a message is still uniform, and all of them together are the plain sum."""
    crowd = masked_crowd()
    salt = Binding(TASK, 1, crowd.roster.view(crowd.server.sharers, MODEL)).salt
    total = np.zeros(LENGTH, "<u4")
    for one in crowd.ids:
        vector = masked(crowd, one)
        seed = device._secrets(crowd.devices[one].root, TASK, 1)[2]
        masks.add_stream(vector, [(masks.self_key(seed, salt, one, "v"), -1)])
        assert chi_square_of(vector) < too_far(255)
        total += vector
    assert (total == 4 * 7).all()


def test_both_ends_of_a_pair_have_one_key_and_opposite_signs():
    secret = bytes(range(32))
    low, high = "a" * 32, "b" * 32
    salt = Binding(TASK, 1, bytes(32)).salt
    assert masks.pair_key(secret, salt, low, high, "v") == masks.pair_key(secret, salt, high, low, "v")
    one_field = terms(3, survivors=3, colluders=0, fields=(RingField("v", 9, 32, 100, 0),))
    bodies = [
        ring.from_bytes(
            device.mask_vectors(one_field, {"v": np.zeros(9, int)}, salt, me, me.encode(), {peer: secret}), 32, 9
        )
        for me, peer in ((low, high), (high, low))
    ]
    own = np.zeros(9, "<u4")
    masks.add_stream(own, [(masks.self_key(me.encode(), salt, me, "v"), 1) for me in (low, high)])
    assert (bodies[0] + bodies[1] == own).all()


def test_G10_a_late_message_after_reconstruction_is_uniform_given_all_that_the_server_holds():
    """Device 0 is called missing and its pair key rebuilt; then its vector arrives. The server takes off every pair
    mask, and what is left is under the self-mask, of which it has no share."""
    crowd = Crowd(terms(6, survivors=5, colluders=0, fields=LONG), 6)
    crowd.vectors[crowd.ids[0]] = {"v": np.full(LENGTH, 7)}
    crowd.go_to("mask")
    crowd.tell()
    late = masked(crowd, crowd.ids[0])
    crowd.deliver(crowd.ids[1:])
    crowd.close()
    crowd.tell(crowd.ids[1:])
    crowd.deliver(crowd.ids[1:])
    crowd.close()
    crowd.tell(crowd.ids[1:])
    crowd.deliver(crowd.ids[1:])
    held, roster = crowd.server, crowd.roster
    adverts = [decode(server.Advert, held.adverts[one]) for one in roster.ids]
    sharers, survivors = np.ones(6, bool), np.arange(6) > 0
    secrets = server._rebuild(held, roster, adverts, sharers, survivors).secrets
    pair = secrets[0]
    assert masks.public_of(pair) == adverts[0].pair
    salt = Binding(TASK, 1, roster.view(held.sharers, MODEL)).salt
    private = masks.X25519PrivateKey.from_private_bytes(pair)
    keys = [
        (masks.pair_key(masks.agree(private, adverts[peer].pair), salt, roster.ids[0], roster.ids[peer], "v"), -1)
        for peer in range(1, 6)
    ]
    masks.add_stream(late, keys)  # signs: device 0 has the lowest id and added each of them
    assert chi_square_of(late) < too_far(255)
    seed = device._secrets(crowd.devices[crowd.ids[0]].root, TASK, 1)[2]
    masks.add_stream(late, [(masks.self_key(seed, salt, roster.ids[0], "v"), -1)])
    assert (late == 7).all()  # so nothing but the self-mask had been left
    crowd.close()
    assert crowd.agrees_with(crowd.ids[1:])


LOW_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    2**255 - 20,
]


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused(point: int):
    public = point.to_bytes(32, "little")
    assert "low order" in refused(lambda: masks.check_point(public))
    private = masks.X25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert "low order" in refused(lambda: masks.agree(private, public))


@pytest.mark.parametrize(
    "public",
    [
        b"",
        bytes(31),
        bytes(33),
        (2**255 - 19).to_bytes(32, "little"),
        (2**255 - 18).to_bytes(32, "little"),
        b"\xff" * 32,
    ],
)
def test_malformed_points_are_refused(public: bytes):
    assert "canonical" in refused(lambda: masks.check_point(public))


def test_key_agreement_is_that_of_rfc_7748():
    """Section 5.2: the first of the iterated vectors, the scalar 9 times the base point 9."""
    nine = (9).to_bytes(32, "little")
    assert masks.public_of(nine).hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert masks.agree(masks.X25519PrivateKey.from_private_bytes(nine), nine) == masks.public_of(nine)


# --- the ring ---


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from([32, 64]), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_what_is_encoded_is_decoded(bits: int, values: list[int]):
    array = np.array(values, np.int64)
    there = ring.from_bytes(ring.to_bytes(ring.encode(array, bits)), bits, len(values))
    assert (ring.decode(there, bits) == array).all()


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_fits_up_to_the_last_number_and_not_beyond(bits: int):
    most = 2 ** (bits - 1) - 1
    ring.check_sum(bits, contributions=1, bound=most - 5, slack=5)
    with pytest.raises(TaskError, match="coarser grid"):
        ring.check_sum(bits, contributions=1, bound=most - 5, slack=6)
    with pytest.raises(TaskError):
        ring.check_sum(16, contributions=1, bound=1, slack=0)


def test_numbers_that_are_not_whole_do_not_enter_the_ring():
    with pytest.raises(TaskError, match="grid"):
        ring.encode(np.array([0.5]), 32)
