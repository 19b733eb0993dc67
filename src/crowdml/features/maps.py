"""Public feature maps: what a task names by kind and seed, and every device makes for itself. NumPy only.

A map turns a sample into features of norm at most one, so that `gram` may sum their second moments. Nothing in it was
fitted on a sample of anyone (review, R4): numbers come from SHA-256 of the seed, and what is centred and sharpened is
so on drawings that this module makes, strokes of no meaning.

Every number is specified, so that two machines make the same map but for the rounding of floats:
- Block i of the stream (tag, seed) is SHA-256("crowdml/maps/1" 0x00 tag 0x00 seed i), seed and i as 8 bytes each,
  little-endian; blocks are strung together. A *bell* is the sum of four bytes less 510 (standard deviation 147.8); a
  *fraction* is a little-endian word of 32 bits over 2^32.
- tests/features/maps.json holds filters, strokes and features of each kind to compare with.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import TaskError

__all__ = ["KINDS", "FeatureMap", "MapSettings", "draw_strokes", "make_map", "random_filters"]

Floats = NDArray[np.float64]

KINDS = ("identity", "cosine", "convolution")
STROKES = 2048
"""Drawings that a convolution map is centred and sharpened on."""
THRESHOLD = 0.6
"""What a filter's answer must pass to count, either way: filters have norm one."""
FLOOR = 0.02
"""Of the mean variance: directions in which drawings vary less are not sharpened any further."""
BELL = math.sqrt(4 * (256**2 - 1) / 12)
"""The standard deviation of the sum of four bytes."""
INK = 9.0
"""The norm to which a picture of 28 by 28 pixels is brought before it meets the filters, about that of a handwritten
digit; larger pictures in proportion to their side. So a map does not care for the scale of its pixels."""
_BLOCK = 256  # samples at a time: patches of all of them would not fit a small board


