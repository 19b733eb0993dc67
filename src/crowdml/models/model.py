"""What a model is: pure functions of public weights and private samples, and the bound that privacy rests on."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal
from typing import Protocol as Interface

from crowdml.arrays import Array, Integers, Outer, Samples, gains_by_factors
from crowdml.errors import TaskError

Norm = Literal["l1", "l2"]


class Model(Interface):
    """Loss, gradient and prediction of one kind of model. No noise, no state, no regulariser.

    The same code runs on NumPy and under `jax.jit`, `vmap` and `scan`: no branch on a value, no shape that depends on
    one. Results have the floating type of the weights, float32 or float64. lambda * w is public: the server adds it.

    Nothing is ever NaN, and no gradient is infinite. A sample with a non-finite entry in x, or whose scores are not
    finite or beyond 1e30 (huge weights), counts as the zero sample: gradient 0, and scores 0 for loss and prediction.
    A sample with a label out of the public range contributes nothing: gradient, loss, mistake and label cells are 0.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""
        ...

    @property
    def classes(self) -> int | None:
        """Number of classes; None where the label is a number."""
        ...

    @property
    def cells(self) -> int:
        """Number of label cells: the classes, or the public bins of a number."""
        ...

    @property
    def convex(self) -> bool:
        """Whether each sample's loss is convex in the weights: an argument about minima may rest on it."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether `gradient_bound` has an answer. Without one, what leaves must be clipped to a bound of the task's."""
        ...

    def start(self) -> Array:
        """The public first weights, [*shape] float32: the same bits on every machine."""
        ...

    def losses(self, weights: Array, samples: Samples) -> Array:
        """Loss of each sample, [b]."""
        ...

    def gradients(self, weights: Array, samples: Samples) -> Array:
        """Gradient of each sample's loss in the weights, [b, *shape]."""
        ...

    def gradient_sum(self, weights: Array, samples: Samples) -> Array:
        """Their sum, [*shape], as one product: where no sample's own gradient is needed, it is several times faster."""
        ...

    def clipped_sum(self, weights: Array, samples: Samples, clip: float) -> Array:
        """The sum, [*shape], of each sample's gradient brought into the l2 ball of radius `clip`; non-finite is zero.

        To within rounding, |one sample's share| <= clip, so replacing a sample moves the sum by at most twice that. No
        sample's own gradient is written down: it costs little more than `gradient_sum`. A gradient whose squared
        length is not a float of this type (beyond 1e19 in float32) counts as zero too.
        """
        ...

    def predict(self, weights: Array, x: Array) -> Array:
        """x [b, d] -> [b]: a class index (int32, the lowest of equals), or a number."""
        ...

    def mistakes(self, weights: Array, samples: Samples) -> Integers:
        """1 where the prediction is wrong, 0 elsewhere: [b] int32."""
        ...

    def label_cells(self, samples: Samples) -> Integers:
        """One row a sample with a 1 in the cell of its label: [b, cells] int32. It reads y alone."""
        ...

    def gradient_bound(self, norm: Norm, radius: float) -> float:
        """Supremum, over all weights, labels and |x| <= radius in `norm`, of that norm of ONE sample's gradient.

        Replacing one sample of a batch moves the sum of the gradients by at most twice this. A TaskError where there
        is none.
        """
        ...

    def smoothness(self, radius: float) -> float | None:
        """Lipschitz constant of ONE sample's gradient in the weights, for |x|_2 <= radius.

        None where it has none (the plain hinge): an argument that needs a smooth loss, as that of a fixed number of
        local steps (review, G5), does not hold there.
        """
        ...


def sample_gradients(model: Model, weights: Array, samples: Samples) -> Array | Outer:
    """Each sample's gradient, [b, *shape]: by its two factors where the model has them and what adds them up gains."""
    factors = getattr(model, "gradient_factors", None)
    if factors is not None and gains_by_factors(len(samples), weights.shape[-1], weights):
        return factors(weights, samples)
    return model.gradients(weights, samples)


def check_radius(norm: str, radius: float) -> None:
    """Refuse a norm that no bound is proved for, and a radius that bounds nothing."""
    if norm not in ("l1", "l2"):
        raise TaskError(f"no gradient bound is known in the norm {norm!r}. Use 'l1' or 'l2' for the features.")
    if not (math.isfinite(radius) and radius > 0):
        raise TaskError(f"features with |x| <= {radius!r} have no gradient bound. Use a positive, finite bound.")


def longest_gradient(model: Model, norm: Norm, bound: float, clip: Fraction | None) -> float:
    """How long a sample's gradient may be: the model's own bound, or the task's `protocol.clip` where that is less.

    `bound`: how long samples may be.
    """
    if clip is not None and not model.bounded:
        return float(clip)
    own = model.gradient_bound(norm, bound)
    return own if clip is None else min(own, float(clip))
