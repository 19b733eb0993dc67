"""Tighter accounting for plans fixed in advance: privacy loss distributions and Renyi DP through dp-accounting.

None of it is a filter: the number of releases, their noise and their sampling must be fixed before the first one, and
must not depend on what was released. Gaussian and Laplace noise is continuous here, so that these numbers plan a task
or price a published one; the ledger of a device charges the losses of `losses.py`.

Neighbours, and what a noise multiplier is: sigma over the norm of ONE contribution (the clip C), for both relations.
Replacing a sample moves a sum by up to 2 C; the functions here see to that, as the libraries do it in different ways
(`PLDAccountant` doubles the sensitivity of a Gaussian itself; `RdpAccountant` does not, and refuses Poisson batches).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml.errors import GuaranteeError, MissingExtra

__all__ = [
    "Neighbours",
    "Sampler",
    "discrete_gaussian_delta",
    "discrete_laplace_delta",
    "gaussian_epsilon_pld",
    "gaussian_epsilon_rdp",
    "laplace_epsilon_pld",
    "laplace_epsilon_rdp",
    "pure_epsilon_pld",
]


class Neighbours(Enum):
    """Which two data sets are neighbours. The ledger knows replace-one only; papers also add or remove."""

    REPLACE_ONE = "replace-one"
    ADD_OR_REMOVE_ONE = "add-or-remove-one"


class Sampler(Enum):
    """How the samples of each release are chosen. Only independent coin flips amplify privacy by `rate`."""

    EVERYTHING = "everything"  # each release uses each sample
    POISSON = "poisson"  # each sample joins each release by its own coin
    SHUFFLED = "shuffled"  # a random order, cut into batches
    CONSECUTIVE = "consecutive"  # batches in the order of arrival


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"{name} is not installed, and plans fixed in advance are priced with it. "
            "Install it with `pip install 'crowdml[sim]'`; the ledger works without."
        ) from error


def _check(multiplier: float, releases: int, delta: float) -> None:
    if not 0.0 < multiplier < math.inf or releases < 1 or not 0.0 < delta < 1.0:
        raise GuaranteeError(
            f"noise multiplier {multiplier}, {releases} releases, delta {delta}: a plan needs a multiplier above 0, "
            "at least one release, and a delta between 0 and 1."
        )


def _check_sampling(sampler: Sampler, rate: float) -> None:
    if sampler is Sampler.EVERYTHING and rate == 1.0:
        return
    if sampler is Sampler.POISSON and 0.0 < rate <= 1.0:
        return
    if sampler is Sampler.POISSON or sampler is Sampler.EVERYTHING:
        raise GuaranteeError(
            f"a rate of {rate} with {sampler.value} sampling. Poisson sampling has a rate above 0 and at most 1; "
            "a plan that uses every sample in every release has rate 1."
        )
    raise GuaranteeError(
        f"{sampler.value} batches were to be accounted at the rate {rate}, and only Poisson sampling amplifies privacy "
        "like that (Chua et al. 2024). Count the releases that use one sample, and account them with "
        "Sampler.EVERYTHING; or draw batches by Sampler.POISSON."
    )


def gaussian_epsilon_pld(
    multiplier: float,
    *,
    releases: int,
    delta: float,
    neighbours: Neighbours,
    sampler: Sampler = Sampler.EVERYTHING,
    rate: float = 1.0,
) -> float:
    """epsilon at delta of this many Gaussian releases, by their privacy loss distribution.

    `multiplier` is sigma over the norm of one contribution, for both kinds of neighbours.
    """
    _check(multiplier, releases, delta)
    _check_sampling(sampler, rate)
    library, pld = _library("dp_accounting"), _library("dp_accounting.pld")
    relation = library.NeighboringRelation[neighbours.name]
    event = library.GaussianDpEvent(multiplier)  # replace-one: the accountant doubles the sensitivity itself
    if sampler is Sampler.POISSON:
        event = library.PoissonSampledDpEvent(rate, event)
    accountant = pld.PLDAccountant(neighboring_relation=relation)
    return float(accountant.compose(event, releases).get_epsilon(delta))


def gaussian_epsilon_rdp(
    multiplier: float,
    *,
    releases: int,
    delta: float,
    neighbours: Neighbours,
    sampler: Sampler = Sampler.EVERYTHING,
    rate: float = 1.0,
) -> float:
    """The same by Renyi DP; looser. Poisson batches under replace-one are refused: nobody proved them there."""
    _check(multiplier, releases, delta)
    _check_sampling(sampler, rate)
    if neighbours is Neighbours.REPLACE_ONE:
        if sampler is Sampler.POISSON:
            raise GuaranteeError(
                "Renyi accounting of Poisson batches is for add-or-remove-one neighbours, and replace-one was asked "
                "for. Use gaussian_epsilon_pld."
            )
        multiplier = multiplier / 2.0  # the accountant takes sigma over the sensitivity, and that is twice the clip
    library, rdp = _library("dp_accounting"), _library("dp_accounting.rdp")
    event = library.GaussianDpEvent(multiplier)
    if sampler is Sampler.POISSON:
        event = library.PoissonSampledDpEvent(rate, event)
    return float(rdp.RdpAccountant().compose(event, releases).get_epsilon(delta))


def laplace_epsilon_pld(epsilon: float, *, releases: int, delta: float) -> float:
    """epsilon at delta of this many Laplace releases, each of which is `epsilon`-DP (scale = sensitivity / epsilon)."""
    _check(epsilon, releases, delta)
    library, pld = _library("dp_accounting"), _library("dp_accounting.pld")
    event = library.LaplaceDpEvent(1.0 / epsilon)
    return float(pld.PLDAccountant().compose(event, releases).get_epsilon(delta))


def laplace_epsilon_rdp(epsilon: float, *, releases: int, delta: float) -> float:
    """The same by Renyi DP; looser."""
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
