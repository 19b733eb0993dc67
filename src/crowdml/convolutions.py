"""Two convolutions with pooling, forward and backward: what a small network does with pictures. No randomness.

The public extractor of devices and the model that the simulator trains compute with the same lines, on NumPy or JAX.
Pictures are [b, side, side, channels]; a convolution keeps the side (zeros around the picture), a pooling halves it.
"""

from __future__ import annotations

from collections.abc import Sequence

from crowdml.arrays import Array, namespace

LARGEST = 1e15
"""Numbers beyond this are as good as infinite: the square of one is still a float32."""

Layer = tuple[Array, Array]
"""A kernel [size, size, channels, filters], and a bias for each filter."""


def pooled_side(side: int, layers: int) -> int:
    """The side of a picture after so many poolings; a last odd row or column is left out."""
    return side >> layers


def patches(pictures: Array, size: int) -> Array:
    """What each place of a convolution sees: [b, side, side, c] -> [b, side^2, size^2 c], by row, column, channel."""
    xp, (many, side, _, channels) = namespace(pictures), pictures.shape
    reach = size // 2
    padded = xp.pad(pictures, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
    shifts = [padded[:, i : i + side, j : j + side] for i in range(size) for j in range(size)]
    return xp.concatenate(shifts, axis=3).reshape(many, side * side, size * size * channels)


def pictures_slope(slope: Array, side: int, size: int) -> Array:
    """The transpose of `patches`: the loss's slope in patches -> its slope in the pictures."""
    xp, many, reach = namespace(slope), slope.shape[0], size // 2
    parts = slope.reshape(many, side, side, size * size, -1)
    found = xp.zeros((many, side + 2 * reach, side + 2 * reach, parts.shape[4]), slope.dtype)
    for place in range(size * size):
        i, j = divmod(place, size)
        around = ((0, 0), (i, size - 1 - i), (j, size - 1 - j), (0, 0))
        found = found + xp.pad(parts[:, :, :, place], around)
    return found[:, reach : reach + side, reach : reach + side]


def halved(answers: Array) -> Array:
    """The largest of each two by two places: [b, side, side, n] -> [b, side // 2, side // 2, n]."""
    return _squares(answers).max(axis=(2, 4))


def halved_slope(slope: Array, answers: Array, pooled: Array) -> Array:
    """The transpose of `halved` at these answers: a slope goes to the largest of its square, shared by equals."""
    xp, side = namespace(slope, answers), answers.shape[1]
    largest = (_squares(answers) == pooled[:, :, None, :, None]).astype(slope.dtype)
    shares = largest * (slope / xp.maximum(largest.sum(axis=(2, 4)), 1))[:, :, None, :, None]
    many, half, channels = slope.shape[0], slope.shape[1], slope.shape[3]
    found = shares.reshape(many, 2 * half, 2 * half, channels)
    return xp.pad(found, ((0, 0), (0, side - 2 * half), (0, side - 2 * half), (0, 0)))


def _squares(answers: Array) -> Array:
    many, side, _, channels = answers.shape
    half = side // 2
    return answers[:, : 2 * half, : 2 * half].reshape(many, half, 2, half, 2, channels)


def forward(pictures: Array, layers: Sequence[Layer]) -> tuple[Array, list[tuple[Array, Array, Array]]]:
    """What the last pooling gives, [b, n] by row, column and filter; and of each layer its patches, answers and pools.

    A layer is a convolution, the largest answer of each two by two places, and of that what is above zero. What is no
    number, or beyond `LARGEST`, counts as 0 to the next layer.
    """
    xp, seen = namespace(pictures, *(each for layer in layers for each in layer)), list[tuple[Array, Array, Array]]()
    for kernel, biases in layers:
        side, size, filters = pictures.shape[1], kernel.shape[0], kernel.shape[3]
        given = patches(pictures, size)
        answers = (given @ kernel.reshape(-1, filters) + biases).reshape(-1, side, side, filters)
        pooled = halved(answers)
        seen.append((given, answers, pooled))
        pictures = xp.where(pooled <= LARGEST, xp.maximum(pooled, 0), 0)
    return pictures.reshape(pictures.shape[0], -1), seen


def backward(
    slope: Array, layers: Sequence[Layer], seen: Sequence[tuple[Array, Array, Array]]
) -> list[tuple[Array, Array]]:
    """From the loss's slope in what `forward` gave: of each layer its patches [b, m, k] and its slopes [b, m, n].

    A sample's gradient in a kernel is its patches' transpose times its slopes, and in the biases the slopes' sum.
    """
    found = list[tuple[Array, Array]]()
    for place in range(len(layers) - 1, -1, -1):
        (kernel, _), (given, answers, pooled) = layers[place], seen[place]
        xp = namespace(slope, pooled)
        passed = xp.where(pooled > 0, slope.reshape(pooled.shape), 0)
        side, filters = answers.shape[1], kernel.shape[3]
        at_answers = halved_slope(passed, answers, pooled).reshape(-1, side * side, filters)
        found.append((given, at_answers))
        if place:
            slope = pictures_slope(at_answers @ kernel.reshape(-1, filters).T, side, kernel.shape[0])
            slope = xp.where(xp.abs(slope) <= LARGEST, slope, 0)
    return found[::-1]
