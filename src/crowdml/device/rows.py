"""From the bytes of a file or stream to samples: one line is one row, whatever stands in it.

How many rows a source has, and which of them is the n-th, depends on its line ends alone. A line that cannot be used
(blank, a stray quote, bytes that are no UTF-8, another number of fields, a label of no class) is a row like any other:
it keeps its place, its sample adds nothing to what leaves, and the reason is counted for the owner. To drop such a row,
or to stop at it, would tell by the number and the time of check-ins what stood in it (review, R3).

The first line alone counts as public. It may be a heading, and its width says whether the source fits the task.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crowdml.errors import DataError
from crowdml.features.bounds import outside, prepared, prepared_numbers
from crowdml.lines import (
    Format,
    as_public,
    columns_of,
    csv_fields,
    is_number,
    longest_line,
    looks_like_heading,
    separator,
    without_bom,
)
from crowdml.records import record
from crowdml.task import Task
from crowdml.texts import count_text

NOTHING_SENT = "Nothing was sent."

WHY = {
    "blank": "blank",
    "length": "too long",
    "encoding": "not in UTF-8",
    "syntax": "not in the source's format",
    "fields": "another number of fields than the task wants",
    "number": "a field that is no finite number",
    "label": "a label that is none of the task's",
}
"""Why a row cannot be used, in the owner's words."""


@record
class Sample:
    """x [d] float32 within the task's ball; y a class index or a number. It has no repr that shows them."""

    x: Any
    y: float

    def __repr__(self) -> str:
        return "Sample(hidden)"


@record
class Row:
    """What stands in one line: features and a label, or a reading in `x`; or why it cannot be used (a key of `WHY`)."""

    x: Any
    y: Any = None
    line: int = 0
    why: str | None = None
    holder: str = ""
    """The device that holds the row, where a column says so."""

    def __repr__(self) -> str:
        return "Row(hidden)"


class Faults:
    """How many rows could not be used, by reason. For the owner alone: it depends on samples and never leaves."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lines: dict[str, int] = {}
        self.clipped = 0
        """Rows that were used, with a number outside the task's bounds held within them."""

    def add(self, why: str, line: int = 0, times: int = 1) -> None:
        self.counts[why] = self.counts.get(why, 0) + times
        self._lines.setdefault(why, line)

    def take(self, other: Faults) -> None:
        """Add what another counted."""
        for why, times in other.counts.items():
            self.add(why, other._lines[why], times)
        self.clipped += other.clipped

    def clear(self) -> None:
        self.counts.clear()
        self._lines.clear()
        self.clipped = 0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def first_line(self) -> bool:
        """Whether the very first line of a file is among them."""
        return 1 in self._lines.values()

    def __str__(self) -> str:
        """'a label that is none of the task's: 2 (first in line 4); blank: 1 (first in line 9)'."""
        said: list[str] = []
        for why, times in sorted(self.counts.items(), key=lambda each: -each[1]):
            line = self._lines[why]
            said.append(f"{WHY[why]}: {times:,}" + (f" (first in line {line:,})" if line else ""))
        return "; ".join(said)


def clipped_text(rows: int) -> str:
    """The sentence for the owner about rows whose numbers were held within the task's bounds."""
    return (
        f"{count_text(rows, 'row')} had a number outside the task's bounds (features.low, features.high): it was held "
        "at the bound, and the row was used."
    )


