"""What devices and the simulator both compute before learning: norms, projections, windows and spectra. NumPy only."""

from crowdml.features.norms import Norm, into_ball, normalise
from crowdml.features.pca import Pca
from crowdml.features.spectrum import spectrum, windows

__all__ = ["Norm", "Pca", "into_ball", "normalise", "spectrum", "windows"]
