"""How well a task's model does on rows of the operator's own: public ones exactly, private ones for a charge.

Public rows belong to nobody in the study. The model is a release already, so to try it on them costs nothing.

Charged rows are private. Guarantee: epsilon-DP for each look, against anyone who is shown it, for replacing one row;
pure losses add over all looks at a row, in whichever sets and for whichever tasks of this server, up to the budget of
its dearest row. A row is its features as they were read, before any scaling for a task: one that differs in the last
digit is another. What passes the
mechanism is the number of mistakes, which one row moves by 1 at most; of tasks that learn numbers the sum of distances,
each between 0 and twice the label's bound, brought to the middle of that, so that one row moves it by 2 bounds at most.
How many rows there are is public. When there is a look depends on versions and states alone (`is_due`), never on rows.

The rows stay in the server's store: no log, page, export or transcript has them. A backup does.
"""

from __future__ import annotations

import csv
import math
import zipfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.channels import combining
from crowdml.datasets import NAMES, load
from crowdml.datasets.files import npz_array, npz_head
from crowdml.errors import DataError, TaskError
from crowdml.features.bounds import label_scale, prepared, prepared_numbers
from crowdml.features.norms import Norm
from crowdml.lines import as_public, columns_of, csv_fields, longest_line, looks_like_heading, read_lines, separator
from crowdml.privacy.door import OwnDoor
from crowdml.privacy.grid import Grid
from crowdml.privacy.losses import Pure
from crowdml.privacy.mechanisms import CountLaplace, GridLaplace, Mechanism
from crowdml.privacy.noise import LARGEST, Source
from crowdml.privacy.private import Private, Rows
from crowdml.privacy.sensitivity import L1, Adjacency
from crowdml.protocols import find
from crowdml.robust import FEWEST_ROWS
from crowdml.server.estimates import REACH, Estimate, judged
from crowdml.server.histograms import is_histogram
from crowdml.storage.server import Store
from crowdml.storage.server.looks import Look, Terms, Validation, attach, looks_of, rows_of, validations
from crowdml.task import Task
from crowdml.texts import count_text, number_text
from crowdml.verdict import Verdict, share_of_majority

__all__ = [
    "OwnRows", "Shown", "Watched", "check_fitting", "check_spread", "check_terms", "check_validated",
    "evaluate", "is_due", "keep_rows", "kind_of_rows", "mechanism_of", "read_rows", "unpack_rows", "watched",
]  # fmt: skip

MOST_ROWS, MOST_BYTES = 1_000_000, 128 * 2**20
"""Most rows that a task is validated on: they lie in the server's database, and in memory while they are in use."""
LEAST_EPSILON = Fraction(1, 1000)
"""The least epsilon of a look: its noise is then a thousand mistakes."""
PART = 4096
"""Rows that the model looks at in one go: check-ins go on between them."""
GROWTH = 20
"""A look is at least a twentieth further on than the one before: a million versions have some hundred looks."""
FINE = Fraction(1, 2**20)
"""Step of exact distances."""
FINEST_CLIP, COARSEST_CLIP = 4096, 16
"""Steps that a distance's bound has, where it is charged."""
COUNT = Fraction(1)

HALTED = {
    "restored": "Nobody looks: the server was restored from a backup, and its ledger lacks the looks since then.",
    "scaled": "Nobody looks: an earlier version kept these rows as the task scales them. Attach the data set again.",
}
"""Why a server looks at no private rows until they are attached again."""

MISTAKES = "about how many rows of the operator's own data the model is wrong on"
DISTANCES = "about how far off the model is on the operator's own data"


# --- which tasks, which rows ---


@dataclass(frozen=True, eq=False, repr=False)
class OwnRows(Samples):
    """Rows of the operator's own, as the model is tried on them. They are known and charged by what was read."""

    read: Array
    """[b, d]: the features before they were scaled for the task."""


def check_validated(task: Task) -> None:
    """Refuse a task whose server has no model to try, or cannot compute what it is tried on."""
    if is_histogram(task):
        raise TaskError(
            f"task {task.name!r} counts labels: its server has no model that could be right or wrong. Its histogram "
            "has its own intervals."
        )
    if task.features.kind == "windows":
        raise TaskError(f"task {task.name!r} cuts its samples out of readings on the device: a server has none.")


