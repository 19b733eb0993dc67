"""Where noise comes from: the operating system's entropy on devices, nothing at all in tests of everything else.

`SystemSource` samples each law exactly: not a float anywhere, not a bit of bias. It compares the binary expansion of a
uniform number, bit by bit as far as needed, with enclosures of the cumulative distribution (docs/proofs/sampler.md).
63 bits decide all but about one draw in 2^43; the rest are given more bits until they are decided, so the total
variation distance to the law is zero.

Out of scope: constant time. Cache misses and, once in a lifetime, a second look at a draw depend on the noise drawn;
someone who measures this process to the microsecond may learn something of it.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from crowdml.arrays import Array, Integers
from crowdml.errors import CrowdmlError, TaskError
from crowdml.privacy.laws import DiscreteGaussian, Geometric, Skellam, Thresholds
from crowdml.records import record

LARGEST = 2**15
"""Grid steps: the largest scale or sigma that a device draws; a larger Skellam share is the sum of several draws."""

WIDEST = 2**20
"""Grid steps: the largest Laplace scale, whose tables grow with its root alone. Most rows stay below LARGEST."""

MOST_DRAWS = 1024
"""Draws that one Skellam value may be the sum of."""

WORD = 63
"""Bits of the first look at a draw: a machine word less one bit, which serves as the sign."""

FEW = 48
"""Draws up to which they are looked up one by one."""

SHORT = 65_536
"""Entries of a table that is kept as a list too, 40 bytes each."""

_ONE, _TWO = np.uint64(1), np.uint64(2)
_LEAST, _MOST = np.int64(-(2**31)), np.int64(2**31 - 1)

Words = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


class Source(Protocol):
    """Independent integer noise, shaped like `like`, int32. Parameters are exact and public."""

    def discrete_laplace(self, scale: Fraction, like: Array) -> Integers:
        """P(z) ~ exp(-|z| / scale)."""
        ...

    def discrete_gaussian(self, sigma: Fraction, like: Array) -> Integers:
        """P(z) ~ exp(-z^2 / (2 sigma^2))."""
        ...

    def skellam(self, variance: Fraction, like: Array) -> Integers:
        """Poisson(variance / 2) - Poisson(variance / 2)."""
        ...

    def uniform_below(self, n: int, like: Array) -> Integers:
        """Each of 0 .. n - 1 with probability 1 / n."""
        ...


@record
class SystemSource:
    """Exact noise from the operating system's entropy. It has no seed: noise from a known seed is no noise."""

    entropy: Callable[[int], bytes] = os.urandom
    """n -> n uniform bytes; another one only in tests."""

    def discrete_laplace(self, scale: Fraction, like: Array) -> Integers:
        """X = G or -1 - G, and G = m H + L, with independent H, L and choice: three small tables at any scale."""
        _at_most("scale", scale, WIDEST)
        size = _size(like)
        m, high, low, signs = _laplace(scale)
        if size <= FEW:
            drawn = [self._find(law, self._words(size)) for law in (high, low, signs)]
            few = [
                -1 - m * block - place if side else m * block + place for block, place, side in zip(*drawn, strict=True)
            ]
            return _shaped(np.array(few, np.int64), like)
        g = m * self._draw(high, size)[0] + self._draw(low, size)[0]
        negative = self._draw(signs, size)[0]
        return _shaped(np.where(negative, -1 - g, g), like)

    def discrete_gaussian(self, sigma: Fraction, like: Array) -> Integers:
        _at_most("sigma", sigma, LARGEST)
        return _shaped(self._signed(_gaussian(sigma), _size(like)), like)

    def skellam(self, variance: Fraction, like: Array) -> Integers:
        draws = max(1, -(-variance // LARGEST**2))
        _at_most("variance", variance, MOST_DRAWS * LARGEST**2)
        law = _tabled(Skellam(variance / draws))
        total = self._signed(law, _size(like))
        for _ in range(draws - 1):
            total += self._signed(law, len(total))
        return _shaped(total, like)

    def uniform_below(self, n: int, like: Array) -> Integers:
        """Words at or above the largest multiple of n are drawn again."""
        if not 1 <= n <= 2**31:
            raise TaskError(f"a choice among {n}: nothing was drawn. It must be among 1 to {2**31}.")
        words = self._words(_size(like))
        fair = 2**64 - 2**64 % n
        while (again := np.flatnonzero(words > np.uint64(fair - 1))).size:
            words[again] = self._words(again.size)
        return _shaped((words % np.uint64(n)).astype(np.int64), like)

    def _signed(self, law: _Tabled, size: int) -> Counts:
        """Signs are fair and independent of the magnitude; that of a zero does not matter."""
        magnitude, negative = self._draw(law, size)
        return np.where(negative, -magnitude, magnitude)

    def _draw(self, law: _Tabled, size: int) -> tuple[Counts, npt.NDArray[np.bool_]]:
        """Independent draws of the law, and as many fair coins.

        A prefix u of U is decided when no enclosed F(k) can lie in [u, u + 1) / 2^63: then the draw is the smallest k
        with U < F(k), whatever bits follow.
        """
        words = self._words(size)
        if size <= FEW and law.list:
            return np.array(self._find(law, words), np.int64), (words & _ONE).astype(np.bool_)
        prefix, coin = words >> _ONE, (words & _ONE).astype(np.bool_)
        found = law.array[1:].searchsorted(prefix, side="right")
        open_ = (found == len(law.array) - 1) | (prefix - law.array[found] < _TWO)
        for place in np.flatnonzero(open_):
            found[place] = self._decide(law.law, int(prefix[place]))
        return found, coin

    def _find(self, law: _Tabled, words: Words) -> list[int]:
        """Finds values one by one: for a few draws arrays cost more than they save."""
        table, found = law.list, list[int]()
        for word in words.tolist():
            prefix = word >> 1
            place = bisect_right(table, prefix) - 1
            if place == len(table) - 1 or prefix - table[place] < 2:
                place = self._decide(law.law, prefix)
            found.append(place)
        return found

    def _decide(self, law: Thresholds, prefix: int) -> int:
        """Decides with 64 more bits, and more again, until it decides; with probability one it does."""
        bits = WORD
        while True:
            bits += 64
            prefix = prefix << 64 | int(self._words(1)[0])
            table = law.thresholds(bits)
            found = bisect_right(table, prefix)
            if found < len(table) and (found == 0 or prefix - table[found - 1] >= 2):
                return found

    def _words(self, count: int) -> Words:
        data = self.entropy(8 * count)
        if len(data) != 8 * count:
            raise CrowdmlError(
                f"the source of entropy gave {len(data)} bytes where {8 * count} were asked for. "
                "No noise was drawn and nothing may be sent. Repair the system's random device."
            )
        return np.frombuffer(data, dtype="<u8").astype(np.uint64)


@record
class Silence:
    """No noise: zeros. Nothing drawn from it is private. For tests, and for simulations that say "noise off"."""

    def discrete_laplace(self, scale: Fraction, like: Array) -> Integers:
        return np.zeros(np.shape(like), np.int32)

    def discrete_gaussian(self, sigma: Fraction, like: Array) -> Integers:
        return np.zeros(np.shape(like), np.int32)

    def skellam(self, variance: Fraction, like: Array) -> Integers:
        return np.zeros(np.shape(like), np.int32)

    def uniform_below(self, n: int, like: Array) -> Integers:
        return np.zeros(np.shape(like), np.int32)


@record(eq=False)
class _Tabled:
    """A law, and the thresholds of the first look: up to 2.6 MB at sigma = 2^15, a few hundred bytes at 1.

    Before them stands -2, modulo 2^64 in the array: what lies below the first threshold is on no other one's edge.
    """

    law: Thresholds
    array: Words
    list: list[int]
    """The table as a list, where it is short."""


@lru_cache(maxsize=64)
def _tabled(law: Thresholds) -> _Tabled:
    """Built once per law."""
    thresholds = [-2, *law.thresholds(WORD)]
    table = np.array([2**64 - 2, *thresholds[1:]], dtype=np.uint64)
    table.flags.writeable = False
    return _Tabled(law, table, thresholds if len(thresholds) <= SHORT else [])


@lru_cache(maxsize=16)
def _gaussian(sigma: Fraction) -> _Tabled:
    return _tabled(DiscreteGaussian(sigma))


@lru_cache(maxsize=16)
def _laplace(scale: Fraction) -> tuple[int, _Tabled, _Tabled, _Tabled]:
    """The size m of a block, and the laws of the block, of the place in it and of the side."""
    m = _block(scale)
    high, low, side = Geometric(scale / m), Geometric(scale, below=m), Geometric(scale, below=2)
    return m, _tabled(high), _tabled(low), _tabled(side)


def forget_tables() -> None:
    """Build each table anew when it is next drawn from: for measurements."""
    for kept in (_tabled, _gaussian, _laplace):
        kept.cache_clear()


def _block(scale: Fraction) -> int:
    """Places in a block of a geometric variable: about as many as there are blocks within 63 bits of probability."""
    return 1 << (max(1, round(44 * scale)).bit_length() // 2)


def _size(like: Array) -> int:
    return math.prod(np.shape(like))


def _shaped(values: Counts, like: Array) -> Integers:
    """As int32. A value outside, less likely than 2^-90000, is held at the edge, which any reader could do."""
    return np.minimum(np.maximum(values, _LEAST), _MOST).astype(np.int32).reshape(np.shape(like))


def _at_most(name: str, value: Fraction, largest: int) -> None:
    if value > largest:
        raise TaskError(
            f"{name} is {float(value):g} grid steps, and a device draws at most {largest}. Nothing was drawn. "
            "Choose a coarser grid."
        )
