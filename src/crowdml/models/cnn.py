"""A small convolutional network for square pictures: convolutions with pooling, then the layers of a perceptron.

Gradients are written by hand, so it trains on devices as in the simulator. A sample's gradient in a kernel is its
patches' transpose times its slopes, written down for each sample: a kernel is small. The layers behind it are those of
`Mlp`, whose gradients' lengths are known without the gradients; what enters them is what the last pooling gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.convolutions import Layer, backward, forward, pooled_side
from crowdml.models.mlp import Layered, Mlp, finite, gradient_squares, gradient_sums, sample_products, stream_words
from crowdml.models.scores import ROOT, shrinking


@dataclass(frozen=True)
class Cnn(Layered):
    """weights [P]: of each convolution a kernel [size, size, channels, filters] and its biases, then those of the head.

    x holds pictures by rows of pixels; they are multiplied by their side, since a picture of norm one has small pixels.
    Of each two by two places of a convolution the largest answer counts, where it is above zero. y in 0..c-1. Not
    convex, and no bound holds for the gradient: what leaves must be clipped.

    A sample cannot be used where a pixel is not finite or beyond 1e15. What enters a layer, a score or a slope beyond
    that counts as 0 there.
    """

    kind: ClassVar[str] = "cnn"

    dimension: int
    classes: int
    seed: int
    """Seed of the public first weights."""
    filters: tuple[int, ...] = (16, 32)
    size: int = 5
    hidden: tuple[int, ...] = (128,)

    @property
    def side(self) -> int:
        return math.isqrt(self.dimension)

    @cached_property
    def head(self) -> Mlp:
        """The layers behind the last pooling."""
        flat = self.filters[-1] * pooled_side(self.side, len(self.filters)) ** 2
        return Mlp(flat, self.classes, self.hidden, self.seed)

    @cached_property
    def kernels(self) -> tuple[tuple[int, int, int, int], ...]:
        """The shape of each convolution's kernel."""
        channels = (1, *self.filters)
        return tuple((self.size, self.size, channels[i], channels[i + 1]) for i in range(len(self.filters)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._first + self.head.shape[0],)

    @cached_property
    def _first(self) -> int:
        """Where the head's weights begin."""
        return sum(math.prod(each) + each[3] for each in self.kernels)

    @property
    def cells(self) -> int:
        return self.classes

    def start(self) -> Array:
        """Kernels uniform within sqrt(6 / (size^2 channels)), the head as a perceptron of this seed, biases 0.

        The kernels' numbers are those of `Mlp.start`, of the stream "crowdml/cnn/1".
        """
        words = stream_words(b"crowdml/cnn/1\0", self.seed, self._first)
        uniform = (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        pieces, at = list[Array](), 0
        for kernel in self.kernels:
            count = math.prod(kernel)
            reach = np.float32(math.sqrt(6 / math.prod(kernel[:3])))
            pieces += [uniform[at : at + count] * reach, np.zeros(kernel[3], np.float32)]
            at += count
        return np.concatenate([*pieces, self.head.start()])

    def layers(self, weights: Array) -> list[Layer]:
        """Of each layer the kernel or matrix and its biases: the convolutions first, then the head's."""
        return [*self._convolutions(weights), *self.head.layers(weights[self._first :])]

    def _convolutions(self, weights: Array) -> list[Layer]:
        found, at = list[Layer](), 0
        for kernel in self.kernels:
            biases = at + math.prod(kernel)
            found.append((weights[at:biases].reshape(kernel), weights[biases : biases + kernel[3]]))
            at = biases + kernel[3]
        return found

    def _forward(self, weights: Array, x: Array) -> tuple[Array, list[tuple[Array, Array, Array]]]:
        """What enters the head, [b, n], infinite where a sample cannot be used; and what each convolution saw."""
        xp = namespace(weights, x)
        with np.errstate(over="ignore", invalid="ignore"):
            x = xp.asarray(x, dtype=weights.dtype)
            pictures = finite(xp, x) * self.side
            shape = (x.shape[0], self.side, self.side, 1)
            flat, seen = forward(pictures.reshape(shape), self._convolutions(weights))
            usable = (xp.abs(x) <= ROOT).all(-1, keepdims=True)
            return xp.where(usable, flat, xp.inf), seen

    def _behind(self, weights: Array, samples: Samples) -> tuple[Array, Samples]:
        """The head's weights, and the samples that it sees."""
        return weights[self._first :], Samples(self._forward(weights, samples.x)[0], samples.y)

    def enters_head(self, weights: Array, x: Array) -> Array:
        """What the last pooling gives, [b, n]."""
        return self._forward(weights, x)[0]

    def losses(self, weights: Array, samples: Samples) -> Array:
        return self.head.losses(*self._behind(weights, samples))

    # --- backward ---

    def _backward(self, weights: Array, samples: Samples) -> tuple[list[tuple[Array, Array]], list[Array], list[Array]]:
        """Of each convolution its patches [b, m, k] and slopes [b, m, n]; what enters the head's layers, and slopes."""
        xp = namespace(weights, samples.x)
        flat, seen = self._forward(weights, samples.x)
        behind = weights[self._first :]
        with np.errstate(over="ignore", invalid="ignore"):
            entering, slopes = self.head.backward(behind, Samples(flat, samples.y))
            slope = finite(xp, slopes[0] @ self.head.layers(behind)[0][0].T)
            return backward(slope, self._convolutions(weights), seen), entering, slopes

    def gradients(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        seen, entering, slopes = self._backward(weights, samples)
        pieces: list[Array] = []
        for given, slope in seen:
            pieces += [_kernels(given, slope).reshape(len(given), -1), slope.sum(1)]
        return xp.concatenate([*pieces, *sample_products(entering, slopes)], axis=1)

    def gradient_sum(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        seen, entering, slopes = self._backward(weights, samples)
        pieces: list[Array] = []
        for given, slope in seen:
            flat = slope.reshape(-1, slope.shape[2])
            pieces += [(given.reshape(-1, given.shape[2]).T @ flat).reshape(-1), flat.sum(0)]
        return xp.concatenate([*pieces, gradient_sums(entering, slopes)])

    def clipped_sum(self, weights: Array, samples: Samples, clip: float) -> Array:
        xp = namespace(weights, samples.x)
        seen, entering, slopes = self._backward(weights, samples)
        each = [(_kernels(given, slope), slope.sum(1)) for given, slope in seen]
        with np.errstate(over="ignore"):
            squares = gradient_squares(entering, slopes)
            for kernel, biases in each:
                tiny = np.finfo(kernel.dtype).tiny * math.prod(kernel.shape[1:])
                squares = squares + (kernel * kernel).sum((1, 2)) + (biases * biases).sum(1) + tiny
            factor = shrinking(squares, clip)
        pieces: list[Array] = []
        for kernel, biases in each:
            pieces += [xp.tensordot(factor, kernel, 1).reshape(-1), factor @ biases]
        return xp.concatenate([*pieces, gradient_sums(entering, [slope * factor[:, None] for slope in slopes])])

    # --- what it says ---

    def scores(self, weights: Array, x: Array) -> Array:
        return self.head.scores(weights[self._first :], self._forward(weights, x)[0])

    def predict(self, weights: Array, x: Array) -> Array:
        xp = namespace(weights, x)
        return self.scores(weights, x).argmax(axis=-1).astype(xp.int32)

    def mistakes(self, weights: Array, samples: Samples) -> Integers:
        return self.head.mistakes(*self._behind(weights, samples))

    def label_cells(self, samples: Samples) -> Integers:
        return self.head.label_cells(samples)


def _kernels(given: Array, slope: Array) -> Array:
    """Each sample's gradient in a kernel: patches [b, m, k] and slopes [b, m, n] -> [b, k, n]."""
    return given.transpose(0, 2, 1) @ slope
