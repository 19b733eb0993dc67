"""What a loader returns: devices' rows, evaluation rows and public rows, kept apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import DataError
from crowdml.texts import one_line

Features = NDArray[np.float32]
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class Dataset:
    """One data set in three disjoint splits; arrays are read-only.

    x_train [n, d], y_train [n]: what devices hold, private. x_test, y_test: errors are reported on these and nothing
    is chosen by them. x_public, y_public: the only rows that PCA, scaling and hyper-parameters may see (review, R4);
    empty where a data set has none to spare. Without classes labels are numbers, float32. `groups` [n] names the person
    behind each training row, or is None; rows of one person are in the order of time. `note` says in a sentence what
    was fitted on what.
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
    names: tuple[str, ...] = ()  # of the features, where they have any
    remarks: tuple[str, ...] = ()  # sentences about what looks wrong in the rows, and was read all the same
    as_published: bool = False  # prepared a paper's way: for reproducing its figures, never for a guarantee

    @property
    def features(self) -> int:
        return int(self.x_train.shape[1])

    def recoded(self, classes: tuple[str, ...], ends: tuple[float, float]) -> Dataset:
        """Labels as the places of these classes, found by name, or else by place; numbers held between these ends.

        Without classes, labels are numbers. It raises where a label is none of the classes.
        """
        if not classes:
            low, high = ends
            beyond = int(((self.y_train < low) | (self.y_train > high)).sum())
            said = (
                f"{self.name}: {beyond:,} of {len(self.y_train):,} labels are outside the task's bounds, {low:g} to "
                f"{high:g}, and are clipped to them."
            )
            y_train, y_test = self.y_train.clip(low, high), self.y_test.clip(low, high)
            return replace(self, y_train=y_train, y_test=y_test, remarks=(*self.remarks, *[said][: bool(beyond)]))
        if set(self.classes) <= set(classes):
            places = [classes.index(name) for name in self.classes]
        elif all(name.isdecimal() and int(name) < len(classes) for name in self.classes):
            places = [int(name) for name in self.classes]
        else:
            strange = next(name for name in self.classes if name not in classes)
            raise DataError(
                f"{self.name} has the label {one_line(strange)!r}, which is none of the task's: "
                f"{', '.join(map(one_line, classes))}. Change labels.classes in the task, or name another --label."
            )
        table = np.asarray(places, np.int32)
        y_train, y_test, y_public = (table[y] for y in (self.y_train, self.y_test, self.y_public))
        return replace(self, y_train=y_train, y_test=y_test, y_public=y_public, classes=classes)


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
    """A view of the array that refuses assignment."""
    array.setflags(write=False)
    return array