@dataclass(frozen=True)
class MapSettings:
    """`{ kind = "convolution", seed = 1 }`: the public feature map of a task, by kind and seed."""

    kind: str = "identity"
    seed: int | None = None
    """Everything random in the map comes from it; `identity` has none."""
    features: int = 512
    """Of `cosine`: how many."""
    width: Fraction = Fraction(1)
    """Of `cosine`: the distance over which its kernel falls, exp(-|x - x'|^2 / (2 width^2))."""
    filters: int = 32
    """Of `convolution`: how many filters; each gives 2 features a place, one for either sign."""
    size: int = 7
    pool: int = 5
    sharpen: Fraction = Fraction(7, 20)
    """Of `convolution`: the power by which directions in which drawings vary much are toned down; 0 leaves them."""
    keep: int = 0
    """Of `convolution`: the directions kept, those in which drawings vary most; 0 keeps all."""
    constant: Fraction = Fraction(1, 10)
    """k: appended to each sample's features, which are brought to norm sqrt(1 - k^2). 0: none is appended."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TaskError(f"protocol.map.kind = {self.kind!r}: choose one of {', '.join(KINDS)}.")
        if self.seed is None and self.kind != "identity":
            raise TaskError(f"protocol.map.seed is missing: a map of kind {self.kind!r} is made from it.")
        limits = (
            ("seed", self.seed or 0, 0, 2**63 - 1),
            ("features", self.features, 1, 4096),
            ("filters", self.filters, 1, 256),
            ("size", self.size, 2, 15),
            ("pool", self.pool, 1, 64),
            ("keep", self.keep, 0, 4096),
            ("sharpen", self.sharpen, 0, Fraction(1, 2)),
            ("constant", self.constant, 0, Fraction(99, 100)),
            ("width", self.width, Fraction(1, 10**6), 10**6),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise TaskError(
                    f"protocol.map.{name} = {float(value):g}: must lie between {float(low):g} and {float(high):g}."
                )


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """x [n, dimension] -> features [n, length], float32, each row of norm at most one.

    Row i depends on row i alone, and on nothing that was fitted on anyone's samples. What is not finite counts as zero.
    """

    settings: MapSettings
    dimension: int
    length: int
    _raw: Any
    _centre: NDArray[np.float32] | None = None
    _sharpener: NDArray[np.float32] | None = None

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        x = np.asarray(x)
        if x.ndim != 2 or x.shape[1] != self.dimension:
            raise TaskError(f"this map takes rows of {self.dimension} numbers, and was given shape {x.shape}.")
        parts = [self._block(x[start : start + _BLOCK]) for start in range(0, len(x), _BLOCK)]
        return np.concatenate(parts) if parts else np.zeros((0, self.length), np.float32)

    def _block(self, x: NDArray[Any]) -> NDArray[np.float32]:
        rows = np.where(np.isfinite(x).all(axis=1, keepdims=True), x, 0).astype(np.float32)
        found = self._raw(rows)
        if self._centre is not None:
            found = found - self._centre
        if self._sharpener is not None:
            found = found @ self._sharpener
        k = float(self.settings.constant)
        radius = math.sqrt(1 - k * k) * (1 - 2.0**-22)
        size = np.sqrt((found.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        factor = radius / np.maximum(size, 1e-30 if self._on_sphere else radius)
        scaled = (found * factor).astype(np.float32)
        if not k:
            return scaled
        return np.concatenate([scaled, np.full((len(x), 1), k * (1 - 2.0**-22), np.float32)], axis=1)

    @property
    def _on_sphere(self) -> bool:
        """Convolutions are brought onto the sphere, so that a sample uses all of its sensitivity; others into it."""
        return self.settings.kind == "convolution"


@lru_cache(maxsize=8)
def make_map(settings: MapSettings, dimension: int) -> FeatureMap:
    """The map of a task whose samples have so many numbers. Made once: drawing and sharpening take a few seconds."""
    extra = 1 if settings.constant else 0
    seed = settings.seed
    if settings.kind == "identity" or seed is None:
        return FeatureMap(settings, dimension, dimension + extra, _same)
    if settings.kind == "cosine":
        return FeatureMap(settings, dimension, settings.features + extra, _cosine(settings, seed, dimension))
    raw, length = _convolution(settings, seed, dimension)
    drawn = draw_strokes(STROKES, seed, math.isqrt(dimension)).reshape(STROKES, -1)
    blocks = range(0, STROKES, _BLOCK)
    seen = np.concatenate([raw(drawn[start : start + _BLOCK].astype(np.float32)) for start in blocks]).astype(
        np.float64
    )
    centre = seen.mean(axis=0)
    keep = settings.keep or length
    if keep > length:
        raise TaskError(f"protocol.map.keep = {keep}: these filters make {length} features, and no more can be kept.")
    needed = settings.sharpen > 0 or keep < length
    sharpener = _sharpener(seen - centre, float(settings.sharpen), keep) if needed else None
    return FeatureMap(settings, dimension, keep + extra, raw, centre.astype(np.float32), sharpener)


def _same(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x


def _cosine(settings: MapSettings, seed: int, dimension: int) -> Any:
    """sqrt(2 / D) cos(x.w + b): a random Fourier feature of the Gaussian kernel (Rahimi and Recht 2007)."""
    count = settings.features
    slopes = _bells("cosine", seed, count * dimension).reshape(dimension, count) / BELL
    slopes = (slopes / float(settings.width)).astype(np.float32)
    turns = (2 * math.pi * _fractions("phase", seed, count)).astype(np.float32)
    height = np.float32(math.sqrt(2 / count))

    def raw(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return height * np.cos(x @ slopes + turns)

    return raw


def _convolution(settings: MapSettings, seed: int, dimension: int) -> tuple[Any, int]:
    """Filters, ReLU of both signs less a threshold, mean pooling: features in the order sign, filter, row, column."""
    side = math.isqrt(dimension)
    places = (side - settings.size + 1) // settings.pool if side * side == dimension else 0
    if places < 1:
        raise TaskError(
            f'protocol.map.kind = "convolution" takes square pictures with room for a filter of {settings.size} and a '
            f"pool of {settings.pool}; features.dimension = {dimension} gives none."
        )
    filters = random_filters(settings.filters, settings.size, seed).reshape(settings.filters, -1)
    kernel = filters.astype(np.float32)
    reach = places * settings.pool
    first = (side - settings.size + 1 - reach) // 2
    length = 2 * settings.filters * places * places

    pooling = np.kron(np.eye(places), np.ones((settings.pool, 1))).astype(np.float32) / np.float32(settings.pool)
    pooling = np.kron(pooling, pooling)  # [reach^2, places^2]: the mean of each square

    def raw(x: NDArray[np.float32]) -> NDArray[np.float32]:
        size = np.sqrt((x.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        inked = (x * (INK * side / 28 / np.maximum(size, 1e-30))).astype(np.float32)
        pictures = inked.reshape(-1, side, side)
        patches = np.empty((settings.size**2, len(x), reach, reach), np.float32)
        for place in range(settings.size**2):
            row, column = first + place // settings.size, first + place % settings.size
            patches[place] = pictures[:, row : row + reach, column : column + reach]
        answers = kernel @ patches.reshape(settings.size**2, -1)  # [filters, n reach^2]
        found = np.empty((len(x), 2, settings.filters, places * places), np.float32)
        for sign in (0, 1):
            passed = answers - np.float32(THRESHOLD) if sign == 0 else -answers - np.float32(THRESHOLD)
            pooled = np.maximum(passed, 0, out=passed).reshape(-1, reach * reach) @ pooling
            found[:, sign] = pooled.reshape(settings.filters, len(x), -1).transpose(1, 0, 2)
        return found.reshape(len(x), length)

    return raw, length


def random_filters(count: int, size: int, seed: int) -> Floats:
    """[count, size, size]: smooth random patterns with mean zero and norm one.

    Bells, smoothed along rows and columns by (1, 4, 6, 4, 1), less their mean, over their norm: integers but for the
    last step.
    """
    raw = _bells("filters", seed, count * size * size).reshape(count, size, size)
    smoother = np.zeros((size, size), np.int64)
    for shift, weight in zip(range(-2, 3), (1, 4, 6, 4, 1), strict=True):
        smoother += weight * np.eye(size, k=shift, dtype=np.int64)
    smooth = np.einsum("ab,fbc,dc->fad", smoother, raw, smoother)
    centred = smooth * (size * size) - smooth.sum(axis=(1, 2), keepdims=True)
    energy = (centred.astype(np.float64) ** 2).sum(axis=(1, 2), keepdims=True)
    return centred / np.sqrt(np.maximum(energy, 1.0))


def _sharpener(centred: Floats, power: float, keep: int) -> NDArray[np.float32]:
    """(C / mean variance + FLOOR)^-power for the covariance C of the drawings' features, [length, keep].

    All kept: a symmetric matrix, which is the same on every machine. Fewer: the leading eigenvectors, largest first,
    each with its entry of largest magnitude positive, times that power of their eigenvalues.
    """
    covariance = centred.T @ centred / len(centred)
    mean = max(float(np.trace(covariance)) / len(covariance), 1e-30)
    values, vectors = np.linalg.eigh(covariance / mean)
    weights = (values.clip(min=0.0) + FLOOR) ** -power
    if keep == len(values):
        return ((vectors * weights) @ vectors.T).astype(np.float32)
    leading = vectors[:, ::-1][:, :keep]
    peak = leading[np.abs(leading).argmax(axis=0), np.arange(keep)]
    return (leading * np.where(peak < 0, -1.0, 1.0) * weights[::-1][:keep]).astype(np.float32)


def draw_strokes(count: int, seed: int, side: int = 28) -> Floats:
    """Drawings [count, side, side] with pixels from 0 to 1: each a smooth stroke of no meaning, about as large, thick
    and slanted as handwriting.

    Seven steps of a walk, corners cut twice, squeezed, slanted and turned at random, fitted to 61 to 70 % of the
    picture, drawn with a round pen. 32 words of the stream "strokes" a drawing: words 0 and 1 are the walk's start,
    2 to 15 its steps, 16 and 17 slant and turn, 18 to 20 squeeze, size and pen.
    """
    data = np.frombuffer(_stream("strokes", seed, 128 * count), np.uint8).reshape(count, 32, 4)
    even = np.ascontiguousarray(data).view("<u4")[..., 0] / 2.0**32
    bell = (data.astype(np.int64).sum(axis=2) - 510) / BELL
    path = even[:, None, 0:2] + np.cumsum(0.28 * bell[:, 2:16].reshape(count, 7, 2), axis=1)
    for _ in range(2):
        path = _cut_corners(path)
    slant, turn = 0.15 + 0.22 * bell[:, 16, None], 0.08 * bell[:, 17, None]
    across = (0.75 + 0.4 * even[:, 18, None]) * path[..., 0] + (turn - slant) * path[..., 1]
    down = path[..., 1] - turn * path[..., 0]
    low = np.stack([across.min(axis=1), down.min(axis=1)])
    high = np.stack([across.max(axis=1), down.max(axis=1)])
    scale = (17 + 2.5 * even[:, 19]) / 28 * side / np.maximum((high - low).max(axis=0), 0.3)
    middle, centre = (low + high) / 2, (side - 1) / 2
    across = (across - middle[0][:, None]) * scale[:, None] + centre
    down = (down - middle[1][:, None]) * scale[:, None] + centre
    pen = (0.6 + 1.3 * even[:, 20]) / 28 * side
    blocks = range(0, count, 256)
    return np.concatenate([_ink(across[at : at + 256], down[at : at + 256], pen[at : at + 256], side) for at in blocks])


def _cut_corners(path: Floats) -> Floats:
    """Chaikin's: each edge is replaced by its middle half; the ends stay. [n, m, 2] -> [n, 2 m, 2]."""
    before, after = path[:, :-1], path[:, 1:]
    halves = np.stack([0.75 * before + 0.25 * after, 0.25 * before + 0.75 * after], axis=2)
    return np.concatenate([path[:, :1], halves.reshape(len(path), -1, 2), path[:, -1:]], axis=1)


