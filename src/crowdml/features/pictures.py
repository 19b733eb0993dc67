"""Variations of public pictures, on which models are tried: turned, stretched and bent a little. NumPy only."""

from __future__ import annotations

import math

import numpy as np

from crowdml.arrays import Array
from crowdml.features.maps import draw_bells

__all__ = ["VARIATIONS", "bend", "variations"]

VARIATIONS = 8
"""How often each picture is bent."""
MOST_BENT = 4000
"""Variations of all pictures together: with more pictures each is bent less often."""
PUBLIC_SEED = 1


def variations(pictures: Array) -> tuple[Array, int]:
    """Square pictures [n, p] -> [times * n, p], and how often each was bent: 8 times, and at most 4,000 in all."""
    times = min(VARIATIONS, MOST_BENT // max(1, len(pictures)))
    return (bend(pictures, times) if times else pictures[:0]), times


def bend(pictures: Array, times: int) -> Array:
    """Square pictures [n, p] -> [times * n, p]: turned, stretched and bent a little, in other ways each time. The draw
    is public and fixed: the same pictures are bent alike wherever it is done."""
    n, side = len(pictures), math.isqrt(pictures.shape[1])
    drawn, middle = draw_bells("bends", PUBLIC_SEED, 36 * n * times).reshape(times, n, 36), (side - 1) / 2
    image, own = pictures.reshape(n, side, side), np.arange(n)[:, None, None]
    rows, columns = np.mgrid[0:side, 0:side]
    corners, made = np.linspace(0, 3, side), list[Array]()
    first = np.minimum(corners.astype(int), 2)
    part = corners - first
    for each in drawn:
        turn = 0.08 * each[:, :4].reshape(n, 2, 2, 1, 1)
        pull = side / 28 * each[:, 4:].reshape(n, 2, 4, 4)
        pull = pull[:, :, first] * (1 - part)[:, None] + pull[:, :, first + 1] * part[:, None]
        pull = pull[..., first] * (1 - part) + pull[..., first + 1] * part
        from_row = rows + turn[:, 0, 0] * (rows - middle) + turn[:, 0, 1] * (columns - middle) + pull[:, 0]
        from_column = columns + turn[:, 1, 0] * (rows - middle) + turn[:, 1, 1] * (columns - middle) + pull[:, 1]
        from_row, from_column = (each.clip(0, side - 1.001) for each in (from_row, from_column))
        y, x = from_row.astype(int), from_column.astype(int)
        down, right = from_row - y, from_column - x
        above = image[own, y, x] * (1 - right) + image[own, y, x + 1] * right
        below = image[own, y + 1, x] * (1 - right) + image[own, y + 1, x + 1] * right
        made.append((above * (1 - down) + below * down).reshape(n, -1))
    return np.concatenate(made).astype(pictures.dtype)