def read_rows(task: Task, given: str, label: str | None = None, ignore: Sequence[str] = ()) -> OwnRows:
    """The rows of a CSV file (features, then the label), of an NPZ file (`x` and `y`), or those that a data set keeps
    for evaluation. Labels are names of classes, their places, or numbers. No error shows a row.

    label, ignore: columns of a CSV file by name, as devices take them: the one of labels, and those that are left out.
    """
    check_validated(task)
    path = Path(given)
    if path.suffix != ".csv" and (label is not None or ignore):
        raise DataError(f"--label and --ignore are for CSV files, and {given!r} is none. Leave them out.")
    if path.suffix == ".csv":
        x, y = _read_csv(task, path, label, ignore)
    elif path.suffix == ".npz":
        x, y = _read_npz(task, path)
    elif given in NAMES:
        return _read_dataset(task, given)
    else:
        raise DataError(
            f"{given!r} is no file that ends in .csv or .npz, and no data set. Known are {', '.join(NAMES)}."
        )
    _check_many(given, x)
    return OwnRows(x, y, x)


def _check_many(given: str, x: Array) -> None:
    if not len(x):
        raise DataError(f"{given} has no rows. Nothing was written.")
    if _is_too_large(len(x), x.shape[1]):
        raise _too_large(given, f"{len(x):,} rows of {x.shape[1]:,} numbers")


def _is_too_large(rows: int, numbers: int) -> bool:
    return rows > MOST_ROWS or 4 * rows * numbers > MOST_BYTES


def _too_large(where: object, found: str) -> DataError:
    return DataError(
        f"{where} has {found}; at most {MOST_ROWS:,} rows and {MOST_BYTES // 2**20} MiB are taken. Nothing was written."
        " Some thousands of rows tell an accuracy to a point of a hundred."
    )


def _read_csv(task: Task, path: Path, label: str | None, ignore: Sequence[str]) -> tuple[Array, Array]:
    names, dimension = {name: place for place, name in enumerate(task.labels.classes)}, task.features.width
    x, y, longest = array("f"), array("f"), longest_line(dimension + 1)
    mark, width, order = ",", dimension + 1, None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(read_lines(file, longest), 1):
                if line is None:
                    raise _too_large(path, f"a line of more than {longest:,} bytes")
                heading = number == 1 and looks_like_heading("csv", line)
                if number == 1:
                    mark = separator(line)
                    width, order = _order(path, line, heading, label, ignore, dimension)
                row = _fields(path, number, line, mark, width, dimension)
                if heading:
                    continue
                row = row if order is None else [row[place] for place in order]
                if _is_too_large(len(y) + 1, dimension):
                    raise _too_large(path, f"more than {len(y):,} rows of {dimension:,} numbers")
                try:
                    x.extend([float(field) for field in row[:-1]])
                    y.append(float(names[row[-1].strip()]) if row[-1].strip() in names else float(row[-1]))
                except ValueError:
                    raise _unreadable(path, f"line {number}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}. Nothing was written.") from None
    return _checked(task, np.asarray(x).reshape(len(y), dimension), np.asarray(y), str(path))


def _order(
    path: Path, first: bytes, heading: bool, label: str | None, ignore: Sequence[str], dimension: int
) -> tuple[int, tuple[int, ...] | None]:
    """How many fields a line has, and where the features and then the label stand, where somebody names columns."""
    if label is None and not ignore:
        return dimension + 1, None
    if not heading:
        raise DataError(
            f"{path}: --label and --ignore name columns by a heading, and it has none. Add one as its first line, or "
            "leave them out. Nothing was written."
        )
    names, order = columns_of(first, str(path), label, ignore, "Nothing was written.")
    if len(order) != dimension + 1:
        raise DataError(
            f"{path} has {count_text(len(order) - 1, 'feature')} ({', '.join(names[place] for place in order[:6])}"
            f"{', ...' * (len(order) > 7)}), and the task takes {dimension}. Leave columns out with --ignore. Nothing "
            "was written."
        )
    return len(names), order


