"""Mechanisms: randomised functions with a stated guarantee. Constants of the task, never of the data.

Each takes the *contributions* of a part, one row a sample, and bounds every row itself before it adds them up: a
handler that forgot to clip cannot break the guarantee. What a handler must see to is that row i depends on sample i
alone (and on public values).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any
from typing import Protocol as Interface

import numpy as np

from crowdml.arrays import Array, Integers, namespace
from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import gaussian_sigma, laplace_scale, skellam_loss
from crowdml.privacy.grid import COUNTS, LARGEST_CLIP, Grid
from crowdml.privacy.losses import ZCDP, Loss, Pure, Total, Unbounded, group
from crowdml.privacy.noise import LARGEST, MOST_DRAWS, Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, L2, Adjacency, Observer
from crowdml.records import record


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
    def is_drawable(self) -> bool:
        """Whether a device can draw it at all; the simulator draws any."""
        return self.most is None or self.squared <= self.most**2


def gaussian_law(sigma: Fraction, unit: Fraction) -> NoiseLaw:
    return NoiseLaw("sigma", sigma**2, unit, LARGEST)


def laplace_law(scale: Fraction, unit: Fraction) -> NoiseLaw:
    return NoiseLaw("scale", scale**2, unit, LARGEST)


def share_law(variance: Fraction, unit: Fraction, honest: int) -> NoiseLaw:
    return NoiseLaw("share", variance, unit, math.isqrt(MOST_DRAWS) * LARGEST, honest)


class Mechanism(Interface):
    """A row of a protocol's table of what may leave."""

    @property
    def kind(self) -> str:
        """Its name in task files, docs and ledger."""
        ...

    @property
    def sensitivity(self) -> L1 | L2: ...
    @property
    def grid(self) -> Grid: ...
    @property
    def loss(self) -> Loss:
        """What one release costs one sample of the part."""
        ...

    @property
    def law(self) -> NoiseLaw | None:
        """The noise on each entry; None where there is none, or where chance replaces values (randomised response)."""
        ...

    @property
    def observer(self) -> Observer: ...
    @property
    def promise(self) -> str:
        """What the owner reads."""
        ...

    @property
    def covers(self) -> Rows:
        """Which rows of the sensed batch it may use; the door holds a handler to it."""
        ...

    @property
    def device_loss(self) -> Loss:
        """What one release costs if all the samples that it covers are replaced at once (review, R10)."""
        ...

    def draw(self, contributions: Array, noise: Source) -> Integers: ...


@record
class GridLaplace:
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
    """Whether ONE contribution comes of all samples together: then it is that of the device that is replaced."""
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE

    def __post_init__(self) -> None:
        _one_of_a_device(self)

    @property
    def sensitivity(self) -> L1:
        return L1(Fraction(2 * self.clip), self.adjacency)

    @cached_property
    def scale(self) -> Fraction:
        return laplace_scale(self.sensitivity.bound, self.epsilon)

    @property
    def law(self) -> NoiseLaw:
        return laplace_law(self.scale, self.grid.step)

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    @property
    def device_loss(self) -> Loss:
        return group(self.loss, _contributions(self))

    def draw(self, contributions: Array, noise: Source) -> Integers:
        total = self.grid.sum(contributions, norm="l1", clip=self.clip)
        return total + noise.discrete_laplace(self.scale, like=total)


def _contributions(row: GridLaplace | GridGaussian | SkellamSum) -> int:
    """How many clipped contributions a device has in its sum: one a sample, or one in all."""
    return 1 if row.whole else row.covers.size


def _one_of_a_device(row: GridLaplace | GridGaussian | SkellamSum) -> None:
    """Refuse to promise a device what only holds for a sample: a sum of several contributions moves further."""
    if row.adjacency is Adjacency.REPLACE_DEVICE and _contributions(row) != 1:
        raise GuaranteeError(
            f"A sum of {row.covers.size} clipped contributions moves by as many times 2 * {row.clip} steps if a device "
            "is replaced, and the table says once. Let the device clip one contribution (`whole`)."
        )


