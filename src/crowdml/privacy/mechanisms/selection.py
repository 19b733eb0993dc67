"""The exponential mechanism: choose K of M by their scores on private rows. Drawn exactly; no float takes part.

The draw peels (McSherry and Talwar 2007; K draws without replacement): each takes one of those that are left with a
probability proportional to exp(-gamma gap), where the gap is how far its score is below the best one, in grid steps.

How it is exact. Weights are irrational, so each is kept as a whole number w of units of 2^-76 and what that leaves off,
between 0 and 2 units. A uniform whole number below sum(w) + 2n is drawn. Below sum(w) it falls on one candidate. Above,
it names one of the n candidates, which is taken with half the probability of what its w leaves off: that is compared
with as many bits as it takes. Otherwise all begins anew. So a candidate is taken with a probability proportional to
its weight, in all its digits. Proof: docs/proofs/exponential.md.
"""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import groupby

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.errors import GuaranteeError
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.laws import exp_minus
from crowdml.privacy.losses import Loss, Pure
from crowdml.privacy.mechanisms.interface import Mechanism
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, Observer
from crowdml.records import record

BITS = 76
"""A weight is a whole number of units of 2^-BITS of the largest."""
SPARE = 16
"""Weights are computed anew, from the best that is left, once what they leave off may be above 2^-SPARE of them."""
WORDS = 4096
"""Words of 31 bits that are drawn at once."""
PART = 1 << 22
"""Scores that are added up at once."""


