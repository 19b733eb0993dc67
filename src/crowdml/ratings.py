"""How well what a model says fits rows with known labels, row by row. Pure functions of arrays; NumPy."""

from __future__ import annotations

import numpy as np

from crowdml.arrays import Array

BEST, WORST = 1.0, -1.0
"""The ends of a rating. One of a class is 1 or 0."""


def rate_classes(said: Array, labels: Array) -> Array:
    """[n]: 1 where the class is right, else 0. Their mean is the accuracy."""
    return (np.asarray(said) == np.asarray(labels)).astype(np.float32)


def rate_numbers(said: Array, labels: Array, least: float) -> Array:
    """[n]: 1 - |min(z, 3 y) - y| / y for a prediction z of a label y (Zhao et al., eq. 6), between -1 and 1.

    The paper prints max in the place of min, which rates every z below 3 y alike and knows no bound above it (privacy
    review, Z6). Predictions count as 0 at least, labels as `least`, which is above 0. What is not finite is rated -1.
    """
    y = np.maximum(np.asarray(labels, np.float64), least)
    z = np.asarray(said, np.float64)
    held = np.clip(np.where(np.isfinite(z), z, np.inf), 0, 3 * y)
    return (1 - np.abs(held - y) / y).clip(WORST, BEST).astype(np.float32)
