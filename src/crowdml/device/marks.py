"""Which message each device sealed last, in a file beside the ledger: so that after a lost ledger no older one serves.

A line for each message, `[device, seq, samples given so far, SHA-256 of its bytes]`, and the round where it was said in
one, on disk before the message can be sent. The last line of a device counts. A line that was cut short by a crash
belongs to a message that was never sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from crowdml.errors import DataError
from crowdml.records import record

__all__ = ["Mark", "Marks", "read_marks"]

MOST_LINES = 10_000
"""Beyond those that count: then the file is written anew."""


@record
class Mark:
    """A message by its number, the samples given with it and before, and the SHA-256 of its bytes in hex."""

    seq: int
    samples: int
    hash: str
    round: int = 0
    """Of a masked task; 0: it was said in none."""


def read_marks(path: Path) -> dict[int, Mark]:
    """The last mark of each device. A file with a line that cannot be read knows nothing: then nobody has a mark."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Nothing was sent. See to the disk.") from error
    marks: dict[int, Mark] = {}
    try:
        for line in lines[:-1]:  # what follows the last line break was cut short
            device, seq, samples, hash_, *more = json.loads(line)
            marks[int(device)] = Mark(int(seq), int(samples), str(hash_), *(int(number) for number in more))
    except (ValueError, TypeError, RecursionError):
        return {}
    return marks


class Marks:
    """The open file. `add` notes, `flush` writes: what was added is on disk when it returns."""

    def __init__(self, path: Path, replace: Callable[[bytes], None]) -> None:
        self._path, self._replace = path, replace
        self._last, self._waiting, self._lines = read_marks(path), list[str](), 0
        self._handle = self._renew()

    def add(self, device: int, mark: Mark) -> None:
        self._last[device] = mark
        self._waiting.append(_line(device, mark))

    def last(self, device: int) -> Mark | None:
        return self._last.get(device)

    def flush(self) -> None:
        if not self._waiting:
            return
        try:
            if self._lines > MOST_LINES:
                os.close(self._handle)
                self._handle = self._renew()
            else:
                data = "".join(self._waiting).encode()
                if os.write(self._handle, data) != len(data):
                    raise OSError(0, "the disk took a part of a line")
                os.fsync(self._handle)
                self._lines += len(self._waiting)
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be written: {error.strerror}. Nothing was sent. See to the disk and try again."
            ) from error
        self._waiting.clear()

    def close(self) -> None:
        os.close(self._handle)

    def _renew(self) -> int:
        """The marks that count, in a new file."""
        self._replace("".join(_line(device, mark) for device, mark in sorted(self._last.items())).encode())
        self._lines = 0
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)


def _line(device: int, mark: Mark) -> str:
    said_in = [mark.round] if mark.round else []
    return json.dumps([device, mark.seq, mark.samples, mark.hash, *said_in]) + "\n"
