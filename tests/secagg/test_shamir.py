"""Shares: enough of them give the secret back, fewer say nothing, and a wrong one does not pass unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_crowd import coins
from scipy import stats

from crowdml.secagg import sealed, shamir


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_threshold_of_shares_give_every_secret_back(data: st.DataObject):
    holders = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, holders))
    secrets = data.draw(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=4))
    points = np.array(data.draw(st.lists(st.integers(1, 70_000), min_size=holders, max_size=holders, unique=True)))
    shares = shamir.split(secrets, threshold, points, coins(data.draw(st.integers())))
    chosen = np.array(data.draw(st.permutations(range(holders))))[:threshold]
    there = shamir.from_bytes(shamir.to_bytes(shares)).reshape(shares.shape)
    found = shamir.join(np.tile(points[chosen], (len(secrets), 1)), there[chosen].transpose(1, 0, 2))
    assert found == secrets


def test_secrets_at_the_ends_of_their_range_come_back():
    secrets = [bytes(32), b"\xff" * 32, bytes(31) + b"\x80"]
    points = np.arange(1, 6)
    shares = shamir.split(secrets, 3, points, coins("ends"))
    assert shamir.join(np.tile(points[2:], (3, 1)), shares[2:].transpose(1, 0, 2)) == secrets


def test_shares_are_those_of_the_textbook():
    """A polynomial evaluated with Python's integers, and Lagrange's formula with modular inverses."""
    secret, p = bytes(range(32)), shamir.P
    points = [3, 5, 9]
    shares = shamir.split([secret], 3, np.array(points), coins("book"))[:, 0].astype(int)
    number = int.from_bytes(secret, "little")
    for limb in range(shamir.LIMBS):
        total = 0
        for x, y in zip(points, shares[:, limb].tolist(), strict=True):
            others = [m for m in points if m != x]
            weight = np.prod([m * pow(m - x, -1, p) % p for m in others], dtype=object) % p
            total += y * int(weight)
        assert total % p == number >> (29 * limb) & (2**29 - 1)


def test_fewer_shares_than_the_threshold_are_uniform():
    """Two of three shares of one secret, over many sharings: their residues fall evenly."""
    counts = np.zeros(64, int)
    for trial in range(400):
        shares = shamir.split([bytes(32)], 3, np.array([1, 2, 3]), coins("few", trial))[:2]
        mixed = (shares[0].astype(np.uint64) * 3 + shares[1]) % shamir.P
        counts += np.bincount((mixed[0] // (shamir.P // 64 + 1)).astype(int), minlength=64)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < stats.chi2.isf(1e-6, 63)


@pytest.mark.parametrize("limb", range(shamir.LIMBS))
def test_a_wrong_share_changes_what_comes_back(limb: int):
    secret = bytes(range(32))
    points = np.array([1, 2, 3, 4])
    shares = shamir.split([secret], 4, points, coins("wrong"))
    wrong = shares.copy()
    wrong[2, 0, limb] = (int(wrong[2, 0, limb]) + 1) % shamir.P
    assert shamir.join(points[None], wrong.transpose(1, 0, 2)) != [secret]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_wrong_shares_are_named_while_at_most_half_of_those_above_the_threshold_are_wrong(data: st.DataObject):
    holders = data.draw(st.integers(1, 40))
    threshold = data.draw(st.integers(1, holders))
    points = np.array(data.draw(st.lists(st.integers(1, 70_000), min_size=holders, max_size=holders, unique=True)))
    shares = shamir.split([data.draw(st.binary(min_size=32, max_size=32))], threshold, points, coins(holders))[:, 0]
    bad = np.array(data.draw(st.permutations(range(holders))))[: data.draw(st.integers(0, (holders - threshold) // 2))]
    for place in bad:
        limb = data.draw(st.integers(0, 8))
        shares[place, limb] = (int(shares[place, limb]) + data.draw(st.integers(1, shamir.P - 1))) % shamir.P
    found = shamir.wrong(points, shares, threshold)
    assert found is not None
    assert set(np.flatnonzero(found).tolist()) == set(bad.tolist())
    clean = np.flatnonzero(~found)
    right, others = clean[:threshold], clean[threshold:]
    assert (shamir.at(points[others], points[right], shares[right]) == shares[others]).all()


def test_with_more_wrong_shares_nothing_is_named():
    points = np.arange(1, 31)
    shares = shamir.split([bytes(32)], 16, points, coins("many"))[:, 0]
    shares[:8] = np.frombuffer(coins("lies")(8 * 36), "<u4").reshape(8, 9) % shamir.P
    assert shamir.wrong(points, shares, 16) is None


def test_points_that_are_zero_or_shared_and_impossible_thresholds_are_refused():
    for points in ([0, 1, 2], [1, 1, 2], [1, 2, shamir.P + 1], [1, 2, shamir.P]):
        with pytest.raises(ValueError, match="point of its own"):
            shamir.split([bytes(32)], 2, np.array(points), coins())
    for threshold in (0, 4):
        with pytest.raises(ValueError, match="cannot be asked for"):
            shamir.split([bytes(32)], threshold, np.array([1, 2, 3]), coins())
    with pytest.raises(ValueError, match="32 bytes"):
        shamir.split([bytes(31)], 2, np.array([1, 2, 3]), coins())


def test_a_word_that_is_no_element_of_the_field_is_not_drawn():
    """Entropy of nothing but ones gives 2^31 - 1, which is thrown away and drawn again."""
    said = iter([b"\xff" * 72, bytes(72)])
    shares = shamir.split([bytes(range(32)), bytes(32)], 2, np.array([1, 2]), lambda size: next(said)[:size])
    assert (shares[0] == shares[1]).all()  # the coefficient is zero


def test_a_letter_opens_for_its_holder_in_its_round_and_for_nobody_else():
    secret, salt = bytes(range(32)), bytes(32)
    content = bytes(range(72))
    letter = sealed.seal(secret, salt, "a", "b", content)
    assert len(letter) == sealed.SEALED_SIZE
    assert sealed.unseal(secret, salt, "a", "b", letter) == content
    assert sealed.unseal(secret, salt, "b", "a", letter) is None
    assert sealed.unseal(secret, salt, "a", "c", letter) is None
    assert sealed.unseal(secret, bytes(31) + b"\1", "a", "b", letter) is None
    assert sealed.unseal(bytes(32), salt, "a", "b", letter) is None
    assert sealed.unseal(secret, salt, "a", "b", letter[:-1] + bytes([letter[-1] ^ 1])) is None
