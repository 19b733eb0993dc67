"""What is computed from public rows of the server's own: exact, for nobody in the study is in them."""

# pyright: reportIncompatibleVariableOverride=false
# A field of one row is computed in another.

from __future__ import annotations

from fractions import Fraction

import numpy as np

from crowdml.arrays import Array, Integers, finite_or_zero, namespace
from crowdml.privacy.grid import Grid
from crowdml.privacy.losses import Loss, Pure
from crowdml.privacy.mechanisms.interface import Mechanism
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, Observer
from crowdml.records import record

FURTHEST = 2**30
"""In grid steps: how large an entry may be. JAX has integers of 32 bits."""


@record
class FromPublic(Mechanism):
    """Lets out one vector that public rows made, on a grid and without noise.

    Guarantee: none is needed and none is given. Only a door that was told that its rows are public lets it through, and
    no device's door is: rows belong to nobody there by the word of the operator alone (`crowdml task validate
    --public`). It passes the door so that the journal has it: a replay, which has no rows, ends in the same bits.
    """

    covers: Rows
    promise: str
    grid: Grid = Grid(Fraction(1, 2**24))
    observer: Observer = Observer.ANYONE
    kind: str = "public"

    law = None
    whole = True
    public = True
    sensitivity = L1(Fraction(0))

    @property
    def loss(self) -> Loss:
        return Pure(Fraction(0))

    @property
    def reach(self) -> tuple[int, int]:
        return -FURTHEST, FURTHEST

    def draw(self, contributions: Array, noise: Source) -> Integers:
        """One contribution [1, ...] -> integers [...], each within the reach. What is not finite is 0."""
        xp = namespace(contributions)
        steps = finite_or_zero(contributions[0]) / float(self.grid.step)
        return xp.rint(xp.clip(steps, -FURTHEST, FURTHEST)).astype(np.int64 if xp is np else xp.int32)
