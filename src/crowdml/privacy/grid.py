"""The grid: each sample's contribution is clipped, truncated toward zero, and summed as integers (review, R8)."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np

from crowdml.arrays import Array, Integers, Outer, compiled_for_cpu, computed_once, finite_or_zero, is_usable, namespace
from crowdml.records import record

Norm = Literal["l1", "l2"]

LARGEST_CLIP = 46_000
"""In grid steps: the square of an l2 clip, and a little more, must fit an int32."""

TOO_LARGE = 1e15
"""In grid steps: a row that is longer counts as zero. Its square is a float32 still."""

NARROW, SHORTER = 2000, 2.0**-12
"""Two lengths of so many numbers together, their product, a quotient and the entries err by less in float32."""

FINEST, COARSEST = Fraction(1, 2**64), Fraction(2**64)
"""Steps between which a float32 neither overflows nor vanishes."""


@record
class Grid:
    """A public grid of a power-of-two step. What travels is multiples of the step, as integers."""

    step: Fraction

    def __post_init__(self) -> None:
        bits = self.step.numerator * self.step.denominator
        if self.step <= 0 or bits & (bits - 1) or 1 not in (self.step.numerator, self.step.denominator):
            raise ValueError(f"A grid step is a power of two; {self.step} is not.")
        if not FINEST <= self.step <= COARSEST:
            raise ValueError(f"A grid step of {float(self.step):g} is out of reach of a float32; choose 2^-64 to 2^64.")

    def sum(self, rows: Array, *, norm: Norm, clip: int | Integers) -> Integers:
        """Contributions [b, ...] -> integers [...]: clip each row to `clip` steps, truncate toward zero, check, add.

        Truncation toward zero never raises a norm, and a row whose *integer* norm is above `clip` all the same (a
        rounding of the scaling factor) counts as zero, as does one with an entry that is not finite, or is far beyond
        any use. So the sum of a batch in which one sample is replaced moves by at most 2 * clip steps, exactly,
        whatever the rows were. Counts are integers already: none is scaled, and a row of them above `clip` is zero.
        Rows may be given by their factors (`Outer`).
        """
        if isinstance(clip, int) and not 0 < clip <= LARGEST_CLIP:  # an array comes of clips that were asked about
            raise ValueError(f"A clip of {clip} grid steps is outside 1 to {LARGEST_CLIP}; choose another grid step.")
        if isinstance(rows, Outer):
            return self._sum_of_outer(rows, norm, clip)
        xp, shape = namespace(rows), rows.shape[1:]
        if len(rows) == 1 or not compiled_for_cpu(rows):  # with flat ones a CPU divides for the place of each number
            rows = rows.reshape(len(rows), -1)  # flat, an accelerator does all that follows in one go
        if self.step == 1 and _are_counts(rows, norm, clip if isinstance(clip, int) else LARGEST_CLIP):
            steps, usable = xp.clip(rows, -clip - 1, clip + 1).astype(xp.int32), True  # so that no norm can wrap round
        else:
            rows = rows.astype(xp.result_type(rows.dtype, xp.float32))  # half a float would overflow below
            with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell, too
                scaled = rows * (1 / float(self.step))
                size = _norm(scaled.reshape(len(rows), -1), norm).reshape(-1, *(1,) * (rows.ndim - 1))
                size = size if norm == "l1" else xp.sqrt(size)
                usable = is_usable(size, TOO_LARGE)
                factor = xp.where(size > clip, clip / xp.maximum(size, clip), 1.0)
                steps = (scaled * factor).astype(xp.int32)  # toward zero
        wide = steps if xp is not np else steps.astype(np.int64)  # on a small board too
        within = _norm(wide, norm) <= (clip if norm == "l1" else clip * clip)
        return xp.where(within & usable, steps, 0).sum(0, dtype=xp.int32).reshape(shape)

    def _sum_of_outer(self, rows: Outer, norm: Norm, clip: int | Integers) -> Integers:
        """`sum` of rows that are given by their factors: the length of a row is the product of two lengths.

        The right factors are scaled, and those of a row that is too long as integers become zero. An entry is one
        product of two numbers, the same ones where it is checked and where it is added: what is added was checked. An
        accelerator takes narrow rows to a clip that is shorter by more than floats can err, and checks nothing: to add
        up the integers of each row once more would take a fourteenth of a check-in there.
        """
        xp, unit = namespace(rows.left), 1 / float(self.step)
        checks = xp is np or compiled_for_cpu(rows.left) or sum(rows.shape[1:]) > NARROW
        most = clip if checks else clip * (1 - SHORTER)
        with np.errstate(over="ignore", invalid="ignore"):
            reach = _length(rows.right, norm) * unit
            size = _length(rows.left, norm) * reach
            usable = (is_usable(size, TOO_LARGE) & is_usable(reach))[:, None]
            scaled = rows.right * (most / xp.maximum(size, most) * unit)[:, None]
        left = finite_or_zero(rows.left)  # apart from the lengths: an accelerator would write it down once more
        right = computed_once(xp.where(usable, scaled, 0))
        if checks:
            within = _norm(_truncated(left, right), norm)[:, 0] <= (clip if norm == "l1" else clip * clip)
            right = computed_once(xp.where(within, right, 0))
        return _truncated(left, right).sum(0, dtype=xp.int32)

    def decode(self, steps: Integers) -> Array:
        """Integers on the grid as numbers: float32, which is public post-processing."""
        xp = namespace(steps)
        return steps.astype(xp.float32) * self._unit

    @cached_property
    def _unit(self) -> float:
        return float(self.step)


def _norm(rows: Array, norm: Norm) -> Array:
    """[b, ...] -> [b, 1, ...]: the l1 norm, or the square of the l2 norm."""
    return (abs(rows) if norm == "l1" else rows * rows).sum(tuple(range(1, rows.ndim)), keepdims=True)


def _length(factors: Array, norm: Norm) -> Array:
    """[b, n] -> [b]: the norm of each, and never less than it, for squares that vanish must not hide a length."""
    if norm == "l1":
        return abs(factors).sum(1)
    squares = (factors * factors).sum(1) + factors.shape[1] * np.finfo(factors.dtype).tiny
    return namespace(factors).sqrt(squares)


def _truncated(left: Array, right: Array) -> Integers:
    """[b, n] and [b, m] -> [b, n, m]: their outer products, toward zero."""
    return (left[:, :, None] * right[:, None, :]).astype(namespace(left).int32)


def _are_counts(rows: Array, norm: Norm, clip: int) -> bool:
    """Whether rows are integers whose norms cannot wrap round once each entry is held to just above the clip.

    An accelerator adds in int32 what NumPy adds in int64, and has no bounds below zero for what is unsigned.
    """
    if namespace(rows) is np:
        return rows.dtype.kind in "iu"
    return rows.dtype == np.int32 and math.prod(rows.shape[1:]) * (clip + 1) ** (1 if norm == "l1" else 2) < 2**31


COUNTS = Grid(Fraction(1))
