"""Entries of the server's own in a journal, beside cohorts' totals: what it decided, so that a replay decides nothing.

`crowdml/closed/1` ends a round of uploads (channel GATHERED): which entries of the journal are in it, and what the
server's own door let out while it combined them. `crowdml/woken/1` says that a timer ran out. `crowdml/released/1` is a
look at rows of the server's own. Uploads stay in the journal: a round is a list of their places, and the protocol reads
them in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from functools import cached_property
from typing import Any

import msgpack
import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.channels import rows_in
from crowdml.records import record
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack
from crowdml.wire.problems import Problem

__all__ = [
    "CLOSE", "CLOSED", "OWN", "RELEASED", "WOKEN", "Bodies", "Journalled", "Own", "Pending", "pack_own", "read_own",
    "seconds_left",
]  # fmt: skip

CLOSED, WOKEN, RELEASED = "crowdml/closed/1", "crowdml/woken/1", "crowdml/released/1"
OWN = frozenset((CLOSED, WOKEN, RELEASED))
CLOSE = "crowdml/close"
"""The tag of the timer by which a round closes: no protocol's tag begins like this."""
LARGEST = 2**28
"""Bytes of an entry of the server's own."""
MOST_UPLOADS, MOST_ROWS = 2**24, 15
LONGEST_TAG = 1024

Bodies = Callable[[Sequence[int]], Iterator[tuple[str, bytes]]]
"""The kind and the body of the uploads at these places of the journal, in this order."""


@record
class Own:
    """What an entry of the server's own says. `number` is the round that was closed, or the version looked at."""

    number: int = 0
    entries: tuple[int, ...] = ()
    tag: str = ""
    """The tag of the timer that ran out; in the entry of a look, what the look cost each row."""
    released: Mapping[str, Integers] | None = None


def pack_own(kind: str, own: Own) -> bytes:
    """The body of an entry of the server's own; a Problem if it could not be read again."""
    drawn = {row: np.asarray(each) for row, each in (own.released or {}).items()}
    wide = {row: [list(each.shape), each.astype("<i8").tobytes()] for row, each in drawn.items()}
    told: dict[str, Any] = {CLOSED: {"entries": list(own.entries), "round": own.number}, WOKEN: {"tag": own.tag},
                            RELEASED: {"loss": own.tag, "version": own.number}}[kind]  # fmt: skip
    body = pack({**told, "released": wide})
    read_own(kind, body)
    return body


def read_own(kind: str, body: bytes) -> Own:
    """What `pack_own` wrote; a Problem of anything else."""
    reader = Reader(body, f"The body of {kind}", limit=LARGEST)
    reader.map(2 if kind == WOKEN else 3)
    entries, number, tag = list[int](), 0, ""
    if kind == CLOSED:
        reader.key("entries")
        for _ in range(reader.array("entries", MOST_UPLOADS)):
            entries.append(reader.integer("an entry", entries[-1] + 1 if entries else 1, LARGEST_INTEGER))
    if kind == RELEASED:
        reader.key("loss")
        tag = reader.text("the loss", LONGEST_TAG)
    reader.key("released")
    released = _read_released(reader)
    if kind == WOKEN:
        reader.key("tag")
        tag = reader.text("the tag", LONGEST_TAG)
    else:
        reader.key("round" if kind == CLOSED else "version")
        number = reader.integer("the version", 0, LARGEST_INTEGER)
    reader.end()
    return Own(number, tuple(entries), tag, released)


def _read_released(reader: Reader) -> dict[str, Integers]:
    found: dict[str, Integers] = {}
    for _ in range(reader.any_map(MOST_ROWS)):
        row = reader.text("a row", LONGEST_TAG)
        if reader.array("what was released", 2) != 2:
            reader.fail("what was released must be [shape, bytes]")
        shape = tuple(reader.integer("its shape", 0, 2**32) for _ in range(reader.array("its shape", 8)))
        if math.prod(max(1, each) for each in shape) > LARGEST:
            reader.fail(f"what was released has at most {LARGEST:,} entries")
        data = reader.binary("what was released", LARGEST, exactly=8 * math.prod(shape))
        found[row] = np.frombuffer(data, "<i8").reshape(shape)
    return found


# --- the uploads of a closed round ---


class Journalled:
    """The uploads of a closed round (`channels.Uploads`), read from the journal as they are asked for."""

    def __init__(self, places: Sequence[int], bodies: Bodies, read: Callable[[Any], list[Any]]) -> None:
        self._places, self._bodies, self._read = places, bodies, read

    @property
    def count(self) -> int:
        return len(self._places)

    @property
    def rows(self) -> tuple[str, ...]:
        return rows_in(self._block(0, 1)[0])

    @cached_property
    def devices(self) -> Integers:
        return np.asarray([int(each.devices) for each in self._messages(256)], np.int32)

    def array(self, row: str) -> Array:
        return np.concatenate(list(self.blocks(row)))

    def blocks(self, row: str, size: int = 256) -> Iterator[Array]:
        for start in range(0, self.count, size):
            yield np.stack([getattr(each, row).value for each in self._block(start, size)])

    def columns(self, row: str, width: int = 65_536) -> Iterator[tuple[slice, Array]]:
        """Goes through the journal once for each slice: as many numbers as the rule asks for are in memory, no more."""
        entries = math.prod(getattr(self._block(0, 1)[0], row).value.shape)
        for start in range(0, entries, width):
            those = slice(start, min(start + width, entries))
            flat = [getattr(each, row).value.reshape(-1)[those].copy() for each in self._messages(64)]
            yield those, np.stack(flat)

    def _messages(self, size: int) -> Iterator[Any]:
        for start in range(0, self.count, size):
            yield from self._block(start, size)

    def _block(self, start: int, size: int) -> list[Any]:
        found = self._read(list(self._bodies(self._places[start : start + size])))
        for each in found:
            if isinstance(each, Problem):
                raise each
        return found


# --- what a snapshot keeps beside the state ---


@record(frozen=False)
class Pending:
    """Where the server stands between two entries, beside the protocol's state: places of the journal, never bodies."""

    open: list[int] = field(default_factory=list)
    """The uploads of the open round."""
    opened: int = 0
    """The entry that opened it; 0: the task's start."""
    wakes: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By tag: the entry that asked for it, and after how many seconds."""
    beside: int = 0
    """Entries of the server's own that are no totals."""

    def pack(self) -> bytes | None:
        """For a snapshot; None where there is nothing to keep."""
        if not (self.open or self.opened or self.wakes or self.beside):
            return None
        wakes = [[tag, *each] for tag, each in sorted(self.wakes.items())]
        return pack([self.open, self.opened, wakes, self.beside])

    @staticmethod
    def read(data: bytes | None) -> Pending:
        if data is None:
            return Pending()
        places, opened, wakes, beside = msgpack.unpackb(data)
        return Pending(places, opened, {tag: (at, after) for tag, at, after in wakes}, beside)


# --- timers ---


def seconds_left(asked_at: str, after: float, now: str) -> float:
    """How long a timer still runs that was set at `asked_at`. A clock that was put back makes no timer longer."""
    passed = (datetime.fromisoformat(now) - datetime.fromisoformat(asked_at)).total_seconds()
    return min(after, max(0.0, after - passed))
