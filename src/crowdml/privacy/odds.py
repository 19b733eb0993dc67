"""What (epsilon, delta) means in plain numbers: how often a guess about an even bet can be right at the most.

Somebody finds it as likely as not that the data is D rather than its neighbour D', sees what was released, and guesses.
With p the chance to say D where it is D, and q where it is D', the guess is right with probability (1 + p - q) / 2.
(epsilon, delta)-DP demands p <= e^epsilon q + delta and 1 - q <= e^epsilon (1 - p) + delta; the most that both allow is
at p = 1 - q = (e^epsilon + delta) / (1 + e^epsilon), which is then also how often the guess is right.
"""

from __future__ import annotations

import math

from crowdml.records import record

STRONG, FAIR, WEAK = 0.75, 0.90, 0.999
"""A promise up to these odds is called so: epsilon 1.1, 2.2 and 6.9 at a small delta. Beyond, it says nothing."""


def certainty(epsilon: float, delta: float) -> float:
    """How often a guess about an even bet can be right, at most, after a release that is (epsilon, delta)-DP."""
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


@record
class Odds:
    """The most often that a guess can be right, and how to speak of it."""

    right: float

    @property
    def shown(self) -> float:
        """Rounded up to a tenth of a hundredth, for a bound that is rounded down is none. Never 1: see `strength`."""
        return min(WEAK, math.ceil(self.right * 1000 - 1e-9) / 1000)

    @property
    def strength(self) -> str:
        """Which words fit: "strong", "fair", "weak"; "none" where a guess may be right more than 99.9 % of the time."""
        if self.right > WEAK:
            return "none"
        return "strong" if self.right <= STRONG else "fair" if self.right <= FAIR else "weak"

    @property
    def sentence(self) -> str:
        """For a terminal: what a guess about one sample is worth after all that a device sends to a study."""
        said = "In plain numbers: a guess about one sample that is right half of the time by chance"
        if self.strength == "none":
            return f"{said} may be right more than 99.9 % of the time after all that is sent: hardly a promise."
        return f"{said} is right at most {100 * self.shown:.1f} % of the time after all that is sent."


def odds(epsilon: float, delta: float) -> Odds:
    """The odds of a guess about an even bet, for people: the one place where an epsilon becomes a percentage."""
    return Odds(certainty(epsilon, delta))
