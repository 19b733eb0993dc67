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
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.arrays import finite_or_zero
from crowdml.errors import PluginError, TaskError
from crowdml.plugins import Registry

Floats = NDArray[np.float64]

STROKES = 2048
"""Drawings that a convolution map is centred and sharpened on."""
THRESHOLD = 0.6
"""What a filter's answer must pass to count, either way: filters have norm one."""
FLOOR = 0.02
"""Share of the mean variance: directions in which drawings vary less are not sharpened any further."""
BELL = math.sqrt(4 * (256**2 - 1) / 12)
"""The standard deviation of the sum of four bytes."""
INK = 9.0
"""The norm to which a picture of 28 by 28 pixels is brought before it meets the filters, about that of a handwritten
digit; larger pictures in proportion to their side. So a map does not care for the scale of its pixels."""
TALL, WIDE = 5.3 / 28, 3.9 / 28
"""The standard deviations of a normalised picture's ink, down and across, as shares of its side."""
SHRINK_DOWN, SHRINK_ACROSS = (0.6, 1.6), (0.4, 1.5)
"""How far a picture may be stretched (below 1) or shrunk (above) to reach them, so that a dot does not fill it."""
_BLOCK = 256  # samples at a time: patches of all of them would not fit a small board


@dataclass(frozen=True)
class MapSettings:
    """`{ kind = "convolution", seed = 1 }`: the public feature map of a task, by kind and seed."""

    kind: str = "identity"
    seed: int | None = None
    """Everything random in the map comes from it; `identity` has none."""
    features: int = 512
    """How many features `cosine` gives."""
    width: Fraction = Fraction(1)
    """The distance over which the kernel of `cosine` falls, exp(-|x - x'|^2 / (2 width^2))."""
    filters: int = 32
    """How many filters `convolution` has; each gives 2 features a place, one for either sign."""
    size: int = 7
    pool: int = 5
    sharpen: Fraction = Fraction(7, 20)
    """For `convolution`, the power by which directions in which drawings vary much are toned down; 0 leaves them."""
    keep: int = 0
    """For `convolution`, the number of directions kept, those in which drawings vary most; 0 keeps all."""
    normalise: bool = False
    """For `convolution`, whether each picture is centred, deslanted and brought to one size before the filters."""
    layers: int = 1
    """For `layers`, how many of them are stacked, each of `features` units."""
    constant: Fraction = Fraction(1, 10)
    """k: appended to each sample's features, which are brought to norm sqrt(1 - k^2). 0: none is appended."""
    plugin: str | None = None
    """Where `kind` comes from a plug-in: which one."""

    def __post_init__(self) -> None:
        if self.sort.random and self.seed is None:
            raise TaskError(f"protocol.map.seed is missing: a map of kind {self.kind!r} is made from it.")
        limits = (
            ("seed", self.seed or 0, 0, 2**63 - 1),
            ("features", self.features, 1, 4096),
            ("filters", self.filters, 1, 256),
            ("size", self.size, 2, 15),
            ("pool", self.pool, 1, 64),
            ("keep", self.keep, 0, 4096),
            ("layers", self.layers, 1, 16),
            ("sharpen", self.sharpen, 0, Fraction(1, 2)),
            ("constant", self.constant, 0, Fraction(99, 100)),
            ("width", self.width, Fraction(1, 10**6), 10**6),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise TaskError(
                    f"protocol.map.{name} = {float(value):g}: must lie between {float(low):g} and {float(high):g}."
                )

    @property
    def sort(self) -> MapKind:
        """What `kind` names."""
        found = KINDS.pinned({"kind": self.kind, "plugin": self.plugin}, "protocol.map")
        if found is None:
            raise TaskError(f"protocol.map.kind = {self.kind!r}: choose one of {', '.join(KINDS)}.")
        return found


Raw = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""x [n, dimension] -> features [n, length], of any size: row i depends on row i alone."""


@dataclass(frozen=True)
class MapKind:
    """A sort of feature map. Whatever `make` computes is brought to norm one at most, so its sums have a price."""

    kind: str
    length: Callable[[MapSettings, int], int]
    """How many features there are for samples of so many numbers: a price is asked for more often than a feature."""
    make: Callable[[MapSettings, int], Raw]
    """The map itself. Everything random in it comes from `settings.seed`, and nothing from anyone's samples."""
    random: bool = True
    """Whether a task has to name a seed."""
    sphere: bool = False
    """Whether features are brought onto the sphere, so that a sample uses all of its sensitivity; else into it."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """x [n, dimension] -> features [n, length], float32, each row of norm at most one.

    Row i depends on row i alone, and on nothing that was fitted on anyone's samples. What is not finite counts as zero.
    """

    settings: MapSettings
    dimension: int
    length: int
    _raw: Raw

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        x = np.asarray(x)
        if x.ndim != 2 or x.shape[1] != self.dimension:
            raise TaskError(f"this map takes rows of {self.dimension} numbers, and was given shape {x.shape}.")
        parts = [self._block(x[start : start + _BLOCK]) for start in range(0, len(x), _BLOCK)]
        return np.concatenate(parts) if parts else np.zeros((0, self.length), np.float32)

    def _block(self, x: NDArray[Any]) -> NDArray[np.float32]:
        rows = finite_or_zero(x, rows=True).astype(np.float32)
        found = self._raw(rows)
        k = float(self.settings.constant)
        radius = math.sqrt(1 - k * k) * (1 - 2.0**-22)
        size = np.sqrt((found.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        factor = radius / np.maximum(size, 1e-30 if self.settings.sort.sphere else radius)
        scaled = (found * factor).astype(np.float32)
        if not k:
            return scaled
        return np.concatenate([scaled, np.full((len(x), 1), k * (1 - 2.0**-22), np.float32)], axis=1)


@lru_cache(maxsize=8)
def make_map(settings: MapSettings, dimension: int) -> FeatureMap:
    """The map of a task whose samples have so many numbers. Made once: drawing and sharpening take a few seconds."""
    return FeatureMap(settings, dimension, map_length(settings, dimension), settings.sort.make(settings, dimension))


def map_length(settings: MapSettings, dimension: int) -> int:
    """How many features a map gives, with the constant, without making it."""
    return settings.sort.length(settings, dimension) + (1 if settings.constant else 0)


def _same(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x


def _cosine(settings: MapSettings, dimension: int) -> Raw:
    """sqrt(2 / D) cos(x.w + b): a random Fourier feature of the Gaussian kernel (Rahimi and Recht 2007)."""
    count, seed = settings.features, settings.seed or 0
    slopes = _bells("cosine", seed, count * dimension).reshape(dimension, count) / BELL
    slopes = (slopes / float(settings.width)).astype(np.float32)
    turns = (2 * math.pi * _fractions("phase", seed, count)).astype(np.float32)
    height = np.float32(math.sqrt(2 / count))

    def raw(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return height * np.cos(x @ slopes + turns)

    return raw


def _layers(settings: MapSettings, dimension: int) -> Raw:
    """Random layers of units a = 1/2 + v.w / 2 held in [0, 1], over the root of their number: of norm one at most.

    v is the sample in the first layer, and 2 a - 1 of the layer below in the others, over the root of its number. A
    ReLU that is held at 1 is what Zhao et al. (2020) take.
    """
    count, seed, width = settings.features, settings.seed or 0, dimension
    weights = list[NDArray[np.float32]]()
    for layer in range(settings.layers):
        drawn = _bells(f"layer {layer}", seed, width * count).reshape(width, count) / BELL
        weights.append((drawn / (1 if layer == 0 else math.sqrt(width))).astype(np.float32))
        width = count
    shrink = np.float32((1 - 2.0**-22) / math.sqrt(count))

    def raw(x: NDArray[np.float32]) -> NDArray[np.float32]:
        units: NDArray[np.float32] = (x + np.float32(1)) / np.float32(2)
        for layer in weights:
            units = np.clip(0.5 + 0.5 * ((2 * units - 1) @ layer), 0, 1).astype(np.float32)
        return (units * shrink).astype(np.float32)

    return raw


def _pooled(settings: MapSettings, dimension: int) -> tuple[int, int]:
    """How many pools a side of a picture has, and how many features that makes."""
    side = math.isqrt(dimension)
    places = (side - settings.size + 1) // settings.pool if side * side == dimension else 0
    length = 2 * settings.filters * max(places, 0) ** 2
    if settings.keep > length > 0:
        raise TaskError(
            f"protocol.map.keep = {settings.keep}: these filters make {length} features, and no more can be kept."
        )
    if places < 1:
        raise TaskError(
            f'protocol.map.kind = "convolution" takes square pictures with room for a filter of {settings.size} and a '
            f"pool of {settings.pool}; features.dimension = {dimension} gives none."
        )
    return places, length


def _sharpened(settings: MapSettings, dimension: int) -> Raw:
    """Convolutions, centred and sharpened on drawings."""
    raw, (_, length) = _convolution(settings, dimension), _pooled(settings, dimension)
    drawn = draw_strokes(STROKES, settings.seed or 0, math.isqrt(dimension)).reshape(STROKES, -1)
    blocks = range(0, STROKES, _BLOCK)
    seen = np.concatenate([raw(drawn[start : start + _BLOCK].astype(np.float32)) for start in blocks]).astype(
        np.float64
    )
    centre, keep = seen.mean(axis=0), settings.keep or length
    needed = settings.sharpen > 0 or keep < length
    sharpener = _sharpener(seen - centre, float(settings.sharpen), keep) if needed else None
    middle = centre.astype(np.float32)

    def sharpened(x: NDArray[np.float32]) -> NDArray[np.float32]:
        found = raw(x) - middle
        return found if sharpener is None else found @ sharpener

    return sharpened


def _convolution(settings: MapSettings, dimension: int) -> Raw:
    """Filters, ReLU of both signs less a threshold, mean pooling: features in the order sign, filter, row, column."""
    side, (places, length) = math.isqrt(dimension), _pooled(settings, dimension)
    filters = random_filters(settings.filters, settings.size, settings.seed or 0).reshape(settings.filters, -1)
    kernel = filters.astype(np.float32)
    reach = places * settings.pool
    first = (side - settings.size + 1 - reach) // 2

    pooling = np.kron(np.eye(places), np.ones((settings.pool, 1))).astype(np.float32) / np.float32(settings.pool)
    pooling = np.kron(pooling, pooling)  # [reach^2, places^2]: the mean of each square

    def raw(x: NDArray[np.float32]) -> NDArray[np.float32]:
        if settings.normalise:
            x = normalise_pictures(x.reshape(-1, side, side)).reshape(x.shape)
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

    return raw


def normalise_pictures(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pictures [n, side, side], each with its ink in the middle, upright and of one size. Looks at that picture alone.

    The centre of mass goes to the middle. The slant, found from second moments, is taken out, at most 1 pixel across
    for 1 down. The standard deviation of the ink down becomes TALL, and that across goes half of the way to WIDE (the
    square root of the factor): how wide a digit is tells which one it is. Pixels between pixels are bilinear, and zero
    outside. A picture without ink stays so.
    """
    side = pictures.shape[1]
    place, middle = np.arange(side), (side - 1) / 2
    ink = np.abs(pictures).astype(np.float64)
    down, across = ink.sum(axis=2), ink.sum(axis=1)  # the ink of each row, and of each column
    mass = down.sum(axis=1)
    share = 1 / np.maximum(mass, 1e-30)
    centre_down = np.where(mass > 1e-30, share * (down @ place), middle)
    centre_across = np.where(mass > 1e-30, share * (across @ place), middle)
    off_down, off_across = place - centre_down[:, None], place - centre_across[:, None]
    tall = share * (down * off_down**2).sum(axis=1)
    wide = share * (across * off_across**2).sum(axis=1)
    both = share * ((ink @ off_across[:, :, None])[:, :, 0] * off_down).sum(axis=1)
    pixel = (side / 28) ** 2  # a variance of one pixel of MNIST
    slant = np.clip(both / np.maximum(tall, pixel), -1, 1)
    upright = np.maximum(wide - slant * both, pixel / 2)  # the variance across once the slant is gone
    height = np.clip(np.sqrt(tall) / (TALL * side), *SHRINK_DOWN)
    width = np.sqrt(np.clip(np.sqrt(upright) / (WIDE * side), *SHRINK_ACROSS))
    step_down = height[:, None] * (place - middle)
    from_down = step_down + centre_down[:, None]
    shifted = slant[:, None] * step_down + centre_across[:, None]  # where the middle of each new row comes from
    from_across = width[:, None, None] * (place - middle) + shifted[..., None]
    # Each new row lies between two old ones, and its pixels between theirs: first rows, then pixels.
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)))
    row, part = _between(from_down, side)
    each = np.arange(len(pictures))[:, None]
    rows = padded[each, row] * (1 - part)[..., None] + padded[each, row + 1] * part[..., None]
    pixel_at, part = _between(from_across, side)
    left, right = (np.take_along_axis(rows, pixel_at + shift, axis=2) for shift in (0, 1))
    return (left * (1 - part) + right * part).astype(np.float32)


