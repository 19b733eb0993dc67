"""A row whose noise changes from one check-in of a device to the next."""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, namespace
from crowdml.errors import GuaranteeError
from crowdml.privacy.grid import LARGEST_CLIP
from crowdml.privacy.losses import Loss, Total
from crowdml.privacy.mechanisms.interface import Mechanism
from crowdml.privacy.mechanisms.stable import GaussianStable
from crowdml.privacy.mechanisms.sums import GridGaussian, GridLaplace
from crowdml.privacy.noise import Source
from crowdml.records import record

Schedulable = GridLaplace | GridGaussian | GaussianStable

FINEST_SHARE = 2**16
"""A share of a vector that is priced by stability is a multiple of its inverse."""


def _of(path: str) -> Any:
    """An answer that another row gives."""
    return property(attrgetter(path))


@record
class Scheduled(Mechanism):
    """A row whose noise changes from one check-in of a device to the next, by a public schedule.

    Check-in t gives `levels[t] / of` of the value, with the noise of `row`: whoever divides by this share finds the
    value under noise that is larger by as much. After the last level nothing is given, and noise alone is said.

    Guarantee: check-in by check-in that of `at(t)`, which is an ordinary row: its sensitivity is the share's, so that
    it costs share^2 rho (share * epsilon for Laplace noise). Which check-in it is depends on no sample, and all of them
    compose; `total` adds up. Proof: docs/proofs/composition.md.
    """

    row: Schedulable
    levels: tuple[int, ...]
    of: int

    def __post_init__(self) -> None:
        if not self.row.whole or not self.levels or not 0 < min(self.levels) <= max(self.levels) <= self.of:
            raise GuaranteeError(
                f"A schedule gives shares of one contribution a check-in, each from 1 to {self.of} of {self.of}; these "
                f"are {len(self.levels)} from {min(self.levels, default=0)} to {max(self.levels, default=0)}."
            )
        if (clip := self.row.clipped) is not None and not clip == self.of <= LARGEST_CLIP:
            raise GuaranteeError(f"Shares are of a clip of {clip} grid steps, at most {LARGEST_CLIP}.")

    @staticmethod
    def over(row: Schedulable, shares: Sequence[Fraction]) -> Scheduled:
        """Shares rounded down to what the row can give; it ends where one of them comes to nothing."""
        of = row.clipped or FINEST_SHARE
        levels = [math.floor(share * of) for share in shares]
        return Scheduled(row, tuple(levels[: levels.index(0)] if 0 in levels else levels), of)

    whole = True
    kind = _of("row.kind")
    grid = _of("row.grid")
    observer = _of("row.observer")
    promise = _of("row.promise")
    covers = _of("row.covers")
    law = _of("row.law")  # the same in every check-in: shares of the value change, and the noise does not
    reach = _of("row.reach")
    sensitivity = _of("_dearest.sensitivity")
    loss = _of("_dearest.loss")

    @property
    def check_ins(self) -> int:
        return len(self.levels)

    @property
    def device_loss(self) -> Loss:
        return self._dearest.device_loss

    @cached_property
    def _dearest(self) -> Mechanism:
        return self._with(max(self.levels))

    def at(self, trip: int) -> Mechanism:
        return self._with(self.levels[trip] if trip < len(self.levels) else 0)

    def _with(self, level: int) -> Mechanism:
        return self.row.given(Fraction(level, self.of))

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
        return row.blurred(row.steps(given, xp.maximum(level, 1)), noise)
