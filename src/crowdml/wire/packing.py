"""Strict msgpack: the few forms that our messages use, each in its shortest encoding, bounded before it is read.

A general parser builds whatever the bytes say, and looks afterwards. This reader is told what must come next and how
large it may be, so that no depth, no size and no type is the sender's choice, and every value has exactly one
encoding: bytes that are read and packed again are the same bytes. Writing is msgpack's own `packb`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn, Self

import msgpack

from crowdml.wire.problems import Problem

LARGEST_INTEGER = 2**63 - 1
"""What every database and language has: signed 64 bits."""


POSITIVE = rb"[\x01-\x7f]|\xcc[\x80-\xff]|\xcd[\x01-\xff].|\xce(?!\x00\x00).{4}|\xcf(?!\x00\x00\x00\x00)[\x00-\x7f].{7}"
"""A pattern of a whole number from 1 to the largest, in its shortest form (with `re.DOTALL`)."""


def pack(value: Any) -> bytes:
    """msgpack, maps in sorted order of their keys, at every depth."""
    return bytes(msgpack.packb(value if type(value) in _SINGLE else _sorted(value)) or b"")


def binary_head(size: int) -> bytes:
    """What msgpack writes before so many bytes. It has no form for 4 GiB and more; such a length is cut to fit."""
    width = 1 if size < 2**8 else 2 if size < 2**16 else 4
    return bytes([0xC4 + width // 2]) + min(size, 2**32 - 1).to_bytes(width, "big")


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return bytes([0xA0 | len(name)]) + name.encode()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: value[key] if type(value[key]) in _SINGLE else _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _SINGLE else _sorted(item) for item in value]
    return value


_SINGLE = (bytes, int, str)


class Reader:
    """Reads `data` from the front. `what` names it in problems ("The envelope", "The receipt")."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes, what: str, *, limit: int) -> None:
        if len(data) > limit:
            raise Problem("too-large", f"{what} has {len(data):,} bytes; at most {limit:,} are read.", limit=limit)
        self._data, self._what, self._at = data, what, 0

    @property
    def at(self) -> int:
        """How many bytes were read."""
        return self._at

    def fail(self, why: str) -> NoReturn:
        raise Problem("malformed", f"{self._what} is refused at byte {self._at}: {why}.")

    def end(self) -> None:
        if self._at != len(self._data):
            self.fail(f"{len(self._data) - self._at} bytes follow after its end")

    def map(self, keys: int) -> None:
        """A map of exactly so many keys (at most 15)."""
        if self._byte("a map") != 0x80 | keys:
            self.fail(f"expected a map of {keys} keys")

    def any_map(self, most: int) -> int:
        """A map of at most so many keys, `most` being at most 15."""
        keys = self._byte("a map") ^ 0x80
        if keys > most:
            self.fail(f"expected a map of at most {most} keys")
        return keys

    def key(self, name: str) -> Self:
        """A key of a map; its value comes next. Keys are sorted, so that the next one is known."""
        expected = _key(name)
        if not self._data.startswith(expected, self._at):
            self.fail(f"expected the key {name!r}")
        self._at += len(expected)
        return self

    def text(self, name: str, longest: int) -> str:
        """A text of at most `longest` bytes."""
        first = self._byte(name)
        if 0xA0 <= first <= 0xBF:
            size = first - 0xA0
        elif first in (0xD9, 0xDA, 0xDB):
            size = self._size(name, 1 << (first - 0xD9), least=(32, 256, 65536)[first - 0xD9])
        else:
            self.fail(f"{name} must be a text")
        try:
            return self._take(name, size, longest).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{name} is not UTF-8")

    def binary(self, name: str, longest: int, *, exactly: int | None = None) -> bytes:
        """Bytes, at most `longest` of them."""
        first = self._byte(name)
        if first not in (0xC4, 0xC5, 0xC6):
            self.fail(f"{name} must be bytes")
        size = self._size(name, 1 << (first - 0xC4), least=(0, 256, 65536)[first - 0xC4])
        if exactly is not None and size != exactly:
            self.fail(f"{name} must have {exactly} bytes, and has {size}")
        return self._take(name, size, longest if exactly is None else exactly)

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        first = self._byte(name)
        if first < 0x80:
            value = first
        elif first >= 0xE0:
            value = first - 256
        elif 0xCC <= first <= 0xCF:
            value = self._size(name, 1 << (first - 0xCC), least=(128, 256, 65536, 2**32)[first - 0xCC])
        elif 0xD0 <= first <= 0xD3:
            width = 1 << (first - 0xD0)
            value = int.from_bytes(self._take(name, width, width), "big", signed=True)
            if value >= (-32, -(2**7), -(2**15), -(2**31))[first - 0xD0]:
                self.fail(f"{name} is not in its shortest form")
        else:
            self.fail(f"{name} must be a whole number")
        if not low <= value <= high:
            self.fail(f"{name} is {value}, and must lie between {low} and {high}")
        return value

    def array(self, name: str, most: int) -> int:
        """The length of a list that follows, at most `most`."""
        first = self._byte(name)
        if first & 0xF0 == 0x90:
            size = first & 0x0F
        elif first in (0xDC, 0xDD):
            size = self._size(name, 2 << (first - 0xDC), least=(16, 65536)[first - 0xDC])
        else:
            self.fail(f"{name} must be a list")
        if size > most:
            self.fail(f"{name} has {size:,} entries, and at most {most:,} are read")
        return size

    def nil(self) -> bool:
        """Whether nil comes next; then it is read."""
        here = self._data[self._at : self._at + 1] == b"\xc0"
        self._at += here
        return here

    def _byte(self, name: str) -> int:
        if self._at >= len(self._data):
            self.fail(f"it ends where {name} should be")
        self._at += 1
        return self._data[self._at - 1]

    def _size(self, name: str, width: int, *, least: int) -> int:
        size = int.from_bytes(self._take(name, width, width), "big")
        if size < least:
            self.fail(f"{name} is not in its shortest form")
        return size

    def _take(self, name: str, size: int, longest: int) -> bytes:
        if size > longest:
            self.fail(f"{name} has {size:,} bytes, and at most {longest:,} are read")
        end = self._at + size
        if end > len(self._data):
            self.fail(f"it ends within {name}")
        taken = self._data[self._at : end]
        self._at = end
        return taken