def _between(at: Floats, side: int) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Places in a picture -> the pixel before each, in a picture with a border of one pixel, and the part beyond it."""
    inside = np.clip(at + 1, 0, side + 1 - 1e-3)
    before = np.floor(inside).astype(np.intp)
    return before, (inside - before).astype(np.float32)


_OURS = (
    MapKind("identity", lambda settings, dimension: dimension, lambda settings, dimension: _same, random=False),
    MapKind("cosine", lambda settings, dimension: settings.features, _cosine),
    MapKind("layers", lambda settings, dimension: settings.features, _layers),
    MapKind("convolution", lambda settings, dimension: settings.keep or _pooled(settings, dimension)[1], _sharpened,
            sphere=True),
)  # fmt: skip


def _plugged(value: Any, where: str) -> tuple[str, MapKind]:
    if not isinstance(value, MapKind):
        raise PluginError(f"{where}: `feature_map` is a {type(value).__name__}, and has to be a crowdml MapKind.")
    return value.kind, value


KINDS: Registry[MapKind] = Registry(
    "feature map", "crowdml.features", {each.kind: lambda each=each: each for each in _OURS}, _plugged
)
"""Every kind of map that a task may name."""


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
        path = cut_corners(path)
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
    blocks = [slice(at, at + 256) for at in range(0, count, 256)]
    return np.concatenate([draw_path(across[block], down[block], pen[block], side) for block in blocks])


def cut_corners(path: Floats) -> Floats:
    """Chaikin's: each edge is replaced by its middle half; the ends stay. [n, m, 2] -> [n, 2 m, 2]."""
    before, after = path[:, :-1], path[:, 1:]
    halves = np.stack([0.75 * before + 0.25 * after, 0.25 * before + 0.75 * after], axis=2)
    return np.concatenate([path[:, :1], halves.reshape(len(path), -1, 2), path[:, -1:]], axis=1)


def draw_bells(kind: str, seed: int, count: int) -> Floats:
    """Public numbers [count] of mean zero and variance one, near to normal ones, by a hash of the kind and the seed."""
    return _bells(kind, seed, count) / BELL


def draw_path(across: Floats, down: Floats, pen: Floats, side: int) -> Floats:
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
