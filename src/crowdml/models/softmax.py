"""Softmax regression: several classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.models.model import Norm, check_radius
from crowdml.models.scores import LARGEST, clipped_sum, gradient_sum, known_class, score, settled

__all__ = ["Softmax"]


@dataclass(frozen=True)
class Softmax:
    """weights [d, c], y in 0..c-1. Loss log sum_k exp(x.w_k) - x.w_y, gradient x (p - e_y)^T.

    p - e_y has l1 norm 2 (1 - p_y) < 2 and l2 norm < sqrt(2); both are approached as p settles on a wrong class.
    Hence |gradient|_1 <= 2 |x|_1 and |gradient|_2 <= sqrt(2) |x|_2, uniformly in the weights.
    """

    dimension: int
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dimension, self.classes)

    @property
    def cells(self) -> int:
        return self.classes

    @property
    def convex(self) -> bool:
        return True

    @property
    def bounded(self) -> bool:
        return True

    def start(self) -> Array:
        return np.zeros(self.shape, np.float32)

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        scores = settled(score(weights, samples.x)[1])
        shifted = scores - scores.max(axis=-1, keepdims=True)
        of_label = xp.where(self._hot(samples), shifted, 0).sum(axis=-1)
        return xp.where(known_class(samples.y, self.classes), xp.log(xp.exp(shifted).sum(axis=-1)) - of_label, 0)

    def gradients(self, weights: Array, samples: Samples) -> Array:
        x, residual = self._slopes(weights, samples)
        usable = (residual == residual).all(-1, keepdims=True)  # NaN alone differs from itself
        xp = namespace(x)
        finite = xp.where(abs(x) <= LARGEST, x, 0)  # apart from the slopes, which an accelerator has in one piece
        return finite[:, :, None] * xp.where(usable, residual, 0)[:, None, :]

    def gradient_sum(self, weights: Array, samples: Samples) -> Array:
        return gradient_sum(*self._slopes(weights, samples))

    def clipped_sum(self, weights: Array, samples: Samples, clip: float) -> Array:
        return clipped_sum(weights, samples.x, lambda x: self._slopes(weights, Samples(x, samples.y)), clip)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        """x [b, d], and the slope of each loss in its scores, [b, c]: NaN where a sample cannot be used."""
        xp = namespace(weights, samples.x)
        x, scores = score(weights, samples.x)
        odds = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        share = 1 / odds.sum(axis=-1, keepdims=True)  # in (0, 1], or NaN as soon as one score is
        usable = (share == share) & known_class(samples.y, self.classes)[:, None]  # NaN alone differs from itself
        return x, xp.where(usable, odds * share - self._hot(samples), xp.nan)

    def predict(self, weights: Array, x: Array) -> Integers:
        xp = namespace(weights, x)
        return settled(score(weights, x)[1]).argmax(axis=-1).astype(xp.int32)

    def mistakes(self, weights: Array, samples: Samples) -> Integers:
        xp = namespace(weights, samples.x)
        wrong = self.predict(weights, samples.x) != samples.y
        return (wrong & known_class(samples.y, self.classes)).astype(xp.int32)

    def label_cells(self, samples: Samples) -> Integers:
        return self._hot(samples).astype(namespace(samples.y).int32)

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        check_radius(norm, radius)
        return (2.0 if norm == "l1" else math.sqrt(2.0)) * radius

    def smoothness(self, radius: float) -> float:
        """The Hessian is (diag(p) - p p^T) times x x^T, and no eigenvalue of the former is above 1/2."""
        check_radius("l2", radius)
        return radius**2 / 2

    def _hot(self, samples: Samples) -> Array:
        return samples.y[:, None] == namespace(samples.y).arange(self.classes)
