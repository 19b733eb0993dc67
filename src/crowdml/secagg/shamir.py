"""Secrets of 32 bytes cut into shares: any `threshold` of them give the secret back, fewer say nothing at all.

Shamir 1979 over the field of p = 2^31 - 1: a secret is nine limbs of 29 bits, each the constant term of a polynomial of
its own with uniform coefficients. A small prime lets NumPy work on all limbs of all secrets at once. A share is the
nine values at the holder's point, 36 bytes. Whether a secret came back right, the caller checks against what its owner
signed.

More shares than the threshold are words of a Reed-Solomon code: `wrong` names those that lie off the polynomial, if at
most half of what is above the threshold do (Gao 2003, "A new algorithm for decoding Reed-Solomon codes").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from crowdml.arrays import Array

P = 2**31 - 1
SECRET_SIZE = 32
LIMBS, LIMB_BITS = 9, 29
SHARE_SIZE = 4 * LIMBS


def split(secrets: Sequence[bytes], threshold: int, points: Array, entropy: Callable[[int], bytes]) -> Array:
    """Shares [holders, secrets, 9] of each secret, at these points [holders]: whole numbers, each once, none zero."""
    points = np.asarray(points, np.uint64)
    if not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of {len(points)} shares cannot be asked for.")
    if len(np.unique(points % P)) != len(points) or not (points % P).all():
        raise ValueError("Each holder needs a point of its own, and zero is the secret's.")
    limbs = np.array([_limbs(secret) for secret in secrets], np.uint64).reshape(1, -1)
    higher = _uniform((threshold - 1) * limbs.size, entropy).reshape(threshold - 1, limbs.size)
    values = np.zeros((len(points), limbs.size), np.uint64)
    for coefficients in (*higher[::-1], limbs[0]):  # Horner, for all holders, secrets and limbs
        values = (values * points[:, None] + coefficients) % P
    return values.reshape(len(points), len(secrets), LIMBS).astype(np.uint32)


def join(points: Array, shares: Array) -> list[bytes | None]:
    """Secrets from points [secrets, threshold] and shares [secrets, threshold, 9]: all of them at once.

    None where the limbs are no secret of 32 bytes: some share was wrong. A wrong share can also give wrong bytes.
    """
    points, shares = np.asarray(points, np.uint64), np.asarray(shares, np.uint64)
    limbs = np.zeros((len(points), LIMBS), np.uint64)
    weights = _at_zero(points)
    for holder in range(points.shape[1]):
        limbs = (limbs + weights[:, holder, None] * shares[:, holder] % P) % P
    return [_secret(row) for row in limbs]


def at(where: Array, points: Array, shares: Array) -> Array:
    """The shares [m, 9] at `where` [m], on the polynomials through shares [t, 9] at points [t]; no point is there."""
    where, points, shares = (np.asarray(each, np.uint64) for each in (where, points, shares))
    apart = (where[:, None] + P - points) % P  # [m, t]
    between = np.where(np.eye(len(points), dtype=bool), np.uint64(1), (points[:, None] + P - points) % P)
    weights = _product(apart)[:, None] * _inverse(apart * _product(between) % P) % P
    values = np.zeros((len(where), LIMBS), np.uint64)
    for holder in range(len(points)):
        values = (values + weights[:, holder, None] * shares[holder]) % P
    return values.astype(np.uint32)


def wrong(points: Array, shares: Array, threshold: int) -> Array | None:
    """Which of shares [n, 9] at points [n] are wrong, as booleans [n]; None if more than (n - threshold) / 2 are.

    One word is decoded for the nine limbs: their sum under factors that are drawn by a hash of all the shares, in which
    a wrong share stays wrong but with probability 2^-31.
    """
    points, shares = np.asarray(points, np.uint64), np.asarray(shares, np.uint64)
    drawn = hashlib.shake_256(b"crowdml/secagg/wrong/1" + points.tobytes() + shares.tobytes()).digest(8 * LIMBS)
    word = (shares * (np.frombuffer(drawn, "<u8") % P) % P).sum(1) % P
    zeros, through = _interpolate(points, word)
    above, rest = zeros, through
    locator_above, locator = np.zeros(1, np.uint64), np.ones(1, np.uint64)
    while 2 * (len(rest) - 1) >= len(points) + threshold:
        quotient, left = _divide(above, rest)
        above, rest = rest, left
        locator_above, locator = locator, _less(locator_above, _times(quotient, locator))
    found, left = _divide(rest, locator)
    if left.any() or len(found) > threshold:
        return None
    values = np.zeros_like(points)
    for coefficient in found[::-1]:
        values = (values * points + coefficient) % P
    return values != word


def to_bytes(share: Array) -> bytes:
    """One share [9] as it travels: nine little-endian words."""
    return np.asarray(share, "<u4").tobytes()


def from_bytes(data: bytes) -> Array:
    """Shares [n, 9] from n * 36 bytes. A word that is no element of the field is read modulo p: it is wrong anyway."""
    return np.frombuffer(data, "<u4").reshape(-1, LIMBS) % np.uint32(P)


def _at_zero(points: Array) -> Array:
    """Lagrange's weights at zero: for points [secrets, t] the product over m != j of x_m / (x_m - x_j)."""
    above = np.ones_like(points)
    below = np.ones_like(points)
    for m in range(points.shape[1]):
        x = points[:, m, None]
        own = np.arange(points.shape[1]) == m
        above = np.where(own, above, above * x % P)
        below = np.where(own, below, below * ((x + P - points) % P) % P)
    return above * _inverse(below) % P


