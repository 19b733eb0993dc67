"""`Private`, `Release` and `Masked`: what must not leave, what may, and what may under masks alone.

Python cannot forbid `private._value`, nor `masked._summand`. Types, the seal and tests over the source
(tests/test_source.py) make it visible: only this module, the door or the seal, and the simulator's pytrees name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from crowdml.errors import LeakError
from crowdml.records import record

T = TypeVar("T")
U = TypeVar("U")


@record
class Rows:
    """Rows `start` to `stop` (not included) of a sensed batch. Static under tracing."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, other: Rows) -> bool:
        return other.start <= self.start and self.stop <= other.stop

    def __str__(self) -> str:
        return f"{self.start} to {self.stop - 1}"


class Private(Generic[T]):
    """A value computed from samples. It has no repr and no codec; only a mechanism sees inside.

    `part` is the piece of the sensed batch that it came from. The runner binds it to serial numbers when it commits:
    in a batch whose first sample has serial s, a part covers the serials s + start to s + stop - 1.
    `map` computes on it and keeps its part; `split` cuts the rows of a batch into two disjoint parts, and only before
    a `map`, since afterwards the rows may have mixed.
    """

    __slots__ = ("_rows", "_value", "part")

    _value: T
    part: Rows

    def __init__(self, value: T, part: Rows, *, _rows: bool = True) -> None:
        self._value = value
        self.part = part
        self._rows = _rows

    def map(self, f: Callable[[T], U]) -> Private[U]:
        """Compute on the value. Row i of what `f` returns must depend on row i of the batch alone."""
        return Private(f(self._value), self.part, _rows=False)

    def map_rows(self, f: Callable[[T], T]) -> Private[T]:
        """The batch with its samples changed one by one: row i of what `f` returns is still sample i."""
        return Private(f(self._value), self.part, _rows=self._rows)

    def split(self, first: int) -> tuple[Private[T], Private[T]]:
        """The first rows and the rest, as two disjoint parts: what each of them loses does not add."""
        if not self._rows:
            raise LeakError(
                f"A value computed from rows {self.part} cannot be split: its rows may have mixed, and the two "
                "parts would be charged as if they were disjoint. Split the batch first, then map each part."
            )
        if not 0 <= first <= self.part.size:
            raise ValueError(f"Cannot split {first} rows off a part of {self.part.size}.")
        rows: Any = self._value
        middle = self.part.start + first
        return (
            Private(rows[:first], Rows(self.part.start, middle)),
            Private(rows[first:], Rows(middle, self.part.stop)),
        )

    def __repr__(self) -> str:
        return f"Private(rows {self.part}, hidden)"

    def __reduce__(self) -> Any:
        raise LeakError("A Private value is never pickled or copied out: it stays where it was sensed.")

    def __bool__(self) -> bool:
        raise LeakError("A Private value decides no branch: what a device does must not depend on its samples.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise LeakError("A Private value is not an array. Compute on it with `map`, let it out with `ctx.release`.")


class Unseen(Private[Any]):
    """Rows at the server's own door; in a replay none. A handler cannot tell which, nor how many there are."""

    def __init__(self, rows: Private[Any] | None = None) -> None:
        self._rows_here = rows

    @property
    def part(self) -> Rows:  # pyright: ignore[reportIncompatibleVariableOverride]  it has none
        raise LeakError("A server's handler is not told which rows it has, since a replay has none: the task says so.")

    def map(self, f: Callable[[Any], Any]) -> Private[Any]:
        return self if self._rows_here is None else Unseen(self._rows_here.map(f))

    def map_rows(self, f: Callable[[Any], Any]) -> Private[Any]:
        return self if self._rows_here is None else Unseen(self._rows_here.map_rows(f))

    def split(self, first: int) -> tuple[Private[Any], Private[Any]]:
        one, other = (None, None) if self._rows_here is None else self._rows_here.split(first)
        return Unseen(one), Unseen(other)


class Stamp:
    """What one door leaves on everything that it lets out in one step. Compared by identity."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def __repr__(self) -> str:
        return f"Stamp({self.where!r})"


RECEIVED = Stamp("received")
"""Stamps what arrived in somebody else's message: it is public already, but it did not come through our door."""


class Release(Generic[T]):
    """A value that a mechanism let out: integers on a public grid. Anyone may look; post-processing is free."""

    __slots__ = ("_stamp", "value")

    value: T

    def __init__(self, value: T, stamp: Stamp | None = None) -> None:
        if not isinstance(stamp, Stamp):
            raise LeakError(
                "A Release is made by the door alone: call `ctx.release(row, private)` with a row of the protocol's "
                "`mechanisms` table. A Release made by hand would carry a value that no mechanism protected."
            )
        self.value = value
        self._stamp = stamp

    def map(self, f: Callable[[T], U]) -> Release[U]:
        """Post-processing: it costs nothing, and the result is still a release of the same step."""
        return Release(f(self.value), self._stamp)

    def __repr__(self) -> str:
        return f"Release({self.value!r})"


class Masked(Generic[T]):
    """A device's contribution to a sum, with its share of the noise: it leaves under masks, and only so.

    One share of noise protects little. So it has no codec: the channel takes the integers out (`device/runner.py`, and
    the simulator, where masks cancel) and puts masks on them; nobody else does (tests/test_source.py).
    """

    __slots__ = ("_stamp", "_summand")

    def __init__(self, steps: T, stamp: Stamp | None = None) -> None:
        if not isinstance(stamp, Stamp):
            raise LeakError(
                "A Masked value is made by the door alone: call `ctx.masked(row, private)` with a row of the "
                "protocol's `mechanisms` table whose observer is the aggregate."
            )
        self._summand = steps
        self._stamp = stamp

    def map(self, f: Callable[[T], U]) -> Masked[U]:
        """A contribution changed under its mask, as a device that lies changes it."""
        return Masked(f(self._summand), self._stamp)

    def __repr__(self) -> str:
        return "Masked(hidden)"

    def __reduce__(self) -> Any:
        raise LeakError("A Masked value is never pickled or copied out: it leaves under masks alone.")

    def __bool__(self) -> bool:
        raise LeakError("A Masked value decides no branch: what a device does must not depend on its samples.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise LeakError("A Masked value is not an array: nobody reads one device's share, only a cohort's total.")
