"""Data made by code: one Gaussian blob per class."""

from __future__ import annotations

import numpy as np

from crowdml.datasets.dataset import Dataset, frozen
from crowdml.errors import DataError
from crowdml.features import Norm, normalise

CLASSES = ("a", "b", "c", "d", "e")


def blobs(
    *, rows: int, features: int, classes: int, seed: int, distance: float = 4.0, normalise: Norm = "l2"
) -> Dataset:
    """`rows` training rows, and a quarter as many each for evaluation and public, with labels drawn uniformly.

    x = distance * centre[y] + standard normal noise, over sqrt(features); centres are random unit vectors. The same
    arguments give the same bits.
    """
    if rows < 1 or features < 1 or classes < 2:
        raise DataError(
            f"blobs of {rows} rows, {features} features and {classes} classes cannot be made: 1, 1, 2 are least."
        )
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((classes, features))
    centres = distance * centres / np.linalg.norm(centres, axis=1, keepdims=True)
    quarter = rows // 4
    y = rng.integers(classes, size=rows + 2 * quarter)
    x = _rows(rng, centres, y, normalise)
    labels = y.astype(np.int32)
    train, test, public = slice(0, rows), slice(rows, rows + quarter), slice(rows + quarter, None)
    names = CLASSES if classes == len(CLASSES) else tuple(str(index) for index in range(classes))
    return Dataset(
        name="synthetic",
        title="Gaussian blobs, made from a seed",
        x_train=frozen(x[train]), y_train=frozen(labels[train]),
        x_test=frozen(x[test]), y_test=frozen(labels[test]),
        x_public=frozen(x[public]), y_public=frozen(labels[public]),
        classes=names,
        groups=None,
        note=f"Made by code from seed {seed}; nothing was fitted.",
    )  # fmt: skip


def _rows(rng: np.random.Generator, centres: np.ndarray, y: np.ndarray, norm: Norm) -> np.ndarray:
    noise = rng.standard_normal((len(y), centres.shape[1]))
    return normalise((centres[y] + noise) / np.sqrt(centres.shape[1]), norm)
