"""Label proportions from noisy counts: projection on the simplex, and shrinkage by the known variance of the noise.

Everything here is post-processing of a release, so it costs nothing however often it is done. No rule wins everywhere
(privacy review, section 6): where the noise outweighs what differs between batches, shrink towards the mean of all of
them; where it does not, project. Both are public: the variance stands in the task, the spread comes from the releases.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from crowdml.arrays import Array
from crowdml.errors import UnknownName

Rule = Literal["auto", "project", "shrink", "clip", "raw"]
RULES: tuple[Rule, ...] = ("auto", "project", "shrink", "clip", "raw")
SWITCH = 3.0
"""Shrink where the noise has this many times the variance of the proportions. Chosen on made-up batches alone
(Dirichlet proportions, 3 to 8 classes, b from 8 to 128, epsilon from 0.05 to 2): 2 to 4 are alike."""
LEAST = 0.001
"""What a count is clipped to from below by the published rule (Sachweh et al., line 10)."""


def project(q: Array) -> Array:
    """The nearest point of {p >= 0, sum p = 1} to each row of q [..., classes], in the l2 norm."""
    q = np.asarray(q, dtype=np.float64)
    falling = -np.sort(-q, axis=-1)
    over = (np.cumsum(falling, axis=-1) - 1) / np.arange(1, q.shape[-1] + 1)
    kept = (falling > over).sum(axis=-1, keepdims=True)
    return np.maximum(q - np.take_along_axis(over, np.maximum(kept, 1) - 1, axis=-1), 0)


def spread(counts: Array, batch: int, variance: float) -> Array:
    """tau^2 [classes]: how far proportions differ between batches, beyond what the noise alone would do.

    The variance of counts / batch over the batches, counts [h, classes], less that of the noise; never below zero.
    `variance` is that of one count's noise.
    """
    q = np.asarray(counts, dtype=np.float64) / batch
    between = q.var(axis=0, ddof=1) if len(q) > 1 else np.zeros(q.shape[-1])
    return np.maximum(between - variance / batch**2, 0)


def shrink(counts: Array, batch: int, variance: float) -> Array:
    """Proportions [h, classes] as mean + tau^2 / (tau^2 + v) (q - mean), projected; v = variance / batch^2.

    The mean is that of the batches given, so give those of one device: it is nearer to them than that of a crowd.
    """
    q = np.asarray(counts, dtype=np.float64) / batch
    noise = variance / batch**2
    between = spread(counts, batch, variance)
    kept = between / (between + noise) if noise > 0 else np.ones_like(between)
    mean = q.mean(axis=0, keepdims=True) if len(q) else q
    return project(mean + kept * (q - mean))


def proportions(counts: Array, batch: int, variance: float, rule: Rule = "auto") -> Array:
    """Noisy counts [h, classes] of batches of public size -> proportions [h, classes], on the simplex but if `raw`.

    `auto` shrinks where the variance of the noise is above SWITCH times that of the proportions, and projects
    elsewhere. `clip` is the published rule, normalised once: counts clipped to [0.001, batch], over their sum. `raw` is
    counts / batch: unbiased, so it is what sums over batches want.
    """
    counts = np.asarray(counts, dtype=np.float64)
    if rule == "auto":
        rule = "shrink" if variance / batch**2 > SWITCH * spread(counts, batch, variance).mean() else "project"
    if rule == "shrink":
        return shrink(counts, batch, variance)
    if rule == "project":
        return project(counts / batch)
    if rule == "raw":
        return counts / batch
    if rule == "clip":
        held = counts.clip(LEAST, batch)
        return held / held.sum(axis=-1, keepdims=True)
    raise UnknownName(f"no rule for noisy proportions is called {rule!r}; there are {', '.join(RULES)}.")