@record
class Selection(Mechanism):
    """Chooses `keep` of M candidates by scores: sums over rows, each of which adds `low` to `high` steps to a score.

    Guarantee: epsilon-DP against anyone who sees the choice, for replacing one row, per release. Each of the `keep`
    draws is (epsilon / keep)-DP, given those before it, and they add up. Replacing a row moves every score by at most
    `high` - `low` steps; a larger `sensitivity` makes the choice more even. Entry m of row i depends on row i and on
    public values, such as uploads. Proof: docs/proofs/exponential.md.
    """

    keep: int
    low: int
    high: int
    sensitivity: L1
    epsilon: Fraction
    covers: Rows
    promise: str
    grid: Grid = COUNTS
    observer: Observer = Observer.ANYONE
    kind: str = "exponential"

    law = None

    def __post_init__(self) -> None:
        if not self.low < self.high or self.sensitivity.bound < self.high - self.low:
            raise GuaranteeError(
                f"A row adds {self.low} to {self.high} steps to a score, so replacing it moves one by up to "
                f"{self.high - self.low}; the table says {self.sensitivity.bound}."
            )
        if self.keep < 1 or self.epsilon <= 0:
            raise GuaranteeError(
                f"An exponential mechanism keeps at least one candidate at an epsilon above 0; this one keeps "
                f"{self.keep} at {float(self.epsilon):g}."
            )

    @property
    def loss(self) -> Loss:
        return Pure(self.epsilon)

    @property
    def reach(self) -> tuple[int, int]:
        return 0, 2**31 - 1

    @property
    def gamma(self) -> Fraction:
        """A candidate's chance in one draw falls by exp(gamma) for each step that its score is lower."""
        return self.epsilon / (2 * self.keep * self.sensitivity.bound)

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """Contributions [b, M] of each row to each score -> int64 [keep], the places of those chosen, in order."""
        return np.sort(np.asarray(peel(self.scores(contributions), self.keep, self.gamma, noise), np.int64))

    def scores(self, contributions: Array) -> Integers:
        """[b, M] -> int64 [M], in grid steps. What is not finite is as low as a row can say."""
        rows = np.asarray(contributions)
        total = np.zeros(rows.shape[1:], np.int64)
        size = max(1, PART // max(1, total.size))
        for start in range(0, len(rows), size):
            some = rows[start : start + size].astype(np.float64) / float(self.grid.step)
            held = np.clip(np.rint(np.where(np.isfinite(some), some, self.low)), self.low, self.high)
            total += held.astype(np.int64).sum(0)
        return total


def peel(scores: Sequence[int] | Integers, keep: int, gamma: Fraction, noise: Source) -> list[int]:
    """The places of `keep` candidates in the order in which they were drawn, each with a probability proportional to
    exp(gamma score) among those that are left. O(M log M + K log M).

    Without noise (`Silence`) they are the best, the earlier one of equals.
    """
    if not 1 <= keep <= len(scores):
        raise GuaranteeError(f"{keep} of {len(scores)} candidates are asked for: at least 1, at most all of them.")
    bits, left = _bits(noise), _Left(scores, gamma)
    return [left.take(bits) for _ in range(keep)]


def peel_plainly(scores: Sequence[int] | Integers, keep: int, gamma: Fraction, noise: Source) -> list[int]:
    """`peel` without a tree, O(K M), for tests: it adds up all weights, as enclosed fractions, before each draw."""
    bits, places = _bits(noise), list(range(len(scores)))
    found = list[int]()
    for _ in range(keep):
        best = max(int(scores[place]) for place in places)
        gaps = [best - int(scores[place]) for place in places]
        found.append(places.pop(_enclosed(gaps, gamma, bits)))
    return found


def _enclosed(gaps: Sequence[int], gamma: Fraction, bits: Callable[[int], int]) -> int:
    """The first place up to which weights make up more than a uniform share of them all."""
    count, drawn = 64, bits(64)
    while True:
        low, below = [exp_minus(gap * gamma, count) for gap in gaps], 0
        for place, each in enumerate(low):
            above, total = below + each, sum(low)
            # share in [drawn, drawn + 1) 2^-count of a total in [total, total + 2 M]
            if (drawn + 1) * (total + 2 * len(gaps)) <= above << count:
                if place == 0 or drawn * total >= below + 2 * place << count:
                    return place
                break
            below = above
        drawn, count = drawn << 64 | bits(64), count + 64


class _Left:
    """Candidates that are left, those of one score together, and a tree of their weights.

    The tree holds a window of scores from the best on: candidates below it have weights of 0 units.
    """

    def __init__(self, scores: Sequence[int] | Integers, gamma: Fraction) -> None:
        values = np.asarray(scores, np.int64)
        order = np.argsort(-values, kind="stable").tolist()
        ranked = [(score, list(those)) for score, those in groupby(order, values.tolist().__getitem__)]
        self.scores = [score for score, _ in ranked]
        self.members = [those[::-1] for _, those in ranked]  # the earliest last, where one is taken off
        self.gamma, self.count, self.first = gamma, len(order), 0
        self.weights = _Weights(gamma)
        self._plant()

    def _plant(self) -> None:
        """Weigh those that are left against the best of them."""
        while not self.members[self.first]:
            self.first += 1
        best, units = self.scores[self.first], list[int]()
        for place in range(self.first, len(self.scores)):
            units.append(self.weights.units(best - self.scores[place]))
            if not units[-1]:
                break
        self.best, self.units = best, units
        self.size = 1 << max(0, len(units) - 1).bit_length()
        self.tree = [0] * (2 * self.size)
        for place, each in enumerate(units):
            self.tree[self.size + place] = each * len(self.members[self.first + place])
        for node in range(self.size - 1, 0, -1):
            self.tree[node] = self.tree[2 * node] + self.tree[2 * node + 1]

    def take(self, bits: Callable[[int], int]) -> int:
        """Draw one, and take it off."""
        if self.tree[1] < self.count << SPARE + 1:
            self._plant()
        tree, total = self.tree, self.tree[1] + 2 * self.count
        length = total.bit_length()
        while True:
            drawn = bits(length)
            if drawn >= total:
                continue
            if drawn >= tree[1]:
                group = self._by_rest(bits, (drawn - tree[1]) // 2)
                if group is None:
                    continue
                return self._remove(*group)
            node = 1
            while node < self.size:
                node *= 2
                if drawn >= tree[node]:
                    drawn -= tree[node]
                    node += 1
            place = node - self.size
            return self._remove(self.first + place, drawn // self.units[place])

    def _by_rest(self, bits: Callable[[int], int], number: int) -> tuple[int, int] | None:
        """Where candidate `number` of those left stands, if what its units leave off takes it; else None."""
        group = self.first
        while number >= len(self.members[group]):
            number -= len(self.members[group])
            group += 1
        place = group - self.first
        units = self.units[place] if place < len(self.units) else 0
        return (group, number) if self.weights.rest_takes(self.best - self.scores[group], units, bits) else None

    def _remove(self, group: int, number: int) -> int:
        """Take off the candidate that stands `number` before the end of its group."""
        those, place = self.members[group], group - self.first
        at = len(those) - 1 - number
        those[at], those[-1] = those[-1], those[at]
        self.count -= 1
        if place < len(self.units):
            node, units = self.size + place, self.units[place]
            while node:
                self.tree[node] -= units
                node //= 2
        return those.pop()


class _Weights:
    """exp(-gamma gap) in units of 2^-BITS, never above it and less than 2 units below it."""

    def __init__(self, gamma: Fraction) -> None:
        self.gamma = gamma
        self.last = int((BITS + 1) / gamma) + 1  # from here on it is below half a unit
        self.block = 1 << (self.last.bit_length() + 1) // 2
        self.short: dict[int, int] = {}
        self.long: dict[int, int] = {}

    def units(self, gap: int) -> int:
        """A product of two table entries, each at most 2 units of 2^-(BITS + 8) too small."""
        if gap >= self.last:
            return 0
        high, low = divmod(gap, self.block)
        return self._entry(self.long, high, self.block) * self._entry(self.short, low, 1) >> BITS + 16

    def _entry(self, table: dict[int, int], number: int, times: int) -> int:
        if number not in table:
            table[number] = exp_minus(number * times * self.gamma, BITS + 8)
        return table[number]

    def rest_takes(self, gap: int, units: int, bits: Callable[[int], int]) -> bool:
        """Whether a uniform number of units, from 0 to 2, is below what `units` leave off."""
        more, drawn = 31, bits(32)
        while True:
            low = exp_minus(gap * self.gamma, BITS + more) - (units << more)
            if drawn < low:
                return True
            if drawn >= low + 2:
                return False
            drawn, more = drawn << 31 | bits(31), more + 31


def _bits(noise: Source) -> Callable[[int], int]:
    """Uniform bits, as a whole number."""

    def words() -> Iterator[int]:
        like = np.zeros(WORDS, np.int32)
        while True:
            yield from np.asarray(noise.uniform_below(2**31, like)).tolist()

    stream = words()

    def bits(count: int) -> int:
        found = 0
        for _ in range(-(-count // 31)):
            found = found << 31 | next(stream)
        return found >> -count % 31

    return bits
