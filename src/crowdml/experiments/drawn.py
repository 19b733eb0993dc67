"""Digits drawn by code: a crowd of any size to choose settings on, with nobody's pictures in it.

MNIST has 240 public rows, too few to tell two settings apart. So choices are made on these drawings: each is a digit's
path of a few points, moved at random, its corners cut, squeezed, slanted and turned, and drawn with a round pen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, load
from crowdml.features import Norm, Pca, normalise
from crowdml.features.maps import cut_corners, draw_path

Path = tuple[tuple[float, float], ...]
"""Points (across, down) from 0 to 1."""
SIDE = 28
MOVED = 0.09
"""The standard deviation by which a point is moved, as a share of the digit's height."""
TRAIN, TEST = 59_760, 10_000
"""As many as MNIST's devices hold, and as MNIST tests on."""

_EIGHT = ((0.75, 0.12), (0.45, 0.0), (0.2, 0.2), (0.5, 0.45), (0.8, 0.75), (0.5, 1.0), (0.2, 0.78), (0.5, 0.5),
          (0.8, 0.25), (0.72, 0.1))  # fmt: skip
_SEVEN = ((0.05, 0.08), (0.5, 0.03), (0.9, 0.05), (0.65, 0.4), (0.45, 0.7), (0.35, 1.0))
FORMS: tuple[tuple[tuple[Path, ...], ...], ...] = (
    ((((0.5, 0.0), (0.15, 0.2), (0.05, 0.5), (0.2, 0.9), (0.5, 1.0), (0.8, 0.85), (0.95, 0.5), (0.85, 0.15),
       (0.5, 0.0)),),),
    ((((0.5, 0.0), (0.5, 0.35), (0.5, 0.7), (0.5, 1.0)),),
     (((0.25, 0.2), (0.5, 0.0), (0.5, 0.5), (0.5, 1.0)),)),
    ((((0.1, 0.2), (0.3, 0.0), (0.75, 0.05), (0.8, 0.35), (0.5, 0.65), (0.1, 1.0), (0.5, 0.95), (0.95, 1.0)),),
     (((0.1, 0.2), (0.4, 0.0), (0.8, 0.15), (0.7, 0.5), (0.3, 0.9), (0.1, 0.95), (0.2, 0.75), (0.5, 0.9),
       (0.95, 0.95)),)),
    ((((0.1, 0.1), (0.5, 0.0), (0.8, 0.2), (0.4, 0.45), (0.85, 0.65), (0.75, 0.95), (0.35, 1.0), (0.05, 0.85)),),),
    ((((0.2, 0.0), (0.1, 0.3), (0.1, 0.5), (0.5, 0.5), (0.9, 0.45)), ((0.75, 0.05), (0.7, 0.4), (0.6, 1.0))),
     (((0.7, 0.0), (0.3, 0.35), (0.05, 0.6), (0.5, 0.6), (0.95, 0.55)), ((0.7, 0.0), (0.65, 0.5), (0.6, 1.0)))),
    ((((0.85, 0.0), (0.5, 0.03), (0.3, 0.05), (0.2, 0.4), (0.6, 0.35), (0.85, 0.6), (0.75, 0.9), (0.4, 1.0),
       (0.1, 0.9)),),),
    ((((0.7, 0.0), (0.4, 0.2), (0.15, 0.55), (0.2, 0.9), (0.5, 1.0), (0.8, 0.85), (0.75, 0.6), (0.45, 0.55),
       (0.2, 0.75)),),),
    ((_SEVEN,), (_SEVEN, ((0.3, 0.5), (0.75, 0.48)))),
    ((_EIGHT,),),
    ((((0.8, 0.2), (0.5, 0.0), (0.2, 0.2), (0.3, 0.45), (0.6, 0.45), (0.8, 0.2), (0.78, 0.6), (0.65, 1.0)),),
     (((0.8, 0.2), (0.5, 0.0), (0.2, 0.2), (0.3, 0.45), (0.6, 0.45), (0.8, 0.2), (0.8, 0.7), (0.6, 0.97),
       (0.25, 0.95)),)),
)  # fmt: skip
"""The forms of each digit from 0 to 9, each form a few paths."""


def draw_digits(count: int, chance: np.random.Generator) -> tuple[Array, Array]:
    """Pictures [count, 784] with pixels from 0 to 1, and labels [count]: ten classes, alike often."""
    labels = chance.integers(0, len(FORMS), count).astype(np.int32)
    pictures = np.zeros((count, SIDE, SIDE), np.float32)
    for digit, forms in enumerate(FORMS):
        mine = chance.integers(0, len(forms), count)
        for number, form in enumerate(forms):
            rows = np.flatnonzero((labels == digit) & (mine == number))
            for part in np.array_split(rows, -(-len(rows) // 256)):
                pictures[part] = _draw(form, len(part), chance)
    return pictures.reshape(count, -1), labels


def _draw(form: tuple[Path, ...], count: int, chance: np.random.Generator) -> Array:
    """[count, SIDE, SIDE]: a form, drawn so often."""
    slant, turn = 0.15 + 0.22 * chance.standard_normal((count, 1)), 0.1 * chance.standard_normal((count, 1))
    squeeze = 0.55 + 0.55 * chance.random((count, 1))
    paths: list[Array] = []
    for path in form:
        moved = np.asarray(path) + MOVED * chance.standard_normal((count, len(path), 2))
        smooth = cut_corners(cut_corners(moved))
        across = squeeze * smooth[..., 0] + (turn - slant) * smooth[..., 1]
        paths.append(np.stack([across, smooth[..., 1] - turn * smooth[..., 0]]))
    every = np.concatenate(paths, axis=2)
    low, high = every.min(axis=2), every.max(axis=2)
    scale = (17 + 2.5 * chance.random(count)) / np.maximum((high - low).max(axis=0), 0.3)
    pen = 0.6 + 1.3 * chance.random(count)
    found = np.zeros((count, SIDE, SIDE))
    for path in paths:
        x, y = (path - ((low + high) / 2)[..., None]) * scale[:, None] + (SIDE - 1) / 2
        found = np.maximum(found, draw_path(x, y, pen, SIDE))
    return found


@lru_cache(maxsize=2)
def _drawings(count: int, seed: int) -> tuple[Array, Array]:
    """Made once for all the settings that are tried on them."""
    return draw_digits(count, np.random.default_rng([seed, count]))


def drawn_crowd(name: str, norm: Norm, *, train: int = TRAIN, test: int = TEST, seed: int = 240) -> Dataset:
    """Drawn digits in the form of the data set `mnist-pixels` or `mnist`, of which they have only the public rows.

    The components of `mnist` are fitted on its public images, here as there.
    """
    data, pixels = load(name, normalise=norm), load("mnist-pixels", normalise="none")
    x, y = _drawings(train + test, seed)
    if name != pixels.name:
        x = Pca.fit(pixels.x_public, data.features).transform(x)
    rows = normalise(x, norm)
    return replace(
        data, name="drawn-digits", x_train=rows[:train], y_train=y[:train], x_test=rows[train:], y_test=y[train:]
    )
