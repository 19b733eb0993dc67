"""Softmax regression: several classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from crowdml.arrays import Array, Integers, Outer, Samples, namespace
from crowdml.models.model import Norm
from crowdml.models.scores import LARGEST, OfClasses, class_cells, known_class, settled


@dataclass(frozen=True)
class Softmax(OfClasses):
    """weights [d, c], or [d + 1, c] with a bias; y below c. Loss log sum_k exp(x.w_k) - x.w_y, gradient x (p - e_y)^T.

    p - e_y has l1 norm 2 (1 - p_y) < 2 and l2 norm < sqrt(2); both are approached as p settles on a wrong class.
    Hence |gradient|_1 <= 2 |x|_1 and |gradient|_2 <= sqrt(2) |x|_2, uniformly in the weights.
    """

    dimension: int
    classes: int
    bias: bool = field(default=False, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dimension + self.bias, self.classes)

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        scores = settled(self._score(weights, samples.x)[1])
        shifted = scores - scores.max(axis=-1, keepdims=True)
        of_label = xp.where(class_cells(samples.y, self.classes), shifted, 0).sum(axis=-1)
        return xp.where(known_class(samples.y, self.classes), xp.log(xp.exp(shifted).sum(axis=-1)) - of_label, 0)

    def gradients(self, weights: Array, samples: Samples) -> Array:
        rows = self.gradient_factors(weights, samples)
        return rows.left[:, :, None] * rows.right[:, None, :]

    def gradient_factors(self, weights: Array, samples: Samples) -> Outer:
        """Gradients by their factors: each is the outer product of x and the slopes of the loss in its scores."""
        x, residual = self._slopes(weights, samples)
        usable = (residual == residual).all(-1, keepdims=True)  # NaN alone differs from itself
        xp = namespace(x)
        finite = xp.where(abs(x) <= LARGEST, x, 0)  # apart from the slopes, which an accelerator has in one piece
        return Outer(finite, xp.where(usable, residual, 0))

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        xp = namespace(weights, samples.x)
        x, scores = self._score(weights, samples.x)
        odds = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        share = 1 / odds.sum(axis=-1, keepdims=True)  # in (0, 1], or NaN as soon as one score is
        usable = (share == share) & known_class(samples.y, self.classes)[:, None]  # NaN alone differs from itself
        return x, xp.where(usable, odds * share - class_cells(samples.y, self.classes), xp.nan)

    def predict(self, weights: Array, x: Array) -> Integers:
        xp = namespace(weights, x)
        return self.scores(weights, x).argmax(axis=-1).astype(xp.int32)

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        return (2.0 if norm == "l1" else math.sqrt(2.0)) * self._reach(norm, radius)

    def smoothness(self, radius: float) -> float:
        """The Hessian is (diag(p) - p p^T) times x x^T, and no eigenvalue of the former is above 1/2."""
        return self._reach("l2", radius) ** 2 / 2