def _inverse(values: Array) -> Array:
    """values^(p-2), which is 1 / values by Fermat."""
    power, base = np.ones_like(values), values
    exponent = P - 2
    while exponent:
        if exponent & 1:
            power = power * base % P
        base = base * base % P
        exponent >>= 1
    return power


def _product(factors: Array) -> Array:
    """The product of each row."""
    found = np.ones(len(factors), np.uint64)
    for column in factors.T:
        found = found * column % P
    return found


def _interpolate(points: Array, values: Array) -> tuple[Array, Array]:
    """The polynomial that is zero at every point, and the one of lower degree with these values: Newton's, expanded.

    Polynomials are coefficients, the constant first, without zeros at the end but of the polynomial zero itself.
    """
    newton = values
    for step in range(1, len(points)):
        apart = (points[step:] + P - points[:-step]) % P
        newton = np.concatenate([newton[:step], (newton[step:] + P - newton[step - 1 : -1]) % P * _inverse(apart) % P])
    zeros, found = np.ones(1, np.uint64), np.zeros(len(points), np.uint64)
    for point, coefficient in zip(points, newton, strict=True):
        found[: len(zeros)] = (found[: len(zeros)] + coefficient * zeros) % P
        zeros = (np.append(np.uint64(0), zeros) + np.append(zeros * (P - point) % P, np.uint64(0))) % P
    return zeros, _trim(found)


def _divide(one: Array, other: Array) -> tuple[Array, Array]:
    """Quotient and remainder."""
    left, size = one.copy(), len(other)
    quotient = np.zeros(max(1, len(one) - size + 1), np.uint64)
    leading = _inverse(other[-1:])[0]
    for place in range(len(one) - size, -1, -1):
        quotient[place] = left[place + size - 1] * leading % P
        left[place : place + size] = (left[place : place + size] + (P - quotient[place]) * other) % P
    return _trim(quotient), _trim(left)


def _times(one: Array, other: Array) -> Array:
    found = np.zeros(len(one) + len(other) - 1, np.uint64)
    for place, factor in enumerate(one):
        found[place : place + len(other)] = (found[place : place + len(other)] + factor * other) % P
    return found


def _less(one: Array, other: Array) -> Array:
    size = max(len(one), len(other))
    return _trim((np.pad(one, (0, size - len(one))) + P - np.pad(other, (0, size - len(other)))) % P)


def _trim(polynomial: Array) -> Array:
    nonzero = np.flatnonzero(polynomial)
    return polynomial[: nonzero[-1] + 1 if len(nonzero) else 1]


def _uniform(count: int, entropy: Callable[[int], bytes]) -> Array:
    """Uniform elements of the field: 31 bits each, and the one value that is none of it is thrown away."""
    found = np.zeros(0, np.uint64)
    while len(found) < count:
        words = np.frombuffer(entropy(4 * (count - len(found))), "<u4").astype(np.uint64) & np.uint64(P)
        found = np.concatenate([found, words[words != P]])
    return found


def _limbs(secret: bytes) -> list[int]:
    if len(secret) != SECRET_SIZE:
        raise ValueError(f"A secret has {SECRET_SIZE} bytes; this has {len(secret)}.")
    number = int.from_bytes(secret, "little")
    return [number >> (LIMB_BITS * limb) & (2**LIMB_BITS - 1) for limb in range(LIMBS)]


def _secret(limbs: Array) -> bytes | None:
    number = 0
    for limb, value in enumerate(limbs.tolist()):
        if value >> LIMB_BITS:
            return None
        number |= value << (LIMB_BITS * limb)
    return number.to_bytes(SECRET_SIZE, "little") if number >> (8 * SECRET_SIZE) == 0 else None
