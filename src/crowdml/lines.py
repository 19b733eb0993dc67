"""Lines of a CSV or NDJSON source and the fields of one: the same rules on devices and on the server.

Only a line feed ends a line, a line is read by itself, and a first line may be a heading.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Literal

from crowdml.errors import DataError
from crowdml.texts import did_you_mean

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


OTHER_MARKS = (";", "\t", "|")
"""What separates fields where no comma does. A first line decides it, which counts as public."""
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*", re.ASCII)


def csv_fields(text: str, mark: str = ",") -> list[str]:
    """The fields of one line by itself: a quote that it does not close is an error, and no way into the next line.

    Between semicolons a comma is the decimal mark: `1,5` is 1.5.
    """
    (fields,) = csv.reader([text], strict=True, delimiter=mark)
    if not fields:
        raise ValueError("no fields")
    if mark == ";":
        return [each.replace(",", ".") if DECIMAL_COMMA.fullmatch(each) else each for each in fields]
    return fields


def separator(first: bytes | None) -> str:
    """What separates the fields of a CSV file, by its first line: a comma wherever there is one."""
    line = (as_public(first) or b"").decode()
    try:
        if len(csv_fields(line)) == 1:
            return next((mark for mark in OTHER_MARKS if len(csv_fields(line, mark)) > 1), ",")
    except (ValueError, csv.Error):
        pass
    return ","


def columns_of(
    first: bytes | None, where: str, label: str | None, ignore: Sequence[str], ending: str
) -> tuple[list[str], tuple[int, ...]]:
    """The names in a heading, and where the features and then the label stand: the last one where nobody names it.

    `ending`: the end of a refusal, which says what was not done.
    """
    names = [field.strip() for field in csv_fields((as_public(first) or b"").decode(), separator(first))]
    for name in (*([] if label is None else [label]), *ignore):
        if name not in names:
            raise DataError(f"{where} has no column {name!r}.{did_you_mean(name, names)} {ending}")
    left = [place for place, name in enumerate(names) if name not in ignore]
    if not left or (label is not None and label in ignore):
        raise DataError(f"{where}: --ignore leaves no column for the label. Name fewer. {ending}")
    target = left[-1] if label is None else names.index(label)
    return names, (*(place for place in left if place != target), target)


def looks_like_heading(form: Format, first: bytes | None) -> bool:
    """Whether a first line names columns: none of its fields is a number, and one of them at least is there."""
    line = as_public(first)
    if form != "csv" or line is None or not line.strip():
        return False
    try:
        fields = csv_fields(line.decode(), separator(first))
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
