"""p-LLP as published, and what a run of it really costs. Simulation alone.

Sachweh, Boiar, Liebig: the pseudocode of section 3 in two readings, by a switch. `in_loop` is what is printed: a row
is divided by its sum after every label, so that later labels meet noise of the counts' size as proportions, and a row
in which every entry was clipped is an exact function of the counts: there is no guarantee at all (review, P1). `once`
divides when all labels have their noise. Nothing here is a mechanism of ours: the noise is floating-point noise (R5) at
the paper's scale, 1 / epsilon, and no handler, door or ledger is involved. What holds and what does not:
docs/papers/sachweh.md; the sound form: docs/protocols/proportions.md.
"""

from __future__ import annotations

import math

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.errors import TaskError

WARNING = "2ε under replace-one; protects one measurement, not a person; in_loop has no guarantee at all."
"""Printed wherever this is run (review, section 3)."""

IN_LOOP, ONCE = "in_loop", "once"
LEAST = 0.001
"""Line 10: a noisy count is not let below this, nor above the batch's size."""
FOLDS = 10
"""Folds of the paper's cross-validation: each sample is trained on in all but one."""


def batch_counts(labels: Integers, batch: int, classes: int) -> Integers:
    """How often each label occurs in each batch, labels [n] -> [h, classes], h = ceil(n / batch), as printed.

    The last batch has what is left, and its size is told exactly (P5).
    """
    starts = range(0, len(labels), batch)
    return np.array([np.bincount(labels[at : at + batch], minlength=classes) for at in starts]).reshape(-1, classes)


def noisy_proportions(counts: Integers, epsilon: float, normalise: str, chance: np.random.Generator) -> Array:
    """Lines 7 to 12 for all rows at once: counts [h, classes] -> Q [h, classes], rows that sum to one."""
    if normalise not in (IN_LOOP, ONCE):
        raise TaskError(f"normalise = {normalise!r}: choose {IN_LOOP!r}, as printed, or {ONCE!r}.")
    q = np.asarray(counts, np.float64).copy()
    m = q.sum(axis=1)
    for label in range(q.shape[1]):
        noisy = q[:, label] + chance.laplace(0.0, 1 / epsilon, len(q))
        q[:, label] = np.clip(noisy, LEAST, m)
        if normalise == IN_LOOP:
            q = q / q.sum(axis=1, keepdims=True)
    return q / q.sum(axis=1, keepdims=True)


def real_epsilon(epsilon: float, normalise: str, *, uses: int = 1) -> float:
    """What one measurement pays where it is counted `uses` times, each with noise of its own: replace-one (P2, P4).

    Of ten folds it is in nine: 18 epsilon. Infinite as printed.
    """
    return math.inf if normalise == IN_LOOP else 2 * epsilon * uses


def atoms(counts: Integers) -> Array:
    """Every value that one row of the printed pseudocode takes with a chance above zero: [2^classes, classes].

    Each label is clipped, to the least or to m; the sums that the row is divided by on the way hold the exact counts
    of the labels that have not had their turn, so what comes out tells all of them.
    """
    row = np.asarray(counts, np.float64)
    m, labels = row.sum(), len(row)
    found = np.empty((2**labels, labels))
    for number in range(2**labels):
        q = row.copy()
        for label in range(labels):
            q[label] = m if number >> label & 1 else LEAST
            q = q / q.sum()
        found[number] = q
    return found
