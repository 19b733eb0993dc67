"""Every bad table at every door: one sentence that names file, row and column and what to do, and exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import crowdml, refused

from crowdml import Crowd, CrowdRegressor, compare
from crowdml.errors import CrowdmlError

DOORS = {
    "data show": ("data", "show", "bad.csv"),
    "task new": ("task", "new", "new.toml", "--data", "bad.csv"),
    "compare": ("compare", "--data", "bad.csv", "--seed", "1"),
    "simulate": ("simulate", "good.toml", "--data", "bad.csv", "--seed", "1"),
}
READERS = ("task new", "compare", "simulate")
"""Doors that need a table that can be learned from; `data show` looks at any table."""
CHANCE = np.random.default_rng(1)
ROWS = [[f"{CHANCE.normal():.3f}", f"{CHANCE.normal():.3f}", ("left", "right")[row % 2]] for row in range(60)]


def text(rows: list[list[str]] = ROWS) -> str:
    return "a,b,side\n" + "".join(",".join(row) + "\n" for row in rows)


def changed(column: int, value: str) -> str:
    """The table with another value in its seventh row, which is line 8."""
    return text([[*row[:column], value, *row[column + 1 :]] if place == 6 else row for place, row in enumerate(ROWS)])


def all_changed(column: int, values: tuple[str, ...]) -> str:
    rows = enumerate(ROWS)
    return text([[*row[:column], values[place % len(values)], *row[column + 1 :]] for place, row in rows])


FLOATS = tuple(f"{row / 7:.4f}" for row in range(60))
TABLES: dict[str, tuple[str | bytes, tuple[str, ...], str]] = {
    "a missing value": (changed(1, ""), READERS, "line 8: column 'b' has no value (in 1 of 60 rows). Fill it in"),
    "a text": (changed(1, "tall"), READERS, "line 8: column 'b' holds a text where features are numbers"),
    "a category": (
        all_changed(1, ("red", "green", "blue")),
        READERS,
        "line 2: column 'b' holds texts ('red', 'green', 'blue') where features are numbers (in 60 rows of 60). Make a "
        "column of 0 and 1 for each of them (as pandas.get_dummies does), or leave it out: --ignore b.",
    ),
    "no finite number": (changed(1, "inf"), READERS, "line 8: column 'b' holds no finite number"),
    "no label": (changed(2, ""), READERS, "line 8: column 'side' has no label (in 1 of 60 rows). Fill it in"),
    "one class": (all_changed(2, ("left",)), READERS, "every label in column 'side' is 'left', and a classifier needs"),
    "one number": (all_changed(2, ("2.5",)), READERS[:2], "every label in column 'side' is 2.5, so there is nothing"),
    "floats for a classifier": (
        all_changed(2, FLOATS),
        READERS[2:],
        "line 3: column 'side' holds 60 different numbers, and the task tells classes apart. Name a --label",
    ),
    "other classes": (
        all_changed(2, ("up", "down")),
        READERS[2:],
        "line 2: column 'side' has the label 'up', which is none of the task's: left, right (as in 60 of 60",
    ),
    "a short line": (text() + "1,2\n", tuple(DOORS), "line 62 has 2 fields, fewer than the 3 columns"),
    "an empty file": ("", tuple(DOORS), "is empty. A table begins with the names of its columns"),
    "a heading alone": ("a,b,side\n", tuple(DOORS), "has a heading and no rows"),
    "one column": ("a\n1\n", tuple(DOORS), "line 1 has one field"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(200), tuple(DOORS), "is no CSV file: it holds no text"),
    "UTF-16": (text().encode("utf-16"), tuple(DOORS), "is text in UTF-16. Save the table as CSV in UTF-8."),
    "Latin-1": (changed(2, "grün").encode("latin-1"), tuple(DOORS), "line 8 is not in UTF-8"),
}
CASES = [(case, door) for case, (_, doors, _) in TABLES.items() for door in doors]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(text())
    assert crowdml("task", "new", "good.toml", "--data", "bad.csv", "--epsilon", "8", "--devices", "6").code == 0
    return tmp_path


@pytest.mark.parametrize(("case", "door"), CASES, ids=[f"{case} at {door}" for case, door in CASES])
def test_a_bad_table_is_refused_in_one_sentence_at_every_door(case: str, door: str, here: Path):
    content, _, why = TABLES[case]
    Path("bad.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    said = refused(*DOORS[door])
    assert said.startswith("crowdml: bad.csv")
    assert why in said
    assert "Traceback" not in said
    assert not Path("new.toml").exists()


@pytest.mark.parametrize("door", READERS)
def test_a_label_that_is_not_there_and_too_many_devices_are_refused_at_every_door(door: str, here: Path):
    assert "bad.csv has no column 'sid' for --label. Did you mean 'side'?" in refused(*DOORS[door], "--label", "sid")
    said = refused(*DOORS[door], "--devices", "100")
    assert said.startswith("crowdml: bad.csv has ") or door == "compare"
    assert "100" in said
    assert "48" in said


@pytest.mark.parametrize("door", READERS)
def test_a_constant_column_is_used_and_said(door: str, here: Path):
    Path("bad.csv").write_text(all_changed(0, ("5",)))
    quick = ("--protocols", "gram", "--masked", "--devices", "6", "--trials", "1", "--epsilon", "8")
    answer = crowdml(*DOORS[door], *(quick if door == "compare" else ()))
    assert answer.code == 0, answer.err
    said = " ".join((answer.out + answer.err).split())
    assert "bad.csv: column 'a' has one value in all 60 rows, which tells nothing. Leave it out: --ignore a." in said


X = CHANCE.normal(size=(60, 2))
Y = np.arange(60) % 2


def with_cell(value: Any) -> Any:
    cells = X.astype(object)
    cells[6, 1] = value
    return cells


ARRAYS = {
    "a missing value": (with_cell(np.nan), Y, {}, r"X\[6, 1\] is missing"),
    "a text": (with_cell("tall"), Y, {}, r"X\[6, 1\] is a text, and 1 of 60 rows"),
    "infinity": (with_cell(np.inf), Y, {}, r"X\[6, 1\] is infinite"),
    "too many devices": (X, Y, {"devices": 100}, "devices = 100"),
}


@pytest.mark.parametrize("case", ARRAYS)
@pytest.mark.parametrize("door", [Crowd, CrowdRegressor, compare])
def test_bad_arrays_are_refused_by_row_and_column(case: str, door: Any):
    x, y, said, why = ARRAYS[case]
    known = {"bounds": (-4, 4), "seed": 1, **({"target": (-1.0, 2.0)} if door is CrowdRegressor else {}), **said}
    learn = (lambda: compare(x, y, **known)) if door is compare else lambda: door(**known).fit(x, y)
    with pytest.raises((CrowdmlError, ValueError), match=why):
        learn()


def test_labels_that_cannot_be_told_apart_are_refused_in_python_too():
    with pytest.raises(CrowdmlError, match="y has one class, 0, in 60 rows"):
        Crowd(bounds=(-4, 4), seed=1).fit(X, 0 * Y)
    with pytest.raises(CrowdmlError, match=r"y holds continuous numbers.*Use CrowdRegressor"):
        Crowd(bounds=(-4, 4), seed=1).fit(X, X[:, 0])
    with pytest.raises(CrowdmlError, match="all 60 labels are 0"):
        compare(X, 0 * Y, bounds=(-4, 4), seed=1)
    with pytest.raises(CrowdmlError, match=r"y\[1\] is missing \(in 30 of 60 rows\)"):
        compare(X, np.where(Y, np.nan, 0.0), bounds=(-4, 4), seed=1)
