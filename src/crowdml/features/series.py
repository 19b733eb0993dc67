"""A series of measurements as samples: a window of the last values, and the class of a value that comes later.

Sachweh, Boiar, Liebig 2021, section 3: x = the w latest measurements, label = the discretised one at horizon r. A
measurement is in w windows and is the label of one sample. Only `proportions` takes such samples: there windows never
leave a device, and one batch counts each label (review, P3). Every other protocol lets something out that depends on
x, where one measurement would be in up to w + 1 samples and pay for one; `crowdml.protocols.refusal` refuses that.

Shapes do not depend on values. A window that holds a non-finite value stays in its place (the buffer makes the zero
sample of it) and a non-finite target has the label -1, which no count has a cell for. To leave such samples out would
move all that follow by one place, so that one measurement changed every later batch (review, P2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from crowdml.errors import DataError
from crowdml.features.spectrum import windows


def look_ahead(values: ArrayLike, width: int, horizon: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """values [n] -> x [m, width], and the value `horizon` steps after each window's last one, [m].

    m = n - width - horizon + 1, or 0 where the series is shorter. One stretch without gaps: windows do not know the
    time, so a series with holes in it is given stretch by stretch, or with NaN where nothing was measured.
    """
    _check(width, horizon)
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1:
        raise DataError(f"windows are cut from a series [n], and this one has the shape {series.shape}.")
    count = max(0, len(series) - width - horizon + 1)
    x = windows(series[: count + width - 1] if count else series[:0], width, 1)
    return _short(x), series[len(series) - count :].copy()


def label(target: ArrayLike, edges: Sequence[float] | NDArray[Any]) -> NDArray[np.int32]:
    """The class of each value: how many of the rising edges are at or below it; -1 where it is not finite.

    With edges 5, 30 there are three classes: below 5, from 5 to below 30, and all from 30.
    """
    target = np.asarray(target, dtype=np.float64)
    found = np.searchsorted(np.asarray(edges, dtype=np.float64), target, side="right")
    return np.where(np.isfinite(target), found, -1).astype(np.int32)


class Windower:
    """Windows of a stream: one measurement in, the sample that it completes out."""

    def __init__(self, width: int, horizon: int, edges: Sequence[float]) -> None:
        _check(width, horizon)
        self._width = width
        self._edges = np.asarray(edges, dtype=np.float64)
        self._latest: deque[float] = deque(maxlen=width + horizon)

    def push(self, value: float) -> tuple[NDArray[np.float32], int] | None:
        """x [width] and its label; None while fewer than width + horizon values have come."""
        self._latest.append(float(value))
        if len(self._latest) < (self._latest.maxlen or 0):
            return None
        held = np.array(self._latest)
        return _short(held[: self._width]), int(label(held[-1], self._edges))


def _short(x: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # beyond float32 is as good as infinite
        return x.astype(np.float32)


def _check(width: int, horizon: int) -> None:
    if width < 1 or horizon < 1:
        raise DataError(f"windows of {width} values that look {horizon} ahead make no sense; both must be at least 1.")
