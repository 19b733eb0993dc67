"""Scores x @ w that are finite or marked, and the labels that count: the guards which all models share."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from crowdml.arrays import Array, Integers, Samples, finite_or_zero, namespace
from crowdml.models.model import Norm, check_radius

LARGEST = 1e30
"""A score beyond this is as good as infinite: twice it is still a float32."""

ROOT = 1e15
"""Root of LARGEST: the square of what is held to it is a float32."""


def score(weights: Array, x: Array) -> tuple[Array, Array]:
    """x [b, d] in the type of the weights, and x @ weights with NaN where that is not finite or beyond `LARGEST`.

    A non-finite entry of x makes every score of its sample NaN, whatever the (finite) weights, so the scores alone
    show which samples cannot be used and x need not be searched. NaN then travels quietly: no infinity is left whose
    difference would warn on NumPy. The product itself may overflow there, which is why it, and it alone, is silenced.
    """
    xp = namespace(weights, x)
    with np.errstate(over="ignore", invalid="ignore"):
        x = xp.asarray(x, dtype=weights.dtype)
        raw = x @ weights
    return x, xp.where(xp.abs(raw) <= LARGEST, raw, xp.nan)


def settled(scores: Array) -> Array:
    """Scores with 0 in the place of NaN: those of the zero sample."""
    return namespace(scores).where(scores == scores, scores, 0)  # NaN alone differs from itself


def known_class(y: Array, classes: int) -> Array:
    """[b] bool: y is one of 0, ..., classes - 1."""
    known = (y >= 0) & (y < classes)
    return known & (y == namespace(y).floor(y)) if y.dtype.kind == "f" else known


def class_cells(y: Array, classes: int) -> Array:
    """[b, classes] bool: whether y [b] is that class."""
    return y[:, None] == namespace(y).arange(classes)


def number_cells(y: Array, bound: float, bins: int) -> Array:
    """[b, bins] int32: a 1 in the interval of [-bound, bound] that y [b] falls into; none for a y outside it."""
    xp = namespace(y)
    known = xp.abs(y) <= bound  # false for NaN
    place = xp.floor((xp.where(known, y, 0) / bound + 1) * (0.5 * bins))
    cell = xp.clip(place, 0, bins - 1)  # y = bound belongs to the last bin
    return ((cell[:, None] == xp.arange(bins)) & known[:, None]).astype(xp.int32)


def gradient_rows(x: Array, slope: Array) -> Array:
    """x [b, d], slope [b] -> [b, d]: each sample's gradient; zero where the slope is NaN."""
    xp = namespace(x, slope)
    usable = slope == slope  # NaN alone differs from itself
    return xp.where(usable[:, None], x, 0) * xp.where(usable, slope, 0)[:, None]


def gradient_sum(x: Array, slope: Array) -> Array:
    """x [b, d], slope [b, ...] -> [d, ...]: the sum of the gradients, as one product.

    x is finite, as a buffer sees to and `into_ball` does: to look at it again would cost an accelerator a third of a
    round. What is not finite all the same ends as a sum that is not, which the grid takes for zero.
    """
    return x.T @ namespace(x, slope).where(slope == slope, slope, 0)


def clipped_sum(weights: Array, x: Array, slopes: Callable[[Array], tuple[Array, Array]], clip: float) -> Array:
    """x [b, d], and what enters the product with its slopes -> their sum, each gradient within the l2 ball of `clip`.

    A gradient is the outer product of x and its slope, so |gradient| = |x| |slope|: the slopes are scaled, and no
    sample's own gradient is ever written down. A sample with a number that is not finite counts as zero; those numbers
    are zero before anything is computed of them, so that one x serves both products.
    """
    xp = namespace(weights, x)
    with np.errstate(over="ignore", invalid="ignore"):
        x = xp.asarray(x, dtype=weights.dtype)
        held = finite_or_zero(x, most=LARGEST)
        entering, slope = slopes(held)
        squares = (entering * entering).sum(-1)
        squares = squares + entering.shape[-1] * np.finfo(x.dtype).tiny  # squares that vanish must not hide a length
        factor = shrinking(squares * (slope * slope if slope.ndim == 1 else (slope * slope).sum(-1)), clip)
        factor = xp.where((held == x).all(-1), factor, 0)
    scaled = slope * (factor if slope.ndim == 1 else factor[:, None])
    return entering.T @ xp.where(scaled == scaled, scaled, 0)


def shrinking(squares: Array, clip: float) -> Array:
    """What brings gradients with these squared lengths, [b], into the ball of radius `clip`: 1 within it.

    0 where the squared length is not finite: such a gradient counts as zero.
    """
    xp = namespace(squares)
    clip = xp.asarray(clip, dtype=squares.dtype)
    usable = squares <= np.finfo(squares.dtype).max  # false for NaN
    return xp.where(usable, clip / xp.maximum(xp.sqrt(xp.where(usable, squares, 0)), clip), 0)


class FromScores:
    """What convex models of scores x @ w share: their gradients follow from the slopes of the losses in the scores.

    With a bias the weights have one row more, the last, and x stands for (x, 1) wherever it is written: |(x, 1)| is
    sqrt(|x|^2 + 1) in the l2 norm and |x| + 1 in the l1 norm.
    """

    bias: bool

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def convex(self) -> bool:
        return True

    @property
    def bounded(self) -> bool:
        return True

    def start(self) -> Array:
        return np.zeros(self.shape, np.float32)

    def _score(self, weights: Array, x: Array) -> tuple[Array, Array]:
        """x [b, d], or (x, 1) [b, d + 1], and its scores [b] or [b, c]: NaN where a sample cannot be used."""
        if self.bias:
            xp = namespace(weights, x)
            x = xp.concatenate([x, xp.ones_like(x[:, :1])], axis=1)
        return score(weights, x)

    def scores(self, weights: Array, x: Array) -> Array:
        """What `predict` decides by: [b], or one for each class [b, c]; 0 where a sample cannot be used."""
        return settled(self._score(weights, x)[1])

    def _reach(self, norm: Norm, radius: float) -> float:
        """The largest |x|, or |(x, 1)|, for |x| <= radius."""
        check_radius(norm, radius)
        if not self.bias:
            return radius
        return radius + 1 if norm == "l1" else math.hypot(radius, 1)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        """x [b, d], and the slope of each loss in its scores, [b] or [b, c]: NaN where a sample cannot be used."""
        raise NotImplementedError

    def gradients(self, weights: Array, samples: Samples) -> Array:
        return gradient_rows(*self._slopes(weights, samples))

    def gradient_sum(self, weights: Array, samples: Samples) -> Array:
        return gradient_sum(*self._slopes(weights, samples))

    def clipped_sum(self, weights: Array, samples: Samples, clip: float) -> Array:
        return clipped_sum(weights, samples.x, lambda x: self._slopes(weights, Samples(x, samples.y)), clip)


class OfClasses(FromScores):
    """What convex models of classes share: a label's cell is its class, and every other prediction is a mistake."""

    classes: int

    @property
    def cells(self) -> int:
        return self.classes

    def predict(self, weights: Array, x: Array) -> Integers:
        raise NotImplementedError

    def mistakes(self, weights: Array, samples: Samples) -> Integers:
        xp = namespace(weights, samples.x)
        wrong = self.predict(weights, samples.x) != samples.y
        return (wrong & known_class(samples.y, self.classes)).astype(xp.int32)

    def label_cells(self, samples: Samples) -> Integers:
        return class_cells(samples.y, self.classes).astype(namespace(samples.y).int32)
