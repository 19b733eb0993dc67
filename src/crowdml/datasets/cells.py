"""The cells of a file with a table: CSV (also packed with gzip), NPZ or Parquet. Nobody has said yet what a column is.

Whatever is no table is refused in a sentence that names the file, the row, the column and what to do. It shows no value
of the table: errors end up in logs.
"""

from __future__ import annotations

import codecs
import gzip
import math
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.files import UNREADABLE, npz_array, npz_head
from crowdml.errors import DataError, MissingExtra
from crowdml.lines import as_public, csv_fields, longest_line, looks_like_heading, read_lines, separator
from crowdml.texts import count_text, did_you_mean, one_line

SUFFIXES = (".csv", ".csv.gz", ".npz", ".parquet")
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?", "-"))
"""Texts that stand for a value that is not there, in lower case."""
MOST_VALUES = 200_000_000
"""Numbers of a table: 1.6 GB while it is read."""
MOST_COLUMNS = 100_000
"""Columns of a CSV file."""


@dataclass
class Cells:
    """The cells of a file: numbers [n, m], NaN where there is none, and the texts among them by column and row."""

    path: str
    names: list[str]
    numbers: NDArray[np.float64]
    texts: dict[int, dict[int, str]] = field(default_factory=dict)
    first_line: int | None = None
    """The line of the first row, of a text file; None where rows are counted from 1."""
    exact: dict[int, list[str]] = field(default_factory=dict)
    """Columns as they were written, where that is kept: `01` and `1` are two names."""
    whose: str | None = None
    """The column that says who holds a row, where the file's own names tell: `devices` or `groups` of an NPZ file."""
    label: int | None = None
    """The column of labels, where the file's own names tell: `y` of an NPZ file."""
    mark: str = ","
    """What separates the fields of a text file."""
    tested: Cells | None = None
    """Rows that the file itself keeps for tests: `x_test` and `y_test` of an NPZ file."""

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def place(self, row: int) -> str:
        return place_of(row, self.first_line)

    def missing(self, column: int) -> NDArray[np.bool_]:
        """[n]: where a column has neither a number nor a text."""
        gone = np.isnan(self.numbers[:, column])
        if texts := self.texts.get(column):
            gone[list(texts)] = False
        return gone

    def column(self, name: str, option: str) -> int:
        """The place of a column that somebody named."""
        if name in self.names:
            return self.names.index(name)
        near = did_you_mean(name, self.names)
        listed = ", ".join(map(one_line, self.names[:20])) + (", ..." if len(self.names) > 20 else "")
        raise DataError(f"{self.path} has no column {name!r} for {option}.{near} Its columns are {listed}.")

    def put(self, column: int, values: NDArray[Any]) -> None:
        """Fill a column: numbers as they are, everything else as its text."""
        if values.dtype.kind in "fiub":
            self.numbers[:, column] = values
            return
        for row, value in enumerate(values.tolist()):
            if isinstance(value, (bool, int, float)):
                self.numbers[row, column] = value
            elif value is not None and str(value).strip().lower() not in MISSING:
                self.texts.setdefault(column, {})[row] = str(value).strip()

    def written(self, column: int) -> list[str]:
        """A column as texts: as it was written where that is known, and else whole numbers without a point."""
        if column in self.exact:
            return self.exact[column]
        numbers, texts = self.numbers[:, column].tolist(), self.texts.get(column, {})
        return [texts.get(row, "") if value != value else _name(value) for row, value in enumerate(numbers)]


def place_of(row: int, first_line: int | None) -> str:
    """Where a row stands: by its line in a text file whose first row is in this line, else by its number from 1."""
    return f"row {row + 1:,}" if first_line is None else f"line {row + first_line:,}"


def _name(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def read_cells(path: Path, exact: Callable[[str], bool]) -> Cells:
    """The cells of a file. `exact`: whether a column of this name is kept as it was written; the last one always is."""
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path} does not end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}: these are read.")
    if not path.is_file():
        why = "is a folder. Name a file in it" if path.is_dir() else "is not there. Check the name"
        raise DataError(f"{path} {why}.")
    try:
        if name.endswith(".npz"):
            return _read_npz(path)
        if name.endswith(".parquet"):
            return _read_parquet(path)
        with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
            return _read_csv(path, file, exact)  # pyright: ignore[reportArgumentType]
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or ("it is no gzip file" if name.endswith(".gz") else str(error))
        raise DataError(f"{path} cannot be read: {why}.") from None


