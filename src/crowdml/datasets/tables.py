"""A table of somebody's own: CSV, NPZ or Parquet, as the rows and labels that a simulated crowd holds.

A row is a sample, one column is its label, one may say which device holds it, and all others are features. Whatever
cannot be used is refused in a sentence that names the file, the row, the column and what to do; it shows no value of
the table but common texts of a category, for errors end up in logs. `described` looks at a table whose columns nobody
has named yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.cells import SUFFIXES, Cells, number_of, place_of, read_cells
from crowdml.datasets.dataset import Dataset, frozen
from crowdml.datasets.looks import FEWEST, MOST_CLASSES, is_label, likely_label, look
from crowdml.datasets.populations import FEWEST as FEWEST_DEVICES
from crowdml.datasets.populations import usual_devices, usually_held
from crowdml.errors import DataError
from crowdml.texts import count_text, one_line

Kind = Literal["class", "number"]
NO_LABEL = frozenset(("", "na", "n/a", "nan", "?"))
"""Texts that stand for a label that is not there, in lower case: "none" and "null" may be names of classes."""
FEW_TEXTS = 20
"""A column of texts with no more different ones than these is a category: a refusal shows some of them."""
LARGEST = 1e30
"""The largest size of a number: no task has larger bounds."""
HELD_OUT = 0.2
"""The share of the rows that a model is tried on, where nobody names other rows."""


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are, and which rows a model is tried on."""

    label: str | None = None
    device: str | None = None
    ignore: tuple[str, ...] = ()
    kind: Kind | None = None
    test: str | None = None
    """A file, or a share of the rows as it was written: 0.2."""
    public: str | None = None
    classes: tuple[str, ...] = ()
    """The classes of a task, where there is one: a label of no class is refused."""

    def table(self, path: str) -> Table:
        return read_table(path, label=self.label, device=self.device, ignore=self.ignore, kind=self.kind)

    def read(self, path: str, seed: int | None) -> Dataset:
        """The table at this path in its splits."""
        return self.split(self.table(path), seed)

    def split(self, table: Table, seed: int | None) -> Dataset:
        """This table in its splits."""
        test = self.test
        share = None if test is None or is_table(test) else share_of(test)
        test = test if share is None else share
        return table.dataset(test=test, public=self.public, seed=seed, classes=self.classes)


def share_of(text: str) -> float:
    """The share of the rows that `--test` names."""
    share = number_of(text)
    if not 0 < share < 1:
        raise DataError(f"--test {one_line(text)}: name a file, or a share of the rows between 0 and 1, such as 0.2.")
    return share


