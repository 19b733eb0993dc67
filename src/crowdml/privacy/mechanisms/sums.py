"""Sums of clipped contributions: with all their noise, as a share of a cohort's, or as they are."""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

from crowdml.arrays import Array, Integers
from crowdml.errors import GuaranteeError, TaskError
from crowdml.privacy.calibration import skellam_loss
from crowdml.privacy.grid import COUNTS, Grid, Norm
from crowdml.privacy.losses import Loss, Unbounded, group
from crowdml.privacy.mechanisms.interface import (
    GaussianNoise,
    LaplaceNoise,
    Mechanism,
    NoiseLaw,
    Share,
    around,
    check_length,
    l1_of,
)
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, L2, Adjacency, Observer
from crowdml.records import record


class Sum(Mechanism):
    """A row that adds up clipped contributions: one a sample, or one in all (`whole`)."""

    clip: int  # in grid steps
    adjacency: Adjacency
    law: NoiseLaw
    norm: ClassVar[Norm] = "l2"

    def __post_init__(self) -> None:
        if self.adjacency is Adjacency.REPLACE_DEVICE and self.contributions != 1:  # a sum of several moves further
            raise GuaranteeError(
                f"A sum of {self.covers.size} clipped contributions moves by as many times 2 * {self.clip} steps if a "
                "device is replaced, and the table says once. Let the device clip one contribution (`whole`)."
            )

    @property
    def clipped(self) -> int:
        return self.clip

    @property
    def contributions(self) -> int:
        """How many clipped contributions a device has in its sum: one a sample, or one in all."""
        return 1 if self.whole else self.covers.size

    @property
    def device_loss(self) -> Loss:
        return group(self.loss, self.contributions)

    @property
    def reach(self) -> tuple[int, int]:
        return around(self.contributions * self.clip, self.law)

    def steps(self, contributions: Array, clip: int | Integers | None = None) -> Integers:
        """The sum in grid steps, each contribution clipped (to less, in a check-in that gives a share)."""
        return self.grid.sum(contributions, norm=self.norm, clip=self.clip if clip is None else clip)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        return self.blurred(self.steps(contributions), noise)


@record
class GridLaplace(LaplaceNoise, Sum):
    """Adds independent discrete Laplace noise to a sum of clipped, truncated per-sample contributions.

    Guarantee: epsilon-DP against anyone for replacing one sample of the part, per release. Each contribution is
    clipped to `clip` grid steps in the l1 norm and truncated toward zero, so the sum moves by at most 2 * clip steps,
    and the scale is 2 * clip / epsilon. Proof: docs/proofs/grid-laplace.md.
    """

    clip: int  # in grid steps
    epsilon: Fraction
    grid: Grid
    covers: Rows
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "discrete-laplace"
    whole: bool = False
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE

    norm: ClassVar[Norm] = "l1"

    @property
    def sensitivity(self) -> L1:
        return L1(Fraction(2 * self.clip), self.adjacency)

    def given(self, share: Fraction) -> GridLaplace:
        """The row of a check-in that gives this share: a smaller sensitivity under the same noise."""
        return replace(self, clip=int(share * self.clip), epsilon=share * self.epsilon)


@record
class GridGaussian(GaussianNoise, Sum):
    """Adds independent discrete Gaussian noise to a sum of clipped, truncated per-sample contributions.

    Guarantee: rho-zCDP against anyone for replacing one sample of the part, per release, in any dimension (Canonne,
    Kamath, Steinke 2020). Each contribution is clipped to `clip` grid steps in the l2 norm and truncated toward zero,
    which never raises a norm: the sum moves by at most 2 * clip steps, rounding included.
    Proof: docs/proofs/grid-gaussian.md.
    """

    clip: int  # in grid steps
    rho: Fraction
    grid: Grid
    covers: Rows
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "discrete-gaussian"
    whole: bool = False
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE

    @property
    def sensitivity(self) -> L2:
        return L2(Fraction(2 * self.clip), self.adjacency)

    def given(self, share: Fraction) -> GridGaussian:
        """The row of a check-in that gives this share: a smaller sensitivity under the same noise."""
        return replace(self, clip=int(share * self.clip), rho=share**2 * self.rho)


@record
class SkellamSum(Share, Sum):
    """Adds this device's share of Skellam noise to a sum of clipped, truncated per-sample contributions.

    Guarantee: Renyi DP at integer orders (Agarwal, Kairouz, Liu 2021) against who sees the cohort's sum, for replacing
    one sample of the part, per release. As in `GridGaussian` the sum moves by at most 2 * clip steps, rounding
    included, and shares of `honest` devices add up to Skellam noise of `honest * variance`.
    Proof: docs/proofs/skellam.md.
    """

    clip: int  # in grid steps
    variance: Fraction
    honest: int
    grid: Grid
    covers: Rows
    length: int
    promise: str
    observer: Observer = Observer.AGGREGATE
    kind: str = "skellam"
    whole: bool = False
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE

    def __post_init__(self) -> None:
        self.check_share()
        super().__post_init__()

    @property
    def sensitivity(self) -> L2:
        return L2(Fraction(2 * self.clip), self.adjacency)

    @property
    def bound(self) -> int:
        return self.contributions * self.clip

    def _loss(self, everything: bool, shares: int) -> Loss:
        l2 = (self.contributions if everything else 1) * self.sensitivity.bound
        return skellam_loss(l2, l1_of(l2, self.length), shares * self.variance)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        check_length(self.length, contributions)
        return self.blurred(self.steps(contributions), noise)


@record
class Exposed(Mechanism):
    """The sum of the contributions as it is: no noise, no guarantee. For the simulator alone.

    It exists so that a run without privacy goes through the same door, and its ledger says infinity.
    """

    sensitivity: L1 | L2
    covers: Rows
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "none"
    grid: Grid = COUNTS
    whole: bool = False

    law = None

    @property
    def reach(self) -> tuple[int, int]:
        raise TaskError("a row has no noise: the simulator runs such a task, a server does not.")

    @property
    def loss(self) -> Loss:
        return Unbounded()

    def draw(self, contributions: Array, noise: Source) -> Array:
        return contributions.sum(0)
