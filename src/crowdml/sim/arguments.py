"""What callers give `Crowd`, `simulate` and `compare`: one rule for all three.

What cannot be used is refused in one sentence: which argument, where in it, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from crowdml.arrays import Array
from crowdml.errors import DataError, TaskError
from crowdml.features.bounds import LEAST, PublicFeatures, outside
from crowdml.settings import short

LARGEST = 1e30
"""The largest size of a number: no task has larger bounds."""
MEND = "Put finite numbers there, or leave these rows or columns out."
SHOWN = 5
"""How many columns a sentence names."""


# --- rows ---


def read_rows(X: Any, name: str = "X") -> Array:
    """X as an array [n, d] of finite numbers."""
    rows = _array(X, name)
    if rows.ndim != 2 or not len(rows):
        raise DataError(f"{name} has shape {rows.shape}: give a table [n, d], with a row for each sample.")
    if (found := unusable_cell(rows, name, column_names(X))) is not None:
        raise DataError(f"{found} {MEND}")
    return rows if rows.dtype.kind in "fiub" else rows.astype(np.float64)


def unusable_cell(X: Any, name: str = "X", columns: Sequence[str] | None = None) -> str | None:
    """Where a table [n, d] holds no finite number first, in a sentence; None where it holds numbers alone."""
    cells = np.asarray(X)
    if cells.ndim != 2 or not cells.size or cells.dtype.kind in "iub":
        return None
    numbers, texts = np.full(cells.shape, np.nan), np.zeros(cells.shape, bool)
    if cells.dtype.kind == "f":
        if float(cells.min()) >= -LARGEST and float(cells.max()) <= LARGEST:
            return None
        numbers = cells.astype(np.float64)
    else:
        for place, value in np.ndenumerate(cells):
            try:
                numbers[place] = float(value)
            except (TypeError, ValueError):
                texts[place] = not _is_missing(value)
    wrong = ~(abs(numbers) <= LARGEST)
    if not wrong.any():
        return None
    row, column = (int(each) for each in np.argwhere(wrong)[0])
    value = numbers[row, column]
    of = "" if columns is None else f" (column {columns[column]!r})"
    many = f"{wrong.any(axis=1).sum():,} of {len(cells):,} rows have such a value."
    return f"{name}[{row}, {column}]{of} is {_kind(value, bool(texts[row, column]))}, and {many}"


def _kind(value: float, text: bool) -> str:
    if text:
        return "a text"
    if math.isnan(value):
        return "missing (NaN)"
    return "infinite (infinity)" if math.isinf(value) else f"{value:g}, larger in size than {LARGEST:g}"


def column_names(X: Any) -> list[str] | None:
    """The names of a data frame's columns; None where X has none."""
    names = getattr(X, "columns", None)
    return None if names is None else [str(each) for each in names]


def owners(groups: Any, rows: int, name: str = "groups") -> Array:
    """The device that holds each row [n], by name or number. Raises where a row names none."""
    found = np.asarray(groups)
    if found.shape != (rows,):
        many = len(found) if found.ndim == 1 else found.shape
        raise DataError(f"{name} says whose {many} rows are, and X has {rows}. Give one device for each row.")
    nobody = np.flatnonzero(_missing(found))
    if len(nobody):
        raise DataError(f"{name}[{nobody[0]}] names no device ({len(nobody):,} of {rows:,} do not). Name one for each.")
    return found.astype(str) if found.dtype == object else found


# --- labels ---


def read_labels(y: Any, rows: int, name: str = "y", *, numbers: bool = False) -> Array:
    """y as an array with a label for each of so many rows, none of them missing: all texts, or all finite numbers.

    numbers: texts are refused, too.
    """
    labels = _array(y, name)
    if labels.shape != (rows,):
        raise DataError(f"{name} has shape {labels.shape}, and there are {rows:,} rows: give one label for each row.")
    labels = of_one_kind(labels, name)
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        place = int(np.argmin(np.isfinite(labels)))
        raise DataError(f"{name}[{place}] is infinite. Labels are finite numbers, or names: leave such rows out.")
    if numbers and labels.dtype.kind not in "fiub":
        raise DataError(f"{name} holds {_first(labels)}, and labels are numbers here. Give numbers.")
    return labels


def of_one_kind(labels: Array, name: str = "y") -> Array:
    """Labels, of which none is missing, as texts or as numbers. Objects become what they are."""
    gone = np.flatnonzero(_missing(labels.reshape(-1)))
    if len(gone):
        raise DataError(
            f"{name}[{gone[0]}] is missing (in {len(gone):,} of {labels.size:,} rows). Fill it in, or leave these rows "
            "out."
        )
    if labels.dtype.kind != "O" or not labels.size:
        return labels
    texts = np.array([isinstance(each, str) for each in labels.flat])
    if 0 < texts.sum() < len(texts):
        text, other = (labels.flat[int(np.argmax(each))] for each in (texts, ~texts))
        raise DataError(f"{name} holds {text!r} and {other!r}: give texts alone, or numbers alone.")
    found = np.array(labels.tolist())
    return found if found.shape == labels.shape and found.dtype.kind in "fiubU" else labels


def _first(labels: Array) -> str:
    return f"{labels.tolist()[0]!r}" if len(labels) else "nothing"


