"""Two classes and one weight vector: logistic regression, the support vector machine, and that smoothed."""

from __future__ import annotations

from dataclasses import dataclass, field

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.models.model import Norm
from crowdml.models.scores import OfClasses, known_class, settled


@dataclass(frozen=True)
class TwoClasses(OfClasses):
    """What they share: weights [d], or [d + 1] with a bias, y in {0, 1}, class 1 where x.w > 0."""

    dimension: int
    bias: bool = field(default=False, kw_only=True)
    classes = 2

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dimension + self.bias,)

    def predict(self, weights: Array, x: Array) -> Integers:
        xp = namespace(weights, x)
        return (self.scores(weights, x) > 0).astype(xp.int32)

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        return 1.0 * self._reach(norm, radius)  # the slope of each of these losses in x.w is at most 1


@dataclass(frozen=True)
class Logistic(TwoClasses):
    """weights [d], y in {0, 1}. Loss log(1 + exp(-s x.w)) with s = 2y - 1, gradient (p - y) x, p = 1/(1 + exp(-x.w)).

    |p - y| < 1, approached as x.w goes to infinity on the wrong side: |gradient| <= |x| in either norm.
    """

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        scores = settled(self._score(weights, samples.x)[1])
        against = xp.where(samples.y == 1, -scores, scores)
        return xp.where(known_class(samples.y, 2), xp.maximum(against, 0) + xp.log1p(xp.exp(-xp.abs(against))), 0)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        xp = namespace(weights, samples.x)
        x, scores = self._score(weights, samples.x)
        usable = (scores == scores) & known_class(samples.y, 2)  # NaN alone differs from itself
        chance = 0.5 + 0.5 * xp.tanh(0.5 * scores)  # never overflows, unlike 1 / (1 + exp(-scores))
        return x, xp.where(usable, chance - (samples.y == 1), xp.nan)

    def smoothness(self, radius: float) -> float | None:
        return self._reach("l2", radius) ** 2 / 4  # p (1 - p) is at most 1/4


@dataclass(frozen=True)
class Svm(TwoClasses):
    """weights [d], y in {0, 1}. Hinge loss max(0, 1 - s x.w) with s = 2y - 1, gradient -s x where s x.w < 1, else 0.

    At the kink s x.w = 1 the subgradient is 0. |gradient| <= |x| in either norm, attained on the wrong side.
    """

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        scores = settled(self._score(weights, samples.x)[1])
        return xp.where(known_class(samples.y, 2), xp.maximum(1 - xp.where(samples.y == 1, scores, -scores), 0), 0)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        xp = namespace(weights, samples.x)
        x, scores = self._score(weights, samples.x)
        sign = xp.where(samples.y == 1, 1, -1).astype(x.dtype)
        usable = (scores == scores) & known_class(samples.y, 2)  # NaN alone differs from itself
        return x, xp.where(usable, xp.where(sign * scores < 1, -sign, 0), xp.nan)

    def smoothness(self, radius: float) -> float | None:
        return None  # at the kink the gradient jumps


@dataclass(frozen=True)
class SmoothSvm(TwoClasses):
    """weights [d], y in {0, 1}. The hinge with its kink rounded over a public width h: with m = s x.w, s = 2y - 1,

    loss 0 for m >= 1, (1 - m)^2 / (2h) for 1 - h < m < 1, and 1 - m - h/2 for m <= 1 - h; gradient -s x times
    (1 - m) / h, held within 0 and 1. |gradient| <= |x|, and it changes with the weights by |x|^2 / h at most (G5).
    """

    width: float = 0.5

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        short = xp.maximum(1 - self._margin(settled(self._score(weights, samples.x)[1]), samples), 0)
        inner = xp.minimum(short, self.width)
        return xp.where(known_class(samples.y, 2), inner / self.width * (short - 0.5 * inner), 0)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        xp = namespace(weights, samples.x)
        x, scores = self._score(weights, samples.x)
        usable = (scores == scores) & known_class(samples.y, 2)  # NaN alone differs from itself
        share = xp.clip(1 - self._margin(scores, samples), 0, self.width) / self.width
        slope = xp.where(samples.y == 1, -share, share)
        return x, xp.where(usable, slope, xp.nan).astype(x.dtype)

    def smoothness(self, radius: float) -> float | None:
        return self._reach("l2", radius) ** 2 / self.width

    def _margin(self, scores: Array, samples: Samples) -> Array:
        return namespace(scores).where(samples.y == 1, scores, -scores)
