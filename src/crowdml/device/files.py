"""Files that a device reads: their rows, their shares, and what a ledger calls them.

A ledger knows how many rows of a share were given. That number means the same rows for life: another share, another
heading, or an earlier version's way to count are refused where they would move it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from crowdml.device.rows import Row, Text
from crowdml.errors import DataError
from crowdml.lines import csv_fields, looks_like_heading, read_lines
from crowdml.records import record


def say_nothing(_: str) -> None:
    """Where nobody listens."""


@record
class Share:
    """Rows `index`, `index + of`, `index + 2 of`, ... of a file or data set."""

    index: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def count(self, rows: int) -> int:
        """How many of so many rows are in this share."""
        return len(range(self.index, rows, self.of))


@record
class Held:
    """The rows of a file that a column says one device holds."""

    column: str
    device: str

    def __str__(self) -> str:
        return f"{quote(self.column, safe='')}={quote(self.device, safe='')}"


def parse_share(text: str) -> Share:
    """'3/100', counted from 0."""
    index, slash, of = text.partition("/")
    if slash and index.isdecimal() and of.isdecimal() and int(index) < int(of):
        return Share(int(index), int(of))
    raise DataError(f"--shard {text!r}: write I/N with I below N, such as 0/10 for the first of ten.")


NAME = re.compile(r"(csv|ndjson)(-lines(-header|-no-header)?)?:(.+):(\d+/\d+|[^:/]+=[^:/]+)", re.DOTALL)
"""What a ledger calls a share of a file: kind, how its rows are counted, path, share. It was `csv:` alone before one
line was one row."""


class TextFile:
    """A CSV or NDJSON file: its rows, how many they are, and what a ledger calls it.

    Its rows are the lines that begin within its size when it is opened, however it grows while it is read.
    """

    def __init__(self, path: Path, text: Text, tell: Callable[[str], None] = say_nothing) -> None:
        self.path, self.text = path, text
        if not path.is_file():
            why = f"{path} is a folder. Name a file in it" if path.is_dir() else f"there is no file {path}"
            raise DataError(f"--source {text.format}:{path}: {why}.")
        self._size = path.stat().st_size
        for line in self._first:
            self.text = text = text.named(line)
            text.check_width(line)
        if self.has_heading and text.header is None:
            tell(text.heading_told)

    def _lines(self) -> Iterator[bytes | None]:
        try:
            with self.path.open("rb") as file:
                yield from read_lines(file, self.text.longest, self._size)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read to its end: {type(error).__name__}.") from None

    @cached_property
    def _first(self) -> list[bytes | None]:
        """The first line alone, which counts as public; nothing of an empty file."""
        return list(islice(self._lines(), 1))

    @cached_property
    def has_heading(self) -> bool:
        return any(map(self.text.has_heading, self._first))

    def rows(self) -> Iterator[Row]:
        """A row for each line but the heading."""
        return self.text.rows(self._lines())

    @cached_property
    def count(self) -> int:
        """Rows: line ends, one more where something stands after the last, one less where there is a heading."""
        lines, last, left = 0, b"\n", self._size
        with self.path.open("rb") as file:
            while block := file.read(min(left, 2**20)):
                lines, last, left = lines + block.count(b"\n"), block[-1:], left - len(block)
        return lines + (last != b"\n") - self.has_heading

    def name(self, share: Share | Held) -> str:
        """What a ledger calls this share: with its heading where that is not what the first line looks like."""
        usual = any(looks_like_heading(self.text.format, line) for line in self._first)
        mark = "" if self.has_heading == usual else "-header" if self.has_heading else "-no-header"
        return f"{self.text.format}-lines{mark}:{self.path.resolve()}:{share}"

    def place(self, share: Share | Held, known: Mapping[str, int]) -> int:
        """How many rows of this share were given. What an earlier version counted holds where it counted alike."""
        name = self.name(share)
        if isinstance(share, Held):
            return known.get(name, 0)
        earlier = 0 if name in known else known.get(f"{self.text.format}:{self.path.resolve()}:{share}", 0)
        passed = self.has_heading + (earlier if self.text.is_readings else earlier * share.of)
        if earlier and self._unlike is not None and self._unlike <= passed:
            raise DataError(
                f"{self.path}: an earlier version of crowdml read {earlier:,} rows of it, and up to there did not "
                "count one row for each line: a row could be given twice. Nothing was read. Put the rows that were not "
                "given yet into a file of another name."
            )
        return known.get(name, earlier)

    @cached_property
    def _unlike(self) -> int | None:
        """The first line that an earlier version did not count as one row, or took for another heading."""
        for number, line in enumerate(self._lines(), 1):
            row = self.text.row(number, line)
            if number == 1 and self.has_heading != _was_heading(line, self.text):
                return 1
            blank = row.why == "blank" and not (self.text.is_readings and self.text.format == "csv")
            unlike = row.why in ("length", "encoding") or (row.why == "syntax" and self.text.format == "csv")
            if line is None or b"\r" in line or blank or unlike:
                return number
        return None


def _was_heading(first: bytes | None, text: Text) -> bool:
    """What earlier versions took for a heading."""
    if not looks_like_heading(text.format, first):
        return False
    fields = csv_fields((first or b"").decode(errors="replace"))
    names = [field.strip().lower() for field in fields]
    if text.is_readings:
        return all(name and name not in ("na", "n/a", "null", "none", "missing", "-", "?") for name in names)
    return len({*fields}) == len(fields) and all(names)


def check_known(name: str | None, known: Mapping[str, int]) -> None:
    """Refuse another share of a file or data set than the one that was read, and another heading of the same file.

    Any two shares may have rows in common, and a heading moves every row by one.
    """
    whole, counted, share = _parts(name)
    for other in known:
        before, theirs, shared = _parts(other)
        if not whole or whole != before:
            continue
        if shared != share:
            raise DataError(
                f"{whole} was read as share {shared}, and share {share} of it may hold the same rows. Nothing was "
                f"read. Go on with share {shared} (--shard; a fleet's --devices, --device), or name another source."
            )
        if theirs != counted:
            raise DataError(
                f"{whole} was read with another --header, and a row could be given twice: every row has moved by one. "
                "Nothing was read. Go on with the --header that it was read with, or name another source."
            )


def _parts(name: str | None) -> tuple[str, str, str]:
    """What is read, whether its heading is another than it looks like, and which share of it."""
    found = NAME.fullmatch(name or "")
    if found is None:
        whole, _, share = (name or "").rpartition(":")
        return whole, "", share
    kind, _, mark, path, share = found.groups()
    return f"{kind}:{path}", mark or "", share
