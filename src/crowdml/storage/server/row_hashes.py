"""How rows of a server's own validation are known one by one: keyed hashes, and which sets share which rows.

A row is known by its features, whatever label it has and in whatever order it comes. Rows are private, so the hashes
are keyed: without the server's database nobody can try guesses on them. One digit changed makes another row.

Migrations use this module, too: what it computes of the same bytes must not change.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import numpy as np

from crowdml.arrays import Array
from crowdml.records import record

__all__ = ["KEY", "SIZE", "Hashed", "Pattern", "counted", "earlier_hash", "hash_rows", "patterns"]

KEY = "rows-key"
"""The setting that holds the key, made with the tables: it stays with the hashes, in every backup too."""
SIZE = 16
"""Bytes of a row's hash."""
Pattern = dict[int, int]
"""How often a row is in each set that has it, by the set's number."""


@record
class Hashed:
    """A set of rows: `whole` is the same for the same rows and labels in any order, `rows` are sorted hashes of
    features, `SIZE` bytes for each row."""

    whole: bytes
    rows: bytes


def hash_rows(key: bytes, data: bytes, count: int, dimension: int) -> Hashed:
    """The hashes of rows as they are stored, float32: all x, then all y."""
    x, labelled = _rows(data, count, dimension)
    plain = x + np.float32(0)  # there is one zero, not two
    features = sorted(_keyed(key, b"row", row.tobytes()) for row in plain)
    whole = b"".join(sorted(_keyed(key, b"labelled row", row.tobytes()) for row in labelled))
    return Hashed(_keyed(key, b"set", whole, 32), b"".join(features))


def earlier_hash(data: bytes, count: int, dimension: int) -> bytes:
    """How version 0.1 knew a set as a whole: without a key, by its features and then by features and labels."""
    found = b""
    for rows in _rows(data, count, dimension):
        hashes = sorted(hashlib.sha256(row.tobytes()).digest() for row in rows)
        found += hashlib.sha256(b"crowdml/rows/1" + b"".join(hashes)).digest()
    return found


def _rows(data: bytes, count: int, dimension: int) -> tuple[Array, Array]:
    """The features [count, dimension], and the same with the label at the end."""
    numbers: Array = np.frombuffer(data, "<f4")
    x, y = numbers[: count * dimension].reshape(count, dimension), numbers[count * dimension :].reshape(count, 1)
    return x, np.concatenate([x, y], axis=1)


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
