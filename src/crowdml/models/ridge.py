"""Ridge regression from noisy second moments: the server's side of `gram`. NumPy alone, no noise, no state.

Everything here is post-processing of a release, so it costs nothing however often it is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from crowdml.arrays import Array

RULE = 0.35
"""c of the ridge c sigma sqrt(D). `ours/gram-tuning` tries it on digits drawn by code: from 0.2 to 0.7 the error there
differs by at most 0.0013 at every epsilon from 0.1 to 10."""
LEAST = 2e-5
"""The ridge without noise, as a part of the trace."""


def clean(gram: Array, deviation: float) -> tuple[Array, Array]:
    """Eigenvalues [d] of a noisy symmetric matrix, treated with the known noise, and its eigenvectors [d, d].

    The noise has `deviation` on the diagonal and 1 / sqrt(2) of it elsewhere, so its own eigenvalues fill a half circle
    of radius sqrt(2 d) deviation and spread those of the matrix. An eigenvalue l stands for v.G.v of the noise-free G
    along its eigenvector v, which is about l - 2 s^2 d h(l): s^2 = deviation^2 / 2, h the mean over all eigenvalues m
    of 1 / (l - m) (Bun, Allez, Bouchaud, Potters 2016, for additive noise), smoothed over 2 s. Never below zero.
    """
    values, vectors = np.linalg.eigh(gram)
    if deviation <= 0:
        return values.clip(min=0.0), vectors
    small = deviation / math.sqrt(2)
    apart = values[:, None] - values[None, :]
    pull = (apart / (apart * apart + (2 * small) ** 2)).mean(axis=1)
    return (values - 2 * small**2 * len(values) * pull).clip(min=0.0), vectors


def solve(gram: Array, cross: Array, deviation: float, c: float = RULE) -> Array:
    """Weights [d, labels] of (G + ridge I) W = B, by the public rule ridge = c deviation sqrt(d).

    gram [d, d] and cross [d, labels] have noise of this standard deviation on the diagonal and on cross. The ridge is
    at least LEAST of the trace, which is public too: it is a release.
    """
    return solve_each(gram, cross, deviation, (c,))[0]


def solve_each(gram: Array, cross: Array, deviation: float, rules: Sequence[float]) -> list[Array]:
    """`solve` for several c at once: the eigenvalues, which take most of the time, are found once."""
    values, vectors = clean(gram, deviation)
    ridges = [max(c * deviation * math.sqrt(len(gram)), LEAST * float(values.sum()), 1e-12) for c in rules]
    return [vectors @ ((vectors.T @ cross) / (values + ridge)[:, None]) for ridge in ridges]


def predict(weights: Array, features: Array, classes: int | None) -> Array:
    """features [n, d] -> [n]: the class with the largest score (the lowest of equals), or a number."""
    scores = np.asarray(features, np.float64) @ np.asarray(weights, np.float64)
    return scores[:, 0] if classes is None else scores.argmax(axis=1).astype(np.int32)


def error_interval(mistakes: int, tested: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval for an error rate, 95 % by default: of mistakes among rows that nothing was chosen by."""
    share = mistakes / tested
    middle = share + z * z / (2 * tested)
    half = z * math.sqrt(share * (1 - share) / tested + z * z / (4 * tested * tested))
    scale = 1 + z * z / tested
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
