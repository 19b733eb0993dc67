"""Which devices share masks: everyone with everyone, or, in a large cohort, each with k neighbours.

The sparse graph is a circle on which each device is joined to the k/2 before and the k/2 after it (Harary), its order
drawn by a hash of everything that was advertised (Bell et al., CCS 2020, section 3). `plan` computes k and t.

Where we differ: a lying server names the missing after it has seen the graph, so no chance may enter there. Let c_all
and c_side bound the colluders among all k and among the k/2 neighbours on one side. We ask for

    2t > k + 1 + c_all    two kinds of shares of one device are never both within reach, even if its neighbours were
                          told different lists: each honest one reveals one kind;
    t > k/2 + c_side      a survivor with no honest surviving neighbour on one side keeps its own mask. So whenever
                          every survivor's mask can be removed, each is joined to the next on the circle: the honest
                          survivors are connected, and nothing but the sum of all of them is left.

Both bounds on colluders hold for all devices at once but with probability 2^-security, even if the server tries
2^GRINDING cohorts and keys until it likes the order. Dropouts that do not depend on the order leave some device with
fewer than t neighbours with probability at most 2^-correctness; then the round is abandoned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb

import numpy as np

from crowdml.arrays import Array

COMPLETE = 200
"""Cohorts up to this size have the complete graph: the sparse one would save little."""
GRINDING = 40
"""Bits: how often a server may shuffle whom it invites before an order of the circle becomes likely that it likes."""


@dataclass(frozen=True)
class GraphPlan:
    """For one size of cohort: `neighbours` of each device, `threshold` shares to rebuild a secret, `quorum` others that
    must have signed the same survivors, and the least `survivors`. `complete` if everyone is a neighbour."""

    devices: int
    neighbours: int
    threshold: int
    quorum: int
    survivors: int
    complete: bool


@lru_cache(maxsize=256)
def plan(
    devices: int, colluders: int, survivors: int, *, security: int = 40, correctness: int = 30, complete: int = COMPLETE
) -> GraphPlan | None:
    """The plan of a cohort, or None if no threshold is both safe and within reach of the survivors.

    2 quorum > devices + colluders: two different lists of survivors cannot both find their signers, as an honest device
    signs one. On the complete graph the threshold is the same number. Above `complete` devices the graph is sparse,
    unless that would need everybody. If there is a plan for some cohort, there is one for every larger one of the same
    rates.
    """
    quorum = (devices + colluders) // 2 + 1
    if quorum > survivors - 1 or not 0 <= colluders < survivors <= devices:
        return None
    low, high = 0, (devices - 1) // 2 if devices > complete else 0  # pairs of neighbours, above `low` and up to `high`
    while high - low > 1:
        middle = (low + high) // 2
        enough = _threshold(devices, colluders, survivors, 2 * middle, security, correctness)
        low, high = (low, middle) if enough else (middle, high)
    threshold = _threshold(devices, colluders, survivors, 2 * high, security, correctness) if high else 0
    if threshold and 2 * high < devices - 1:
        return GraphPlan(devices, 2 * high, threshold, quorum, survivors, complete=False)
    return GraphPlan(devices, devices - 1, quorum, quorum, survivors, complete=True)


def _threshold(n: int, colluders: int, survivors: int, k: int, security: int, correctness: int) -> int:
    """The least safe t for k neighbours; 0 if the survivors would not reach it."""
    rare = Fraction(1, n * 2 ** (security + GRINDING + 1))  # two events, each for every device
    everywhere = _most(n - 1, colluders, k, rare)
    one_side = _most(n - 1, colluders, k // 2, rare / 2)
    threshold = max((k + 1 + everywhere) // 2 + 1, k // 2 + one_side + 1)
    too_many = k - threshold + 1  # missing neighbours
    fails = threshold > k or tail(n - 1, n - survivors, k, too_many) > Fraction(1, n * 2**correctness)
    return 0 if fails else threshold


def tail(total: int, marked: int, drawn: int, least: int) -> Fraction:
    """The probability that among `drawn` of `total`, without replacement, at least `least` are marked. Exact: devices
    and server compute the same plan on every machine."""
    return Fraction(sum(_ways(total, marked, drawn)[max(least, 0) :]), comb(total, drawn))


def _most(total: int, marked: int, drawn: int, probability: Fraction) -> int:
    """The least number that is exceeded with at most this probability."""
    allowed = probability * comb(total, drawn)
    beyond = 0
    ways = _ways(total, marked, drawn)
    for hits in range(len(ways) - 1, -1, -1):
        beyond += ways[hits]
        if beyond > allowed:
            return hits
    return 0


def _ways(total: int, marked: int, drawn: int) -> list[int]:
    """In how many ways 0, 1, ..., min(marked, drawn) of the drawn are marked."""
    least = max(0, drawn - (total - marked))
    ways = comb(marked, least) * comb(total - marked, drawn - least)
    found = [0] * least
    for hits in range(least, min(marked, drawn) + 1):
        found.append(ways)
        ways = ways * (marked - hits) * (drawn - hits) // ((hits + 1) * (total - marked - drawn + hits + 1))
    return found


def circle(ids: Sequence[str], seed: bytes) -> Array:
    """The order of the devices on the circle, as indices: sorted by the hash of seed and id."""
    drawn = [hashlib.sha256(b"crowdml/secagg/circle/1" + seed + one.encode()).digest() for one in ids]
    return np.array(sorted(range(len(ids)), key=drawn.__getitem__))


def neighbours_on(order: Array, neighbours: int) -> Array:
    """Neighbours of each device, [devices, neighbours], as indices in rising order. The relation is symmetric."""
    n = len(order)
    if neighbours >= n - 1:
        everyone = np.arange(n)
        return np.array([np.delete(everyone, one) for one in everyone]).reshape(n, n - 1)
    half = neighbours // 2
    steps = np.concatenate([np.arange(1, half + 1), -np.arange(1, half + 1)])
    found = np.empty((n, neighbours), np.int64)
    found[order] = np.sort(order[(np.arange(n)[:, None] + steps) % n], axis=1)
    return found
