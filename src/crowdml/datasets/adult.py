"""UCI Adult as Guo and Gong use it (section VI-A): 14 attributes as 105 numbers, who earns more than 50,000 dollars.

Where we differ, and why: the words of an attribute are those of the data set's own description, which is public, and
not those that the rows happen to hold; numeric columns are scaled by the least and the largest value of public rows
(review, G13), and what lies outside is clipped. With the eighth workclass of the description and a constant, which
gives the model its intercept, there are the paper's 105 columns.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.dataset import Prepared
from crowdml.datasets.files import TABLE
from crowdml.errors import DataError

TRAIN, TEST = 30_000, 10_000
"""The paper's sizes. 45,222 rows are complete: 5,222 are left, and these are public."""
ORDER = 20_180_601
"""Seed of the one order that the complete rows are cut in."""

NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
YES = {"sex": "Male"}
"""A binary attribute is 0 or 1."""
WORDS: dict[str, tuple[str, ...]] = {name: tuple(words) for name, words in TABLE["adult"].items()}
"""The categories of `adult.names`, in its order."""
COLUMNS = len(NUMBERS) + len(YES) + sum(map(len, WORDS.values())) + 1


def encode(rows: list[dict[str, str]]) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.int32]]:
    """Complete rows -> numbers [n, 6] as they are, indicators and a constant [n, 99], labels [n]."""
    numbers = np.array([[float(row[name]) for name in NUMBERS] for row in rows])
    columns = [np.array([[row[name] == yes] for row in rows], np.float32) for name, yes in YES.items()]
    for name, words in WORDS.items():
        place = {word: number for number, word in enumerate(words)}
        hot = np.zeros((len(rows), len(words)), np.float32)
        hot[np.arange(len(rows)), [place[row[name]] for row in rows]] = 1
        columns.append(hot)
    columns.append(np.ones((len(rows), 1), np.float32))
    return numbers, np.concatenate(columns, axis=1), np.array([row["income"] == ">50K" for row in rows], np.int32)


def scale(numbers: NDArray[Any], seen: NDArray[Any]) -> NDArray[np.float32]:
    """Each column onto [0, 1] by the least and the largest value among the rows `seen`; beyond them it is clipped."""
    low, high = seen.min(0), seen.max(0)
    return np.clip((numbers - low) / np.maximum(high - low, 1e-12), 0, 1).astype(np.float32)


def splits(rows: list[dict[str, str]], *, as_published: bool) -> Prepared:
    """30,000 rows for devices, 10,000 for errors and the rest public, in one fixed order.

    Numbers are scaled by the public rows alone; as published, by all rows, and then there is no public split.
    """
    complete = [row for row in rows if "?" not in row.values()]
    if len(complete) <= TRAIN + TEST:
        raise DataError(
            f"data set 'adult': {len(complete)} complete rows, and {TRAIN + TEST} are for devices and errors."
        )
    numbers, rest, y = encode(complete)
    order = np.random.default_rng(ORDER).permutation(len(complete))
    train, test, public = np.split(order, [TRAIN, TRAIN + TEST])
    x = np.concatenate([scale(numbers, numbers if as_published else numbers[public]), rest], axis=1)
    public = public[:0] if as_published else public
    return Prepared(x[train], y[train], x[test], y[test], x[public], y[public])


def read(path: Path) -> list[dict[str, str]]:
    """The rows of adult.csv.gz."""
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"data set 'adult': {path} is not a readable .csv.gz file: {error}.") from error
    return list(csv.DictReader(io.StringIO(text)))


def adult(paths: tuple[Path, ...]) -> Prepared:
    """`splits` with scaling from public rows: R4 is met."""
    return splits(read(paths[0]), as_published=False)


def adult_as_published(paths: tuple[Path, ...]) -> Prepared:
    """`splits` the paper's way: scaling has seen every row."""
    return splits(read(paths[0]), as_published=True)
