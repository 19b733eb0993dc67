"""The laws of the noise: discrete Laplace, discrete Gaussian, Skellam, as numbers to look at and as exact integers.

`pmf` is for eyes, tests and the simulator: float64, about 1e-12 relative. `thresholds` is what a device samples from:
integers that enclose the cumulative distribution at any precision asked for, with the error bound proved in
docs/proofs/sampler.md. No randomness here, and no float takes part in an enclosure: floats only guess how long a table
has to be, and integers then check the guess.

All three laws are symmetric on the integers, log-concave, and largest at zero: their weights are products of ratios
r_1 >= r_2 >= ... below one. That is all the machinery knows of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from crowdml.errors import TaskError
from crowdml.records import record

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]


class Thresholds(Protocol):
    """A law on 0, 1, 2, ... whose cumulative distribution F can be enclosed."""

    def thresholds(self, bits: int) -> list[int]:
        """T with T[k] <= 2^bits F(k) < T[k] + 2. At the last k, F is 1 and T is 2^bits, or 1 - F is below 2^-bits."""
        ...


class Law(Thresholds, Protocol):
    """A symmetric law of an integer X. `thresholds` encloses P(|X| <= k)."""

    @property
    def variance(self) -> float | Fraction: ...

    def pmf(self, k: Ints) -> Floats:
        """P(X = k), elementwise; about 1e-12 relative where it is not tiny."""
        ...

    def tail(self, bits: int) -> int:
        """The smallest t with P(|X| > t) < 2^-bits."""
        ...


@record
class Geometric:
    """P(k) ~ exp(-k / scale) on 0, 1, 2, ..., or on 0 .. below - 1: what a discrete Laplace variable is made of."""

    scale: Fraction
    below: int | None = None

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def thresholds(self, bits: int) -> list[int]:
        return _enclose(self._ratios, self._depth, bits, sides=1, below=self.below)

    def _depth(self, k: int) -> float:
        return float(k / self.scale)

    def _ratios(self, count: int, precision: int) -> tuple[list[int], int]:
        return [exp_minus(1 / self.scale, precision)] * count, 2


@record
class DiscreteLaplace:
    """P(z) = tanh(1 / (2 scale)) exp(-|z| / scale)."""

    scale: Fraction

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    @property
    def variance(self) -> float:
        alpha = float(np.exp(-1 / float(self.scale)))  # P(z) ~ alpha^|z|
        return 2 * alpha / (1 - alpha) ** 2

    def pmf(self, k: Ints) -> Floats:
        rate = float(1 / self.scale)
        return math.tanh(rate / 2) * np.exp(-rate * np.abs(np.asarray(k, np.float64)))

    def tail(self, bits: int) -> int:
        return _first(lambda t: not self._beyond(t, bits), 0)

    def thresholds(self, bits: int) -> list[int]:
        part = Geometric(self.scale)
        return _enclose(part._ratios, part._depth, bits, sides=2)

    def _beyond(self, t: int, bits: int) -> bool:
        """Whether P(|X| > t) = 2 q^(t+1) / (1 + q) is at least 2^-bits; never equal, for q = exp(-1 / scale) is no root
        of a polynomial with integer coefficients."""
        precision = bits + 64
        while True:
            power, ratio = (exp_minus(x / self.scale, precision) for x in (Fraction(t + 1), Fraction(1)))
            one = 1 << precision
            if (2 * power << bits) >= one + ratio + 2:
                return True
            if (2 * (power + 2) << bits) < one + ratio:
                return False
            precision *= 2


@record
class DiscreteGaussian:
    """P(z) ~ exp(-z^2 / (2 sigma^2)) (Canonne, Kamath, Steinke 2020)."""

    sigma: Fraction

    def __post_init__(self) -> None:
        _positive("sigma", self.sigma)

    @property
    def variance(self) -> float:
        if self.sigma > 4:  # the correction is below exp(-2 pi^2 sigma^2) < 1e-137
            return float(self.sigma**2)
        k = np.arange(-64, 65)
        return float((k**2 * self.pmf(k)).sum())

    def pmf(self, k: Ints) -> Floats:
        rate = float(1 / (2 * self.sigma**2)) if self.sigma > Fraction(1, 10**6) else math.inf
        if rate > 750:  # P(0) is 1 in float64
            return (np.asarray(k) == 0).astype(np.float64)
        if self.sigma > 4:  # Poisson summation; the correction is as in `variance`
            total = float(self.sigma) * math.sqrt(2 * math.pi)
        else:
            total = math.fsum(math.exp(-rate * j * j) for j in range(-64, 65))
        return np.exp(-rate * np.asarray(k, np.float64) ** 2) / total

    def tail(self, bits: int) -> int:
        return _tail(self, bits)

    def thresholds(self, bits: int) -> list[int]:
        return _enclose(self._ratios, self._depth, bits, sides=2)

    def _depth(self, k: int) -> float:
        return float(k * k / (2 * self.sigma**2))

    def _ratios(self, count: int, precision: int) -> tuple[list[int], int]:
        """r_k = exp(-(2k - 1) / (2 sigma^2)) by r_(k+1) = r_k q: each product adds the errors of both and one unit."""
        ratio, step = (exp_minus(x / self.sigma**2, precision) for x in (Fraction(1, 2), Fraction(1)))
        ratios: list[int] = []
        for _ in range(count):
            ratios.append(ratio)
            ratio = ratio * step >> precision
        return ratios, 3 * count


@record
class Skellam:
    """The difference of two independent Poisson variables of mean variance / 2: P(z) = exp(-variance) I_|z|(variance).

    Sums of independent Skellam variables are Skellam, and their variances add: shares of noise add up exactly.
    """

    variance: Fraction

    def __post_init__(self) -> None:
        _positive("variance", self.variance)

    def pmf(self, k: Ints) -> Floats:
        """By Miller's recurrence on d_k = 1 - P(k) / P(k-1), which keeps the small difference from one accurate."""
        size = np.abs(np.asarray(k, np.int64))
        v = float(self.variance)
        last = int(size.max(initial=0)) + 2
        last = _first(lambda n: self._depth(n) > 50, last)  # so that the probabilities sum to one
        start = _first(lambda n: self._depth(n) > self._depth(last) + 25, last)
        step, drop = 2 / v, 1 - v / (start + math.hypot(start, v))
        drops: list[float] = []
        for j in range(start, 0, -1):
            excess = j * step - drop
            drop = excess / (1 + excess)
            drops.append(drop)
        weights = np.concatenate([[1.0], np.cumprod(1 - np.array(drops[::-1][:last]))])
        return (weights / (2 * weights[1:].sum() + 1))[size]

    def tail(self, bits: int) -> int:
        return _tail(self, bits)

    def thresholds(self, bits: int) -> list[int]:
        return _enclose(self._ratios, self._depth, bits, sides=2)

    def _depth(self, k: int) -> float:
        """About -log(P(k) / P(0))."""
        v = float(self.variance)
        return k * math.asinh(k / v) - k * k / (v + math.hypot(k, v))

    def _ratios(self, count: int, precision: int) -> tuple[list[int], int]:
        """r_k = P(k) / P(k-1) downwards by r_k = 1 / (2k / variance + r_(k+1)), from the certain 0 <= r <= 1 far out.

        Far out two bounds close in on each other; from `count` down the lower one goes on alone, and each step adds at
        most two units to its error.
        """
        one, square = 1 << precision, 1 << 2 * precision
        top, bottom = 2 * self.variance.denominator << precision, self.variance.numerator
        low, high = 0, one
        target = self._depth(count) + precision * math.log(2) / 2 + 2
        for k in range(_first(lambda n: self._depth(n) > target, count), count, -1):
            term = k * top // bottom
            low, high = square // (term + 1 + high), min(square // max(term + low, one) + 1, one)
        ratios, ratio = [0] * count, low
        for k in range(count, 0, -1):
            ratio = square // max(k * top // bottom + ratio, one)
            ratios[k - 1] = ratio
        return ratios, high - low + 2 * count


