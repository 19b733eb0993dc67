"""What a loader returns: devices' rows, evaluation rows and public rows, kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class Dataset:
    """One data set in three disjoint splits; arrays are read-only.

    x_train [n, d], y_train [n]: what devices hold, private. x_test, y_test: errors are reported on these and nothing
    is chosen by them. x_public, y_public: the only rows that PCA, scaling and hyper-parameters may see (review, R4);
    empty where a data set has none to spare. `groups` [n] names the person behind each training row, or is None; rows
    of one person are in the order of time. `note` says in a sentence what was fitted on what.
    """

    name: str
    title: str
    x_train: Features
    y_train: Labels
    x_test: Features
    y_test: Labels
    x_public: Features
    y_public: Labels
    classes: tuple[str, ...]
    groups: Labels | None
    note: str
    as_published: bool = False  # prepared a paper's way: for reproducing its figures, never for a guarantee

    @property
    def features(self) -> int:
        return int(self.x_train.shape[1])


@dataclass(frozen=True)
class Prepared:
    """The splits before rows are normalised: what a recipe computes from the source files, and what the cache keeps."""

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    x_public: NDArray[Any]
    y_public: NDArray[Any]
    groups: NDArray[Any] | None = None


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, refusing assignment."""
    array.setflags(write=False)
    return array