def _fields(path: Path, number: int, line: bytes, mark: str, width: int, dimension: int) -> list[str]:
    """The fields of one line. Each line is a row, as on a device: one that cannot be used is refused, never dropped."""
    try:
        text = ((as_public(line) or b"") if number == 1 else line).decode()
        fields = csv_fields(text, mark) if text.strip() else []
    except (ValueError, csv.Error):
        raise DataError(
            f"{path}, line {number}: not in UTF-8, or its quotes do not close. Nothing was written."
        ) from None
    if len(fields) == width:
        return fields
    found = f"{len(fields)} fields" if fields else "it is blank"
    wanted = f"the task takes {dimension} numbers and a label" if width == dimension + 1 else f"its heading has {width}"
    raise DataError(f"{path}, line {number}: {found}, and {wanted}. Nothing was written.")


def _read_npz(task: Task, path: Path) -> tuple[Array, Array]:
    try:
        with zipfile.ZipFile(path) as file:
            members = file.namelist()
            if sorted(members) != ["x.npy", "y.npy"]:
                raise _no_npz(path, f"it has {len(members):,} members")
            x, y = (_read_member(path, file, name) for name in ("x", "y"))
    except DataError:
        raise
    except Exception as error:  # of a file that is empty, cut off, another kind, under a password: all kinds of them
        raise _no_npz(path, type(error).__name__) from None
    if y.dtype.kind == "U" and task.classes is not None:
        names = {name: place for place, name in enumerate(task.labels.classes)}
        y = np.asarray([names.get(str(each), -1) for each in y.ravel()])
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub" or x.ndim != 2 or y.shape != (len(x),):
        raise DataError(f"{path}: x is a table of numbers and y has a label for each row of it. Nothing was written.")
    return _checked(task, x, y, str(path))


def _no_npz(path: Path, why: str) -> DataError:
    return DataError(f"{path} cannot be read as an NPZ file with arrays x and y: {why}. Nothing was written.")


def _read_member(path: Path, file: zipfile.ZipFile, name: str) -> Array:
    """One array of an NPZ file, where its head says that it is not too large."""
    shape, dtype = npz_head(file, name)
    if math.prod(shape) * max(4, dtype.itemsize) > MOST_BYTES or (shape and shape[0] > MOST_ROWS):
        said = " x ".join(f"{each:,}" for each in shape)
        raise _too_large(path, f"an array {name} of {said} entries of {dtype.itemsize} bytes")
    return npz_array(file, name)


def _read_dataset(task: Task, name: str) -> OwnRows:
    """Rows of a data set: scaled by the task's norm, as those that devices have of it."""
    seed = 1 if name == "synthetic" else None
    norm = cast(Norm, task.features.norm.kind if task.features.low is None else "none")
    data = load(name, normalise=norm, seed=seed)
    if task.classes is not None and len(data.classes) != task.classes:
        raise DataError(
            f"data set {name!r} has {len(data.classes)} classes, and task {task.name!r} has {task.classes}. "
            "Nothing was written."
        )
    _check_many(name, data.x_test)
    x, y = _checked(task, data.x_test, data.y_test, f"data set {name!r}")
    return OwnRows(x, y, load(name, normalise="none", seed=seed).x_test)


def _checked(task: Task, x: Array, y: Array, where: str) -> tuple[Array, Array]:
    """float32, and within what the task's devices may have."""
    if len(x) and x.shape[1] != task.features.width:
        raise DataError(
            f"{where} has rows of {x.shape[1]:,} numbers, and the task takes {task.features.width:,}. Nothing was "
            "written."
        )
    narrow, labels, fits = np.empty(x.shape, np.float32), np.empty(len(x), np.float32), np.empty(len(x), bool)
    with np.errstate(over="ignore"):
        for start in range(0, len(x), PART):  # in parts: all of them as float64 would take many times the file's memory
            part = slice(start, start + PART)
            narrow[part], labels[part] = x[part].astype(np.float64), y[part].astype(np.float64)
            fits[part] = np.isfinite(narrow[part]).all(axis=1) & np.isfinite(labels[part])
    if task.classes is None:
        labels = prepared_numbers(task.labels, labels).astype(np.float32)  # as devices do
    else:
        fits &= (labels >= 0) & (labels < task.classes) & (labels == np.floor(labels))
    if not fits.all():
        raise _unreadable(where, f"row {int(np.flatnonzero(~fits)[0]) + 1}")
    return narrow, labels


