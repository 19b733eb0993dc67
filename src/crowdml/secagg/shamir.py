"""Secrets of 32 bytes cut into shares: any `threshold` of them give the secret back, fewer say nothing at all.

Shamir 1979 over the field of p = 2^31 - 1: a secret is nine limbs of 29 bits, each the constant term of a polynomial of
its own with uniform coefficients. A small prime lets NumPy work on all limbs of all secrets at once. A share is the
nine values at the holder's point, 36 bytes. Whether a secret came back right, the caller checks against what its owner
signed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from crowdml.arrays import Array

__all__ = ["LIMBS", "SECRET_SIZE", "SHARE_SIZE", "P", "from_bytes", "join", "split", "to_bytes"]

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
