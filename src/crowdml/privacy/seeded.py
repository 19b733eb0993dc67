"""The simulator's noise: the same laws, fast and seeded. Never on a device: noise from a known seed is no noise.

Each value is a hash of (seed, device, step, draw, lane) looked up in an alias table of the law. The hash is integer
arithmetic on 32 bits and so is the look-up, so NumPy, JAX on the event queue and JAX in a compiled loop draw the same
integers. One gather a value: as fast as a polynomial logarithm in a compiled loop, and right for every law.

How close: a table cell's probability is a multiple of 2^-31, so a law is off by at most 2^-16 in total variation.
Values beyond 2^16 cells share cells of 2, 4, 8, ... neighbouring integers, drawn evenly; that adds less than 2^-12 at
a scale of 2^15. tests/privacy/test_seeded.py holds all of it against the exact probability mass functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, namespace
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Law, Skellam

MOST_BITS = 16
TAIL_BITS = 32


def stream(seed: int, device: Any, step: Any) -> Array:
    """The key of a step's noise: integers that broadcast to [...] -> uint32 [..., 2]. NumPy, a whole run at once."""
    shape = np.broadcast_shapes(np.shape(device), np.shape(step))
    flat = (np.atleast_1d(np.asarray(word)) for word in (device, step))  # NumPy warns where a single word wraps round
    return streams(halves(seed), *flat).reshape(*shape, 2)


def halves(seed: int | list[int]) -> Array:
    """A seed as two words, uint32 [2]; or each of several, [T, 2]."""
    whole = np.array(seed if isinstance(seed, list) else [seed], object) & 0xFFFFFFFFFFFFFFFF
    words = np.stack([whole & 0xFFFFFFFF, whole >> 32], -1).astype(np.uint32)
    return words if isinstance(seed, list) else words[0]


def streams(seeds: Array, device: Array, step: Array) -> Array:
    """`stream` for seeds given by their halves, uint32 [..., 2], on NumPy and on JAX: all broadcast to [...]."""
    xp = namespace(seeds, device, step)
    words = xp.broadcast_arrays(*(each.astype(xp.uint32) for each in (seeds[..., 0], seeds[..., 1], device, step)))
    keys: list[Array] = []
    for salt in (0x243F6A88, 0x13198A2E):
        key = xp.full_like(words[0], salt)
        for word in words:
            key = _mix(key ^ word)
        keys.append(key)
    return xp.stack(keys, axis=-1)


@dataclass
class SeededSource:
    """A `Source` for simulation, on the key that `stream` made. A new one serves each step; `draw` counts its calls."""

    key: Array  # uint32 [2]
    draw: int = field(default=0)

    def discrete_laplace(self, scale: Fraction, like: Integers) -> Integers:
        return self._sample(DiscreteLaplace(scale), like)

    def discrete_gaussian(self, sigma: Fraction, like: Integers) -> Integers:
        return self._sample(DiscreteGaussian(sigma), like)

    def skellam(self, variance: Fraction, like: Integers) -> Integers:
        return self._sample(Skellam(variance), like)

    def uniform_below(self, n: int, like: Integers) -> Integers:
        """Even to within n / 2^32."""
        xp = namespace(self.key, like)
        return (self._words(xp, like) % np.uint32(n)).astype(xp.int32).reshape(like.shape)

    def _sample(self, law: Law, like: Integers) -> Integers:
        xp = namespace(self.key, like)
        table = _alias(law)
        word = self._words(xp, like)
        bits = table.bits
        cell = word >> np.uint32(32 - bits)
        entry = xp.asarray(table.entries)[cell.astype(xp.int32)]
        low = (word << np.uint32(bits)) >> np.uint32(bits + 1)  # the bits below the cell, less the sign
        value = xp.where(low < (entry >> np.uint32(bits)), cell, entry & np.uint32((1 << bits) - 1))
        if table.width > 1:
            value = value * np.uint32(table.width) + self._words(xp, like) % np.uint32(table.width)
        value = value.astype(xp.int32)
        return xp.where((word & np.uint32(1)) == 1, value, -value).reshape(like.shape)

    def _words(self, xp: Any, like: Integers) -> Array:
        """A hash of 32 bits for each lane: two keys, the second between the rounds, so that no two streams overlap."""
        key = _mix(self.key ^ np.uint32(0x9E3779B9 * (self.draw + 1) & 0xFFFFFFFF))
        self.draw += 1
        lane = xp.arange(int(np.prod(like.shape)), dtype=xp.uint32)
        word = (lane * np.uint32(0x9E3779B9)) ^ key[0]
        word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D) + key[1]
        word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
        return word ^ (word >> np.uint32(16))


def _mix(word: Array) -> Array:
    """A bijection of 32 bits in which each bit of the input moves about half of the output."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (word ^ (word >> np.uint32(16))) + np.uint32(0x9E3779B9)


@dataclass(frozen=True)
class AliasTable:
    """Walker's alias method for |X|, packed: the upper bits of an entry are the chance to stay, the lower the alias."""

    entries: np.ndarray[Any, np.dtype[np.uint32]]
    bits: int
    width: int


@lru_cache(maxsize=64)
def _alias(law: Law) -> AliasTable:
    support = int(law.tail(TAIL_BITS)) + 1
    width = 1
    while -(-support // width) > 1 << MOST_BITS:
        width *= 2
    bits = max(1, (-(-support // width) - 1).bit_length())
    mass = law.pmf(np.arange((1 << bits) * width)).astype(np.float64)
    mass[1:] *= 2  # of |X|
    cells = mass.reshape(-1, width).sum(1)
    share = cells / cells.sum() * (1 << bits)
    stay, alias = _vose(share)
    chance = np.rint(stay * (1 << (31 - bits))).astype(np.uint64)
    entries = ((chance << np.uint64(bits)) | alias.astype(np.uint64)).astype(np.uint32)
    entries.setflags(write=False)
    return AliasTable(entries, bits, width)


def _vose(share: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Chances to stay and aliases for shares that average 1 (Vose 1991)."""
    left = share.tolist()
    alias = list(range(len(left)))
    stay = [1.0] * len(left)
    small = [i for i, part in enumerate(left) if part < 1]
    large = [i for i, part in enumerate(left) if part >= 1]
    while small and large:
        poor, rich = small.pop(), large[-1]
        stay[poor], alias[poor] = left[poor], rich
        left[rich] -= 1 - left[poor]
        if left[rich] < 1:
            small.append(large.pop())
    return np.asarray(stay), np.asarray(alias)