def _unreadable(where: object, place: str) -> DataError:
    return DataError(
        f"{where}, {place}: a field is no finite number, or the label is none of the task's. Nothing was written."
    )


def check_terms(task: Task, terms: Terms, count: int) -> None:
    """Refuse terms that allow no look, or that no exact noise is drawn for."""
    if terms.every < 1:
        raise DataError(f"A look every {terms.every} versions: the least is 1.")
    if terms.epsilon is None:
        return
    if terms.epsilon < LEAST_EPSILON:
        raise DataError(f"An epsilon of {float(terms.epsilon):g} a look: the least is {float(LEAST_EPSILON):g}.")
    if terms.budget is None or terms.budget < terms.epsilon:
        said = "none" if terms.budget is None else f"{float(terms.budget):g}"
        raise DataError(f"A budget of {said} allows no look of epsilon {float(terms.epsilon):g}. Say how much it is.")
    mechanism_of(task, terms.epsilon, count)


def kind_of_rows(table: Mapping[str, Mechanism]) -> str:
    """What the rows have to be that a server's own door lets this out of: public, or charged."""
    return "public" if all(row.public for row in table.values()) else "charged"


def check_fitting(task: Task, terms: Terms, count: int) -> None:
    """Refuse rows from which the protocol's own door could let nothing out."""
    table = find(task).server_mechanisms(task)
    if not table:
        return
    kind, most = kind_of_rows(table), min(row.covers.size for row in table.values())
    if terms.kind != kind:
        asks = (
            "takes them without a charge, so they have to be public: say --public, of rows that belong to nobody in "
            "the study, or take a rule with a price"
            if kind == "public"
            else "charges what it takes of them: say --epsilon and --budget, or take a rule for public rows"
        )
        raise DataError(f"Task {task.name!r} combines its rounds with rows of the operator's own, and {asks}.")
    if count > most:
        raise DataError(
            f"{count:,} rows: task {task.name!r} combines its rounds with at most {most:,} rows of the operator's own. "
            "Attach fewer."
        )
    price = sum((row.loss.epsilon for row in table.values() if isinstance(row.loss, Pure)), Fraction(0))
    if terms.budget is not None and terms.budget < price:
        raise DataError(
            f"A budget of {float(terms.budget):g}: a round of task {task.name!r} takes ε = {float(price):g} of it. "
            "Say how much all its rounds may take."
        )


def check_spread(task: Task, rows: Samples) -> None:
    """Refuse public rows with too few of a class for the rule that looks at them: devices would pay, and no round
    would close."""
    by = combining(task)
    if by is None or by.rule != "grouping":
        return
    found = [len(rows)] if task.classes is None else np.bincount(rows.y.astype(np.int64), minlength=task.classes)
    for place, count in enumerate(found):
        if count < FEWEST_ROWS:
            named = "" if task.classes is None else f" of class {task.labels.classes[place]!r}"
            raise DataError(
                f"{count_text(int(count), 'row')}{named}: task {task.name!r} groups uploads by public rows, and needs "
                f"at least {FEWEST_ROWS}{' of each class' if named else ''}. Name more rows. Nothing was written."
            )


def keep_rows(store: Store, task: Task, rows: OwnRows, terms: Terms, at: str, *, new_rows: bool = False) -> Validation:
    """Validate a task on these rows from now on. `new_rows`: none of them is in a set whose rows nobody knows."""
    check_terms(task, terms, len(rows))
    check_fitting(task, terms, len(rows))
    check_spread(task, rows)
    count, dimension = rows.x.shape
    data = b"".join(np.ascontiguousarray(each, "<f4").data for each in (rows.x, rows.y))
    read = None if rows.read is rows.x else rows.read.astype("<f4").tobytes()
    del rows  # where nobody else has them they are not in memory twice while they are written
    return attach(store, task.hash, count, dimension, data, terms, at, read=read, new_rows=new_rows)


def unpack_rows(data: bytes, count: int, dimension: int) -> Samples:
    numbers = np.frombuffer(data, "<f4")
    return Samples(numbers[: count * dimension].reshape(count, dimension), numbers[count * dimension :])


# --- when, and what ---