@record
class GridGaussian:
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
    """Whether ONE contribution comes of all samples together: then it is that of the device that is replaced."""
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE

    def __post_init__(self) -> None:
        _one_of_a_device(self)

    @property
    def sensitivity(self) -> L2:
        return L2(Fraction(2 * self.clip), self.adjacency)

    @cached_property
    def sigma(self) -> Fraction:
        return gaussian_sigma(self.sensitivity.bound, self.rho)  # rounded up

    @property
    def law(self) -> NoiseLaw:
        return gaussian_law(self.sigma, self.grid.step)

    @property
    def loss(self) -> Loss:
        return ZCDP(self.rho)

    @property
    def device_loss(self) -> Loss:
        return group(self.loss, _contributions(self))

    def draw(self, contributions: Array, noise: Source) -> Integers:
        total = self.grid.sum(contributions, norm="l2", clip=self.clip)
        return total + noise.discrete_gaussian(self.sigma, like=total)


@record
class CountLaplace:
    """Adds discrete Laplace noise to counts: each sample adds one to at most one cell.

    Guarantee: epsilon-DP against anyone for replacing one sample of the part, for all cells together, per release.
    A sample in one cell at most moves a single count by 1, and several cells together by 2 (out of one, into
    another): the scale is sensitivity / epsilon. Proof: docs/proofs/discrete-laplace.md.
    """

    sensitivity: L1
    epsilon: Fraction
    covers: Rows
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "count-laplace"
    grid: Grid = COUNTS

    def __post_init__(self) -> None:
        if self.sensitivity.bound < 1:
            raise GuaranteeError(
                f"A count moves by at least 1; a sensitivity of {self.sensitivity.bound} is too small."
            )

    @cached_property
    def scale(self) -> Fraction:
        return laplace_scale(self.sensitivity.bound, self.epsilon)

    @property
    def law(self) -> NoiseLaw:
        return laplace_law(self.scale, self.grid.step)

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    @property
    def device_loss(self) -> Loss:
        return group(self.loss, self.covers.size)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, cells] of zeros and ones, at most a single one in a row."""
        cells = math.prod(contributions.shape[1:])
        if cells > 1 and self.sensitivity.bound < 2:
            raise GuaranteeError(
                f"Counts in {cells} cells move by 2 when a sample is replaced; the table says "
                f"{self.sensitivity.bound}. Put L1(2) in the row of the table."
            )
        xp = namespace(contributions)
        total = self.grid.sum(xp.where(contributions > 0, contributions, 0), norm="l1", clip=1)
        return total + noise.discrete_laplace(self.scale, like=total)


FURTHEST = 2**24
"""In grid steps: the largest reach of a vector's entries, up to which a float32 holds every integer."""


class Aggregated(Mechanism, Interface):
    """A row that leaves under masks: each device adds a share of the noise, and the cohort's sum has all of it.

    The guarantee is against whoever sees the sum, with at most the tolerated colluders among the survivors: `honest`
    shares are in it that nobody else knows. `alone` is what is left of it if everyone else colludes (review, R11):
    the noise of this device's own share.
    """

    @property
    def variance(self) -> Fraction:
        """Of one device's share, in squared grid steps."""
        ...

    @property
    def honest(self) -> int: ...
    @property
    def length(self) -> int:
        """Entries of the vector, flat."""
        ...

    @property
    def bound(self) -> int:
        """The largest entry that a device can add, before noise."""
        ...

    @property
    def alone(self) -> Loss: ...
    @property
    def device_alone(self) -> Loss: ...


def l1_of(l2: Fraction, length: int) -> Fraction:
    """How far integers can move in the l1 norm that move by l2 in the l2 norm: sqrt(length) l2, rounded up, or l2^2."""
    return min(Fraction(math.isqrt(math.ceil(length * l2 * l2)) + 1), l2 * l2)


def root_up(value: Fraction) -> Fraction:
    """The square root, rounded up by at most 2^-20; exact where it is a multiple of that."""
    scaled = math.ceil(value * 2**40)
    root = math.isqrt(scaled)
    return Fraction(root + (root * root < scaled), 2**20)


def _share(row: Aggregated) -> None:
    """Refuse a share of noise that proves nothing, or that an int32 cannot hold beside the value it is added to.

    A value that wrapped round would no longer be a summand of the sum that the proof speaks of; at 64 standard
    deviations none does.
    """
    if row.honest < 1 or row.variance <= 0 or row.length < 1:
        raise GuaranteeError(
            f"A share of noise has a variance above 0, {row.length} entries at least 1, and at least one honest device "
            f"adds one; this has a variance of {float(row.variance):g} and {row.honest} honest devices."
        )
    if row.bound + 64 * (math.isqrt(math.ceil(row.variance)) + 1) >= 2**31:
        raise GuaranteeError(
            f"A device adds up to {row.bound} grid steps and noise of {math.sqrt(row.variance):.3g}, which 32 bits do "
            "not hold. Choose a coarser grid."
        )