def _ink(across: Floats, down: Floats, pen: Floats, side: int) -> Floats:
    """How dark each pixel is: one where its centre lies within the pen's radius of the path, falling over a pixel."""
    place = np.arange(side, dtype=np.float64)
    nearest = np.full((len(pen), side, side), np.inf)
    for step in range(across.shape[1] - 1):
        x, y = across[:, step, None], down[:, step, None]
        dx, dy = across[:, step + 1, None] - x, down[:, step + 1, None] - y
        length = np.maximum(dx * dx + dy * dy, 1e-12)
        px, py = place - x, place - y  # [n, side] each: of columns, and of rows
        along = np.clip(((px * dx)[:, None, :] + (py * dy)[:, :, None]) / length[:, None], 0.0, 1.0)
        off = (px[:, None, :] - along * dx[:, None]) ** 2 + (py[:, :, None] - along * dy[:, None]) ** 2
        nearest = np.minimum(nearest, off)
    return np.clip(pen[:, None, None] + 0.5 - np.sqrt(nearest), 0.0, 1.0)


def _stream(tag: str, seed: int, length: int) -> bytes:
    head = b"crowdml/maps/1\0" + tag.encode() + b"\0" + seed.to_bytes(8, "little")
    blocks = (hashlib.sha256(head + i.to_bytes(8, "little")).digest() for i in range(-(-length // 32)))
    return b"".join(blocks)[:length]


def _bells(tag: str, seed: int, count: int) -> NDArray[np.int64]:
    return np.frombuffer(_stream(tag, seed, 4 * count), np.uint8).reshape(count, 4).sum(axis=1, dtype=np.int64) - 510


def _fractions(tag: str, seed: int, count: int) -> Floats:
    return np.frombuffer(_stream(tag, seed, 4 * count), "<u4") / 2.0**32