def is_due(found: Validation, version: int, *, stopped: bool) -> bool:
    """Whether to look at this version now. It asks nothing of the rows.

    The last look that a budget allows is kept for the end of the task: that model is the one that people use.
    """
    if found.halted is not None or found.left == 0 or version < 1:
        return False
    newest = found.newest or 0
    if version <= newest:
        return False
    if stopped:
        return True
    return found.left != 1 and version >= newest + max(found.terms.every if newest else 1, newest // GROWTH)


def mechanism_of(task: Task, epsilon: Fraction, count: int) -> CountLaplace | GridLaplace:
    """What a look at charged rows passes through."""
    covers = Rows(0, count)
    if task.classes is not None:
        return CountLaplace(L1(Fraction(1), Adjacency.REPLACE_SAMPLE), epsilon, covers, MISTAKES)
    bound = Fraction(task.labels.bound)
    most = min(FINEST_CLIP, 2**30 // count, int(LARGEST * epsilon / 2))
    step = Fraction(2) ** math.ceil(math.log2(bound / most)) if most >= COARSEST_CLIP else COUNT
    clip = math.ceil(bound / step)
    if not COARSEST_CLIP <= clip <= most:
        raise DataError(
            f"{count:,} rows at an epsilon of {float(epsilon):g} a look: no grid is fine enough for distances up to "
            f"{2 * float(bound):g}. Take a larger epsilon, or fewer rows."
        )
    return GridLaplace(clip, epsilon, Grid(step), covers, DISTANCES)


def evaluate(
    task: Task, weights: Array, samples: Samples, version: int, at: str, epsilon: Fraction | None, noise: Source
) -> Look:
    """One look at the rows: exact, or through the mechanism. Nobody may be shown it before it is in the ledger."""
    apart = _mistakes if task.classes is not None else _distances

    def tried(rows: Samples) -> Array:
        parts = [apart(task, weights, rows[start : start + PART]) for start in range(0, len(rows), PART)]
        return np.concatenate(parts)

    if epsilon is None:
        step = COUNT if task.classes is not None else FINE
        return Look(version, at, round(Fraction(float(tried(samples).sum(dtype=np.float64))) / step), step, None)
    row = mechanism_of(task, epsilon, len(samples))
    step, private = row.grid.step, Private(samples, row.covers)
    middle, centred = 0, private.map(tried)
    if row.clipped is not None:
        middle = row.clipped  # so that a distance moves the sum by half as much
        centred = private.map(lambda rows: np.rint(tried(rows) / float(step)) * float(step) - middle * float(step))
    released = OwnDoor({"look": row}, noise).release("look", centred)
    return Look(version, at, int(released.value) + middle * len(samples), step, Pure(row.epsilon))


def _predictions(task: Task, weights: Array, x: Array) -> Array:
    """What a device would say of these rows."""
    return find(task).predict(task, weights, prepared(task.features, x))


def _mistakes(task: Task, weights: Array, samples: Samples) -> Array:
    """[b]: 1 where the model is wrong."""
    return (_predictions(task, weights, samples.x) != samples.y).astype(np.int32)


def _distances(task: Task, weights: Array, samples: Samples) -> Array:
    """[b]: how far a prediction is from the number. One beyond the label's bound counts as the bound."""
    bound = float(task.labels.bound)
    said = np.nan_to_num(np.asarray(_predictions(task, weights, samples.x), np.float64), posinf=bound, neginf=-bound)
    return abs(np.clip(said, -bound, bound) - samples.y)


# --- what people see ---


@dataclass(frozen=True)
class Shown:
    """A version and its figure: an accuracy, or a mean distance. What noise leaves open of it, about 95 %."""

    version: int
    at: str
    figure: Estimate


@dataclass(frozen=True)
class Watched:
    """What a task is validated on, and what came of it."""

    found: Validation
    measure: str
    """`accuracy`, or `distance` where numbers are learned: so the plot is called, too."""
    shown: tuple[Shown, ...]
    verdict: Verdict | None = None
    """What the last accuracy is worth; None where there is none, or the noise hides it."""

    @property
    def last(self) -> Shown | None:
        return self.shown[-1] if self.shown else None

    @property
    def state(self) -> str:
        """In a word: whether the server keeps evaluating new versions."""
        if self.found.halted is not None:
            return "halted"
        if self.found.left == 0:
            return "spent"
        return "last" if self.found.left == 1 else "looks"

    def said(self, *, stopped: bool = False) -> str:
        """How it stands, for operators: a sentence. `stopped`: the task is."""
        if stopped and self.state in ("looks", "last"):
            return "The task is stopped. Its last version has been evaluated, or soon will be."
        return {
            "halted": HALTED.get(self.found.halted or "", HALTED["restored"]),
            "spent": "The evaluations have ended: their budget is spent.",
            "last": "One evaluation is left, and is kept for the end of the task.",
            "looks": "The server keeps evaluating new versions.",
        }[self.state]

    def short(self, *, open_: bool = True) -> str:
        """The last figure, with what the noise leaves open."""
        if self.last is None:
            return "no look yet"
        figure = self.last.figure
        reach = (figure.high - figure.low) / 2
        is_open = open_ and self.found.terms.epsilon is not None
        if self.measure == "accuracy":
            noise = f" ± {100 * reach:.1f}" if is_open else ""
            return "too noisy to tell" if figure.hidden else f"{100 * figure.clipped.value:.1f}{noise}%"
        return number_text(figure.value, 4) + (f" ± {number_text(reach, 4)}" if is_open else "")

    def text(self) -> str:
        """The estimate, and the version that it is of."""
        return self.short() if self.last is None else f"{self.short()} at version {self.last.version:,}"

    def promise(self) -> str:
        """The promise to the rows: whom it protects, from whom, and how far; nobody where they are public."""
        terms = self.found.terms
        if terms.epsilon is None or terms.budget is None:
            return "Public rows, which belong to nobody in the study: figures are exact, and cost nothing."
        return (
            "This protects one row of the operator's own data from anyone who sees these figures: ε = "
            f"{float(terms.epsilon):g} a look for replacing it, ε = {float(self.found.spent):g} in all looks so far, "
            f"at most {float(terms.budget):g}; δ = 0."
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        terms, found = self.found.terms, self.found
        last = self.last
        return {
            "data": terms.name,
            "kind": terms.kind,
            "rows": found.count,
            "every": terms.every,
            "epsilon_look": None if terms.epsilon is None else float(terms.epsilon),
            "epsilon_spent": float(found.spent),
            "epsilon_budget": None if terms.budget is None else float(terms.budget),
            "looks_left": found.left,
            "state": self.state,
            "measure": self.measure,
            "version": None if last is None else last.version,
            self.measure: None if last is None else last.figure.value,
            "verdict": None if self.verdict is None else self.verdict.plain,
            "looks": [
                {"version": each.version, "value": each.figure.value, "low": each.figure.low, "high": each.figure.high}
                for each in self.shown
            ],
        }


def watched(store: Store, task: Task) -> Watched | None:
    """What a task is validated on, with every look; None where it is not."""
    found = validations(store).get(task.hash)
    if found is None:
        return None
    seen = looks_of(store, found)
    measure = "distance" if task.classes is None else "accuracy"
    shown = tuple(_shown(task, found, each) for each in seen)
    last = judged(task, shown[-1].figure, _majority(store, task, found)) if shown else None
    return Watched(found, measure, shown, last)


def _majority(store: Store, task: Task, found: Validation) -> float | None:
    """The share of the most common class among public rows. Of private ones it would be another release: None."""
    if found.terms.epsilon is not None or task.classes is None:
        return None
    return _share_of_majority(store, found.rows, found.count, found.dimension, found.attached_at)


@lru_cache(maxsize=64)
def _share_of_majority(store: Store, rows: int, count: int, dimension: int, attached_at: str) -> float | None:
    """Read once for rows that were attached at this time: they may be 128 MiB, and figures are made every second."""
    data = rows_of(store, rows)
    return None if data is None else share_of_majority(unpack_rows(data, count, dimension).y)


def _shown(task: Task, found: Validation, seen: Look) -> Shown:
    value = float(seen.value * seen.step) / found.count
    reach = 0.0
    if seen.loss is not None:
        scale = float(mechanism_of(task, seen.loss.epsilon, found.count).scale * seen.step)
        reach = REACH * math.sqrt(2) * scale / found.count
    if task.classes is not None:
        value = 1 - value
    else:
        value, reach = (label_scale(task.labels)[1] * each for each in (value, reach))
    return Shown(seen.version, seen.at, Estimate(value, value - reach, value + reach))