def is_table(name: str) -> bool:
    """Whether a name is that of a file with a table, and not that of a data set."""
    return name.lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class Table:
    """Features x [n, d] float32 as they were read, a label for each row, and who holds it where a column says so."""

    path: str
    names: tuple[str, ...]
    """The columns that are features."""
    x: NDArray[np.float32]
    y: NDArray[Any]
    """[n]: names of classes, or numbers."""
    label: str
    """The column that `y` comes from."""
    kind: Kind
    classes: tuple[str, ...]
    """Sorted, as numbers where all of them are; none where labels are numbers."""
    devices: NDArray[Any] | None
    """[n]: who holds each row, by name; None where no column says so."""
    device: str | None = None
    """The column that `devices` comes from."""
    notes: tuple[str, ...] = ()
    """Sentences about what looks wrong and was read all the same."""
    tested: Table | None = None
    """The rows for tests that the file itself has."""
    first_line: int | None = None
    """The line of the first row, of a text file; None where rows are counted from 1."""

    def __len__(self) -> int:
        return len(self.y)

    def dataset(
        self,
        *,
        test: str | float | None = None,
        public: str | None = None,
        seed: int | None = None,
        classes: tuple[str, ...] = (),
    ) -> Dataset:
        """The table in three splits, its features as they were read.

        test: a file of the same columns, or the share of the rows that are held out, drawn by `seed` (a fifth without
        it). public: a file with rows that nobody of the crowd holds. classes: those of a task, if there is one: a label
        that is none of them is refused by its row.
        """
        self._check_labels(classes)
        other = None if public is None else self.like(public)
        if other is not None:
            other._check_labels(classes)
        if isinstance(test, str):
            train, held = self, self.like(test)
            how = f"tested on {len(held):,} rows of {test}"
        elif test is None and self.tested is not None:
            train, held = self, self.tested
            how = f"tested on {len(held):,} rows that the file keeps for it"
        else:
            train, held = self._split(HELD_OUT if test is None else test, seed)
            how = f"tested on {len(held):,} of its rows, drawn by the seed, that no device holds"
        held._check_labels(classes)
        empty = train.x[:0], train.y[:0]
        x_public, y_public = empty if other is None else (other.x, other.y)
        parts = [train.y, held.y, y_public]
        there = _sorted({name for part in parts for name in part.tolist()}) if self.kind == "class" else ()
        y_train, y_test, y_public = (_coded(part, there) for part in parts)
        groups = None
        if train.devices is not None:
            groups = np.unique(train.devices, return_inverse=True)[1].astype(np.int32)
        return Dataset(
            name=Path(self.path).name,
            title=Path(self.path).name,
            x_train=frozen(train.x),
            y_train=frozen(y_train),
            x_test=frozen(held.x),
            y_test=frozen(y_test),
            x_public=frozen(x_public),
            y_public=frozen(y_public),
            classes=there,
            groups=groups,
            names=self.names,
            remarks=self.notes,
            note=f"{self.path}, {len(train):,} rows on devices; {how}.",
        )

    def _check_labels(self, classes: tuple[str, ...]) -> None:
        """Refuse a label that is none of these classes, which are found by name, or else by place."""
        there = set(self.classes)
        if self.kind != "class" or not classes or there <= set(classes):
            return
        if all(name.isdecimal() and int(name) < len(classes) for name in there):
            return
        strange = np.flatnonzero([name not in classes for name in self.y.tolist()])
        raise DataError(
            f"{self.path}, {self.place(int(strange[0]))}: column {one_line(self.label)!r} has the label "
            f"{one_line(str(self.y[strange[0]]))!r}, which is none of the task's: {', '.join(map(one_line, classes))} "
            f"(as in {len(strange):,} of {len(self):,} rows). Mend the file, change labels.classes in the task, or "
            "name another --label."
        )

    def place(self, row: int) -> str:
        """Where a row stands in the file: 'line 8'."""
        return place_of(row, self.first_line)

    def kept(self, test: str | None) -> int:
        """How many rows there are besides those to test on."""
        return len(self) - round(self._share(test) * len(self))

    def check_kept(self, test: str | None) -> None:
        """Refuse a table that leaves too few rows for a crowd, besides those to test on."""
        rows = self.kept(test)
        if rows < FEWEST_DEVICES:
            kept = "" if rows == len(self) else f", {rows:,} without those to test on"
            less = "Bring more rows" if rows == len(self) else "Take a smaller share with --test, or bring more rows"
            raise DataError(
                f"{self.path} has {count_text(len(self), 'row')}{kept}: too few for a crowd, which has at least "
                f"{FEWEST_DEVICES} devices. {less}."
            )

    def _share(self, test: str | None) -> float:
        if test is None:
            return HELD_OUT if self.tested is None else 0.0
        return 0.0 if is_table(test) else share_of(test)

    def crowd(self, devices: int | None = None, test: str | None = None) -> tuple[int, int]:
        """How many devices hold the rows besides those to test on, and how many rows most of them hold at least.

        test: as in `Columns`. Without a number of devices they are those that a column names, or as many as is usual.
        """
        share, rows = self._share(test), self.kept(test)
        if self.devices is not None:
            counts = np.unique(self.devices, return_counts=True)[1]
            left = counts - np.ceil(np.round(share * counts, 9))  # at least, see `_drawn`
            held = usually_held(left)
            many = int((left >= held).sum())
            return (many if devices is None else min(devices, many)), held
        many = usual_devices(rows) if devices is None else devices
        if not 1 <= many <= rows:
            kept = "" if rows == len(self) else f", {rows:,} without those to test on"
            raise DataError(
                f"{self.path} has {len(self):,} rows{kept}: too few for {many:,} devices. Say --devices {rows} or "
                "fewer."
            )
        return many, rows // many

    def like(self, path: str) -> Table:
        """Another file with these features and labels; its other columns are left out."""
        return _same_columns(read_cells(Path(path), lambda name: name == self.label), self)

    def _split(self, share: float, seed: int | None) -> tuple[Table, Table]:
        if seed is None:
            raise DataError(f"{self.path}: rows to test on are drawn by a seed. Give one.")
        if not 0 < share < 1:
            raise DataError(f"--test {share:g}: name a file, or a share of the rows between 0 and 1, such as 0.2.")
        held = round(share * len(self))
        if not 1 <= held < len(self):
            raise DataError(
                f"--test {share:g} of {self.path} is {held} of its {len(self):,} rows. Take a share that leaves rows "
                "on both sides, or name a file."
            )
        drawn = self._drawn(share, held, np.random.default_rng(seed).permutation(len(self)))
        return self._rows(np.flatnonzero(~drawn)), self._rows(np.flatnonzero(drawn))

    def _drawn(self, share: float, held: int, order: NDArray[Any]) -> NDArray[np.bool_]:
        """[n]: which `held` rows are held out, in this order: of each device its share, rounded down or up."""
        drawn = np.zeros(len(self), bool)
        if self.devices is None:
            drawn[order[:held]] = True
            return drawn
        whose = np.unique(self.devices, return_inverse=True)[1][order]
        counts = np.bincount(whose)
        by_device = np.argsort(whose, kind="stable")
        place = np.empty(len(self), np.int64)  # of each row among those of its device, in the drawn order
        place[by_device] = np.arange(len(self)) - np.repeat(np.cumsum(counts) - counts, counts)
        wanted = np.round(share * counts, 9)[whose]
        drawn[order[place < np.floor(wanted)]] = True
        more = np.flatnonzero((place < wanted) & ~drawn[order])
        drawn[order[more[: held - int(drawn.sum())]]] = True
        return drawn

    def _rows(self, rows: NDArray[Any]) -> Table:
        devices = None if self.devices is None else self.devices[rows]
        return dataclasses.replace(self, x=self.x[rows], y=self.y[rows], devices=devices)


