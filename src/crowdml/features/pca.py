"""Principal components as a public artefact: fitted on public rows once, then applied by every device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import DataError
from crowdml.features.norms import normalise

_BLOCK = 8192  # rows converted to float64 at a time, so that 60,000 images need no second copy in memory


@dataclass(frozen=True)
class Pca:
    """x -> (x - mean) @ components, with mean [d], components [d, k] orthonormal columns, variance [k] descending.

    Guarantee (review, R4): the three arrays depend on the rows given to `fit` and on nothing else, so fitted on public
    rows they cost no privacy. Signs are fixed: the entry of largest magnitude in each component is positive.
    """

    mean: NDArray[np.float64]
    components: NDArray[np.float64]
    variance: NDArray[np.float64]

    @classmethod
    def fit(cls, x: NDArray[Any], dimension: int) -> Pca:
        """The `dimension` leading eigenvectors of the covariance of x [n, d], in float64."""
        n, d = x.shape
        if not 1 <= dimension <= min(n - 1, d):
            raise DataError(
                f"PCA to {dimension} dimensions is not possible from {n} rows of {d} features; "
                f"ask for 1 to {max(min(n - 1, d), 0)}."
            )
        if not np.isfinite(x).all():
            raise DataError("PCA was given rows with entries that are not finite; drop them or make them zero first.")
        mean = x.mean(axis=0, dtype=np.float64)
        covariance = np.zeros((d, d))
        for block in _blocks(x):
            centred = block - mean
            covariance = covariance + centred.T @ centred
        values, vectors = np.linalg.eigh(covariance / n)
        leading = vectors[:, ::-1][:, :dimension]
        peak = leading[np.abs(leading).argmax(axis=0), np.arange(dimension)]
        return cls(mean, leading * np.where(peak < 0, -1.0, 1.0), values[::-1][:dimension].clip(min=0.0))

    def transform(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """x [n, d] -> [n, k]."""
        if x.ndim != 2 or x.shape[1] != self.mean.shape[0]:
            raise DataError(
                f"this PCA maps rows of {self.mean.shape[0]} features, and was given an array of shape {x.shape}."
            )
        parts = [((block - self.mean) @ self.components).astype(np.float32) for block in _blocks(x)]
        return np.concatenate(parts) if parts else np.zeros((0, self.components.shape[1]), np.float32)

    def sharpen(self, x: NDArray[Any], *, power: float, floor: float, constant: float) -> NDArray[np.float32]:
        """x [n, d] -> [n, k + 1]: directions over (variance + floor)^power, on a sphere, and `constant` appended.

        Rows have the l2 norm 1 at most. What varies much is toned down, so that gradients see little variance too.
        """
        rows = normalise(self.transform(x) * (self.variance + floor) ** -power, "l2", math.sqrt(1 - constant**2))
        return np.concatenate([rows, np.full((len(rows), 1), constant, np.float32)], axis=1)


def _blocks(x: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    return (x[start : start + _BLOCK].astype(np.float64) for start in range(0, len(x), _BLOCK))
