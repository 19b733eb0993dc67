"""One vector that all samples made together, and that one sample moves by no more than a proven bound."""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from crowdml.arrays import Array, Integers, finite_or_zero, namespace
from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import skellam_loss
from crowdml.privacy.grid import Grid
from crowdml.privacy.losses import ZCDP, Loss
from crowdml.privacy.mechanisms.interface import (
    GaussianNoise,
    Mechanism,
    NoiseLaw,
    Share,
    around,
    check_length,
    l1_of,
    root_up,
)
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L2, Observer
from crowdml.records import record

FURTHEST = 2**24
"""In grid steps: the largest reach of a vector's entries, up to which a float32 holds every integer."""


class Stable(Mechanism):
    """A row that lets out one vector, which replacing a sample moves by at most `stability` in its own unit: a bound
    that the protocol proves of the floats it computes, not a clip.

    The vector is no sum of clipped samples, so review R8 does not apply: it is rounded to the grid, and sqrt(length)
    steps are paid for that. Entries are held within `limit` steps, so 2 sqrt(length) limit bounds it whatever the
    protocol did.
    """

    stability: Fraction
    """In the vector's own unit, in the l2 norm."""
    device_stability: Fraction
    """If all samples are replaced."""
    limit: int
    """In grid steps."""
    length: int
    law: NoiseLaw
    whole = True

    def __post_init__(self) -> None:
        if not 0 < self.stability <= self.device_stability:
            raise GuaranteeError(
                f"One sample moves the vector by {float(self.stability):g} and all of them by "
                f"{float(self.device_stability):g}: the first is above 0 and no more than the second."
            )
        if not 0 < self.limit <= FURTHEST:
            raise GuaranteeError(f"A limit of {self.limit} grid steps is outside 1 to {FURTHEST}; choose another grid.")

    @property
    def sensitivity(self) -> L2:
        return L2(self.moved(self.stability))

    def moved(self, stability: Fraction) -> Fraction:
        """In grid steps, rounding paid; entries within the limit move by twice the limit at most, and are rounded."""
        root = root_up(Fraction(self.length))
        return min(stability / self.grid.step + root, 2 * self.limit * root)

    def steps(self, contributions: Array, clip: Any = None) -> Integers:
        """Contributions [1, length]: to the nearest step, within the limit; zero where one of them is not finite."""
        check_length(self.length, contributions)
        xp = namespace(contributions)
        rows = contributions.astype(xp.result_type(contributions.dtype, xp.float32))
        steps = finite_or_zero(rows, rows=True) * (1 / float(self.grid.step))
        return xp.rint(xp.clip(steps, -self.limit, self.limit)).astype(xp.int32).sum(0, dtype=xp.int32)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        return self.blurred(self.steps(contributions), noise)


@record
class SkellamStable(Share, Stable):
    """Adds this device's share of Skellam noise to ONE vector that all samples of the part made together.

    Guarantee: as `SkellamSum`, where replacing one sample moves the vector as `Stable` says.
    Proof: docs/proofs/skellam.md.
    """

    stability: Fraction
    device_stability: Fraction
    limit: int
    variance: Fraction
    honest: int
    grid: Grid
    covers: Rows
    length: int
    promise: str
    observer: Observer = Observer.AGGREGATE
    kind: str = "skellam-stable"

    def __post_init__(self) -> None:
        self.check_share()
        super().__post_init__()

    @property
    def bound(self) -> int:
        return self.limit

    def _loss(self, everything: bool, shares: int) -> Loss:
        l2 = self.moved(self.device_stability if everything else self.stability)
        return skellam_loss(l2, l1_of(l2, self.length), shares * self.variance)


@record
class GaussianStable(GaussianNoise, Stable):
    """Adds discrete Gaussian noise to ONE vector that all samples of the part made together.

    Guarantee: rho-zCDP against anyone for replacing one sample of the part, per release, which moves the vector as
    `Stable` says. Proofs: docs/proofs/grid-gaussian.md, docs/proofs/skellam.md.
    """

    stability: Fraction
    device_stability: Fraction
    limit: int
    rho: Fraction
    grid: Grid
    covers: Rows
    length: int
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "gaussian-stable"

    @property
    def reach(self) -> tuple[int, int]:
        return around(self.limit, self.law)

    @property
    def device_loss(self) -> Loss:
        return ZCDP(self.rho * (self.moved(self.device_stability) / self.sensitivity.bound) ** 2)

    def given(self, share: Fraction) -> GaussianStable:
        """The row of a check-in that gives this share: a smaller sensitivity under the same noise."""
        if not share:
            return replace(self, rho=Fraction(0))
        slack = self.grid.step / 2**10  # for the product with the share
        one, everything = (share * bound + slack for bound in (self.stability, self.device_stability))
        smaller = self.moved(one) / self.sensitivity.bound  # rounding is paid in full
        return replace(self, stability=one, device_stability=everything, rho=smaller**2 * self.rho)