def _fits(row: Aggregated | GaussianStable, contributions: Array) -> None:
    """Refuse a vector of another length than the one that the table prices: the l1 sensitivity depends on it."""
    cells = math.prod(contributions.shape[1:])
    if cells != row.length:
        raise GuaranteeError(f"The table prices {row.length} entries, and this value has {cells}.")


@record
class SkellamSum:
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
    """Whether ONE contribution comes of all samples together: then it is that of the device that is replaced."""
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE

    def __post_init__(self) -> None:
        _share(self)
        _one_of_a_device(self)

    @property
    def sensitivity(self) -> L2:
        return L2(Fraction(2 * self.clip), self.adjacency)

    @property
    def law(self) -> NoiseLaw:
        return share_law(self.variance, self.grid.step, self.honest)

    @property
    def bound(self) -> int:
        return _contributions(self) * self.clip

    def _loss(self, samples: int, shares: int) -> Loss:
        l2 = samples * self.sensitivity.bound
        return skellam_loss(l2, l1_of(l2, self.length), shares * self.variance)

    @property
    def loss(self) -> Loss:
        return self._loss(1, self.honest)

    @property
    def device_loss(self) -> Loss:
        return self._loss(_contributions(self), self.honest)

    @property
    def alone(self) -> Loss:
        return self._loss(1, 1)

    @property
    def device_alone(self) -> Loss:
        return self._loss(_contributions(self), 1)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        _fits(self, contributions)
        total = self.grid.sum(contributions, norm="l2", clip=self.clip)
        return total + noise.skellam(self.variance, like=total)


@record
class SkellamCount:
    """Adds this device's share of Skellam noise to counts: each sample adds one to at most one cell.

    Guarantee: as `SkellamSum`. Replacing a sample moves a single count by 1; several by 1 in two cells, sqrt(2) in the
    l2 norm. Proof: docs/proofs/skellam.md.
    """

    sensitivity: L1
    variance: Fraction
    honest: int
    covers: Rows
    length: int
    promise: str
    observer: Observer = Observer.AGGREGATE
    kind: str = "skellam-count"
    grid: Grid = COUNTS

    def __post_init__(self) -> None:
        if self.sensitivity.bound < min(2, self.length):
            raise GuaranteeError(
                f"Counts in {self.length} cells move by {min(2, self.length)} when a sample is replaced; the table "
                f"says {self.sensitivity.bound}."
            )
        _share(self)

    @property
    def law(self) -> NoiseLaw:
        return share_law(self.variance, self.grid.step, self.honest)

    @property
    def bound(self) -> int:
        return self.covers.size

    def _loss(self, samples: int, shares: int) -> Loss:
        """Integers that move by l1 in all move by at most sqrt(l1 * most of one cell) in the l2 norm."""
        l1 = samples * self.sensitivity.bound
        return skellam_loss(root_up(l1 * samples), l1, shares * self.variance)

    @property
    def loss(self) -> Loss:
        return self._loss(1, self.honest)

    @property
    def device_loss(self) -> Loss:
        return self._loss(self.covers.size, self.honest)

    @property
    def alone(self) -> Loss:
        return self._loss(1, 1)

    @property
    def device_alone(self) -> Loss:
        return self._loss(self.covers.size, 1)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, cells] of zeros and ones, at most a single one in a row."""
        _fits(self, contributions)
        xp = namespace(contributions)
        total = self.grid.sum(xp.where(contributions > 0, contributions, 0), norm="l1", clip=1)
        return total + noise.skellam(self.variance, like=total)


@record
class SkellamStable:
    """Adds this device's share of Skellam noise to ONE vector that all samples of the part made together.

    Guarantee: as `SkellamSum`, where replacing one sample moves the vector by at most `stability` in its own unit: a
    bound that the protocol proves of the floats it computes, not a clip. The vector is no sum of clipped samples, so
    review R8 does not apply: it is rounded to the grid, and sqrt(length) steps are paid for that. Entries are held
    within `reach` steps, so 2 sqrt(length) reach bounds it whatever the protocol did. Proof: docs/proofs/skellam.md.
    """

    stability: Fraction  # in the vector's own unit, l2
    device_stability: Fraction  # all samples replaced
    reach: int  # in grid steps
    variance: Fraction
    honest: int
    grid: Grid
    covers: Rows
    length: int
    promise: str
    observer: Observer = Observer.AGGREGATE
    kind: str = "skellam-stable"

    whole = True
    """One row for all samples."""

    def __post_init__(self) -> None:
        _share(self)
        if not 0 < self.stability <= self.device_stability:
            raise GuaranteeError(
                f"One sample moves the vector by {float(self.stability):g} and all of them by "
                f"{float(self.device_stability):g}: the first is above 0 and no more than the second."
            )
        if not 0 < self.reach <= FURTHEST:
            raise GuaranteeError(f"A reach of {self.reach} grid steps is outside 1 to {FURTHEST}; choose another grid.")

    @property
    def sensitivity(self) -> L2:
        return L2(self.steps(self.stability))

    def steps(self, stability: Fraction) -> Fraction:
        """In grid steps, rounding paid; entries within the reach move by twice the reach at most, and are rounded."""
        root = root_up(Fraction(self.length))
        return min(stability / self.grid.step + root, 2 * self.reach * root)

    @property
    def law(self) -> NoiseLaw:
        return share_law(self.variance, self.grid.step, self.honest)

    @property
    def bound(self) -> int:
        return self.reach

    def _loss(self, stability: Fraction, shares: int) -> Loss:
        l2 = self.steps(stability)
        return skellam_loss(l2, l1_of(l2, self.length), shares * self.variance)

    @property
    def loss(self) -> Loss:
        return self._loss(self.stability, self.honest)

    @property
    def device_loss(self) -> Loss:
        return self._loss(self.device_stability, self.honest)

    @property
    def alone(self) -> Loss:
        return self._loss(self.stability, 1)

    @property
    def device_alone(self) -> Loss:
        return self._loss(self.device_stability, 1)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [1, length]: to the nearest step; what is not finite is zero, what is beyond `reach` held."""
        total = _rounded(self, contributions)
        return total + noise.skellam(self.variance, like=total)


