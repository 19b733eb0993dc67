"""Tighter accounting for plans fixed in advance: privacy loss distributions and Renyi DP through dp-accounting.

None of it is a filter: the number of releases, their noise and their sampling must be fixed before the first one, and
must not depend on what was released. Gaussian noise is continuous here, so that these numbers plan a task
or price a published one; the ledger of a device charges the losses of `losses.py`.

Neighbours, and what a noise multiplier is: sigma over the norm of ONE contribution (the clip C), for both relations.
Replacing a sample moves a sum by up to 2 C; the functions here see to that, as the libraries do it in different ways
(`PLDAccountant` doubles the sensitivity of a Gaussian itself; `RdpAccountant` does not, and refuses Poisson batches).
"""

from __future__ import annotations

import importlib
import math
from enum import Enum
from typing import Any

from crowdml.errors import GuaranteeError, MissingExtra


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


def _gaussian(multiplier: float, sampler: Sampler, rate: float) -> Any:
    library = _library("dp_accounting")
    event = library.GaussianDpEvent(multiplier)
    return library.PoissonSampledDpEvent(rate, event) if sampler is Sampler.POISSON else event


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
    accountant = pld.PLDAccountant(neighboring_relation=relation)  # replace-one: it doubles the sensitivity itself
    return float(accountant.compose(_gaussian(multiplier, sampler, rate), releases).get_epsilon(delta))


def gaussian_epsilon_rdp(
    multiplier: float,
    *,
    releases: int,
    delta: float,
    neighbours: Neighbours,
    sampler: Sampler = Sampler.EVERYTHING,
    rate: float = 1.0,
) -> float:
    """Epsilon by Renyi DP, which is looser. Poisson batches under replace-one are refused: nobody proved them there."""
    _check(multiplier, releases, delta)
    _check_sampling(sampler, rate)
    if neighbours is Neighbours.REPLACE_ONE:
        if sampler is Sampler.POISSON:
            raise GuaranteeError(
                "Renyi accounting of Poisson batches is for add-or-remove-one neighbours, and replace-one was asked "
                "for. Use gaussian_epsilon_pld."
            )
        multiplier = multiplier / 2.0  # the accountant takes sigma over the sensitivity, and that is twice the clip
    accountant = _library("dp_accounting.rdp").RdpAccountant()
    return float(accountant.compose(_gaussian(multiplier, sampler, rate), releases).get_epsilon(delta))
