"""Second moments under masks: products of integers, summed over samples, with one share of Skellam noise.

Each sample is clipped and brought to integers first and multiplied afterwards (review, R8), so its contribution is a
product of two short integer vectors and the sensitivity of the sum is a theorem about such products, with no rounding
to pay. Proof: docs/proofs/moments.md.
"""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from crowdml.arrays import Array, Integers, finite_or_zero
from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import skellam_loss, skellam_variance
from crowdml.privacy.grid import TOO_LARGE, Grid
from crowdml.privacy.laws import Skellam
from crowdml.privacy.losses import Filter, Loss, Renyi, Total, exact
from crowdml.privacy.mechanisms import Mechanism, NoiseLaw, Share, l1_of, root_up
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L2, Adjacency, Observer
from crowdml.records import record

LARGEST_PART = 2**17
"""In grid steps: noise of a larger standard deviation is drawn as a sum, so that no table of its law grows large."""
EXACT = 2**53
"""Sums of integers below it are exact in float64, in whatever order a machine adds them."""


def moments_move(clip: int, positive: bool) -> Fraction:
    """How far replacing one sample moves (h h^T, h y^T) in the Frobenius norm for |h|, |y| <= clip, rounded up.

    sqrt(9/2) clip^2, at h.h' = -clip^2 / 2 with one label; 2 clip^2 where no entry is below zero.
    """
    return Fraction(2 * clip**2) if positive else root_up(Fraction(9, 2) * clip**4)


def moments_loss(l2: Fraction, l1: Fraction, variance: Fraction) -> Renyi:
    """As `calibration.skellam_loss`, where entries off the diagonal have half the variance, as if sqrt(2) times them
    had been sent: `l2` is in that norm, and the terms beyond the Gaussian's take the smaller variance for all entries.
    """
    return skellam_loss(l2, l1, variance, Fraction(variance) / 2)


