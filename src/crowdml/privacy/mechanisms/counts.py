"""Counts, in which a sample is in one cell at most, and labels that are said with a chance of being wrong."""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

import math
from fractions import Fraction

from crowdml.arrays import Array, Integers, namespace
from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import skellam_loss
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.losses import Loss, Pure
from crowdml.privacy.mechanisms.interface import LaplaceNoise, Mechanism, Share, around, check_length, root_up
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, Observer
from crowdml.records import record


@record
class CountLaplace(LaplaceNoise):
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

    @property
    def reach(self) -> tuple[int, int]:
        return around((0, self.covers.size), self.law)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, cells] of zeros and ones, at most a single one in a row."""
        cells = math.prod(contributions.shape[1:])
        if cells > 1 and self.sensitivity.bound < 2:
            raise GuaranteeError(
                f"Counts in {cells} cells move by 2 when a sample is replaced; the table says "
                f"{self.sensitivity.bound}. Put L1(2) in the row of the table."
            )
        return self.blurred(counted(contributions), noise)


@record
class SkellamCount(Share):
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
        self.check_share()

    @property
    def bound(self) -> int:
        return self.covers.size

    def _loss(self, everything: bool, shares: int) -> Loss:
        """Integers that move by l1 in all move by at most sqrt(l1 * most of one cell) in the l2 norm."""
        samples = self.covers.size if everything else 1
        l1 = samples * self.sensitivity.bound
        return skellam_loss(root_up(l1 * samples), l1, shares * self.variance)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, cells] of zeros and ones, at most a single one in a row."""
        check_length(self.length, contributions)
        return self.blurred(counted(contributions), noise)


def counted(contributions: Array) -> Integers:
    """[b, cells] of zeros and ones -> [cells]: a row with more than a single one counts as zero."""
    return COUNTS.sum(namespace(contributions).where(contributions > 0, contributions, 0), norm="l1", clip=1)


@record
class RandomisedResponse(Mechanism):
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

    law = None

    @property
    def reach(self) -> tuple[int, int]:
        return 0, self.classes - 1

    @property
    def sensitivity(self) -> L1:
        return L1(Fraction(2))

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Labels [b] -> labels [b]. A label outside 0 to classes - 1 is answered as label 0."""
        xp = namespace(contributions)
        known = (contributions >= 0) & (contributions < self.classes)
        labels = xp.where(known, contributions, 0).astype(xp.int32)
        kept = noise.uniform_below(2**30, like=labels) < self.keep.numerator * (2**30 // self.keep.denominator)
        other = (labels + 1 + noise.uniform_below(self.classes - 1, like=labels)) % self.classes
        return xp.where(kept, labels, other)
