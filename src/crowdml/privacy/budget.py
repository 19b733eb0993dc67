"""What an owner permits, what is left of it, and the sentence that says no."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import cached_property

from crowdml.errors import GuaranteeError
from crowdml.privacy.losses import Filter, Total, exact
from crowdml.records import record


@record
class Budget:
    """Caps the total of any one sample, and the number of samples that this device gives in its life.

    Guarantee: however the releases depend on one another, each sample's releases together are (epsilon, delta)-DP,
    with the neighbours and observers of its charges (`Filter`); at most `samples` samples are ever given; and, where
    `device_epsilon` is set, all releases together are (device_epsilon, delta)-DP for replacing all of the device's
    samples. Over all tasks; or over the charges of `task` alone, where that is a task's hash.

    `plan` is what one sample is to pay in all, where that is public and fixed before the first release: a plan that
    costs no more than epsilon at delta is then allowed to its end.
    """

    epsilon: Fraction
    delta: float
    samples: int
    device_epsilon: Fraction | None = None
    task: bytes | None = None
    plan: Total | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", exact(self.epsilon))
        if self.device_epsilon is not None:
            object.__setattr__(self, "device_epsilon", exact(self.device_epsilon))
        if self.samples < 0:
            raise GuaranteeError(f"a budget of {self.samples} samples: use 0 to give nothing, or a positive number.")
        _ = self.sample_filter, self.device_filter  # refuse a budget that no filter can keep

    @cached_property
    def sample_filter(self) -> Filter:
        return Filter.of(self.epsilon, self.delta, self.plan)

    @cached_property
    def device_filter(self) -> Filter | None:
        return None if self.device_epsilon is None else Filter.of(self.device_epsilon, self.delta)


@record
class Allowance:
    """What is left of a budget: to its dearest sample, in samples not yet given, and to the device (None: no cap)."""

    epsilon: float
    samples: int
    device_epsilon: float | None


def spent(budget: Filter, total: Total) -> Fraction | float:
    """What the total has used of the filter's epsilon: above `budget.epsilon` exactly where the filter refuses it.

    The lesser of its two rules: the sum of pure losses, or the divergence at the filter's own order, converted. The
    conversion costs something before the first loss, so that the first charge is dearer than the next ones.
    """
    pure = total.pure if total.is_pure else math.inf
    divergence, limit = None, budget.divergence
    if budget.order is not None and limit is not None:
        divergence = total.divergence(budget.order)
    if divergence is None or limit is None:
        return pure
    return min(pure, max(Fraction(0), divergence + budget.epsilon - limit))


def shortfall(budget: Filter, before: Total, after: Total) -> str:
    """'ε=0.2, and ε=0.1 of 1 is left': the cost is rounded up, what is left down, so that one exceeds the other."""
    spent_before, spent_after = spent(budget, before), spent(budget, after)
    cost = math.inf if spent_after == math.inf else spent_after - spent_before
    left = max(Fraction(0), budget.epsilon - spent_before)
    return (
        f"ε={_digits(cost, ROUND_CEILING)}, and ε={_digits(left, ROUND_FLOOR)} of "
        f"{_digits(budget.epsilon, ROUND_FLOOR)} is left"
    )


def _digits(value: Fraction | float, rounding: str) -> str:
    if value == math.inf:
        return "infinity"
    fraction = Fraction(value)
    rounded = Context(prec=4, rounding=rounding).divide(Decimal(fraction.numerator), Decimal(fraction.denominator))
    return f"{rounded.normalize():f}" if 1e-4 <= rounded < 1e7 or not rounded else f"{rounded.normalize():e}"
