"""The door: the only way from `Private` to `Release`. It draws once, and notes every draw for the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crowdml.arrays import Integers
from crowdml.errors import LeakError
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Private, Release, Rows, Stamp
from crowdml.records import record


@record
class Passage:
    """One release of this step: which row of the table, and which part of the batch. The runner charges it."""

    row: str
    mechanism: Mechanism
    part: Rows


@dataclass
class Door:
    """One step's door. A new one stands in every step, so that what was let out before is not let out again.

    Whether the owner's budget allows the step is checked before any noise is drawn: the runner prices the whole
    table, since which rows are drawn must not depend on values.
    """

    table: Mapping[str, Mechanism]
    noise: Source
    stamp: Stamp = field(default_factory=lambda: Stamp("this step"))
    passages: list[Passage] = field(default_factory=list)

    def release(self, row: str, private: Private[Any]) -> Release[Integers]:
        """Let `private` out through the mechanism in row `row` of the protocol's table."""
        if row not in self.table:
            raise LeakError(
                f"Nothing may leave as {row!r}: the protocol's `mechanisms` table has the rows {sorted(self.table)}. "
                "Add a row with its sensitivity and promise, so that owners see its price before it is drawn."
            )
        if not isinstance(private, Private):  # pyright: ignore[reportUnnecessaryIsInstance]  handlers are not all typed
            raise LeakError(
                f"`ctx.release({row!r}, ...)` takes a Private value, so that its part can be charged; this is a "
                f"{type(private).__name__}. Public values go into the message as they are, in a Public field."
            )
        mechanism = self.table[row]
        if not private.part.within(mechanism.covers):
            raise LeakError(
                f"Row {row!r} covers rows {mechanism.covers} of the batch, and that is what it is priced for; "
                f"this value came from rows {private.part}. Split the batch as the table says, or change its `covers`."
            )
        if any(passage.row == row for passage in self.passages):
            raise LeakError(
                f"Row {row!r} was let out already in this step, and a check-in is priced for one such release. "
                "Give the second one a row of its own in the table."
            )
        rows = tuple(getattr(private._value, "shape", ()))[:1]
        if rows != (private.part.size,):
            raise LeakError(
                f"Row {row!r} takes one row for each of the {private.part.size} samples of its part, and the mechanism "
                f"bounds each row; this value has {rows[0] if rows else 'no'} rows. Let `map` keep the samples apart."
            )
        value = mechanism.draw(private._value, self.noise)
        self.passages.append(Passage(row, mechanism, private.part))
        return Release(value, self.stamp)
