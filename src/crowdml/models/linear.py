"""Linear regression with Huber's loss, and with the squared loss of the papers, which has no bound."""

from __future__ import annotations

from dataclasses import dataclass, field

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.errors import TaskError
from crowdml.models.model import Norm, check_radius
from crowdml.models.scores import LARGEST, ROOT, FromScores, number_cells, settled


@dataclass(frozen=True)
class Linear(FromScores):
    """weights [d], or [d + 1] with a bias; y a number, |y| <= bound. Huber loss of r = x.w - y, gradient
    clip(r, -width, width) x.

    Loss r^2 / 2 for |r| <= width, width (|r| - width / 2) beyond: the clipped-gradient form of least squares, whose own
    gradient has no bound. |gradient| <= width |x| in either norm, attained by every |r| >= width.
    A prediction is a mistake where |r| > tolerance. Label cells are `bins` equal intervals of [-bound, bound].
    """

    dimension: int
    width: float = 1.0
    tolerance: float = 0.1
    bound: float = 1.0
    bins: int = 10
    bias: bool = field(default=False, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dimension + self.bias,)

    @property
    def classes(self) -> None:
        return None

    @property
    def cells(self) -> int:
        return self.bins

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        off = xp.abs(self.predict(weights, samples.x) - self._target(weights, samples))
        inner = xp.minimum(off, self.width)
        return xp.where(self._known(samples), inner * (off - 0.5 * inner), 0)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        xp = namespace(weights, samples.x)
        x, scores = self._score(weights, samples.x)
        usable = (scores == scores) & self._known(samples)  # NaN alone differs from itself
        slope = xp.clip(scores - self._target(weights, samples), -self.width, self.width)
        # the entries of x are held to LARGEST, so that a width above 1 cannot carry them to infinity
        return xp.clip(x, -LARGEST, LARGEST), xp.where(usable, slope, xp.nan)

    def predict(self, weights: Array, x: Array) -> Array:
        return settled(self._score(weights, x)[1])

    def mistakes(self, weights: Array, samples: Samples) -> Integers:
        xp = namespace(weights, samples.x)
        off = xp.abs(self.predict(weights, samples.x) - self._target(weights, samples))
        return ((off > self.tolerance) & self._known(samples)).astype(xp.int32)

    def label_cells(self, samples: Samples) -> Integers:
        return number_cells(samples.y, self.bound, self.bins)

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        return self.width * self._reach(norm, radius)

    def smoothness(self, radius: float) -> float | None:
        return self._reach("l2", radius) ** 2  # within the width the slope is the residual itself

    def _known(self, samples: Samples) -> Array:
        return namespace(samples.y).abs(samples.y) <= self.bound  # false for NaN

    def _target(self, weights: Array, samples: Samples) -> Array:
        return namespace(samples.y).where(self._known(samples), samples.y, 0).astype(weights.dtype)


@dataclass(frozen=True)
class LeastSquares(Linear):
    """weights [d], y a number with |y| <= bound. Loss (x.w - y)^2 as Guo and Gong write it, gradient 2 (x.w - y) x.

    It grows with the weights without bound, so no sensitivity holds for it (review, G4): for as-published runs alone.
    The width of Huber's loss, which is the sound form, has no meaning here.
    """

    @property
    def bounded(self) -> bool:
        return False

    def losses(self, weights: Array, samples: Samples) -> Array:
        xp = namespace(weights, samples.x)
        off = self.predict(weights, samples.x) - self._target(weights, samples)
        off = xp.clip(off, -ROOT, ROOT)  # so that the square is a float32
        return xp.where(self._known(samples), off * off, 0)

    def _slopes(self, weights: Array, samples: Samples) -> tuple[Array, Array]:
        xp = namespace(weights, samples.x)
        x, scores = self._score(weights, samples.x)
        usable = (scores == scores) & self._known(samples)  # NaN alone differs from itself
        slope = xp.clip(2 * (scores - self._target(weights, samples)), -ROOT, ROOT)
        return xp.clip(x, -ROOT, ROOT), xp.where(usable, slope, xp.nan)

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        check_radius(norm, radius)
        raise TaskError(
            "model 'least-squares': the gradient 2 (x.w - y) x grows with the weights, so no bound holds for it and no "
            "noise protects it (Guo and Gong's Lemma 1 fails: finding G4). Use 'linear', whose loss is Huber's."
        )

    def smoothness(self, radius: float) -> float | None:
        return 2 * self._reach("l2", radius) ** 2