@lru_cache(maxsize=256)
def moments_variance(l2: Fraction, l1: Fraction, epsilon: Fraction, delta: float) -> Fraction:
    """The least variance, rounded up, such that a release whose loss is `moments_loss` is (epsilon, delta)-DP."""
    budget = exact(epsilon)

    def is_enough(variance: Fraction) -> bool:
        plan = Total.of([moments_loss(l2, l1, variance)])
        return exact(plan.epsilon(delta)) <= budget and Filter.of(budget, delta, plan).allows(Total(), plan)

    low = skellam_variance(l2, l1, epsilon, delta)  # enough if the smaller variance cost nothing
    high = low
    while not is_enough(high):
        low, high = high, 2 * high
    for _ in range(20 if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


class Products(Mechanism):
    """A row that sums, over samples, the products of features with one another and with labels, in whole numbers.

    A contribution is one sample's row [features + labels]. What leaves is one vector: the diagonal, the products of two
    features row by row, then features times labels row by row.
    """

    clip: int
    """How long a sample's features and labels may be, in grid steps, or how large each of them."""
    features: int
    labels: int
    adjacency: Adjacency
    takes_units: bool = False
    """Whether it takes units in [0, 1] and 1 - 2y of each output, instead of features of norm one and labels."""

    @property
    def length(self) -> int:
        return self.features * (self.features + 1) // 2 + self.features * self.labels

    @property
    def clipped(self) -> int:
        return self.clip

    @property
    def _unit(self) -> int:
        """Samples that are replaced at once: one, or all that a device gives."""
        return 1 if self.adjacency is Adjacency.REPLACE_SAMPLE else self.covers.size

    def equations(self, moments: Integers, shares: float) -> tuple[Array, Array, float]:
        """G [d, d] and B [d, labels] of summed releases that hold `shares` shares of noise, and the standard deviation
        of that noise: what `models.ridge` solves."""
        raise NotImplementedError

    def _parts(self, rows: Array) -> tuple[Array, Array]:
        """Contributions as features [b, features] and labels [b, labels]; refuse rows of another length."""
        if rows.ndim != 2 or rows.shape[1] != self.features + self.labels:
            raise GuaranteeError(
                f"The table prices {self.features} features and {self.labels} labels a sample; this has {rows.shape}."
            )
        return rows[:, : self.features], rows[:, self.features :]


@record
class SkellamGram(Products, Share):
    """Adds this device's share of Skellam noise to sums of h h^T and h y^T over its samples.

    Guarantee: Renyi DP at integer orders (Agarwal, Kairouz, Liu 2021) against who sees the cohort's sum, for replacing
    one sample, or all samples of the device, per release. With one share that is all of the noise (`observer` ANYONE)
    it holds against who sees what the device sends. Features h and labels y are each clipped to `clip` grid steps
    in the l2 norm and truncated toward zero, then multiplied: the moments move by at most sqrt(9/2) clip^2 (2 clip^2
    if `positive`: entries below zero count as zero), counted with twice the squares off the diagonal, where the noise
    has half the variance. Proof: docs/proofs/moments.md.
    """

    clip: int  # in grid steps
    features: int
    labels: int
    variance: Fraction
    """Variance of one device's share: on the diagonal and on features times labels. Half of it off the diagonal."""
    honest: int
    grid: Grid
    covers: Rows
    promise: str
    positive: bool = False
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE
    observer: Observer = Observer.AGGREGATE
    kind: str = "skellam-gram"

    def __post_init__(self) -> None:
        if self.honest < 1 or self.variance <= 0 or min(self.features, self.labels, self.clip) < 1:
            raise GuaranteeError(
                f"A share of noise has a variance above 0 and at least one honest device adds one; this has "
                f"{float(self.variance):g} and {self.honest}, for {self.features} features and {self.labels} labels."
            )
        if self.observer is not Observer.AGGREGATE and self.honest != 1:
            raise GuaranteeError(
                f"Where anyone sees a device's moments its own noise is all there is: one share, and not {self.honest}."
            )
        if self.observer is not Observer.AGGREGATE and max(self.reach) >= 2**31:
            raise GuaranteeError(
                f"Moments of {self.covers.size} samples and their noise reach {max(self.reach)} steps, which 32 bits "
                "do not hold. Choose a coarser grid."
            )
        if self.bound >= EXACT:
            raise GuaranteeError(
                f"{self.covers.size} samples of up to {self.clip} grid steps sum up to {self.bound}, which is not "
                "exact in float64. Choose a coarser grid."
            )

    @property
    def law(self) -> NoiseLaw:
        """On the diagonal and on features times labels. Values are products of two numbers on the grid, so that one
        step of them is the square of the grid's."""
        return NoiseLaw("share", self.variance, self.grid.step**2, None, Skellam(self.variance), self.honest)

    @property
    def bound(self) -> int:
        return self.covers.size * self.clip**2

    @property
    def sensitivity(self) -> L2:
        return L2(self._unit * moments_move(self.clip, self.positive), self.adjacency)

    def _loss(self, everything: bool, shares: int) -> Loss:
        l2 = (self.covers.size if everything else self._unit) * moments_move(self.clip, self.positive)
        return moments_loss(l2, l1_of(l2, self.length), shares * self.variance)

    def equations(self, moments: Integers, shares: float) -> tuple[Array, Array, float]:
        gram, cross = split(moments, self.features, self.labels)
        unit = self.clip**2  # of a product, in squared grid steps
        return gram / unit, cross / unit, math.sqrt(shares * self.variance) / unit

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, features + labels]: a sample's features, then its labels -> int64 [length]. What a device
        sends by itself are integers of 32 bits, held at their ends, which any reader could do."""
        found = self.moments(contributions) + self.noise(noise)
        if self.observer is Observer.AGGREGATE:
            return found
        return found.clip(-(2**31), 2**31 - 1).astype(np.int32)

    def moments(self, contributions: Array) -> Integers:
        """The sums without noise, exact: for `draw`, and for simulations that add the noise of a whole cohort."""
        h, y = (self.steps(part).astype(np.float64) for part in self._parts(np.asarray(contributions)))
        return join(h.T @ h, h.T @ y)

    def steps(self, rows: Array) -> Integers:
        """Rows [b, n] -> int64 [b, n], each of integer norm at most `clip`: clip, truncate toward zero, check.

        A row with a number that is not finite counts as zero, and so does one that a rounding left too long.
        """
        wide = np.asarray(rows, np.float64)
        scaled = finite_or_zero(wide, most=TOO_LARGE * float(self.grid.step), rows=True) / float(self.grid.step)
        size = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))
        whole = np.trunc(scaled * (self.clip / np.maximum(size, self.clip))).astype(np.int64)
        if self.positive:
            whole = np.maximum(whole, 0)
        within = (whole * whole).sum(axis=1, keepdims=True) <= self.clip**2
        return np.where(within, whole, 0)

    def noise(self, source: Source, shares: int = 1) -> Integers:
        """Noise of `shares` devices together, int64 [length]: the sum of Skellam variables is one of their variance."""
        above = self.features * (self.features - 1) // 2
        parts = max(1, -(-shares * self.variance // LARGEST_PART**2))
        each = shares * self.variance / parts
        total = np.zeros(self.length, np.int64)
        for _ in range(parts):
            drawn = (
                source.skellam(each, like=np.zeros(self.features, np.int32)),
                source.skellam(each / 2, like=np.zeros(above, np.int32)),
                source.skellam(each, like=np.zeros(self.features * self.labels, np.int32)),
            )
            total += np.concatenate(drawn)
        return total


def join(gram: Array, cross: Array) -> Integers:
    """A symmetric matrix of whole numbers [d, d] and [d, labels] as one vector: diagonal, above it, then the second."""
    parts = (np.diagonal(gram), gram[_above(len(gram))], cross.reshape(-1))
    return np.concatenate([np.rint(part).astype(np.int64) for part in parts])


def split(moments: Array, features: int, labels: int) -> tuple[Array, Array]:
    """The other way: float64 [features, features], symmetric, and [features, labels]."""
    above = features * (features - 1) // 2
    diagonal, upper, cross = np.split(np.asarray(moments, np.float64), [features, features + above])
    gram = np.zeros((features, features))
    gram[_above(features)] = upper
    return gram + gram.T + np.diag(diagonal), cross.reshape(features, labels)


@lru_cache(maxsize=4)
def _above(size: int) -> Array:
    return np.triu(np.ones((size, size), np.bool_), 1)


KINDS: tuple[type, ...] = (SkellamGram,)
"""The mechanisms of this module, for the docs and the tests that look for each of them."""