def _missing(values: Array) -> Array:
    """[n]: which values are missing."""
    if values.dtype.kind not in "fO":
        return np.zeros(len(values), bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.array([_is_missing(each) for each in values], bool)


def _is_missing(value: Any) -> bool:
    """Whether this is None, NaN, or what a data frame has in their place."""
    try:
        return value is None or bool(value != value)  # NaN alone differs from itself
    except TypeError:  # the truth of pandas.NA is not known
        return True
    except ValueError:  # an array
        return False


# --- settings ---


def pair(given: Any, name: str, *, otherwise: str = "") -> tuple[Any, Any]:
    """(X, y), rows and their labels, of an argument that has to be such a pair."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        shape = getattr(given, "shape", None)
        what = short(repr(given)) if shape is None else f"an array of shape {shape}"
        if isinstance(given, tuple | list):
            what = f"a {type(given).__name__} of {len(given)}"
        raise DataError(f"{name} is {what}: give (X, y), rows and their labels{otherwise}.")
    return given[0], given[1]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether this is a finite number, and neither True nor False."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def whole(value: Any, name: str, least: int, none: str = "") -> None:
    """Refuse what is no whole number from `least` on. none: what None means, where it is allowed."""
    if none and value is None:
        return
    if not (is_number(value) and value == int(value) >= least):
        raise TaskError(
            f"{name} = {short(repr(value))}: a whole number from {least} on{none and f', or None for {none}'}."
        )


def several(given: Any, name: str, what: str) -> list[Any]:
    """One or several values as a list, which must not be empty."""
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not found:
        raise TaskError(f"{name} is empty: give {what}, or several.")
    return found


def refuse_bounds(given: Any, columns: int, names: Sequence[str] | None = None) -> None:
    """Refuse bounds of columns that are not (low, high): finite numbers, or one for each column."""
    low: list[Any]
    high: list[Any]
    try:
        low, high = (np.broadcast_to(np.asarray(side, object), columns).tolist() for side in given)
    except (TypeError, ValueError):
        low, high = [None], [None]
    for each in (*low, *high):
        if not is_number(each) or not (each == 0 or LEAST <= abs(each) <= LARGEST):
            raise TaskError(
                f"bounds = {short(repr(given))}: give (low, high), finite numbers or one for each of {columns} columns."
            )
    for place, (least, most) in enumerate(zip(low, high, strict=True)):
        if least > most:
            raise TaskError(
                f"bounds: low = {float(least):g} is above high = {float(most):g} in {column(names, place)}. Swap them."
            )


def read_target(given: Any) -> tuple[Any, Any]:
    """(low, high), the public bounds of labels that are numbers."""
    low: Any
    high: Any
    try:
        low, high = given
    except (TypeError, ValueError):
        low, high = None, None
    if not (is_number(low) and is_number(high)):
        raise TaskError(f"target = {short(repr(given))}: give (low, high), two numbers.")
    if not low < high:
        raise TaskError(f"target = {short(repr(given))}: low must be below high, and both finite.")
    return low, high


# --- what bounds do to rows ---


def column(names: Sequence[str] | None, place: int) -> str:
    """A column by its name, or as Python writes it: 'X[:, 3]'."""
    return f"X[:, {place}]" if names is None else f"column {names[place]!r}"


def clipped_numbers(
    features: PublicFeatures, x: Array, names: Sequence[str] | None, widen: str = "bounds"
) -> str | None:
    """A sentence where numbers of x [n, d] lie outside their column's bounds; `widen` is what to change then."""
    beyond = outside(features, x)
    beyond[:, _equal_bounds(features, x.shape[1])] = False
    if not beyond.any():
        return None
    most = int(beyond.sum(axis=0).argmax())
    return (
        f"{beyond.sum():,} of {x.size:,} numbers lie outside their bounds and are clipped, most often in "
        f"{column(names, most)} ({beyond[:, most].sum():,} of {len(x):,} rows). If such numbers are right, widen "
        f"{widen} there."
    )


def clipped_labels(y: Array, low: Any, high: Any) -> str | None:
    """A sentence where labels y [n] lie outside their bounds."""
    low, high = float(low), float(high)
    slack = 1e-6 * max(abs(low), abs(high))  # bounds are rounded
    beyond = int(((y < low - slack) | (y > high + slack)).sum())
    if not beyond:
        return None
    return (
        f"{beyond:,} of {len(y):,} labels lie outside target = ({low:g}, {high:g}) and are clipped to it. If such "
        "labels are right, widen target."
    )


def erased_columns(features: PublicFeatures, x: Array, names: Sequence[str] | None, *, taken: bool) -> str | None:
    """A sentence where the two bounds of a column of x [n, d] are equal, for it is then 0 in all rows. taken: the
    bounds were taken from x."""
    places = _equal_bounds(features, x.shape[1])
    if not len(places):
        return None
    told = [column(names, int(place)) for place in places[:SHOWN]]
    if len(places) > SHOWN:
        told.append(f"{len(places) - SHOWN:,} more columns")
    one = len(places) == 1
    which = told[0] if one else f"{', '.join(told[:-1])} and {told[-1]}"
    it, has = ("it", "has") if one else ("they", "have")
    if taken:
        return (
            f"{which} {has} one value in all {len(x):,} rows, so {it} {'tells' if one else 'tell'} nothing and "
            f"{'becomes' if one else 'become'} 0. Leave {'it' if one else 'them'} out, or give bounds that are wider."
        )
    return (
        f"{which} {has} bounds whose low equals the high, so {it} {'becomes' if one else 'become'} 0 in all rows. Give "
        f"a low below the high, or leave {'it' if one else 'them'} out."
    )


def _equal_bounds(features: PublicFeatures, columns: int) -> Array:
    """The columns whose two bounds are equal, by number."""
    if features.low is None or features.high is None:
        return np.zeros(0, np.int64)
    low, high = (np.broadcast_to(np.asarray(each, object), columns) for each in (features.low, features.high))
    return np.flatnonzero(low == high)


def _array(given: Any, name: str) -> Array:
    try:
        return np.asarray(given)
    except ValueError:
        raise DataError(f"{name} has parts of different lengths. Give an array.") from None
