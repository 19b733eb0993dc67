"""The functional mechanism: noisy coefficients of a loss that is a polynomial of second order in its weights.

For fixed public units h in [0, 1]^b and a score s = h.w, squared error through a sigmoid and the logistic loss come to
the same polynomial after their second order: (1 - 2y) s / 4 + s^2 / 16, and (1 - 2y) s / 2 + s^2 / 8 for each class
(Zhao et al., eq. 12 and 17; Zhang et al. 2012). So one release serves both, in units of 1/16 and of 1/8. Whatever
minimises it, and with whatever ridge, is post-processing.
"""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

import numpy as np

from crowdml.arrays import Array, Integers, finite_or_zero
from crowdml.errors import GuaranteeError
from crowdml.privacy.grid import Grid
from crowdml.privacy.laws import DiscreteLaplace
from crowdml.privacy.losses import Loss, Pure
from crowdml.privacy.mechanisms import NoiseLaw
from crowdml.privacy.moments import Products, join, split
from crowdml.privacy.noise import WIDEST, Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, Adjacency, Observer
from crowdml.records import record


def coefficients_move(clip: int, units: int, outputs: int) -> int:
    """How far replacing one sample moves the coefficients in the l1 norm: 2 clip^2 (b^2 + 4 b outputs).

    Over 16 clip^2 that is b/2 + b^2/8 for one output, Lemma 3. Over 8 clip^2 it is b M + b^2/4 for M classes. Lemma 4
    has M (b + b^2/4), as it sends the coefficients of s^2 once for each class, which are the same for all.
    """
    return 2 * clip**2 * (units**2 + 4 * units * outputs)


@record
class PolynomialLaplace(Products):
    """Adds discrete Laplace noise to the coefficients of a loss of second order, summed over samples.

    Guarantee: epsilon-DP against anyone, for replacing one sample of the part, or all of them where the task protects
    devices, per release. A sample's units are held in [0, 1] and its labels 1 - 2y in [-1, 1], rounded to `clip` grid
    steps, and multiplied as integers: h_p^2, 2 h_p h_q for p < q, and 4 h_p (1 - 2y). In the l1 norm they come to
    clip^2 (b^2 + 4 b outputs) at most. Proof: docs/proofs/polynomials.md.
    """

    clip: int  # in grid steps
    features: int
    labels: int
    epsilon: Fraction
    grid: Grid
    covers: Rows
    promise: str
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE
    observer: Observer = Observer.ANYONE
    kind: str = "polynomial-laplace"
    takes_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.features, self.labels, self.clip) < 1 or self.epsilon <= 0:
            raise GuaranteeError(
                f"A polynomial has at least one unit, one output and one grid step, at an epsilon above 0; this has "
                f"{self.features}, {self.labels}, {self.clip} and {float(self.epsilon):g}."
            )
        if max(self.reach) >= 2**31:
            raise GuaranteeError(
                f"Coefficients of {self.covers.size} samples and their noise reach {max(self.reach)} steps, which 32 "
                "bits do not hold. Choose a coarser grid."
            )

    @property
    def sensitivity(self) -> L1:
        return L1(Fraction(self._unit * coefficients_move(self.clip, self.features, self.labels)), self.adjacency)

    @property
    def scale(self) -> Fraction:
        return self.sensitivity.bound / self.epsilon

    @property
    def law(self) -> NoiseLaw:
        return NoiseLaw("scale", self.scale**2, self.grid.step**2, WIDEST, DiscreteLaplace(self.scale))

    @property
    def reach(self) -> tuple[int, int]:
        far = 4 * self.covers.size * self.clip**2 + self.law.tail()
        return -far, far

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    @property
    def device_loss(self) -> Loss:
        return Pure(self.epsilon * self.covers.size / self._unit)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, units + outputs]: a sample's units, then 1 - 2y of each output -> int32 [length]."""
        total = self.coefficients(contributions)
        found = total + noise.discrete_laplace(self.scale, like=np.zeros(self.length, np.int32)).astype(np.int64)
        return found.clip(-(2**31), 2**31 - 1).astype(np.int32)

    def coefficients(self, contributions: Array) -> Integers:
        """The sums without noise, exact."""
        units, signs = self._parts(finite_or_zero(np.asarray(contributions, np.float64), rows=True))
        h, t = np.rint(units.clip(0, 1) * self.clip), np.rint(signs.clip(-1, 1) * self.clip)
        squares = h.T @ h
        return join(2 * squares - np.diag(np.diagonal(squares)), 4 * (h.T @ t))

    def equations(self, moments: Integers, shares: float) -> tuple[Array, Array, float]:
        """G = sum h h^T and B = sum h (2y - 1)^T of `shares` releases together, and the standard deviation of the noise
        for which `models.ridge` treats them: it has half the variance off the diagonal, and here it is a quarter."""
        doubled, linear = split(moments, self.features, self.labels)
        unit, own = self.clip**2, np.diagonal(doubled)
        gram = (doubled + np.diag(own)) / 2  # off the diagonal half of what was sent
        return gram / unit, linear / (-4 * unit), math.sqrt(shares * self.law.variance / 2) / unit


KINDS: tuple[type, ...] = (PolynomialLaplace,)
"""The mechanisms of this module, for the docs and the tests that look for each of them."""
