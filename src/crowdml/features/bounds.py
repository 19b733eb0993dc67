"""Rows as a task takes them: columns within public bounds, each scaled alike, and rows within the task's ball.

The device, the simulator, validation and exports all prepare rows here, or say the same in another language. Bounds
are part of the task, so they are public; each row is treated alone, and nothing is fitted (review, R4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from crowdml.features.norms import into_ball, normalise

Bounds = Fraction | tuple[Fraction, ...] | None
Floats = NDArray[np.float64]
LEAST = Fraction(1, 10**30)
"""The smallest number besides 0 that a task holds."""


class PublicFeatures(Interface):
    """What a task says of its features: `crowdml.task.Features`."""

    @property
    def dimension(self) -> int: ...
    @property
    def norm(self) -> Any: ...
    @property
    def low(self) -> Bounds: ...
    @property
    def high(self) -> Bounds: ...
    @property
    def extractor(self) -> Any: ...


def prepared(features: PublicFeatures, x: NDArray[Any]) -> NDArray[np.float32]:
    """x [..., d] as devices learn from it -> float32 [..., d], each row in the ball of `features.norm`.

    With bounds every column is held within them and scaled to [-1, 1] first. With an extractor x holds pictures, and
    their features are brought onto the sphere. A row outside the ball is shrunk onto it; one with a number that is not
    finite becomes the zero row, whatever its bounds.
    """
    if features.extractor is not None:
        from crowdml.features.extractor import extract  # for pictures alone

        found = extract(features.extractor, x, features.dimension)
        return normalise(found, features.norm.kind, float(features.norm.bound))
    wide = np.asarray(x, dtype=np.float64)
    scale = scaling(features)
    if scale is not None:
        middle, factor = scale
        held = np.clip((np.where(np.isfinite(wide), wide, np.nan) - middle) * factor, -1.0, 1.0)
        wide = np.where(np.isfinite(wide), held, np.nan)
    return into_ball(wide, features.norm.kind, float(features.norm.bound))


def scaling(features: PublicFeatures) -> tuple[Floats, Floats] | None:
    """The middle of each column's bounds and the factor that brings them to -1 and 1; None where there are none.

    A column whose two bounds are equal says nothing, and becomes 0.
    """
    if features.low is None or features.high is None:
        return None
    low, high = _numbers(features.low), _numbers(features.high)
    width = high - low
    return low + width / 2, np.divide(2.0, width, out=np.zeros_like(width), where=width > 0)


class PublicLabels(Interface):
    """What a task says of labels that are numbers: `crowdml.task.Labels`."""

    @property
    def bound(self) -> Fraction: ...
    @property
    def low(self) -> Fraction | None: ...
    @property
    def ends(self) -> tuple[float, float]: ...


def prepared_numbers(labels: PublicLabels, y: Any) -> Floats:
    """Labels that are numbers, as devices learn them: scaled by `label_scale` and held within the task's bounds."""
    middle, half = label_scale(labels)
    bound = float(labels.bound)
    return np.clip((np.asarray(y, np.float64) - middle) / half, -bound, bound)


def label_scale(labels: PublicLabels) -> tuple[float, float]:
    """(middle, half) of the public bounds of a number: it is middle + half * what a model learns and says."""
    if labels.low is None:
        return 0.0, 1.0
    low, high = labels.ends
    return (low + high) / 2, (high - low) / 2


def bounds_of(rows: NDArray[Any]) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    """The least and the largest value of each column of rows [n, d]. No epsilon covers what they tell of these rows.

    They are rounded to four digits, outward: no row lies outside.
    """
    wide = np.asarray(rows, np.float64)
    low, high = wide.min(axis=0).tolist(), wide.max(axis=0).tolist()
    return tuple(_outward(each, math.floor) for each in low), tuple(_outward(each, math.ceil) for each in high)


def _outward(value: float, rounded: Callable[[Fraction], int]) -> Fraction:
    if abs(value) < LEAST:
        return LEAST * rounded(Fraction(value))
    step = Fraction(10) ** (math.floor(math.log10(abs(value))) - 3)
    return step * rounded(Fraction(value) / step)


def outside(features: PublicFeatures, x: NDArray[Any]) -> NDArray[np.bool_]:
    """x [n, d] -> [n, d]: which numbers lie outside their column's bounds, and are clipped."""
    if features.low is None or features.high is None:
        return np.zeros(x.shape, bool)
    slack = 1e-6 * np.maximum(abs(_numbers(features.low)), abs(_numbers(features.high)))  # bounds are rounded
    return (x < _numbers(features.low) - slack) | (x > _numbers(features.high) + slack)


def _numbers(bounds: Fraction | tuple[Fraction, ...]) -> Floats:
    return np.atleast_1d(np.asarray([float(each) for each in bounds] if isinstance(bounds, tuple) else float(bounds)))