def _rounded(row: SkellamStable | GaussianStable, contributions: Array) -> Integers:
    _fits(row, contributions)
    xp = namespace(contributions)
    rows = contributions.astype(xp.result_type(contributions.dtype, xp.float32))
    usable = xp.isfinite(rows)
    steps = xp.where(usable, rows, 0.0) * (1 / float(row.grid.step))
    return xp.rint(xp.clip(steps, -row.reach, row.reach)).astype(xp.int32).sum(0, dtype=xp.int32)


@record
class GaussianStable:
    """Adds discrete Gaussian noise to ONE vector that all samples of the part made together.

    Guarantee: rho-zCDP against anyone for replacing one sample of the part, per release, where that moves the vector
    by at most `stability` in its own unit; rounding to the grid is paid, as in `SkellamStable`, whose vector this is
    with all the noise on it. Proofs: docs/proofs/grid-gaussian.md, docs/proofs/skellam.md.
    """

    stability: Fraction  # in the vector's own unit, l2
    device_stability: Fraction  # all samples replaced
    reach: int  # in grid steps
    rho: Fraction
    grid: Grid
    covers: Rows
    length: int
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "gaussian-stable"

    whole = True
    """One row for all samples."""

    def __post_init__(self) -> None:
        if not 0 < self.stability <= self.device_stability or not 0 < self.reach <= FURTHEST:
            raise GuaranteeError(
                f"One sample moves the vector by {float(self.stability):g}, all by {float(self.device_stability):g}, "
                f"within {self.reach} grid steps: above 0, in this order, and at most {FURTHEST} steps."
            )

    @property
    def sensitivity(self) -> L2:
        return L2(self.steps(self.stability))

    def steps(self, stability: Fraction) -> Fraction:
        """In grid steps, rounding paid."""
        return stability / self.grid.step + root_up(Fraction(self.length))

    @cached_property
    def sigma(self) -> Fraction:
        return gaussian_sigma(self.sensitivity.bound, self.rho)  # rounded up

    @property
    def law(self) -> NoiseLaw:
        return gaussian_law(self.sigma, self.grid.step)

    @property
    def loss(self) -> Loss:
        return ZCDP(self.rho)

    @property
    def device_loss(self) -> Loss:
        return ZCDP(self.rho * (self.steps(self.device_stability) / self.sensitivity.bound) ** 2)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [1, length]: to the nearest step; what is not finite is zero, what is beyond `reach` held."""
        total = _rounded(self, contributions)
        return total + noise.discrete_gaussian(self.sigma, like=total)


FINEST_SHARE = 2**16
"""A share of a vector that is priced by stability is a multiple of its inverse."""


@record
class Scheduled:
    """A row whose noise changes from one check-in of a device to the next, by a public schedule.

    Check-in t gives `levels[t] / of` of the value, with the noise of `row`: whoever divides by this share finds the
    value under noise that is larger by as much. After the last level nothing is given, and noise alone is said.

    Guarantee: check-in by check-in that of `at(t)`, which is an ordinary row: its sensitivity is the share's, so that
    it costs share^2 rho (share * epsilon for Laplace noise). Which check-in it is depends on no sample, and all of them
    compose; `total` adds up. Proof: docs/proofs/composition.md.
    """

    row: GridLaplace | GridGaussian | GaussianStable
    levels: tuple[int, ...]
    of: int

    def __post_init__(self) -> None:
        if not self.row.whole or not self.levels or not 0 < min(self.levels) <= max(self.levels) <= self.of:
            raise GuaranteeError(
                f"A schedule gives shares of one contribution a check-in, each from 1 to {self.of} of {self.of}; these "
                f"are {len(self.levels)} from {min(self.levels, default=0)} to {max(self.levels, default=0)}."
            )
        if not isinstance(self.row, GaussianStable) and not self.row.clip == self.of <= LARGEST_CLIP:
            raise GuaranteeError(f"Shares are of a clip of {self.row.clip} grid steps, at most {LARGEST_CLIP}.")

    @staticmethod
    def over(row: GridLaplace | GridGaussian | GaussianStable, shares: Sequence[Fraction]) -> Scheduled:
        """Shares rounded down to what the row can give; it ends where one of them comes to nothing."""
        of = FINEST_SHARE if isinstance(row, GaussianStable) else row.clip
        levels = [math.floor(share * of) for share in shares]
        return Scheduled(row, tuple(levels[: levels.index(0)] if 0 in levels else levels), of)

    @property
    def kind(self) -> str:
        return self.row.kind

    @property
    def grid(self) -> Grid:
        return self.row.grid

    @property
    def observer(self) -> Observer:
        return self.row.observer

    @property
    def promise(self) -> str:
        return self.row.promise

    @property
    def covers(self) -> Rows:
        return self.row.covers

    whole = True
    """One row for all samples."""

    @property
    def law(self) -> NoiseLaw | None:
        """The noise of every check-in: shares of the value change from one to the next, and the noise does not."""
        return self.row.law

    @property
    def sensitivity(self) -> L1 | L2:
        """Of the dearest check-in, as the losses are."""
        return self._dearest.sensitivity

    @property
    def loss(self) -> Loss:
        return self._dearest.loss

    @property
    def device_loss(self) -> Loss:
        return self._dearest.device_loss

    @cached_property
    def _dearest(self) -> Mechanism:
        return self._with(max(self.levels))

    def at(self, trip: int) -> Mechanism:
        """The row that check-in number `trip` (from 0) goes through: what the ledger charges."""
        return self._with(self.levels[trip] if trip < len(self.levels) else 0)

    def _with(self, level: int) -> Mechanism:
        """A smaller sensitivity under the same noise: both are what the loss is made of, so neither is rounded."""
        row, share = self.row, Fraction(level, self.of)
        if isinstance(row, GridLaplace):
            return replace(row, clip=level, epsilon=share * row.epsilon)
        if isinstance(row, GridGaussian):
            return replace(row, clip=level, rho=share**2 * row.rho)
        if not level:
            return replace(row, rho=Fraction(0))
        slack = row.grid.step / 2**10  # for the product with the share
        one, everything = (share * bound + slack for bound in (row.stability, row.device_stability))
        smaller = row.steps(one) / row.sensitivity.bound  # rounding is paid in full
        return replace(row, stability=one, device_stability=everything, rho=smaller**2 * row.rho)

    def total(self, check_ins: int, loss: Callable[[Mechanism], Loss] = lambda row: row.loss) -> Total:
        """What so many check-ins cost at the most: the dearest ones of the schedule. Exact."""
        counted = Counter(self._by_price[:check_ins])
        return Total.of(Total.of([loss(self._with(level))]).scaled(times) for level, times in counted.items())

    @cached_property
    def _by_price(self) -> tuple[int, ...]:
        return tuple(sorted(self.levels, reverse=True))

    def share(self, trip: Any) -> Array:
        """The share of a check-in as a float32; `trip` may be traced."""
        return self._level(trip).astype(np.float32) / self.of

    def _level(self, trip: Any) -> Integers:
        xp = namespace(trip)
        place = xp.minimum(xp.asarray(trip), len(self.levels))
        return xp.asarray(self._table)[place]

    @cached_property
    def _table(self) -> Integers:
        return np.asarray([*self.levels, 0], np.int32)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        raise GuaranteeError("A scheduled row is drawn for a check-in, which this does not name. Use `draw_at`.")

    def draw_at(self, trip: Any, contributions: Array, noise: Source) -> Integers:
        """The share of the one contribution [1, ...] that check-in number `trip` gives, with the row's noise."""
        xp, row = namespace(contributions, trip), self.row
        level, share = self._level(trip), self.share(trip)
        given = xp.where(level > 0, contributions, 0) * share.astype(contributions.dtype)
        if isinstance(row, GaussianStable):
            total = _rounded(row, given)
            return total + noise.discrete_gaussian(row.sigma, like=total)
        laplace = isinstance(row, GridLaplace)
        total = row.grid.sum(given, norm="l1" if laplace else "l2", clip=xp.maximum(level, 1))
        if isinstance(row, GridLaplace):
            return total + noise.discrete_laplace(row.scale, like=total)
        return total + noise.discrete_gaussian(row.sigma, like=total)