def _read_csv(path: Path, file: BinaryIO, exact: Callable[[str], bool]) -> Cells:
    head = file.read(4096)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path} is text in UTF-16. Save the table as CSV in UTF-8.")
    if b"\0" in head:
        raise DataError(f"{path} is no CSV file: it holds no text. Save the table as CSV, in UTF-8.")
    file.seek(0)
    lines = enumerate(read_lines(file, longest_line(MOST_COLUMNS)), 1)
    number, first = next(lines, (0, b""))
    mark = separator(first)
    heading = _heading(path, first, mark, is_empty=not number)
    named = looks_like_heading("csv", first)
    names = _checked_names(str(path), heading) if named else [str(place + 1) for place in range(len(heading))]
    width, numbers, kept = len(names), array("d"), {len(names) - 1: list[str]()}
    kept |= {place: list[str]() for place, name in enumerate(names) if exact(name)}
    texts: dict[int, dict[int, str]] = {}
    count, blank = 0, 0
    for number, line in _with_first(lines, None if named else first):
        if line is not None and not line.strip():
            blank = blank or number
            continue
        if blank:
            raise DataError(f"{path}, line {blank:,} is blank, and rows follow it. Delete the line.")
        fields = _fields(path, number, line, names, mark)
        try:
            numbers.extend([float(each) for each in fields])
        except ValueError:
            del numbers[count * width :]
            for column, each in enumerate(fields):
                numbers.append(number_of(each))
                if numbers[-1] != numbers[-1] and each.strip().lower() not in MISSING:
                    texts.setdefault(column, {})[count] = each.strip()
        for column, values in kept.items():
            values.append(fields[column].strip())
        count += 1
        _refuse_large(path, len(numbers))
    if not count:
        raise DataError(f"{path} has a heading and no rows. Put a row below it for each sample.")
    table = np.frombuffer(numbers).reshape(count, width)
    return Cells(str(path), names, table, texts, 1 + named, kept, mark=mark)