@record
class Text:
    """How lines of a CSV or NDJSON source become rows of a task. `header`: None decides by the first line."""

    format: Format
    name: str
    task: Task
    header: bool | None = None
    columns: int = 1
    """Readings in a row, where the task's samples are cut out of readings."""
    label: str | None = None
    """The column of labels by its name in the heading; None: the last one."""
    ignore: tuple[str, ...] = ()
    """Columns that are no features, by name."""
    device: str | None = None
    """The column that says which device of a fleet holds a row, by name; it is no feature."""
    order: tuple[int, ...] | None = None
    """Where the features and then the label stand in a line, once names were found in a heading (`named`)."""
    holder: int | None = None
    """Where the device stands, likewise."""
    fields: int = 0
    """How many fields such a line has."""
    mark: str = ","
    """What separates fields, as the first line has it."""

    @property
    def longest(self) -> int:
        """Bytes of a line that is read: from the task alone."""
        return longest_line(max(self.columns, self.task.features.width + 1))

    @property
    def is_readings(self) -> bool:
        return self.task.features.kind == "windows"

    def has_heading(self, first: bytes | None) -> bool:
        """Whether the first line names the columns: as the owner says, or because none of its fields is a number."""
        return looks_like_heading(self.format, first) if self.header is None else self.header

    @property
    def heading_told(self) -> str:
        """What the owner is told where the first line decided."""
        return (
            f"The first line of {self.name} is taken for a heading: none of its fields is a number. If it is a row, "
            "say --header no."
        )

    def named(self, first: bytes | None) -> Text:
        """This text as its first line has it: what separates fields, and the columns that somebody named."""
        text = replace(self, mark=separator(first)) if self.format == "csv" else self
        if self.label is None and not self.ignore and self.device is None:
            return text
        if self.format != "csv" or self.is_readings or not self.has_heading(first):
            raise DataError(
                f"{self.name}: --label, --ignore and --device name columns by a heading, and it has none. Add one as "
                f"its first line, or leave them out. {NOTHING_SENT}"
            )
        out = (*self.ignore, *([] if self.device is None else [self.device]))
        names, order = columns_of(first, self.name, self.label, out, NOTHING_SENT)
        holder = None if self.device is None else names.index(self.device)
        return replace(text, order=order, holder=holder, fields=len(names))

    def check_width(self, first: bytes | None) -> None:
        """Refuse a source whose first line has another width than the task: all its rows would pay for nothing."""
        row = self.row(1, as_public(first))
        if row.why is None or (row.why == "blank" and self.is_readings):
            return
        wanted = f"{count_text(self._width, 'number')} and a label"
        if self.is_readings:
            wanted = "one a row; --shard I/N reads one of N columns" if self.columns == 1 else f"{self.columns} columns"
        if row.why == "fields":
            extra = 1 if self.format == "csv" and not self.is_readings else 0  # the label
            told = f"has {count_text(len(row.x) + extra, 'field')}"
        elif self.format == "ndjson" and not self.is_readings:
            told = 'is no object like {"x": [...], "y": ...}'
        else:
            told = f"is {WHY[row.why]}"
        raise DataError(f"{self.name}: its first line {told}, and the task wants {wanted}. {NOTHING_SENT}")

    @property
    def _width(self) -> int:
        return self.columns if self.is_readings else self.task.features.width

    def rows(self, lines: Iterable[bytes | None], tell: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
        """A row for each line but the heading."""
        text = self
        for number, line in enumerate(lines, 1):
            if number == 1:
                text = self.named(line)
                text.check_width(line)
                if self.has_heading(line):
                    if self.header is None:
                        tell(self.heading_told)
                    continue
            yield text.row(number, without_bom(line) if number == 1 else line)

    def row(self, number: int, line: bytes | None) -> Row:
        """What stands in this line."""
        if line is None:
            return Row(None, line=number, why="length")
        if not line.strip():
            return Row(None, line=number, why="blank")
        try:
            text = line.decode()
            found = csv_fields(text, self.mark) if self.format == "csv" else json.loads(text)
        except UnicodeDecodeError:
            return Row(None, line=number, why="encoding")
        except (ValueError, RecursionError, csv.Error):
            return Row(None, line=number, why="syntax")
        return self._reading(number, found) if self.is_readings else self._sample(number, found)

    def _sample(self, number: int, found: Any) -> Row:
        holder = ""
        if self.format == "csv":
            if self.order is not None:
                if len(found) != self.fields:
                    return Row(found[:-1], line=number, why="fields")
                holder = "" if self.holder is None else found[self.holder].strip()
                found = [found[place] for place in self.order]
            x, y = found[:-1], found[-1]
        elif isinstance(found, dict):
            x, y = found.get("x"), found.get("y")
        else:
            return Row(None, line=number, why="syntax")
        fits = isinstance(x, list) and len(x) == self._width
        return Row(x, y, number, None if fits else "fields" if isinstance(x, list) else "syntax", holder)

    def _reading(self, number: int, found: Any) -> Row:
        value = found.get("value") if isinstance(found, dict) else found
        fits = not isinstance(value, list) or (self.format == "csv" and len(value) == self.columns)
        return Row(value, line=number, why=None if fits else "fields")


# --- samples ---


def samples_of(rows: Sequence[Any], task: Task, faults: Faults) -> list[Sample]:
    """A sample for each row: the zero sample of no label for one that cannot be used, which is counted.

    A row is a `Row`, or a pair (x, y). Of windows a number that is not finite makes the zero window, and its label
    stays: it is another reading. Their readings were counted where they were read.
    """
    norm, windows = task.features.norm, task.features.kind == "windows"
    x, nothing = np.zeros((len(rows), task.features.width)), math.nan if task.classes is None else -1.0
    labels: list[float | None] = []
    why: list[str | None] = []
    for place, given in enumerate(rows):
        row = _as_row(given)
        fault, label, numbers = row.why, _label(row.y, task), None
        if fault is None:
            numbers, fault = _numbers(row.x, task.features.width)
        if numbers is not None:
            x[place] = numbers
        labels.append(label)
        why.append(fault or ("label" if label is None else None))
    inside = prepared(task.features, x)
    faults.clipped += int((outside(task.features, x).any(axis=1) & np.isfinite(x).all(axis=1)).sum())
    finite: Any = np.isfinite(x).all(axis=1)
    if norm.kind == "none":  # nothing was scaled: beyond float32 it is as good as infinite
        with np.errstate(over="ignore"):
            finite &= np.isfinite(x.astype(np.float32)).all(axis=1)
    samples: list[Sample] = []
    for place, label in enumerate(labels):
        fault = why[place] or (None if windows or finite[place] else "number")
        if fault is not None and not windows:
            faults.add(fault, _as_row(rows[place]).line)
        if fault is None and label is not None:
            samples.append(Sample(inside[place], label))
        else:
            samples.append(Sample(np.zeros(task.features.dimension, np.float32), nothing))
    return samples


def _as_row(given: Any) -> Row:
    if isinstance(given, Row):
        return given
    try:
        x, y = given
    except Exception:  # whatever a function of the owner's yields: it is a row, and cannot be used
        return Row(None, why="syntax")
    return Row(x, y)


def _numbers(x: Any, dimension: int) -> tuple[Any, str | None]:
    """The features [d], or why there are none. Each field by itself: a long one takes no memory for all the others."""
    try:
        numbers = [float(each) for each in x] if isinstance(x, list | tuple) else np.asarray(x, np.float64)
    except Exception:  # the fields' own conversions raise what they like
        return None, "number"
    return (numbers, None) if np.shape(numbers) == (dimension,) else (None, "fields")


def _label(y: Any, task: Task) -> float | None:
    if isinstance(y, str) and y.strip() in task.labels.classes:
        return float(task.labels.classes.index(y.strip()))
    if y is None or isinstance(y, bool) or (isinstance(y, str) and not is_number(y)):
        return None
    try:
        number = float(y)
    except Exception:  # as above
        return None
    if task.classes is None:
        return float(prepared_numbers(task.labels, number)) if math.isfinite(number) else None
    return number if number in range(task.classes) else None


def reading_of(given: Any, column: int, faults: Faults) -> float:
    """The number in one column of a row of readings; NaN, which keeps its place, where there is none."""
    row = given if isinstance(given, Row) else Row(given)
    value = row.x[column] if row is given and row.why is None and isinstance(row.x, list) else row.x
    number = math.nan if row.why is not None or isinstance(value, bool) else _number(value)
    if not math.isfinite(number):
        faults.add(row.why or "number", row.line)
        return math.nan
    return number


def _number(value: Any) -> float:
    try:
        return float(value)
    except Exception:  # as above
        return math.nan