def _coded(y: NDArray[Any], classes: tuple[str, ...]) -> NDArray[Any]:
    """Names of classes as their places, int32; numbers as they are, float32."""
    if not classes:
        return y.astype(np.float32)
    place = {name: index for index, name in enumerate(classes)}
    return np.asarray([place[name] for name in y.tolist()], np.int32)


def _sorted(names: Collection[str]) -> tuple[str, ...]:
    """Names of classes in order: by their numbers where all are numbers."""
    if all(math.isfinite(number_of(name)) for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def read_table(
    path: str | Path,
    *,
    label: str | None = None,
    device: str | None = None,
    ignore: Collection[str] = (),
    kind: Kind | None = None,
) -> Table:
    """Read a table. label: the column of labels; without it the one that is called so, or the last one (`looks`).
    device: the column that says who holds a row.

    ignore: columns that are no features. kind: what the labels are, where the caller knows; else texts and a few whole
    numbers are classes.
    """
    cells = read_cells(Path(path), lambda name: name in (label, device) or (label is None and is_label(name)))
    device = cells.whose if device is None else device
    out = {cells.column(name, "--ignore") for name in ignore}
    out |= set() if device is None else {cells.column(device, "--device")}
    left = [place for place in range(len(cells.names)) if place not in out]
    if label is not None:
        target = cells.column(label, "--label")
    else:
        target = cells.label if cells.label in left else likely_label(cells.names, left) if left else -1
    columns = [place for place in left if place != target]
    if not columns:
        raise DataError(f"{path} has a column of labels and no features. Add columns, or name fewer to --ignore.")
    found = _table(cells, columns, target, device, kind)
    if len(found.classes) == 1:
        raise DataError(
            f"{path}: every label in column {one_line(found.label)!r} is {one_line(found.classes[0])!r}, and a "
            "classifier needs two classes. Name another --label."
        )
    if found.kind == "number" and (found.y == found.y[0]).all():
        raise DataError(
            f"{path}: every label in column {one_line(found.label)!r} is {found.y[0]:g}, so there is nothing to "
            "predict. Name another --label."
        )
    tested = None if cells.tested is None else _same_columns(cells.tested, found)
    notes = (*_on_label(cells, found, target, left, named=label is not None, kind=kind), *_constants(cells, columns))
    notes += tuple(_on_features(cells, columns, device))
    return dataclasses.replace(found, notes=notes, tested=tested)


def _same_columns(cells: Cells, like: Table) -> Table:
    """The features and labels of one table in another file."""
    columns = [cells.column(name, f"a feature, as {like.path} has") for name in like.names]
    return _table(cells, columns, cells.column(like.label, "--label"), None, like.kind)


def _table(cells: Cells, columns: Sequence[int], target: int, device: str | None, kind: Kind | None) -> Table:
    for place in columns:
        _refuse_cells(cells, place)
    y, kind = _labels(cells, target, kind)
    classes = _sorted(set(y.tolist())) if kind == "class" else ()
    names = tuple(cells.names[place] for place in columns)
    devices = None if device is None else np.asarray(_holders(cells, cells.column(device, "--device")))
    x = cells.numbers[:, columns].astype(np.float32)
    label = cells.names[target]
    return Table(cells.path, names, x, y, label, kind, classes, devices, device, first_line=cells.first_line)


def _option(option: str, name: str) -> str:
    """An option as it is typed."""
    return f"{option} {name!r}" if " " in name else f"{option} {name}"


def _refuse_cells(cells: Cells, column: int) -> None:
    """Refuse a column of features that holds a text, no value, or a number without end; by its first such row."""
    name, texts = one_line(cells.names[column]), cells.texts.get(column, {})
    without = f"or leave {'the column' if ' ' in name else 'it'} out: {_option('--ignore', name)}"
    if texts and look(cells, column) == "device":
        raise DataError(
            f"{cells.path}, {cells.place(min(texts))}: column {name!r} holds texts and looks like it says which device "
            f"holds a row. Say {_option('--device', name)}, {without}."
        )
    if texts:
        common = Counter(texts.values()).most_common()
        some = "texts" if len(common) > 1 else "a text"
        how = "Write numbers"
        if len(common) <= FEW_TEXTS and len(texts) > len(common):  # a category, and not the name of a row
            some += f" ({', '.join(repr(one_line(text[:30])) for text, _ in common[:3])}{', ...' * (len(common) > 3)})"
            how = "Make a column of 0 and 1 for each of them (as pandas.get_dummies does)"
        raise DataError(
            f"{cells.path}, {cells.place(min(texts))}: column {name!r} holds {some} where features are numbers (in "
            f"{count_text(len(texts), 'row')} of {cells.rows:,}). {how}, {without}."
        )
    gone = cells.missing(column)
    if gone.any():
        raise DataError(
            f"{cells.path}, {cells.place(int(gone.argmax()))}: column {name!r} has no value (in {int(gone.sum()):,} of "
            f"{cells.rows:,} rows). Fill it in, delete these rows, {without}."
        )
    endless = abs(cells.numbers[:, column]) > LARGEST
    if endless.any():
        raise DataError(
            f"{cells.path}, {cells.place(int(endless.argmax()))}: column {name!r} holds no finite number, or one "
            f"above {LARGEST:g} in size (in {int(endless.sum()):,} of {cells.rows:,} rows). Mend it, {without}."
        )


def _labels(cells: Cells, column: int, kind: Kind | None) -> tuple[NDArray[Any], Kind]:
    name, written = one_line(cells.names[column]), cells.written(column)
    gone = [row for row, text in enumerate(written) if text.strip().lower() in NO_LABEL]
    if gone:
        raise DataError(
            f"{cells.path}, {cells.place(gone[0])}: column {name!r} has no label (in {len(gone):,} of {cells.rows:,} "
            "rows). Fill it in, or delete these rows."
        )
    values = [number_of(text) for text in written]
    texts = [row for row, value in enumerate(values) if not math.isfinite(value)]
    broken = [row for row, value in enumerate(values) if math.isfinite(value) and not value.is_integer()]
    kind = kind or kind_of(written)
    if kind == "number" and texts:
        raise DataError(
            f"{cells.path}, {cells.place(texts[0])}: column {name!r} holds a text, and the task predicts a number. "
            "Mend the row, or name another --label."
        )
    if kind == "class" and broken and not texts and len(set(values)) > min(MOST_CLASSES, cells.rows // 2):
        raise DataError(
            f"{cells.path}, {cells.place(broken[0])}: column {name!r} holds {len(set(values)):,} different numbers, "
            'and the task tells classes apart. Name a --label with classes, or say labels.kind = "number" in the task.'
        )
    return (np.asarray(values) if kind == "number" else np.asarray(written)), kind


def kind_of(written: Sequence[str]) -> Kind:
    """What labels are where nobody says it: texts name classes, and so do a few whole numbers that come again.

    Whole numbers of which most stand in one row alone are numbers, as are others with a stray text among them.
    """
    there = [text for text in written if text.strip().lower() not in NO_LABEL]
    values = [number_of(text) for text in there]
    numbers = {value for value in values if math.isfinite(value)}
    texts = sum(not math.isfinite(value) for value in values)
    broken = any(not value.is_integer() for value in numbers)
    if texts:
        return "number" if (broken or len(numbers) > MOST_CLASSES) and 2 * texts <= len(there) else "class"
    most = MOST_CLASSES if len(there) < FEWEST else min(MOST_CLASSES, len(there) // 2)
    return "number" if broken or len(set(there)) > most else "class"


def _holders(cells: Cells, column: int) -> list[str]:
    written = cells.written(column)
    if "" in written:
        raise DataError(
            f"{cells.path}, {cells.place(written.index(''))}: column {one_line(cells.names[column])!r} does not say "
            "whose the row is. Fill it in, or delete the row."
        )
    return written


def _on_label(
    cells: Cells, found: Table, target: int, left: Sequence[int], *, named: bool, kind: Kind | None
) -> Iterator[str]:
    """What was decided about the labels, where it is not plain."""
    name = one_line(found.label)
    if not named and target != left[-1]:
        yield f"{cells.path}: the labels were taken from column {name!r}, by its name. Name another with --label."
    whole = found.kind == "number" and bool((found.y == np.floor(found.y)).all())
    values = len(set(found.y.tolist())) if whole and kind is None else MOST_CLASSES + 1
    if values <= MOST_CLASSES:
        yield (
            f"{cells.path}: column {name!r} holds {values} different whole numbers in {count_text(len(found), 'row')}, "
            "so they are numbers to predict and no classes. If they name classes, write them as texts, such as "
            "'class 7'; if they number the rows, name another --label."
        )


def _on_features(cells: Cells, columns: Sequence[int], device: str | None) -> Iterator[str]:
    """Features that look like something else, and are used all the same."""
    for place in columns:
        name, found = one_line(cells.names[place]), look(cells, place)
        out = f"leave it out: {_option('--ignore', name)}"
        if found == "device" and device is None:
            yield (
                f"{cells.path}: column {name!r} looks like it says which device holds a row, and is used as a feature. "
                f"Say {_option('--device', name)}, or {out}."
            )
        elif found in ("device", "row id"):
            yield (
                f"{cells.path}: column {name!r} looks like it numbers {'rows' if found == 'row id' else 'devices'}, "
                f"and is used as a feature. If it says nothing of the label, {out}."
            )


def _constants(cells: Cells, columns: Sequence[int]) -> Iterator[str]:
    for place in columns:
        held = cells.numbers[:, place]
        if (held == held[0]).all():
            name = one_line(cells.names[place])
            yield (
                f"{cells.path}: column {name!r} has one value in all {cells.rows:,} rows, which tells nothing. "
                f"Leave it out: --ignore {name}."
            )
