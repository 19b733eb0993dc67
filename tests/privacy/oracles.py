"""What the losses of the ledger are held against: the field's accountants, and exact sums over discrete noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml.privacy.accounting import _check, _library
from crowdml.privacy.losses import Filter, Loss, Total


def allows(total: Total, cost: Loss | Total, epsilon: Fraction | float, delta: float) -> bool:
    """Whether a filter that the budget alone fixes lets a release that costs `cost` follow what cost `total`."""
    return Filter.of(epsilon, delta).allows(total, cost)


def laplace_epsilon_pld(epsilon: float, *, releases: int, delta: float) -> float:
    """epsilon at delta of this many Laplace releases, each of which is `epsilon`-DP (scale = sensitivity / epsilon)."""
    _check(epsilon, releases, delta)
    library, pld = _library("dp_accounting"), _library("dp_accounting.pld")
    event = library.LaplaceDpEvent(1.0 / epsilon)
    return float(pld.PLDAccountant().compose(event, releases).get_epsilon(delta))


def laplace_epsilon_rdp(epsilon: float, *, releases: int, delta: float) -> float:
    """Epsilon by Renyi DP, which is looser."""
    _check(epsilon, releases, delta)
    library, rdp = _library("dp_accounting"), _library("dp_accounting.rdp")
    event = library.LaplaceDpEvent(1.0 / epsilon)
    return float(rdp.RdpAccountant().compose(event, releases).get_epsilon(delta))


def pure_epsilon_pld(epsilon: float, *, releases: int, delta: float) -> float:
    """epsilon at delta of this many releases of ANY `epsilon`-DP mechanisms, adaptive or not.

    Randomised response with the same epsilon dominates each of them (Kairouz, Oh, Viswanath 2015).
    """
    _check(epsilon, releases, delta)
    distributions = _library("dp_accounting.pld.privacy_loss_distribution")
    common = _library("dp_accounting.pld.common")
    one = distributions.from_privacy_parameters(common.DifferentialPrivacyParameters(epsilon, 0.0))
    return float(one.self_compose(releases).get_epsilon_for_delta(delta))


def _hockey_stick(log_weight: Callable[[Any], Any], *, shift: int, epsilon: float, reach: int) -> float:
    """sum over z of max(0, p(z) - e^epsilon p(z - shift)) for integer noise with p(z) ~ exp(log_weight(z)).

    Integers beyond `reach` are left out; the caller takes it so far out that they weigh nothing in float64.
    """
    z = np.arange(-reach - abs(shift), reach + abs(shift) + 1, dtype=np.float64)
    weight, moved = log_weight(z), log_weight(z - shift)
    excess = -np.expm1(np.minimum(0.0, epsilon + moved - weight))
    return math.fsum(np.exp(weight) * excess) / math.fsum(np.exp(weight))


def discrete_laplace_delta(epsilon: float, *, scale: Fraction | float, shift: int) -> float:
    """The exact delta, but for float64, of discrete Laplace noise on one integer that neighbours move by `shift`."""
    b = float(scale)
    return _hockey_stick(lambda z: -np.abs(z) / b, shift=shift, epsilon=epsilon, reach=math.ceil(80.0 * b) + 1)


def discrete_gaussian_delta(epsilon: float, *, sigma: Fraction | float, shift: int) -> float:
    """The exact delta, but for float64, of discrete Gaussian noise on one integer that neighbours move by `shift`."""
    s = float(sigma)
    return _hockey_stick(lambda z: -0.5 * (z / s) ** 2, shift=shift, epsilon=epsilon, reach=math.ceil(13.0 * s) + 1)
