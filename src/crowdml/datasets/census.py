"""Salaries of US government employees (American Community Survey 2018): 16 attributes as 79 numbers, salaries on a log.

Every bound and every word is public: it comes from the survey's code book, the two classifications of the US government
(SOC for occupations, NAICS for industries) or our choice, and never from the rows. So nothing is fitted.

An occupation has 518 codes and an industry 259. Counted as one column each way they would be most of the columns, with
few rows in each; here an occupation is one of SOC's 23 major groups (the two digits before the dash), and an industry
one of NAICS's 20 sectors.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.dataset import Prepared
from crowdml.errors import DataError

TEST, PUBLIC = 30_000, 10_000
"""Rows for errors and public rows; devices hold the rest."""
ORDER = 2018
"""Seed of the one order that the rows are cut in."""
LOWEST, HIGHEST = 1_000, 1_000_000
"""Dollars a year. Rows at or below the first are left out; the scale of the logarithm goes from one to the other."""
LEAST = 0.05
"""The smallest scaled salary (1,413 dollars): a relative error is a quotient by it."""

NUMBERS = {
    "age": 64, "family_size": 20, "children": 12, "education_level": 24, "english_level": 4, "hours_worked": 99,
    "weeks_worked": 52,
}  # fmt: skip
"""Columns of numbers with public upper bounds; below 0, as the code -1 of `children`, counts as 0."""
YES = {"sex": "female", "hispanic_origin": "yes", "nativity": "foreign-born"}
"""A binary attribute is 0 or 1."""
WORDS: dict[str, tuple[str, ...]] = {
    "race": ("white", "black", "asian", "mix", "other", "AIAN", "NHOPI"),
    "citizenship": ("1", "2", "3", "4", "5"),
    "marital": ("married", "never married", "divorced", "separated", "widowed"),
    "economic_region": (
        "Southeast", "Far West", "Mideast", "Rocky Mountain", "Great Lakes", "Plains", "New England", "Southwest",
        "Abroad",
    ),
    "occupation": tuple(str(group) for group in range(11, 57, 2)),
    "industry": (
        "11", "21", "22", "23", "31", "42", "44", "48", "51", "52", "53", "54", "55", "56", "61", "62", "71", "72",
        "81", "92",
    ),
}  # fmt: skip
"""The categories of the code books; occupations are SOC's major groups and industries the first code of a sector."""
SECTORS = {"3M": "31", "32": "31", "33": "31", "4M": "44", "45": "44", "49": "48"}
"""Manufacturing, retail and transport have several codes each; the M of the survey is for "multiple"."""
COLUMNS = len(NUMBERS) + len(YES) + sum(map(len, WORDS.values()))


def read(path: Path) -> list[dict[str, str]]:
    """The rows of census_acs2018_gov.csv.gz."""
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"data set 'census': {path} is not a readable .csv.gz file: {error}.") from error
    return list(csv.DictReader(io.StringIO(text)))


def word(row: dict[str, str], name: str) -> str:
    """The category of a row's attribute: groups of occupations and sectors of industries stand for their codes."""
    code = row[name][:2] if name in ("occupation", "industry") else row[name]
    return SECTORS.get(code, code) if name == "industry" else code


def encode(rows: list[dict[str, str]]) -> NDArray[np.float32]:
    """Rows -> [n, 79] within [0, 1]."""
    columns = [np.clip([[float(row[name]) / most] for row in rows], 0, 1) for name, most in NUMBERS.items()]
    columns += [np.array([[row[name] == yes] for row in rows], float) for name, yes in YES.items()]
    for name, words in WORDS.items():
        place = {each: number for number, each in enumerate(words)}
        hot = np.zeros((len(rows), len(words)))
        hot[np.arange(len(rows)), [place[word(row, name)] for row in rows]] = 1
        columns.append(hot)
    return np.concatenate(columns, axis=1).astype(np.float32)


def scale(salary: NDArray[Any]) -> NDArray[np.float32]:
    """Dollars -> log(salary / 1,000) / log(1,000), held between 0.05 and 1."""
    return np.clip(np.log(salary / LOWEST) / math.log(HIGHEST / LOWEST), LEAST, 1).astype(np.float32)


def splits(rows: list[dict[str, str]]) -> Prepared:
    """30,000 rows for errors, 10,000 public and the rest on devices, in one fixed order."""
    kept = [row for row in rows if float(row["salary"]) > LOWEST]
    if len(kept) <= TEST + PUBLIC:
        raise DataError(
            f"data set 'census': {len(kept):,} rows with a salary above {LOWEST:,} dollars, and {TEST + PUBLIC:,} are "
            "for errors and public."
        )
    x, y = encode(kept), scale(np.array([float(row["salary"]) for row in kept]))
    test, public, train = np.split(np.random.default_rng(ORDER).permutation(len(kept)), [TEST, TEST + PUBLIC])
    return Prepared(x[train], y[train], x[test], y[test], x[public], y[public])


def census(paths: tuple[Path, ...]) -> Prepared:
    """`splits` of the table."""
    return splits(read(paths[0]))
