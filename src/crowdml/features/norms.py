"""Rows brought onto the sphere or into the ball that a sensitivity rests on.

Each row is treated alone, so nothing is fitted and nothing about one sample shows in another (review, R4).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crowdml.arrays import Array, finite_or_zero, namespace
from crowdml.errors import DataError

Norm = Literal["l1", "l2", "none"]
NORMS: tuple[Norm, ...] = ("l1", "l2", "none")

# Scaled entries are rounded to float32 (relative error 2^-24); this margin keeps the rounded row inside the bound.
_INSIDE = 1.0 - 2.0**-22


def normalise(x: NDArray[Any], kind: Norm, bound: float = 1.0) -> NDArray[np.float32]:
    """Scale each row of x [..., d] onto the sphere of radius `bound` -> float32 [..., d].

    The norm of a row, computed without rounding, is at most `bound` and at least (1 - 1e-6) `bound`; a zero row stays
    zero, and a row with a non-finite entry becomes the zero row. Kind "none" only does the latter.
    """
    return _scaled(x, kind, bound, grow=True)


def into_ball(x: NDArray[Any], kind: Norm, bound: float = 1.0) -> NDArray[np.float32]:
    """Shrink the rows of x [..., d] that lie outside the ball of radius `bound` onto it -> float32 [..., d].

    No row's norm is above `bound` afterwards; rows inside keep their length. Non-finite rows become zero.
    """
    return _scaled(x, kind, bound, grow=False)


def shorten(x: Array, bound: float, axis: int | None = None) -> Array:
    """x no longer than `bound` in the l2 norm, along an axis or as one vector, on NumPy or JAX. Within it the factor is
    exactly 1. x is finite, and its squares add up (`finite_or_zero`)."""
    xp = namespace(x)
    size = xp.sqrt((x * x).sum(axis=axis, keepdims=axis is not None))
    return x * (bound / xp.maximum(size, bound))


def _scaled(x: NDArray[Any], kind: Norm, bound: float, *, grow: bool) -> NDArray[np.float32]:
    if kind not in NORMS:
        raise DataError(f"norm {kind!r} is not known; it must be one of {', '.join(map(repr, NORMS))}.")
    if not (np.isfinite(bound) and 2.0**-100 <= bound <= 2.0**100):
        raise DataError(f"a norm bound of {bound!r} cannot be kept; it must be from 2^-100 to 2^100, usually 1.")
    wide = np.asarray(x, dtype=np.float64)
    if kind == "none":
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        return finite_or_zero(narrow, rows=True)
    wide = finite_or_zero(wide, rows=True)
    # Dividing by the largest entry first keeps squares and sums from overflowing, and tiny rows from vanishing.
    largest = np.abs(wide).max(axis=-1, keepdims=True, initial=0.0)
    unit = wide / np.where(largest == 0, 1.0, largest)
    size = (
        np.abs(unit).sum(axis=-1, keepdims=True) if kind == "l1" else np.sqrt((unit * unit).sum(axis=-1, keepdims=True))
    )
    size = np.where(size == 0, 1.0, size)
    target = bound * _INSIDE
    on_sphere = unit * (target / size)
    if grow:
        return on_sphere.astype(np.float32)
    with np.errstate(over="ignore"):
        outside = largest > target / size
    return np.where(outside, on_sphere, wide).astype(np.float32)
