"""Which message each device sealed last, in a file beside the ledger, so that an older ledger is noticed.

A line for each message, on disk after the ledger has the message and before a byte of it is sent:
`[device, seq, samples given so far, SHA-256 of its bytes, round, task, whether it is a check-in]`. So every message
that was ever sent has a line, and a ledger that does not know the last check-in of these lines is an older copy. After
a lost ledger only the statement of the last line is believed. Lines of version 0.1 end after the hash or the round,
and were written before the ledger had the message. A line that was cut short by a crash belongs to a message that was
never sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path

from crowdml.errors import LOST_MARKS, DataError, LedgerError
from crowdml.records import record

MOST_LINES = 10_000
"""Beyond those that count: then the file is written anew."""


@record
class Mark:
    """A message by its number, the samples given with it and before, and the SHA-256 of its bytes in hex."""

    seq: int
    samples: int
    hash: str
    round: int = 0
    """The round of masking that the message belongs to; 0: none."""
    task: str = ""
    """The task's hash in hex. Lines of version 0.1 do not name it."""
    is_check_in: bool = True
    """False: the message belongs to a round, after its check-in. Lines of version 0.1 do not tell."""


@record(frozen=False)
class Marked:
    """What the lines of one device say."""

    last: Mark
    """The last message of any kind."""
    check_in: Mark | None = None
    """The last check-in of any task."""
    highest: dict[str, Mark] = field(default_factory=dict)
    """The mark of the highest round, by task; under "" that of lines which name no task."""

    def add(self, mark: Mark) -> None:
        self.last = mark
        if mark.is_check_in:
            self.check_in = mark
        if mark.round and mark.round >= self.round(mark.task):
            self.highest[mark.task] = mark

    def round(self, task: str) -> int:
        """The highest round of the task in which the device sealed a message; 0: none is known."""
        return self.highest[task].round if task in self.highest else 0

    def lines(self) -> Iterator[Mark]:
        """The marks that count, in an order that leads to the same when they are read again."""
        ends = [mark for mark in (self.check_in, self.last) if mark is not None]
        yield from (mark for mark in self.highest.values() if mark not in ends)
        yield from dict.fromkeys(ends)


def read_marks(path: Path) -> dict[int, Marked]:
    """What is marked of each device. A line that cannot be read may be the last of its device: then nothing is known,
    and it is refused. What follows the last line break was cut short by a crash, before its message was sent."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Nothing was sent. Check the disk.") from error
    found: dict[int, Marked] = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            device, seq, samples, hash_, *more = json.loads(line)
            round_, task, is_check_in = (*more, *(0, "", 1)[len(more) :])
            mark = Mark(int(seq), int(samples), str(hash_), int(round_), str(task), bool(is_check_in))
            for text in (mark.hash, mark.task):
                bytes.fromhex(text)
            found.setdefault(int(device), Marked(mark)).add(mark)
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerError(
                f"line {number} of {path} cannot be read: which message this device sealed last is not known. "
                f"{LOST_MARKS}"
            ) from error
    return found


class Marks:
    """The open file. `add` notes, `flush` writes: what was added is on disk when it returns."""

    def __init__(self, path: Path, replace: Callable[[bytes], None]) -> None:
        self._path, self._replace = path, replace
        self._marked, self._waiting, self._lines = read_marks(path), list[str](), 0
        self._handle = self._renew()

    def add(self, device: int, mark: Mark) -> None:
        self._marked.setdefault(device, Marked(mark)).add(mark)
        self._waiting.append(_line(device, mark))

    def of(self, device: int) -> Marked | None:
        """What is marked of a device; None: nothing is."""
        return self._marked.get(device)

    def flush(self) -> None:
        if not self._waiting:
            return
        try:
            if self._lines > MOST_LINES:
                before, self._handle = self._handle, self._renew()
                os.close(before)
            else:
                data = "".join(self._waiting).encode()
                if os.write(self._handle, data) != len(data):
                    raise OSError(0, "the disk took a part of a line")
                os.fsync(self._handle)
                self._lines += len(self._waiting)
        except OSError as error:
            self._lines = MOST_LINES + 1  # a part of a line may be there: the next one goes into a new file
            raise DataError(
                f"{self._path} cannot be written: {error.strerror}. Nothing was sent. Check the disk and try again."
            ) from error
        self._waiting.clear()

    def close(self) -> None:
        os.close(self._handle)

    def _renew(self) -> int:
        """Write the marks that count to a new file."""
        marked = sorted(self._marked.items(), key=lambda pair: pair[0])
        self._replace("".join(_line(device, mark) for device, each in marked for mark in each.lines()).encode())
        self._lines = 0
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)


def _line(device: int, mark: Mark) -> str:
    row: list[object] = [device, mark.seq, mark.samples, mark.hash]
    if mark.task:
        row += [mark.round, mark.task, int(mark.is_check_in)]
    elif mark.round:
        row.append(mark.round)
    return json.dumps(row) + "\n"
