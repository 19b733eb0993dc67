"""What every mechanism answers, the law of its noise, and what rows under masks have in common."""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import gaussian_sigma, laplace_scale
from crowdml.privacy.grid import Grid
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Law, Skellam
from crowdml.privacy.losses import ZCDP, Loss, Pure, Total, group
from crowdml.privacy.noise import LARGEST, MOST_DRAWS, Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, L2, Observer
from crowdml.records import record

SIGMAS = 6
"""Standard deviations of a cohort's noise by which an entry of an honest sum may leave the public bound."""


@record
class NoiseLaw:
    """The noise that one device adds to each entry of what it releases: what people and programs are shown of it."""

    parameter: str
    """How the literature names its width: "sigma", "scale" (b of a Laplace law), or "share" (the standard deviation of
    one device's part of a cohort's noise)."""
    squared: Fraction
    """The width in steps, squared: a share is known by its variance, and that is exact."""
    unit: Fraction
    """The size of one step, in the unit of the value that the mechanism releases."""
    most: int | None
    """The largest width in steps that `SystemSource` draws; None: the mechanism draws larger ones in parts."""
    drawn: Law
    """The law of an entry's noise, in steps."""
    honest: int | None = None
    """Devices whose shares are in a published sum, at least; None: all of the noise is this device's own."""

    @property
    def steps(self) -> float:
        """The width in steps of the grid."""
        return math.sqrt(self.squared)

    @property
    def size(self) -> float:
        """The width in the unit of the value."""
        return self.steps * float(self.unit)

    @property
    def size_in_sum(self) -> float:
        """The width of the noise in a cohort's sum, at least, in the unit of the value."""
        return math.sqrt(self.honest or 1) * self.size

    @property
    def variance(self) -> float:
        """The variance of the noise on one entry, in squared steps."""
        return float(self.drawn.variance)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on one entry, in the unit of the value."""
        return math.sqrt(self.variance) * float(self.unit)

    def tail(self, bits: int = 64) -> int:
        """In steps: noise beyond it has a chance below 2^-bits."""
        return self.drawn.tail(bits)

    @property
    def is_drawable(self) -> bool:
        """Whether a device can draw it at all; the simulator draws any."""
        return self.most is None or self.squared <= self.most**2


class Mechanism:
    """A row of a protocol's table of what may leave. All rows answer the same questions: nobody has to ask which kind
    one is. The answers here are those of a row that has all its noise itself, and the same in every check-in."""

    kind: str
    """Its name in task files, docs and ledger."""
    sensitivity: L1 | L2
    grid: Grid
    observer: Observer
    promise: str
    """What the owner reads."""
    covers: Rows
    """Which rows of the sensed batch it may use; the door holds a handler to it."""
    loss: Loss
    """What one release costs one sample of the part."""
    law: NoiseLaw | None
    """The noise on each entry; None where there is none, or where chance replaces values (randomised response)."""
    reach: tuple[int, int]
    """The least and the most that an honest entry can be, in steps. Noise goes beyond with a chance below 2^-64."""
    whole: bool = False
    """Whether the samples make ONE contribution together; else each makes its own."""
    public: bool = False
    """Whether it is for public rows of the server's own alone: it hides nothing."""

    @property
    def clipped(self) -> int | None:
        """How long a contribution may be, in grid steps; None where it is not clipped."""
        return None

    @property
    def device_loss(self) -> Loss:
        """What one release costs if all the samples that it covers are replaced at once (review, R10)."""
        return group(self.loss, self.covers.size)

    @property
    def alone(self) -> Loss:
        """What one release costs a sample if everyone else colludes (review, R11)."""
        return self.loss

    @property
    def device_alone(self) -> Loss:
        """What one release costs if everyone else colludes and all samples are replaced at once."""
        return self.device_loss

    @property
    def noise_variance(self) -> float:
        """The variance of the noise that one device adds to an entry, in squared steps; 0 where it adds none."""
        return 0.0 if self.law is None else self.law.variance

    def reach_of_sum(self, cohort: int) -> int:
        """How far from zero an entry of the sum over so many honest devices can lie, in steps."""
        return cohort * max(abs(end) for end in self.reach)

    @property
    def check_ins(self) -> int | None:
        """How many check-ins of a device have a value in them, where a public schedule says so (`Scheduled`)."""
        return None

    @property
    def scheduled(self) -> bool:
        """Whether some check-ins of a device cost more than others."""
        return self.check_ins is not None

    def at(self, trip: int) -> Mechanism:
        """The row that check-in number `trip` (from 0) of a device goes through: what the ledger charges."""
        return self

    def share(self, trip: Any) -> Array:
        """The share of its value that check-in number `trip` gives, as a float32; `trip` may be traced."""
        return np.float32(1)

    def total(self, check_ins: int, loss: Callable[[Mechanism], Loss] = lambda row: row.loss) -> Total:
        """What so many check-ins cost at the most, in their `loss` or in another of the row's losses."""
        return Total.of([loss(self)]).scaled(check_ins)

    def blurred(self, total: Integers, noise: Source) -> Integers:
        """What the samples come to, in grid steps, with the row's noise."""
        raise NotImplementedError

    def draw(self, contributions: Array, noise: Source) -> Integers:
        raise NotImplementedError

    def draw_at(self, trip: Any, contributions: Array, noise: Source) -> Integers:
        """What check-in number `trip` of a device lets out."""
        return self.draw(contributions, noise)


