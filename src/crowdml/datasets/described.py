"""What a table looks like before anybody has said which column is what: `crowdml data show`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from crowdml.datasets.cells import Cells, read_cells
from crowdml.datasets.tables import MOST_CLASSES

Look = Literal["label", "device", "row id", "constant", "empty", "category", "text", "feature"]
LABELS = re.compile(r"(?i)(label|target|class|y|outcome|diagnosis|species|category)")
DEVICES = re.compile(r"(?i).*(device|user|person|subject|patient|participant|client|owner|household|site|who).*")
FEWEST = 10
"""Rows below which a column of different values need not be an id."""


@dataclass(frozen=True)
class ColumnFacts:
    """One column. `low` and `high` are those of its numbers; None where it has none."""

    name: str
    looks: Look
    values: int
    """How many different ones there are."""
    missing: int
    texts: int
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TableFacts:
    """A table as it was found. `classes`: each label of the likely label column and how many rows have it."""

    path: str
    rows: int
    columns: tuple[ColumnFacts, ...]
    label: str
    kind: Literal["class", "number"]
    classes: dict[str, int]
    device: str | None
    devices: int | None
    mark: str = ","
    """What separates the fields of a CSV file."""

    @property
    def missing(self) -> int:
        return sum(column.missing for column in self.columns)

    def looking(self, *looks: Look) -> list[str]:
        """The names of columns that look like one of these."""
        return [column.name for column in self.columns if column.looks in looks]


def described(path: str | Path) -> TableFacts:
    """What stands in a table: its columns, which of them are likely labels and devices, and what is missing."""
    cells = read_cells(Path(path), ())
    label = next((place for place, name in enumerate(cells.names) if LABELS.fullmatch(name)), len(cells.names) - 1)
    columns = [_column(cells, place, is_label=place == label) for place in range(len(cells.names))]
    device = next((place for place, column in enumerate(columns) if column.looks == "device"), None)
    values, counts = np.unique(cells.written(label), return_counts=True)
    numbers = cells.numbers[:, label]
    whole = not cells.texts.get(label) and bool((numbers == np.floor(numbers)).all())
    kind = "class" if cells.texts.get(label) or (whole and len(values) <= MOST_CLASSES) else "number"
    order = counts.argsort(kind="stable")[::-1]
    return TableFacts(
        str(path),
        cells.rows,
        tuple(columns),
        cells.names[label],
        kind,
        {str(values[place]): int(counts[place]) for place in order} if kind == "class" else {},
        None if device is None else cells.names[device],
        None if device is None else columns[device].values,
        cells.mark,
    )


def _column(cells: Cells, place: int, *, is_label: bool) -> ColumnFacts:
    name, numbers, texts = cells.names[place], cells.numbers[:, place], cells.texts.get(place, {})
    there, missing = numbers[~np.isnan(numbers)], int(cells.missing(place).sum())
    values = len(np.unique(there)) + len(set(texts.values()))
    whole = bool((there == np.floor(there)).all())
    looks: Look = "feature"
    if missing == cells.rows:
        looks = "empty"
    elif is_label:
        looks = "label"
    elif values == 1:
        looks = "constant"
    elif DEVICES.fullmatch(name) and values <= cells.rows // 2 and whole:
        looks = "device"
    elif values == cells.rows >= FEWEST and (len(texts) == cells.rows or (whole and not texts)):
        looks = "row id"
    elif texts:
        looks = "category" if values <= MOST_CLASSES and len(texts) + missing == cells.rows else "text"
    low, high = (float(there.min()), float(there.max())) if len(there) else (None, None)
    return ColumnFacts(name, looks, values, missing, len(texts), low, high)
