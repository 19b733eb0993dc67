"""A public extractor: two convolutions, two poolings and a hidden layer with fixed weights make a picture's features.

A task names the file of the weights by its SHA-256 (`features.extractor`), so server, devices, simulator and exports
compute with the same one. Nothing in it was fitted on a sample of anyone: ours was trained on digits that code draws
(`crowdml.experiments.extractor`; review, R4). Each picture is treated alone. NumPy only.

A picture is enlarged to the network's side, centred, made upright and brought to one size (`normalise_pictures`), and
its ink to a norm of that side: so neither the scale of its pixels nor where it stands matters. What the hidden layer
says, less the public centre, is scaled onto the sphere of `features.norm`: every sample uses all of its sensitivity,
and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from crowdml import artefacts
from crowdml.arrays import finite_or_zero
from crowdml.convolutions import Layer, forward, pooled_side
from crowdml.errors import DataError, TaskError
from crowdml.features.maps import normalise_pictures
from crowdml.features.norms import Norm, normalise
from crowdml.safetensors import read_tensors
from crowdml.texts import one_line

Floats = NDArray[np.float32]

FORMAT = "crowdml/extractor/1"
LARGEST_SIDE = 64
MOST_FILTERS = 128
LARGEST_SIZE = 9
_BLOCK, _NUMBERS = 64, 2**23  # pictures and numbers at a time: the patches of all would not fit a small board


class Named(Interface):
    """What a task says of its extractor: `crowdml.task.Extractor`."""

    @property
    def sha256(self) -> str: ...
    @property
    def pixels(self) -> int: ...


@dataclass(frozen=True)
class Seen:
    """An extractor and the size of its pictures, where no task names them."""

    sha256: str
    pixels: int


@dataclass(frozen=True, eq=False)
class Network:
    """The weights of an extractor for pictures of `side` by `side` pixels."""

    side: int
    layers: tuple[Layer, Layer]
    matrix: Floats  # [n, hidden], of the hidden layer
    biases: Floats
    centre: Floats
    """The hidden layer's mean on public drawings."""

    @property
    def block(self) -> int:
        """How many pictures are treated at a time. A file of a few kB may ask for much of each of them."""
        patches = (pooled_side(self.side, i) ** 2 * math.prod(self.layers[i][0].shape[:3]) for i in range(2))
        return max(1, min(_BLOCK, _NUMBERS // max(patches)))

    def __call__(self, pictures: Floats) -> Floats:
        """Pictures [b, side, side] -> [b, hidden]: the hidden layer less its centre."""
        flat, _ = forward(pictures[..., None], self.layers)
        return np.maximum(flat @ self.matrix + self.biases, 0) - self.centre


def read_network(data: bytes, where: str) -> Network:
    """The network in a file; one that is no extractor is refused in a sentence."""
    tensors, metadata = read_tensors(data, where)
    side = metadata.get("side", "")
    if metadata.get("format") != FORMAT or not (side.isascii() and side.isdigit() and len(side) < 4):
        raise DataError(f'{where} is no extractor: its metadata have to say format = "{FORMAT}" and side.')
    names = ("weights.0", "biases.0", "weights.1", "biases.1", "weights.2", "biases.2", "centre")
    shapes = {name: tensors[name].shape for name in names if name in tensors}
    if set(tensors) != set(names) or not _fits(shapes, int(side)):
        told = ", ".join(f"{one_line(name)} {' x '.join(map(str, tensors[name].shape))}" for name in sorted(tensors))
        raise DataError(
            f"{where} is no extractor: two convolutions, a hidden layer and its centre, for pictures of side {side}, "
            f"do not have these tensors: {told[:400]}."
        )
    found = [tensors[name] for name in names]
    return Network(int(side), ((found[0], found[1]), (found[2], found[3])), *found[4:])


def _fits(shapes: dict[str, tuple[int, ...]], side: int) -> bool:
    """Whether these are the shapes of one extractor: odd kernels on one channel, and layers that follow one another."""
    first, second, hidden = shapes["weights.0"], shapes["weights.1"], shapes["weights.2"]
    if len(first) != 4 or len(second) != 4 or len(hidden) != 2 or not 4 <= side <= LARGEST_SIDE:
        return False
    odd = all(each[0] == each[1] and each[0] % 2 and each[0] <= LARGEST_SIZE for each in (first, second))
    chained = first[2] == 1 and second[2] == first[3] and hidden[0] == second[3] * pooled_side(side, 2) ** 2
    small = 0 < first[3] <= MOST_FILTERS and 0 < second[3] <= MOST_FILTERS and hidden[1] > 0
    biases = (shapes["biases.0"], shapes["biases.1"], shapes["biases.2"], shapes["centre"])
    return odd and chained and small and biases == ((first[3],), (second[3],), (hidden[1],), (hidden[1],))


@lru_cache(maxsize=8)
def network(sha256: str) -> Network:
    """The network behind a hash, from an artefact that is here."""
    return read_network(artefacts.find(sha256), f"The artefact {sha256[:12]}")


def check_extractor(named: Named, dimension: int) -> None:
    """Refuse a task whose extractor is not here, or does not make as many features as the task says."""
    hidden = len(network(named.sha256).biases)
    if hidden != dimension:
        raise TaskError(
            f"features.dimension = {dimension}: the extractor {named.sha256[:12]} makes {hidden} features of a picture."
            f" Say {hidden}."
        )


def picture_features(file: Path | str, x: NDArray[Any], norm: Norm, bound: float) -> Floats:
    """Features of pictures x [n, pixels] by the extractor in a file, on the sphere of a task's norm: as devices do."""
    named = Seen(artefacts.read_file(file), x.shape[1])
    return normalise(extract(named, x, len(network(named.sha256).biases)), norm, bound)


def extract(named: Named, x: NDArray[Any], dimension: int) -> Floats:
    """Pictures [..., pixels] -> features [..., dimension], before they are brought to the task's norm.

    A picture with a number that is not finite gives NaN: `prepared` makes the zero row of it.
    """
    check_extractor(named, dimension)
    made = network(named.sha256)
    rows = np.asarray(x, np.float64).reshape(-1, named.pixels)
    parts = [_features(made, rows[at : at + made.block]) for at in range(0, len(rows), made.block)]
    found = np.concatenate(parts) if parts else np.zeros((0, dimension), np.float32)
    found[~np.isfinite(rows).all(axis=1)] = np.nan
    return found.reshape(*np.shape(x)[:-1], dimension)


def _features(made: Network, rows: NDArray[np.float64]) -> Floats:
    return made(upright(rows, made.side))


def upright(rows: NDArray[Any], side: int) -> Floats:
    """Pictures [b, pixels] as a network sees them: [b, side, side], centred, upright, of one size, of norm `side`."""
    rows = finite_or_zero(np.asarray(rows, np.float64), rows=True)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    pictures = (rows / np.where(largest > 0, largest, 1)).astype(np.float32)
    found = normalise_pictures(enlarged(pictures, side)).reshape(len(rows), -1)
    size = np.sqrt((found.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return (found * (side / np.maximum(size, 1e-30))).astype(np.float32).reshape(-1, side, side)


def enlarged(rows: Floats, side: int) -> Floats:
    """Pictures [b, n^2] as [b, side, side]: each new pixel lies between old ones, and the ends on the ends."""
    old = math.isqrt(rows.shape[1])
    pictures = rows.reshape(-1, old, old)
    if old == side:
        return pictures
    at = np.arange(side) * (old - 1) / (side - 1)
    before = np.minimum(at.astype(int), max(old - 2, 0))
    between = np.zeros((side, old), np.float32)
    between[np.arange(side), before] = 1 - (at - before)
    between[np.arange(side), np.minimum(before + 1, old - 1)] += at - before
    return np.asarray(between @ pictures @ between.T, np.float32)