Ratios = Callable[[int, int], tuple[list[int], int]]
"""(count, precision) -> r_1 .. r_count in units of 2^-precision, and a bound in units on the error of each."""


def exp_minus(x: Fraction, precision: int) -> int:
    """An integer E with E <= 2^precision exp(-x) <= E + 2, for x >= 0; and E <= 2^precision."""
    if x >= precision:
        return 0
    halvings = max(0, math.ceil(x).bit_length()) + 8
    extra = halvings + 32
    while True:
        work = precision + extra
        one = 1 << work
        top, bottom = x.numerator, x.denominator << halvings  # y = top / bottom <= 2^-8
        term, low, terms = one, one, 0
        while term:  # exp(y) by its series: terms are rounded down, and the rest is below the last unit
            terms += 1
            term = term * top // (bottom * terms)
            low += term
        high = low + 2 * terms + 2
        low, high = (one << work) // high, min((one << work) // low + 1, one)
        for _ in range(halvings):
            low, high = low * low >> work, (high * high >> work) + 1
        floor, ceiling = low >> extra, -(-high >> extra)
        if ceiling - floor <= 2:
            return floor
        extra *= 2


def _enclose(
    ratios: Ratios, depth: Callable[[int], float], bits: int, *, sides: int, below: int | None = None
) -> list[int]:
    """`Thresholds.thresholds` for the weights w_0 = 1, w_k = sides * r_1 ... r_k.

    With every r within `error` units, w_k is within sides * k (error + 1) units and each partial sum within `slack`.
    """
    reach = (bits + 4) * math.log(2) + 1
    spare = 12
    while True:
        last = _first(lambda k: depth(k) >= reach, 2)  # noqa: B023  # used within this turn only
        last = last if below is None else min(last, below - 1)
        whole = below is not None and last == below - 1
        precision = max(128, bits + 3 * last.bit_length() + spare)
        steps, error = ratios(last + 1, precision)
        one = 1 << precision
        slack = sides * last * (last + 1) * (error + 1)
        weight, total = one, one
        sums = [total]
        for ratio in steps[:last]:
            weight = weight * ratio >> precision
            total += sides * weight
            sums.append(total)
        ratio = steps[last] + error  # of the first weight left out; by log-concavity later ratios are smaller still
        weight += last * (error + 1)
        rest = 0 if whole else sides * weight * ratio // (one - ratio) + 1 if ratio < one else total
        if (4 * slack + 2 * rest) << bits <= total - slack:
            most = total + slack + rest
            cut = [max(0, (part - slack << bits) // most) for part in sums]
            return [*cut[:-1], 1 << bits] if whole else cut
        reach, spare = reach + 8, spare + 32


@lru_cache(maxsize=256)
def _tail(law: DiscreteGaussian | Skellam, bits: int) -> int:
    """The smallest t with P(|X| > t) < 2^-bits: in floats where they are far from the boundary, else by enclosure.

    It is kept, for the range of a row rests on it and is asked for whenever a task starts.
    """
    depth = law._depth
    if bits <= 900:
        last = _first(lambda k: depth(k) > (bits + 1) * math.log(2) + 40, 2)
        weights = law.pmf(np.arange(last + 1))
        beyond = 2 * np.append(np.cumsum(weights[:0:-1])[::-1], 0)  # P(|X| > t) at t
        goal = 2.0**-bits
        t = int(np.argmax(beyond < goal))
        if beyond[t] < goal * (1 - 1e-6) and (t == 0 or beyond[t - 1] > goal * (1 + 1e-6)):
            return t
    extra = 64
    while True:
        cuts = law.thresholds(bits + extra)
        whole, goal = 1 << (bits + extra), 1 << extra
        t = next(t for t, cut in enumerate(cuts) if whole - cut - 2 < goal)  # the first that may do
        if whole - cuts[t] < goal:
            return t
        extra *= 2


def _first(holds: Callable[[int], bool], at_least: int) -> int:
    """The smallest n >= at_least where a condition that stays true holds."""
    low, high = at_least - 1, max(at_least, 1)
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _positive(name: str, value: Fraction) -> None:
    if value <= 0:
        raise TaskError(
            f"{name} is {value}, and noise needs one above zero. Nothing was drawn. Name a positive {name}."
        )
