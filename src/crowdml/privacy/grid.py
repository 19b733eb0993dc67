"""The grid: each sample's contribution is clipped, truncated toward zero, and summed as integers (review, R8)."""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np

from crowdml.arrays import Array, Integers, namespace
from crowdml.records import record

Norm = Literal["l1", "l2"]

LARGEST_CLIP = 46_000
"""In grid steps: the square of an l2 clip, and a little more, must fit an int32."""

TOO_LARGE = 1e15
"""In grid steps: an entry beyond it counts as zero, so that no square overflows a float32."""

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
        rounding of the scaling factor) counts as zero, as does an entry that is not finite or beyond the clip. So the
        sum of a batch in which one sample is replaced moves by at most 2 * clip steps, exactly, whatever the rows were.
        """
        if isinstance(clip, int) and not 0 < clip <= LARGEST_CLIP:  # an array comes of clips that were asked about
            raise ValueError(f"A clip of {clip} grid steps is outside 1 to {LARGEST_CLIP}; choose another grid step.")
        xp = namespace(rows)
        axes = tuple(range(1, rows.ndim))
        rows = rows.astype(xp.result_type(rows.dtype, xp.float32))  # half a float would overflow below
        usable = abs(rows) < TOO_LARGE * float(self.step)  # nor what is not finite; first, for a warning would tell too
        scaled = xp.where(usable, rows, 0.0) * (1 / float(self.step))
        size = (
            abs(scaled).sum(axes, keepdims=True)
            if norm == "l1"
            else xp.sqrt((scaled * scaled).sum(axes, keepdims=True))
        )
        factor = xp.where(size > clip, clip / xp.maximum(size, clip), 1.0)
        steps = (scaled * factor).astype(xp.int32)  # toward zero
        steps = xp.where((steps >= -clip) & (steps <= clip), steps, 0)  # so that no norm below can wrap round
        wide = steps if xp is not np else steps.astype(np.int64)  # on a small board too
        if norm == "l1":
            within = abs(wide).sum(axes, keepdims=True) <= clip
        else:
            within = (wide * wide).sum(axes, keepdims=True) <= clip * clip
        return xp.where(within, steps, 0).sum(0, dtype=xp.int32)

    def decode(self, steps: Integers) -> Array:
        """Integers on the grid as numbers: float32, which is public post-processing."""
        xp = namespace(steps)
        return steps.astype(xp.float32) * self._unit

    @cached_property
    def _unit(self) -> float:
        return float(self.step)


COUNTS = Grid(Fraction(1))
