"""How far neighbours can move a query, in which norm, under which neighbours, and against whom."""

from __future__ import annotations

from enum import Enum
from fractions import Fraction

from crowdml.records import record


class Adjacency(Enum):
    """Which two data sets are neighbours. Counts are public, so we replace; we do not add or remove."""

    REPLACE_SAMPLE = "replace-sample"
    REPLACE_DEVICE = "replace-device"


class Observer(Enum):
    """Against whom a guarantee holds."""

    ANYONE = "anyone"
    AGGREGATE = "aggregate"
    DEVICES = "devices"


@record
class L1:
    """Neighbours move the query by at most `bound` grid steps in the l1 norm."""

    bound: Fraction
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE


@record
class L2:
    """Neighbours move the query by at most `bound` grid steps in the l2 norm."""

    bound: Fraction
    adjacency: Adjacency = Adjacency.REPLACE_SAMPLE
