"""Mechanisms: randomised functions with a stated guarantee. Constants of the task, never of the data.

Each takes the *contributions* of a part, one row a sample, and bounds every row itself before it adds them up: a
handler that forgot to clip cannot break the guarantee. What a handler must see to is that row i depends on sample i
alone (and on public values).
"""

from __future__ import annotations

from crowdml.privacy.mechanisms.counts import CountLaplace, RandomisedResponse, SkellamCount
from crowdml.privacy.mechanisms.interface import Mechanism, NoiseLaw, Share, l1_of, root_up
from crowdml.privacy.mechanisms.public import FromPublic
from crowdml.privacy.mechanisms.scheduled import Scheduled
from crowdml.privacy.mechanisms.selection import Selection
from crowdml.privacy.mechanisms.stable import FURTHEST, GaussianStable, SkellamStable, Stable
from crowdml.privacy.mechanisms.sums import Exposed, GridGaussian, GridLaplace, SkellamSum, Sum

__all__ = [
    "FURTHEST", "KINDS", "CountLaplace", "Exposed", "FromPublic", "GaussianStable", "GridGaussian", "GridLaplace",
    "Mechanism", "NoiseLaw", "RandomisedResponse", "Scheduled", "Selection", "Share", "SkellamCount", "SkellamStable",
    "SkellamSum", "Stable", "Sum", "l1_of", "root_up",
]  # fmt: skip

KINDS: tuple[type, ...] = (
    GridLaplace,
    GridGaussian,
    CountLaplace,
    SkellamSum,
    SkellamCount,
    SkellamStable,
    GaussianStable,
    RandomisedResponse,
    Selection,
    FromPublic,
    Exposed,
)
"""Every mechanism, for the docs and the tests that look for each of them."""
