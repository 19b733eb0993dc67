"""The statistics of the privacy tests (review, section 7): a false alarm once in a million streams, no retries."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from scipy import stats

from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Skellam

ALARM = 1e-6
FIVE_SIGMA = float(stats.norm.isf(ALARM / 2))
FAILURE = 1e-3
"""Chance that an audit's lower bound is too high."""


class Stream:
    """Uniform bytes that depend on a label only: entropy for a `SystemSource` that a test can repeat."""

    def __init__(self, label: str) -> None:
        self.label, self.calls = label, 0

    def __call__(self, count: int) -> bytes:
        self.calls += 1
        return hashlib.shake_256(f"{self.label}/{self.calls}".encode()).digest(count)


def sample(source: Any, law: Any, like: Any) -> Any:
    """Draws of this law from a source."""
    match law:
        case DiscreteLaplace(scale):
            return source.discrete_laplace(scale, like)
        case DiscreteGaussian(sigma):
            return source.discrete_gaussian(sigma, like)
        case Skellam(variance):
            return source.skellam(variance, like)
        case _:
            raise TypeError(law)


def cells(law: Any, count: int = 40) -> tuple[Any, Any]:
    """Right ends of about `count` equiprobable cells, and the probability of each; the last one has no end."""
    k = np.arange(-law.tail(60), law.tail(60) + 1)
    inside = np.cumsum(law.pmf(k))
    ends = np.unique(np.searchsorted(inside, np.arange(1, count) / count))
    return k[ends], np.diff(inside[ends], prepend=0, append=1)


def misfit(values: Any, law: Any) -> float:
    """Chi-square over its limit at a false-alarm rate of 1e-6: above 1 the values do not have this law."""
    ends, mass = cells(law)
    seen = np.bincount(np.searchsorted(ends, np.asarray(values).reshape(-1)), minlength=len(mass))
    expected = mass * np.size(values)
    good = expected > 5
    seen, expected = (np.append(part[good], part[~good].sum()) for part in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    return float(((seen - expected) ** 2 / expected).sum() / stats.chi2.isf(ALARM, len(seen) - 1))


def correlation(a: Any, b: Any) -> float:
    """In standard deviations of what independent pairs would show."""
    return abs(float(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])) * math.sqrt(np.size(a))


def at_least(hits: int, runs: int) -> float:
    """Clopper and Pearson's lower end for a probability, half of the failure rate."""
    return 0.0 if hits == 0 else float(stats.beta.ppf(FAILURE / 2, hits, runs - hits + 1))


def at_most(hits: int, runs: int) -> float:
    return 1.0 if hits == runs else float(stats.beta.ppf(1 - FAILURE / 2, hits + 1, runs - hits))


def audited_epsilon(on: int, off: int, runs: int) -> float:
    """A lower bound of the true epsilon of a pure release, from how often an event fixed beforehand happened."""
    return math.log(at_least(on, runs) / at_most(off, runs))


def audited_mu(on: int, off: int, runs: int) -> float:
    """A lower bound of the true mu of a Gaussian release."""
    return float(stats.norm.ppf(at_least(on, runs)) - stats.norm.ppf(at_most(off, runs)))
