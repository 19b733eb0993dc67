"""How rows of a server's own validation are known one by one: keyed hashes, and which sets share which rows.

A row is known by its features as they were read, before they are scaled for a task, whatever label it has and in
whatever order it comes. Rows are private, so the hashes are keyed: without the server's database nobody can try guesses
on them. One digit changed makes another row.

Migrations use this module, too: what it computes of the same bytes must not change.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from crowdml.arrays import Array
from crowdml.records import record

KEY = "rows-key"
"""The setting that holds the key, made with the tables: it stays with the hashes, in every backup too."""
SIZE = 16
"""Bytes of a row's hash."""
PART = 4096
"""Rows that are hashed in one go: they are not in memory twice."""
Pattern = dict[int, int]
"""How often a row is in each set that has it, by the set's number."""


@record
class Hashed:
    """A set of rows: `whole` is the same for the same rows and labels in any order, `rows` are sorted hashes of
    features as they were read, `SIZE` bytes for each row."""

    whole: bytes
    rows: bytes


def hash_rows(key: bytes, data: bytes, count: int, dimension: int, read: bytes | None = None) -> Hashed:
    """The hashes of rows as they are stored, float32: all x, then all y. `read`: all x as they were read, if scaled.

    Tasks with other norms keep other numbers of the same row, so these are two sets, and they share the row.
    """
    before = np.frombuffer(data if read is None else read, "<f4")[: count * dimension].reshape(count, dimension)
    features: list[bytes] = []
    labelled: list[bytes] = []
    for part, kept in _parts(data, count, dimension):
        plain = before[part] + np.float32(0)  # there is one zero, not two
        features += (_keyed(key, b"row", row.tobytes()) for row in plain)
        both = np.concatenate([plain, kept], axis=1)
        labelled += (_keyed(key, b"labelled row", row.tobytes()) for row in both)
    whole = b"".join(sorted(labelled))
    return Hashed(_keyed(key, b"set", whole, 32), b"".join(sorted(features)))


def earlier_hash(data: bytes, count: int, dimension: int) -> bytes:
    """How version 0.1 knew a set as a whole: without a key, by its features and then by features and labels."""
    found = b""
    for width in (dimension, dimension + 1):
        hashes = [
            hashlib.sha256(row[:width].tobytes()).digest() for _, rows in _parts(data, count, dimension) for row in rows
        ]
        found += hashlib.sha256(b"crowdml/rows/1" + b"".join(sorted(hashes))).digest()
    return found


def _parts(data: bytes, count: int, dimension: int) -> Iterator[tuple[slice, Array]]:
    """Some rows at a time: their places, and their features with the label at the end [PART, dimension + 1]."""
    numbers: Array = np.frombuffer(data, "<f4")
    x, y = numbers[: count * dimension].reshape(count, dimension), numbers[count * dimension :].reshape(count, 1)
    for start in range(0, count, PART):
        part = slice(start, start + PART)
        yield part, np.concatenate([x[part], y[part]], axis=1)


def _keyed(key: bytes, what: bytes, data: bytes, size: int = SIZE) -> bytes:
    return hashlib.blake2b(data, digest_size=size, key=key, person=what).digest()


def counted(rows: bytes) -> Counter[bytes]:
    """How often each row is in a set, by its hash."""
    return Counter(rows[start : start + SIZE] for start in range(0, len(rows), SIZE))


def patterns(of: int, sets: Mapping[int, Counter[bytes]]) -> list[Pattern]:
    """Which sets the rows of one set are in, and how often: what differs, without what another pattern contains.

    A row loses to a look at each set it is in, as often as it is there: so the dearest row has one of these patterns.
    """
    found = {tuple(sorted((number, rows[row]) for number, rows in sets.items() if row in rows)) for row in sets[of]}
    largest: list[Pattern] = []
    for each in sorted(found, key=lambda pairs: -sum(times for _, times in pairs)):
        pattern = dict(each)
        if not any(all(more.get(number, 0) >= times for number, times in each) for more in largest):
            largest.append(pattern)
    return largest
