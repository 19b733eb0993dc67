"""The door: the only way from `Private` to `Release` or `Masked`. It draws once, and notes it for the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np

from crowdml.arrays import Integers
from crowdml.errors import GuaranteeError, LeakError, ProtocolError
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Masked, Private, Release, Rows, Stamp, Unseen
from crowdml.privacy.sensitivity import Observer
from crowdml.records import record


@record
class Passage:
    """One release of this step: which row of the table, and which part of the batch. The runner charges it."""

    row: str
    mechanism: Mechanism
    part: Rows
    trip: Any = 0
    """The device's how-many-th check-in this is: what a scheduled row costs depends on it."""

    @property
    def priced(self) -> Mechanism:
        """The row as it was in this check-in."""
        return self.mechanism.at(int(self.trip))


@record(frozen=False)
class Door:
    """One step's door. A new one stands in every step, so that what was let out before is not let out again.

    Whether the owner's budget allows the step is checked before any noise is drawn: the runner prices the whole
    table, since which rows are drawn must not depend on values.
    """

    table: Mapping[str, Mechanism]
    noise: Source
    stamp: Stamp = field(default_factory=lambda: Stamp("this step"))
    passages: list[Passage] = field(default_factory=list)
    trip: Any = 0
    """How many check-ins of this task the device made before: the shell says so, and no handler."""
    public: bool = False
    """Whether the rows are the server's own and public: the shell says so. A row that hides nothing asks for it."""

    def release(self, row: str, private: Private[Any]) -> Release[Integers]:
        """Let `private` out through the mechanism in row `row` of the protocol's table."""
        mechanism = self._row(row)
        if mechanism.observer is Observer.AGGREGATE:
            raise LeakError(
                f"Row {row!r} has only this device's share of the noise, which protects a cohort's sum and not this "
                "value. Let it out with `ctx.masked(row, private)`, under masks."
            )
        return Release(self._draw(row, mechanism, private), self.stamp)

    def masked(self, row: str, private: Private[Any]) -> Masked[Integers]:
        """Add this device's share of the noise of row `row`: what comes back leaves under masks alone."""
        mechanism = self._row(row)
        if mechanism.observer is not Observer.AGGREGATE:
            raise LeakError(
                f"Row {row!r} is for {mechanism.observer.value} to see, and has all its noise itself. "
                "Let it out with `ctx.release(row, private)`."
            )
        return Masked(self._draw(row, mechanism, private), self.stamp)

    def _row(self, row: str) -> Mechanism:
        if row not in self.table:
            raise LeakError(
                f"Nothing may leave as {row!r}: the protocol's `mechanisms` table has the rows {sorted(self.table)}. "
                "Add a row with its sensitivity and promise, so that owners see its price before it is drawn."
            )
        mechanism = self.table[row]
        if mechanism.public and not self.public:
            raise LeakError(
                f"Row {row!r} hides nothing: it lets out what public rows of the server's own come to, and these are "
                "private. Attach public ones with `crowdml task validate --public`, or take a rule with a price."
            )
        return mechanism

    def _draw(self, row: str, mechanism: Mechanism, private: Private[Any]) -> Integers:
        if not isinstance(private, Private):  # pyright: ignore[reportUnnecessaryIsInstance]  handlers are not all typed
            raise LeakError(
                f"The door takes a Private value for {row!r}, so that its part can be charged; this is a "
                f"{type(private).__name__}. Public values go into the message as they are, in a Public field."
            )
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
        wanted = 1 if mechanism.whole else private.part.size
        if rows != (wanted,):
            each = "one row for all" if wanted == 1 else "one row for each"
            raise LeakError(
                f"Row {row!r} takes {each} of the {private.part.size} samples of its part, and the mechanism "
                f"bounds each row; this value has {rows[0] if rows else 'no'} rows. Let `map` keep the samples apart."
            )
        try:
            value = mechanism.draw_at(self.trip, private._value, self.noise)
        except GuaranteeError as error:
            raise GuaranteeError(f"Row {row!r}: {error}") from error
        self.passages.append(Passage(row, mechanism, private.part, self.trip))
        return value


def _as_journalled(steps: Integers) -> Integers:
    """A copy with the bits that a replay reads from the journal, and which nobody changes."""
    return np.frombuffer(np.asarray(steps, "<i8").tobytes(), "<i8").reshape(np.shape(steps))


@record(frozen=False)
class OwnDoor(Door):
    """The server's door, for rows of its own. It keeps what it let out, for the journal: `drawn`, by row."""

    drawn: dict[str, Integers] = field(default_factory=dict)

    def release(self, row: str, private: Private[Any]) -> Release[Integers]:
        here: Any = private._rows_here if isinstance(private, Unseen) else private
        found = super().release(row, here)
        self.drawn[row] = _as_journalled(found.value)
        return Release(self.drawn[row], self.stamp)


@record(frozen=False)
class Recorded:
    """The server's door in a replay: what was let out then is let out again, without rows and without noise."""

    drawn: Mapping[str, Integers]
    stamp: Stamp = field(default_factory=lambda: Stamp("a replay"))

    def release(self, row: str, private: Private[Any]) -> Release[Integers]:
        if row not in self.drawn:
            raise ProtocolError(
                f"a replay asks the server's door for row {row!r}, and its journal has {sorted(self.drawn) or 'none'} "
                "here: the protocol is not the one that wrote the journal. Nothing was drawn."
            )
        return Release(_as_journalled(self.drawn[row]), self.stamp)
