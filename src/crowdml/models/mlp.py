"""A multi-layer perceptron: any depth, three activations, softmax or squared error on top.

Gradients are written by hand. One sample's gradient in a layer's weights is the outer product of what enters the layer
and the slope delta of the loss in its scores, so its length is known without it: |a|^2 |delta|^2 for the weights, and
|delta|^2 for the biases (Goodfellow 2015). Each sample's slopes are scaled, and the products run once.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.errors import TaskError
from crowdml.models.model import Norm, check_radius
from crowdml.models.scores import ROOT, known_class, number_cells, shrinking

Activation = Literal["relu", "tanh", "sigmoid"]
Top = Literal["softmax", "squared"]
ACTIVATIONS: tuple[Activation, ...] = ("relu", "tanh", "sigmoid")
TOPS: tuple[Top, ...] = ("softmax", "squared")


class Layered:
    """A model of several layers: its loss is not convex, and no bound holds for its gradient."""

    kind: ClassVar[str]

    @property
    def convex(self) -> bool:
        return False

    @property
    def bounded(self) -> bool:
        return False

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        check_radius(norm, radius)
        raise TaskError(
            f"model {self.kind!r}: its gradient grows with the weights of the other layers, so no bound holds for it. "
            "Give the task a bound of its own, protocol.clip, to which each sample's gradient is clipped."
        )

    def smoothness(self, radius: float) -> float | None:
        check_radius("l2", radius)
        return None  # products of layers: no constant holds for all weights


@dataclass(frozen=True)
class Mlp(Layered):
    """weights [P]: layer by layer, a matrix [n_in, n_out] by rows, then its biases [n_out].

    y in 0..c-1, or (classes None, top "squared") a number with |y| <= bound, a mistake where the prediction is further
    from it than `tolerance`; label cells are then `bins` intervals. Loss: softmax's, or |scores - target|^2 / 2 with
    the target e_y or y. It is not convex, and no bound holds for its gradient: what leaves must be clipped.

    A sample cannot be used where a feature is not finite or beyond 1e15. What enters a unit, a score or a slope counts
    as 0 there.
    """

    kind: ClassVar[str] = "mlp"

    dimension: int
    classes: int | None
    hidden: tuple[int, ...]
    seed: int
    """Seed of the public first weights."""
    activation: Activation = "relu"
    top: Top = "softmax"
    tolerance: float = 0.1
    bound: float = 1.0
    bins: int = 10

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Units of each layer, the features first and the scores last."""
        return (self.dimension, *self.hidden, self.classes or 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum((into + 1) * out for into, out in pairwise(self.widths)),)

    @property
    def cells(self) -> int:
        return self.classes or self.bins

    def start(self) -> Array:
        """Uniform within sqrt(6 / n_in) before a ReLU (He), sqrt(6 / (n_in + n_out)) elsewhere (Glorot); biases 0.

        Block i of the stream is SHA-256("crowdml/mlp/1" 0x00 seed i), seed and i as 8 bytes each, little-endian; its
        words of 32 bits, little-endian too, give a number each, their upper 24 bits over 2^23 less 1, all layers in one
        row. That is exact, and the product with the width in float32 is rounded once.
        """
        words = stream_words(b"crowdml/mlp/1\0", self.seed, self.shape[0])
        uniform = (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
        pieces, at, last = list[Array](), 0, len(self.hidden)
        for layer, (into, out) in enumerate(pairwise(self.widths)):
            he = self.activation == "relu" and layer < last
            reach = np.float32(math.sqrt(6 / (into if he else into + out)))
            pieces += [uniform[at : at + into * out] * reach, np.zeros(out, np.float32)]
            at += into * out
        return np.concatenate(pieces)

    def layers(self, weights: Array) -> list[tuple[Array, Array]]:
        """The matrix [n_in, n_out] and the biases [n_out] of each layer."""
        found, at = [], 0
        for into, out in pairwise(self.widths):
            biases = at + into * out
            found.append((weights[at:biases].reshape(into, out), weights[biases : biases + out]))
            at = biases + out
        return found

    # --- forward ---

    def _forward(self, weights: Array, x: Array) -> tuple[list[Array], Array]:
        """What enters each layer, [b, n_in] each, and the scores [b, k], 0 where a sample is unusable. All finite."""
        xp = namespace(weights, x)
        layers = self.layers(weights)
        with np.errstate(over="ignore", invalid="ignore"):
            entering = [finite(xp, xp.asarray(x, dtype=weights.dtype))]
            for matrix, biases in layers[:-1]:
                entering.append(self._activate(xp, finite(xp, entering[-1] @ matrix + biases)))
            matrix, biases = layers[-1]
            return entering, xp.where(_usable(xp, x), finite(xp, entering[-1] @ matrix + biases), 0)

    def _activate(self, xp: Array, z: Array) -> Array:
        if self.activation == "relu":
            return xp.maximum(z, 0)
        return xp.tanh(z) if self.activation == "tanh" else 0.5 + 0.5 * xp.tanh(0.5 * z)

    def _slope(self, xp: Array, back: Array, a: Array) -> Array:
        """back, the loss's slope in the units a [b, n], carried to what entered their activation."""
        if self.activation == "relu":
            return xp.where(a > 0, back, 0)
        return back * (1 - a * a) if self.activation == "tanh" else back * (a * (1 - a))

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        scores = self._forward(weights, samples.x)[1]
        if self.top == "squared":
            off = scores - self._target(weights, samples)
            return xp.where(self._known(samples), 0.5 * (off * off).sum(-1), 0)
        shifted = scores - scores.max(axis=-1, keepdims=True)
        of_label = xp.where(self._hot(samples), shifted, 0).sum(axis=-1)
        return xp.where(self._known(samples), xp.log(xp.exp(shifted).sum(axis=-1)) - of_label, 0)

    # --- backward ---

    def backward(self, weights: Array, samples: Samples) -> tuple[list[Array], list[Array]]:
        """What enters each layer and the loss's slope in its scores, [b, n_in] and [b, n_out] each, all finite.

        A sample that cannot be used has slope 0 everywhere.
        """
        xp = namespace(weights, samples.x)
        entering, scores = self._forward(weights, samples.x)
        layers = self.layers(weights)
        with np.errstate(over="ignore", invalid="ignore"):
            slopes = [finite(xp, self._top(xp, scores, weights, samples))]
            for (matrix, _), a in zip(layers[:0:-1], entering[:0:-1], strict=True):
                slopes.append(finite(xp, self._slope(xp, slopes[-1] @ matrix.T, a)))
        return entering, slopes[::-1]

    def _top(self, xp: Array, scores: Array, weights: Array, samples: Samples) -> Array:
        """The loss's slope in the scores, [b, k]."""
        known = self._known(samples)[:, None] & _usable(xp, samples.x)
        if self.top == "squared":
            return xp.where(known, scores - self._target(weights, samples), 0)
        odds = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        return xp.where(known, odds / odds.sum(axis=-1, keepdims=True) - self._hot(samples), 0)

    def gradients(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        return xp.concatenate(sample_products(*self.backward(weights, samples)), axis=1)

    def gradient_sum(self, weights: Array, samples: Samples) -> Array:
        return gradient_sums(*self.backward(weights, samples))

    def clipped_sum(self, weights: Array, samples: Samples, clip: float) -> Array:
        entering, slopes = self.backward(weights, samples)
        with np.errstate(over="ignore"):
            factor = shrinking(gradient_squares(entering, slopes), clip)[:, None]
        return gradient_sums(entering, [slope * factor for slope in slopes])

    # --- what it says ---

    def scores(self, weights: Array, x: Array) -> Array:
        return self._forward(weights, x)[1]

    def predict(self, weights: Array, x: Array) -> Array:
        xp, scores = namespace(weights, x), self.scores(weights, x)
        return scores[:, 0] if self.classes is None else scores.argmax(axis=-1).astype(xp.int32)

    def mistakes(self, weights: Array, samples: Samples) -> Integers:
        xp = namespace(weights, samples.x)
        said = self.predict(weights, samples.x)
        if self.classes is None:
            wrong = xp.abs(said - self._target(weights, samples)[:, 0]) > self.tolerance
        else:
            wrong = said != samples.y
        return (wrong & self._known(samples)).astype(xp.int32)

    def label_cells(self, samples: Samples) -> Integers:
        if self.classes is None:
            return number_cells(samples.y, self.bound, self.bins)
        return self._hot(samples).astype(namespace(samples.y).int32)

    def _known(self, samples: Samples) -> Array:
        if self.classes is None:
            return namespace(samples.y).abs(samples.y) <= self.bound  # false for NaN
        return known_class(samples.y, self.classes)

    def _hot(self, samples: Samples) -> Array:
        return samples.y[:, None] == namespace(samples.y).arange(self.classes)

    def _target(self, weights: Array, samples: Samples) -> Array:
        """[b, k]: e_y, or y."""
        if self.classes is not None:
            return self._hot(samples).astype(weights.dtype)
        y = namespace(samples.y).where(self._known(samples), samples.y, 0)
        return y.astype(weights.dtype)[:, None]


def _usable(xp: Array, x: Array) -> Array:
    """[b, 1]: the samples whose features are all finite, and within ROOT."""
    return (xp.abs(x) <= ROOT).all(-1, keepdims=True)


def finite(xp: Array, raw: Array) -> Array:
    return xp.where(xp.abs(raw) <= ROOT, raw, 0)


def _square(rows: Array) -> Array:
    """|row|^2, [b]: never less than it, for squares that vanish must not hide a length."""
    return (rows * rows).sum(-1) + rows.shape[-1] * np.finfo(rows.dtype).tiny


def stream_words(kind: bytes, seed: int, count: int) -> Array:
    """So many words of the public stream of a model's kind and seed, uint32."""
    tag = kind + seed.to_bytes(8, "little")
    blocks = (hashlib.sha256(tag + block.to_bytes(8, "little")).digest() for block in range(-(-count // 8)))
    return np.frombuffer(b"".join(blocks), "<u4")[:count]


def gradient_squares(entering: list[Array], slopes: list[Array]) -> Array:
    """The squared length of each sample's gradient in all layers, [b], from what enters them and their slopes."""
    return sum((_square(a) + 1) * _square(slope) for a, slope in zip(entering, slopes, strict=True))


def sample_products(entering: list[Array], slopes: list[Array]) -> list[Array]:
    """Each sample's gradient in each layer's matrix and biases, [b, n] each."""
    pieces: list[Array] = []
    for a, slope in zip(entering, slopes, strict=True):
        pieces += [(a[:, :, None] * slope[:, None, :]).reshape(len(a), a.shape[1] * slope.shape[1]), slope]
    return pieces


def gradient_sums(entering: list[Array], slopes: list[Array]) -> Array:
    """[P]: the sum over samples of their gradients, one product a layer."""
    xp = namespace(*entering, *slopes)
    pieces: list[Array] = []
    for a, slope in zip(entering, slopes, strict=True):
        pieces += [(a.T @ slope).reshape(-1), slope.sum(0)]
    return xp.concatenate(pieces)
