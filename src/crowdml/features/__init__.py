"""What devices and the simulator both compute before learning: norms, projections, windows and spectra. NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crowdml.features.bounds import bounds_of, label_scale, outside, prepared, prepared_numbers, scaling
from crowdml.features.norms import Norm, into_ball, normalise, shorten
from crowdml.features.spectrum import spectrum, windows

if TYPE_CHECKING:
    from crowdml.features.pca import Pca

__all__ = [
    "Norm", "Pca", "bounds_of", "into_ball", "label_scale", "normalise", "outside", "prepared", "prepared_numbers",
    "scaling", "shorten", "spectrum", "windows",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`Pca` is imported when it is asked for: a device that only shrinks rows onto a ball does not need it."""
    if name != "Pca":
        raise AttributeError(f"module 'crowdml.features' has no attribute {name!r}")
    from crowdml.features.pca import Pca

    return Pca
