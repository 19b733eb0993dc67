"""What a table looks like before anybody has said which column is what: `crowdml data show`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from crowdml.datasets.cells import Cells, read_cells
from crowdml.datasets.looks import Look, different, is_label, likely_label, look
from crowdml.datasets.tables import kind_of


@dataclass(frozen=True)
class ColumnFacts:
    """One column. `low` and `high` are those of its numbers; None where it has none."""

    name: str
    looks: Look
    values: int
    """How many different ones there are."""
    missing: int
    texts: int
    first_missing: str | None
    """Where its first missing value stands: "line 8"; None where none is missing."""
    first_text: str | None
    """Where its first text stands; None where it has none."""
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

    @property
    def strays(self) -> list[ColumnFacts]:
        """Columns of numbers with a few texts among them, which somebody has to mend."""
        numbers = ("feature", "label") if self.kind == "number" else ("feature",)
        return [column for column in self.columns if column.texts and column.looks in numbers]

    def looking(self, *looks: Look) -> list[str]:
        """The names of columns that look like one of these."""
        return [column.name for column in self.columns if column.looks in looks]


def described(path: str | Path) -> TableFacts:
    """What stands in a table: its columns, which of them are likely labels and devices, and what is missing."""
    cells = read_cells(Path(path), is_label)
    label = cells.label if cells.label is not None else likely_label(cells.names, range(len(cells.names)))
    columns = [_column(cells, place, labels=place == label) for place in range(len(cells.names))]
    device = next((place for place, column in enumerate(columns) if column.looks == "device"), None)
    values, counts = np.unique(cells.written(label), return_counts=True)
    kind = kind_of(cells.written(label))
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


def _column(cells: Cells, place: int, *, labels: bool) -> ColumnFacts:
    numbers, texts, gone = cells.numbers[:, place], cells.texts.get(place, {}), cells.missing(place)
    there = numbers[~np.isnan(numbers)]
    low, high = (float(there.min()), float(there.max())) if len(there) else (None, None)
    return ColumnFacts(
        cells.names[place],
        "label" if labels and not gone.all() else look(cells, place),
        different(cells, place),
        int(gone.sum()),
        len(texts),
        cells.place(int(gone.argmax())) if gone.any() else None,
        cells.place(min(texts)) if texts else None,
        low,
        high,
    )
