"""What a column of a table looks like, by its name and its values: for `crowdml data show`, and for warnings.

Nothing is decided here but which column holds the labels where nobody names one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from crowdml.datasets.cells import Cells

Look = Literal["label", "device", "row id", "constant", "empty", "category", "text", "feature"]
MOST_CLASSES = 100
"""A column with more whole numbers than these is a column of numbers, unless somebody says that it names classes."""
FEWEST = 10
"""Rows below which a column of different values need not be an id."""
FIRST = re.compile(r"(?i)label|target")
"""Names of columns that hold labels wherever they stand."""
LIKELY = re.compile(r"(?i)class|outcome|diagnosis|species")
"""Names of columns that hold labels wherever they stand, where none has a name of the `FIRST`."""
_WORDS = "device|user|person|subject|patient|participant|client|owner|household|site|who"
_NUMBER = "id|no|nr|number|code|key|name"
DEVICES = re.compile(rf"(?i)((.*[\W_])?({_WORDS})s?([\W_]*({_NUMBER}))?|id)")
"""Names of columns that say whose a row is: `person_id` and `userId`, and not `household_size`."""
NUMBERS = re.compile(rf"(?i)(.*[\W_])?(id|index|no|nr|row|key)|.*[a-z]ID|.*[a-z]Id|(.*[\W_])?({_WORDS})|unnamed: 0")
"""Names of columns that may number rows."""


def likely_label(names: Sequence[str], places: Sequence[int]) -> int:
    """The column of labels where nobody names one: the last that is called so, or else the last of these places."""
    for known in (FIRST, LIKELY):
        found = [place for place in places if known.fullmatch(names[place])]
        if found:
            return found[-1]
    return places[-1]


def is_label(name: str) -> bool:
    """Whether a column of this name may hold the labels where nobody names one, wherever it stands."""
    return any(known.fullmatch(name) is not None for known in (FIRST, LIKELY))


def look(cells: Cells, place: int) -> Look:
    """What a column looks like that does not hold the labels."""
    name, numbers, texts = cells.names[place], cells.numbers[:, place], cells.texts.get(place, {})
    there, missing = numbers[~np.isnan(numbers)], int(cells.missing(place).sum())
    filled, values = cells.rows - missing, different(cells, place)
    whole = bool((there == np.floor(there)).all()) if len(there) else True
    if not filled:
        return "empty"
    if values == 1:
        return "constant"
    if values == cells.rows >= FEWEST and (len(texts) == cells.rows or (whole and not texts and _counts(name, there))):
        return "row id"
    if DEVICES.fullmatch(name) and 3 <= values < filled and whole:
        return "device"
    if len(texts) * 2 <= filled:  # numbers, with a stray text at most
        return "feature"
    return "category" if values <= MOST_CLASSES and len(texts) == filled else "text"


def different(cells: Cells, place: int) -> int:
    """How many different values a column has."""
    numbers = cells.numbers[:, place]
    return len(np.unique(numbers[~np.isnan(numbers)])) + len(set(cells.texts.get(place, {}).values()))


def _counts(name: str, there: np.ndarray) -> bool:
    """Whether whole numbers that are all different number the rows: by the name, or without a gap between them."""
    return NUMBERS.fullmatch(name) is not None or bool(there.max() - there.min() == len(there) - 1)