def at(mechanism: Mechanism, trip: int) -> Mechanism:
    """What a row is in a device's check-in number `trip`, from 0: itself, but for a scheduled one."""
    return mechanism.at(trip) if isinstance(mechanism, Scheduled) else mechanism


def paid(mechanism: Mechanism, check_ins: int, loss: Callable[[Mechanism], Loss] = lambda row: row.loss) -> Total:
    """What so many check-ins cost in one row of the table, at the most."""
    if isinstance(mechanism, Scheduled):
        return mechanism.total(check_ins, loss)
    return Total.of([loss(mechanism)]).scaled(check_ins)


@record
class RandomisedResponse:
    """Says each sample's label, or, with a public probability, another one drawn evenly.

    Guarantee: epsilon-DP against anyone for replacing one sample, per release: the true label is kept with
    probability e^epsilon / (e^epsilon + classes - 1), rounded down to a multiple of 2^-30.
    Proof: docs/proofs/randomised-response.md.
    """

    classes: int
    epsilon: Fraction
    covers: Rows
    promise: str
    observer: Observer = Observer.ANYONE
    kind: str = "randomised-response"
    grid: Grid = COUNTS

    def __post_init__(self) -> None:
        unproved = self.classes < 2 or not Fraction(1, 10**6) <= self.epsilon <= 64
        if unproved or self.keep * self.classes < 1:  # rounded down, the truth would be rarer than each lie
            raise GuaranteeError(
                f"Randomised response over {self.classes} classes at epsilon {float(self.epsilon):g}: "
                "it needs at least two classes and an epsilon from 1e-6 to 64, where its 30 bits prove what it says."
            )

    @property
    def keep(self) -> Fraction:
        """Rounded down: a little more noise than needed, never less."""
        odds = math.exp(-float(self.epsilon))
        return Fraction(math.floor(2**30 / (1 + (self.classes - 1) * odds) * (1 - 1e-12)), 2**30)

    @property
    def law(self) -> None:
        return None

    @property
    def sensitivity(self) -> L1:
        return L1(Fraction(2))

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    @property
    def device_loss(self) -> Loss:
        return group(self.loss, self.covers.size)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Labels [b] -> labels [b]. A label outside 0 to classes - 1 is answered as label 0."""
        xp = namespace(contributions)
        known = (contributions >= 0) & (contributions < self.classes)
        labels = xp.where(known, contributions, 0).astype(xp.int32)
        kept = noise.uniform_below(2**30, like=labels) < self.keep.numerator * (2**30 // self.keep.denominator)
        other = (labels + 1 + noise.uniform_below(self.classes - 1, like=labels)) % self.classes
        return xp.where(kept, labels, other)


@record
class Exposed:
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
    """Whether it takes one row for all samples."""

    @property
    def law(self) -> None:
        return None

    @property
    def loss(self) -> Loss:
        return Unbounded()

    @property
    def device_loss(self) -> Loss:
        return Unbounded()

    def draw(self, contributions: Array, noise: Source) -> Array:
        return contributions.sum(0)


KINDS: tuple[type, ...] = (
    GridLaplace,
    GridGaussian,
    CountLaplace,
    SkellamSum,
    SkellamCount,
    SkellamStable,
    GaussianStable,
    RandomisedResponse,
    Exposed,
)
"""Every mechanism, for the docs and the tests that look for each of them."""
