"""Lines of a CSV or NDJSON source and the fields of one: the same rules on devices and on the server.

Only a line feed ends a line, a line is read by itself, and a first line may be a heading.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO, Literal

__all__ = [
    "Format",
    "as_public",
    "csv_fields",
    "is_number",
    "longest_line",
    "looks_like_heading",
    "read_lines",
    "without_bom",
]

Format = Literal["csv", "ndjson"]
BOM = b"\xef\xbb\xbf"
LONGEST, LONGEST_FIELD = 2**20, 64
"""Bytes of a line, beside those of each field: a longer line is a row that cannot be used, and takes no memory."""


def longest_line(fields: int) -> int:
    """How many bytes a line of so many fields may have."""
    return LONGEST + LONGEST_FIELD * fields


def read_lines(file: BinaryIO, longest: int, size: int | None = None) -> Iterator[bytes | None]:
    """Each line without its end; None for one of more than `longest` bytes. Only `\\n` ends a line.

    Bytes after the last line end are a line, too, and the last one: what a writer appends to it later is no row of its
    own. `size`: lines that begin at this byte or later are not read.
    """
    passed = 0
    while (size is None or passed < size) and (head := file.readline(longest + 2)):
        passed, rest = passed + len(head), head
        while not rest.endswith(b"\n") and len(head) > longest:
            rest = file.readline(2**16)
            passed += len(rest)
            if not rest:
                break
        line = head.removesuffix(b"\n").removesuffix(b"\r")
        yield None if len(line) > longest else line
        if not rest.endswith(b"\n"):
            return


def csv_fields(text: str) -> list[str]:
    """The fields of one line by itself: a quote that it does not close is an error, and no way into the next line."""
    (fields,) = csv.reader([text], strict=True)
    if not fields:
        raise ValueError("no fields")
    return fields


def looks_like_heading(form: Format, first: bytes | None) -> bool:
    """Whether a first line names columns: none of its fields is a number, and one of them at least is there."""
    line = as_public(first)
    if form != "csv" or line is None or not line.strip():
        return False
    try:
        fields = csv_fields(line.decode())
    except (ValueError, csv.Error):
        return False
    return not any(map(is_number, fields)) and any(field.strip() for field in fields)


def as_public(first: bytes | None) -> bytes | None:
    """The first line, with what is no UTF-8 replaced: names of columns come in all encodings."""
    line = without_bom(first)
    return None if line is None else line.decode(errors="replace").encode()


def without_bom(first: bytes | None) -> bytes | None:
    return None if first is None else first.removeprefix(BOM)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