def around(middle: int | tuple[int, int], law: NoiseLaw) -> tuple[int, int]:
    """The least and the most of an entry that lies within (low, high), or so far from zero, before noise."""
    low, high = middle if isinstance(middle, tuple) else (-middle, middle)
    far = law.tail()
    return low - far, high + far


class LaplaceNoise(Mechanism):
    """A row with discrete Laplace noise on each entry: epsilon-DP at the scale sensitivity / epsilon."""

    epsilon: Fraction

    @cached_property
    def scale(self) -> Fraction:
        return laplace_scale(self.sensitivity.bound, self.epsilon)

    @property
    def law(self) -> NoiseLaw:
        return NoiseLaw("scale", self.scale**2, self.grid.step, LARGEST, DiscreteLaplace(self.scale))

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    def blurred(self, total: Integers, noise: Source) -> Integers:
        return total + noise.discrete_laplace(self.scale, like=total)


class GaussianNoise(Mechanism):
    """A row with discrete Gaussian noise on each entry: rho-zCDP."""

    rho: Fraction

    @cached_property
    def sigma(self) -> Fraction:
        return gaussian_sigma(self.sensitivity.bound, self.rho)  # rounded up

    @property
    def law(self) -> NoiseLaw:
        return NoiseLaw("sigma", self.sigma**2, self.grid.step, LARGEST, DiscreteGaussian(self.sigma))

    @property
    def loss(self) -> Loss:
        return ZCDP(self.rho)

    def blurred(self, total: Integers, noise: Source) -> Integers:
        return total + noise.discrete_gaussian(self.sigma, like=total)


class Share(Mechanism):
    """A row that leaves under masks: each device adds a share of the noise, and the cohort's sum has all of it.

    The guarantee is against whoever sees the sum, with at most the tolerated colluders among the survivors: `honest`
    shares are in it that nobody else knows. `alone` is what is left of it if everyone else colludes (review, R11):
    the noise of this device's own share.
    """

    variance: Fraction
    """The variance of one device's share, in squared grid steps."""
    honest: int
    length: int
    """Entries of the vector, flat."""
    bound: int
    """The largest entry that a device can add, before noise."""

    def _loss(self, everything: bool, shares: int) -> Loss:
        """What this many shares of noise prove, for one sample or for `everything` that a device gives."""
        raise NotImplementedError

    @property
    def loss(self) -> Loss:
        return self._loss(False, self.honest)

    @property
    def device_loss(self) -> Loss:
        return self._loss(True, self.honest)

    @property
    def alone(self) -> Loss:
        return self._loss(False, 1)

    @property
    def device_alone(self) -> Loss:
        return self._loss(True, 1)

    @property
    def law(self) -> NoiseLaw:
        most = math.isqrt(MOST_DRAWS) * LARGEST
        return NoiseLaw("share", self.variance, self.grid.step, most, Skellam(self.variance), self.honest)

    @property
    def reach(self) -> tuple[int, int]:
        return around(self.bound, self.law)

    def blurred(self, total: Integers, noise: Source) -> Integers:
        return total + noise.skellam(self.variance, like=total)

    def reach_of_sum(self, cohort: int) -> int:
        return cohort * self.bound + self.slack_of_sum(cohort)

    def slack_of_sum(self, cohort: int) -> int:
        """How much the noise of so many devices adds to an entry, in steps: six standard deviations."""
        return SIGMAS * (math.isqrt(math.ceil(cohort * self.variance)) + 1)

    def check_share(self) -> None:
        """Refuse a share of noise that proves nothing, or that an int32 cannot hold beside the value it is added to.

        A value that wrapped round would no longer be a summand of the sum that the proof speaks of; at 64 standard
        deviations none does.
        """
        if self.honest < 1 or self.variance <= 0 or self.length < 1:
            raise GuaranteeError(
                f"A share of noise has a variance above 0, {self.length} entries at least 1, and at least one honest "
                f"device adds one; this has a variance of {float(self.variance):g} and {self.honest} honest devices."
            )
        if self.bound + 64 * (math.isqrt(math.ceil(self.variance)) + 1) >= 2**31:
            raise GuaranteeError(
                f"A device adds up to {self.bound} grid steps and noise of {math.sqrt(self.variance):.3g}, which 32 "
                "bits do not hold. Choose a coarser grid."
            )


def check_length(length: int, contributions: Array) -> None:
    """Refuse a vector of another length than the one that the table prices: the l1 sensitivity depends on it."""
    cells = math.prod(contributions.shape[1:])
    if cells != length:
        raise GuaranteeError(f"The table prices {length} entries, and this value has {cells}.")


def l1_of(l2: Fraction, length: int) -> Fraction:
    """How far integers can move in the l1 norm that move by l2 in the l2 norm: sqrt(length) l2, rounded up, or l2^2."""
    return min(Fraction(math.isqrt(math.ceil(length * l2 * l2)) + 1), l2 * l2)


def root_up(value: Fraction) -> Fraction:
    """The square root, rounded up by at most 2^-20; exact where it is a multiple of that."""
    scaled = math.ceil(value * 2**40)
    root = math.isqrt(scaled)
    return Fraction(root + (root * root < scaled), 2**20)
