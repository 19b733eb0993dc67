"""Rates behind noisy counts, each with what the noise and the choice of samples leave open, together about 95 %."""

from __future__ import annotations

import math
from dataclasses import dataclass

from crowdml.protocol import Noisy
from crowdml.task import Task
from crowdml.verdict import Verdict, verdict

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

    @property
    def rest(self) -> Estimate:
        """The accuracy, of an error rate."""
        return Estimate(1 - self.value, 1 - self.high, 1 - self.low)

    @classmethod
    def around(cls, value: float, deviation: float) -> Estimate:
        """A value with its standard deviation."""
        return cls(value, value - REACH * deviation, value + REACH * deviation)


def judged(task: Task, accuracy: Estimate, majority: float | None = None) -> Verdict | None:
    """What a noisy accuracy is worth: better than a guess is one whose whole interval is. None where noise hides it,
    and where there are no classes to guess from."""
    if task.classes is None or accuracy.hidden:
        return None
    reach, masked = (accuracy.high - accuracy.low) / 2, task.masking is not None
    return verdict(accuracy.clipped.value, classes=task.classes, majority=majority, spread=reach, masked=masked)


def share_of(noisy: Noisy, place: int) -> Estimate:
    """counts / samples, give or take: the noise's own variance, and that of a share among so many samples."""
    value = noisy.counts[place] / noisy.samples
    inside = min(1.0, max(0.0, value))
    deviation = math.sqrt(noisy.variance / noisy.samples**2 + inside * (1 - inside) / noisy.samples)
    return Estimate.around(value, deviation)
