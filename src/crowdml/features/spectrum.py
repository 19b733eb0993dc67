"""Windows of a signal, and the spectrum of acceleration that Crowd-ML learns activities from.

Hamm et al., ICDCS 2015, section V-B: |a| of a triaxial accelerometer at 20 Hz, 3.2 s windows, 64-bin FFT.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import DataError

BINS = 64  # 3.2 s at 20 Hz


def windows(signal: NDArray[Any], length: int, stride: int) -> NDArray[Any]:
    """Cut a signal [n, ...] into windows -> [m, length, ...], m = (n - length) // stride + 1; a short rest is dropped.

    A stride of `length` gives windows that do not overlap, so that each measurement is in one sample at most; with a
    smaller stride a measurement is in several samples, and the guarantee for one sample does not cover it.
    """
    if length < 1 or stride < 1:
        raise DataError(f"windows of length {length} every {stride} samples make no sense; both must be at least 1.")
    starts = np.arange(0, len(signal) - length + 1, stride)
    return signal[starts[:, None] + np.arange(length)]


def spectrum(acceleration: NDArray[Any]) -> NDArray[np.float32]:
    """Magnitude of the 64-bin FFT of |a|, over 64: acceleration [n, 64, 3], or its magnitude [n, 64] -> [n, 64].

    Bin 0 is the mean of |a|. Bins 33 to 63 mirror bins 31 to 1, as |a| is real: kept, since the paper has 64 features.
    """
    magnitude = np.asarray(acceleration, dtype=np.float64)
    if magnitude.ndim == 3 and magnitude.shape[2] == 3:
        magnitude = np.sqrt((magnitude * magnitude).sum(axis=2))
    if magnitude.ndim != 2 or magnitude.shape[1] != BINS:
        raise DataError(
            f"a spectrum needs windows of shape [n, {BINS}, 3] or [n, {BINS}], and was given {np.shape(acceleration)}."
        )
    return (np.abs(np.fft.fft(magnitude, axis=1)) / BINS).astype(np.float32)
