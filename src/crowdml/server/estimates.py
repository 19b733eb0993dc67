"""Rates behind noisy counts, each with what the noise and the choice of samples leave open, together about 95 %."""

from __future__ import annotations

import math
from dataclasses import dataclass

from crowdml.protocol import Noisy

__all__ = ["REACH", "Estimate", "share_of"]

REACH = 2.12
"""Standard deviations to either side: 95 % of one Laplace draw, and a little more of a sum of them."""


@dataclass(frozen=True)
class Estimate:
    """A rate between 0 and 1 as noisy counts show it: nothing is cut off at 0 or 1. People are shown `clipped`."""

    value: float
    low: float
    high: float

    @property
    def hidden(self) -> bool:
        """Whether the interval rules nothing out: the noise hides the rate."""
        return self.low <= 0 and self.high >= 1

    @property
    def clipped(self) -> Estimate:
        """This estimate, clipped to [0, 1]: noise can lead beyond it, but no rate is there."""
        return Estimate(*(min(1.0, max(0.0, each)) for each in (self.value, self.low, self.high)))

    @classmethod
    def around(cls, value: float, deviation: float) -> Estimate:
        """A value with its standard deviation."""
        return cls(value, value - REACH * deviation, value + REACH * deviation)


def share_of(noisy: Noisy, place: int) -> Estimate:
    """counts / samples, give or take: the noise's own variance, and that of a share among so many samples."""
    value = noisy.counts[place] / noisy.samples
    inside = min(1.0, max(0.0, value))
    deviation = math.sqrt(noisy.variance / noisy.samples**2 + inside * (1 - inside) / noisy.samples)
    return Estimate.around(value, deviation)