def _with_first(lines: Iterator[tuple[int, bytes | None]], first: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    if first is not None:
        yield 1, as_public(first)
    yield from lines


def number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _heading(path: Path, first: bytes | None, mark: str, *, is_empty: bool) -> list[str]:
    """The fields of the first line; raises where the file is no CSV file."""
    line = as_public(first)
    if line is None:
        raise DataError(f"{path}, line 1 is longer than a row can be. Save a CSV file, with a line for each row.")
    if not line.strip():
        why = "is empty" if is_empty else "begins with a blank line"
        raise DataError(f"{path} {why}. A table begins with the names of its columns, separated by commas.")
    try:
        fields = csv_fields(line.decode(), mark)
    except Exception:  # a quote that does not close, a field without end
        raise DataError(f"{path}, line 1 is no line of a CSV file: its quotes do not close.") from None
    if len(fields) > MOST_COLUMNS:
        raise DataError(f"{path}, line 1 has {len(fields):,} fields; at most {MOST_COLUMNS:,} are read. Save fewer.")
    if len(fields) < 2:
        raise DataError(f"{path}, line 1 has one field, and a table has features and a label, separated by commas.")
    return fields


def _checked_names(where: str, given: Sequence[str]) -> list[str]:
    names = [name.strip() or f"column {place}" for place, name in enumerate(given, 1)]
    if len(set(names)) < len(names):
        twice = next(name for name, many in Counter(names).items() if many > 1)
        places = [str(place) for place, name in enumerate(names, 1) if name == twice]
        raise DataError(
            f"{where}: columns {' and '.join(places)} are both called {one_line(twice)!r}. Give each its own name."
        )
    return names


def _fields(path: Path, number: int, line: bytes | None, names: list[str], mark: str) -> list[str]:
    if line is None:
        raise DataError(f"{path}, line {number:,} is longer than a row can be. Is it a CSV file?")
    try:
        fields = csv_fields(line.decode(), mark)
    except UnicodeDecodeError:
        raise DataError(f"{path}, line {number:,} is not in UTF-8. Save the file as UTF-8.") from None
    except Exception:
        raise DataError(
            f"{path}, line {number:,}: its quotes do not close. A row is one line: take line breaks out of fields."
        ) from None
    if len(fields) != len(names):
        more = "more" if len(fields) > len(names) else "fewer"
        raise DataError(
            f"{path}, line {number:,} has {count_text(len(fields), 'field')}, {more} than the {len(names)} columns "
            f"({one_line(names[0])} to {one_line(names[-1])}). Mend the line."
        )
    return fields


X, Y, WHOSE = ("x", "X", "x_train", "X_train"), ("y", "Y", "y_train"), ("devices", "groups")
"""What the arrays of an NPZ file are called: features, labels, and who holds a row."""
KNOWN = frozenset((*X, *Y, *WHOSE, "feature_names", "x_test", "y_test"))


def _read_npz(path: Path) -> Cells:
    try:
        with zipfile.ZipFile(path) as file:
            there = [name.removesuffix(".npy") for name in file.namelist()]
            held = {name: _read_member(path, file, name) for name in there if name in KNOWN}
    except UNREADABLE as error:
        raise DataError(
            f"{path} is no NPZ file without pickles ({type(error).__name__}). Write it with np.savez(FILE, x=X, y=y)."
        ) from None
    x, y, whose = (next((name for name in known if name in held), None) for known in (X, Y, WHOSE))
    if x is None or y is None:
        listed = ", ".join(map(one_line, sorted(there)[:20])) or "none"
        raise DataError(f"{path} has no arrays x and y: it has {listed}. Write it with np.savez(FILE, x=X, y=y).")
    columns = {name: held[name] for name in (whose, y) if name is not None}
    names = held.get("feature_names")
    cells = _from_arrays(str(path), held[x], names, columns)
    cells.whose, cells.label = whose, len(cells.names) - 1
    if "x_test" in held and "y_test" in held:
        cells.tested = _from_arrays(f"{path}, x_test", held["x_test"], names, {y: held["y_test"]})
    return cells


def _read_member(path: Path, file: zipfile.ZipFile, name: str) -> NDArray[Any]:
    shape, dtype = npz_head(file, name)
    _refuse_large(f"{path}, array {name}", math.prod(shape) * math.ceil(dtype.itemsize / 8))
    return npz_array(file, name)


def _refuse_large(where: object, values: int) -> None:
    if values > MOST_VALUES:
        raise DataError(f"{where} has more than {MOST_VALUES:,} values. Take some of its rows.")


def _from_arrays(where: str, x: NDArray[Any], given: Any, columns: dict[str, NDArray[Any]]) -> Cells:
    """Features [n, d], or pictures [n, ...] laid flat, and the columns beside them."""
    rows = len(x) if x.ndim else 0
    x = x.reshape(rows, -1) if rows else x
    if x.ndim != 2 or not rows or x.dtype.kind not in "fiub" or not x.shape[1]:
        shape = " x ".join(map(str, x.shape)) or "nothing"
        raise DataError(f"{where}: its features are {shape} of type {x.dtype}, and not a table of numbers.")
    if given is not None and given.shape != x.shape[1:]:
        raise DataError(f"{where}: feature_names has shape {given.shape}, and there are {x.shape[1]:,} features.")
    names = [str(place + 1) for place in range(x.shape[1])] if given is None else [str(name) for name in given]
    cells = Cells(where, _checked_names(where, [*names, *columns]), np.full((rows, x.shape[1] + len(columns)), np.nan))
    cells.numbers[:, : x.shape[1]] = x
    for place, (name, values) in enumerate(columns.items(), x.shape[1]):
        if values.shape != (rows,):
            raise DataError(
                f"{where}: array {name!r} has shape {values.shape}, and there are {rows:,} rows: one value each."
            )
        cells.put(place, values)
    return cells


def _read_parquet(path: Path) -> Cells:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra(
            f"{path}: Parquet files are read by the package pyarrow, which is not installed. Run `pip install "
            "'crowdml[parquet]'`, or save the table as CSV."
        ) from error
    try:
        about = parquet.read_metadata(path)
        _refuse_large(path, about.num_rows * about.num_columns)
        table = parquet.read_table(path)
    except DataError:
        raise
    except Exception as error:  # of a file that is cut off, or of another kind
        raise DataError(f"{path} is no Parquet file: {type(error).__name__}. Save the table again.") from None
    names = _checked_names(str(path), table.column_names)
    if not table.num_rows or not names:
        raise DataError(f"{path} has no rows. Put a row into it for each sample.")
    cells = Cells(str(path), names, np.full((table.num_rows, len(names)), np.nan))
    for place, column in enumerate(table.columns):
        plain = column.combine_chunks()
        cells.put(place, np.asarray(plain.to_pylist(), object) if plain.null_count else plain.to_numpy(False))
    return cells
