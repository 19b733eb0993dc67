"""`crowdml task new --data FILE`: a task that fits a table, with every choice explained in a comment.

What must be public before a study starts (bounds of the columns, names of the classes) is named by whoever writes the
task, or read from public rows. Where it is read from the table itself, the file says that no epsilon covers it.
"""

from __future__ import annotations

import csv
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.datasets.tables import Columns, Table
from crowdml.errors import DataError, TaskError
from crowdml.features import bounds_of, outside
from crowdml.protocols import find
from crowdml.settings import describe
from crowdml.shape import Shape
from crowdml.suggest import fits, fitting_delta, prefers_masks, suggest
from crowdml.task import Bound, Features, Task, TaskBudget, parse
from crowdml.texts import count_text, did_you_mean, number_text, one_line

MOST_MOMENTS = 500
"""Features up to which `gram` is the first choice: it sends the square of their number."""
UNCOVERED = "no ε covers what they reveal about its rows. Set others with --bounds, or name public rows with --public."


Ends = tuple[Fraction, Fraction]
Sides = tuple[Fraction, ...]
"""The lower or the upper bound of each column."""


@dataclass(frozen=True)
class Written:
    """A task, the text of its file, and what is told besides."""

    task: Task
    text: str
    notes: tuple[str, ...]


def task_of_table(
    path: str,
    columns: Columns,
    *,
    name: str,
    bounds: str | None,
    protocol: str | None,
    epsilon: float,
    delta: float | None = None,
    devices: int | None,
    masked: bool | None = None,
) -> Written:
    """A task for the table at this path. masked: the server hears sums alone; None: by the number of devices."""
    table = columns.table(path)
    table.check_kept(columns.test)
    found = PublicFacts.of(table, columns.public, bounds)
    shape = Shape(len(table.names), len(found.classes) or None, *table.crowd(devices, columns.test))
    chosen = protocol or _protocol(shape, masked)
    if masked is None:
        masked = prefers_masks(chosen, shape)
    elif not masked and (reason := fits(chosen, shape, False)) is not None:
        way = "Name" if fits(chosen, shape, True) else "Say --masked, or name"
        raise TaskError(f"--alone: {reason} {way} another --protocol.")
    task = suggest(
        shape,
        protocol=chosen,
        epsilon=epsilon,
        delta=fitting_delta(table.kept(columns.test), delta),
        masked=masked,
        names=found.classes or None,
        low=found.low,
        high=found.high,
        ends=found.ends,
        name=name,
    )
    budget = TaskBudget(Fraction(str(epsilon)), shape.held)
    task = task.with_(privacy=replace(task.privacy, budget=budget))
    why = _reasons(table, found, shape, task, protocol is not None)
    notes = (*table.notes, *found.notes)
    head = f"A task for {Path(path).name}, written by `crowdml task new`. Change what you like."
    text = _toml(task, why, [head, *notes])
    if parse(text) != task:
        raise TaskError(f"{path}: the task that fits it cannot be written as a file. Please report this.")
    return Written(task, text, (*notes, *found.warnings))


# --- what is public ---


@dataclass(frozen=True)
class PublicFacts:
    """What a task says about samples before the first one is seen, and where it was taken from."""

    low: tuple[Fraction, ...]
    high: tuple[Fraction, ...]
    classes: tuple[str, ...]
    ends: Ends | None
    """The bounds of labels that are numbers."""
    source: str
    classes_source: str
    notes: tuple[str, ...]
    """What no epsilon covers."""
    warnings: tuple[str, ...] = ()
    """What the bounds clip or erase. It tells of rows, so no task file has it."""

    @classmethod
    def of(cls, table: Table, public: str | None, bounds: str | None) -> PublicFacts:
        """Those that `--bounds` names, else those of the file with public rows, else those of the table itself."""
        other = None if public is None else table.like(public)
        notes: list[str] = []
        classes, from_rows = table.classes, f"the names in column {table.label!r}"
        if other is not None and set(table.classes) <= set(other.classes):
            classes, from_rows = other.classes, f"the names in {other.path}"
        elif classes:
            notes.append(
                f"The names of the classes were read from column {table.label!r} of the table: they become public."
            )
        rows = other or table
        ends: Ends | None = None
        if bounds is not None:
            low, high, ends = given_bounds(table, bounds)
            source = f"named with --bounds {bounds}"
        else:
            low, high = bounds_of(rows.x)
            source = f"the smallest and largest values in {rows.path}"
            if other is None:
                notes.append(f"The bounds of the columns are the smallest and largest values in the table: {UNCOVERED}")
        warnings = _outside(table, low, high, source)
        if other is not None and bounds is None:
            warnings += _erased(table, other, low, high)
        if table.kind == "class":
            ends = None
        elif ends is None:
            (least,), (largest,) = bounds_of(rows.y[:, None])
            ends = least, largest
            if other is None:
                notes.append(f"The bounds of the labels are the smallest and largest label in the table: {UNCOVERED}")
        return cls(low, high, classes, ends, source, from_rows, tuple(notes), tuple(warnings))


def _outside(table: Table, low: Sides, high: Sides, source: str) -> list[str]:
    """A sentence where numbers of the table lie outside the bounds of its columns."""
    features = Features(len(table.names), Bound("l2"), low=low, high=high)
    beyond = outside(features, table.x)
    if not beyond.any():
        return []
    most = int(beyond.sum(axis=0).argmax())
    return [
        f"{table.path}, {table.place(int(beyond.any(axis=1).argmax()))}: a number is outside the bounds of its column "
        f"(in {int(beyond.any(axis=1).sum()):,} of {len(table):,} rows), which are {source}. Most often it is column "
        f"{one_line(table.names[most])!r} ({count_text(int(beyond[:, most].sum()), 'row')}). Devices clip it to the "
        "bound: name wider bounds with --bounds, if these are wrong."
    ]


def _erased(table: Table, other: Table, low: Sides, high: Sides) -> list[str]:
    """A sentence for each column of the table whose bounds leave no room, for the public rows have one value in it."""
    held = [place for place in range(len(table.names)) if low[place] == high[place] and np.ptp(table.x[:, place])]
    return [
        f"{other.path}: column {one_line(table.names[place])!r} has one value in all {len(other):,} rows, so its "
        f"bounds are equal and devices would make 0 of it. Leave it out with --ignore, or name bounds with --bounds."
        for place in held
    ]


def given_bounds(table: Table, bounds: str) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...], Ends | None]:
    """The bounds that somebody names: `LOW,HIGH` for all columns, or a CSV file with lines of column, low and high.

    The third value is those of the labels, where the file has a line for their column.
    """
    if not bounds.lower().endswith(".csv"):
        low, high = _pair(bounds.split(","), f"--bounds {bounds}")
        return (low,) * len(table.names), (high,) * len(table.names), None
    try:
        with Path(bounds).open(encoding="utf-8", newline="") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--bounds {bounds} cannot be read: {error}. Write lines of column,low,high.") from None
    found: dict[str, tuple[Fraction, Fraction]] = {}
    for number, line in enumerate(lines, 1):
        if number == 1 and [each.strip().lower() for each in line[1:]] == ["low", "high"]:
            continue
        where = f"{bounds}, line {number}"
        if len(line) != 3:
            raise DataError(f"{where} has {count_text(len(line), 'field')}: write column,low,high.")
        known = (*table.names, table.label)
        if line[0].strip() not in known:
            near = did_you_mean(line[0].strip(), known)
            raise DataError(f"{where}: {table.path} has no column {line[0].strip()!r}.{near} Write column,low,high.")
        found[line[0].strip()] = _pair(line[1:], where)
    missing = next((name for name in table.names if name not in found), None)
    if missing is not None:
        raise DataError(f"--bounds {bounds} says nothing of column {missing!r}. Add a line for it: column,low,high.")
    ends = [found[name] for name in table.names]
    return tuple(low for low, _ in ends), tuple(high for _, high in ends), found.get(table.label)


def _pair(fields: list[str], where: str) -> tuple[Fraction, Fraction]:
    from crowdml.exact import read_exact

    try:
        low, high = (read_exact(each.strip()) for each in fields)
    except ValueError:
        raise DataError(f"{where}: name two numbers, the lower bound first, such as 0,100, or a file.") from None
    if low == high:
        raise DataError(
            f"{where}: both bounds are {float(low):g}, and a column within them says nothing. Name two different "
            "numbers, the lower bound first, or leave the column out of the table: --ignore."
        )
    if low > high:
        raise DataError(f"{where}: the lower bound {float(low):g} is above the upper bound {float(high):g}. Swap them.")
    return low, high


def _protocol(shape: Shape, masked: bool | None) -> str:
    """The first choice for a crowd of this shape; `crowdml compare` tries all of them."""
    if masked is not False and shape.features <= MOST_MOMENTS and prefers_masks("gram", shape):
        return "gram"
    return "sgd"


# --- the file ---


def _reasons(table: Table, found: PublicFacts, shape: Shape, task: Task, named: bool) -> dict[str, str]:
    """A comment for each key that the file may have."""
    listed = ", ".join(map(one_line, table.names[:6])) + (", ..." if len(table.names) > 6 else "")
    uses = task.privacy.uses
    crowd = f"{count_text(shape.devices, 'device')} with {count_text(shape.held, 'row')} each"
    first = "as you said" if named else f"a first choice for {crowd}; `crowdml compare` tries the others"
    rule = "by a public rule from the size of the crowd and the price"
    bounds = f"public, {found.source}; a device scales each column to [-1, 1] by the two"
    said = {
        **_helps(task),
        "features.dimension": f"one for each feature: {listed}",
        "features.low": f"the lower bound of each column: {bounds}",
        "features.high": "the upper bound of each column",
        "features.norm": "every row lies in this ball, and the noise is made for it",
        "labels.kind": "the task predicts a number",
        "labels.classes": f"public: {found.classes_source}",
        "labels.low": "the lower bound of the labels, public; a device scales a label to [-1, 1] by the two",
        "labels.high": "the upper bound of the labels",
        "model.kind": "the server solves for it" if task.model["kind"] == "ridge" else "few weights need little noise",
        "model.bias": "an intercept",
        "model.c": "how much the server shrinks its solution, in proportion to the noise",
        "model.width": "an error beyond this, of a label scaled to [-1, 1], pulls no harder than one of this size",
        "protocol.kind": first,
        "protocol.batch": f"samples of a check-in: {crowd}",
        "protocol.step": f"the size of the server's steps, {rule}",
        "protocol.clip": f"a sample's gradient is cut to this length, and the noise is made for it; {rule}",
        "protocol.momentum": "the share of a step that the next one carries on",
        "protocol.update": "how the server steps: by the newest gradients, and on with a share of its last step",
        "protocol.map": "what a device makes of a row first: with the identity, the row itself and this constant",
        "protocol.rho": f"how strongly a device is held to the crowd's model; {rule}",
        "protocol.relaxation": f"how many times the mean update the server moves; {rule}",
        "protocol.barrier": "a round of the server closes with so many uploads: all devices",
        "protocol.local_steps": "steps that a device makes before it sends where they lead",
        "protocol.rate": f"the size of a device's own steps, {rule}",
        "protocol.server_batch": "a round of the server closes with so many uploads: all devices",
        "privacy.mechanism": f"each device adds {'a share' if task.masking else 'all'} of the noise",
        "privacy.epsilon": f"what a sample pays in all, in {count_text(uses, 'use')}, at delta",
        "privacy.uses": "how many check-ins a sample serves: the price above is for all of them",
        "privacy.delta": "the probability beyond what epsilon allows: far below one over the number of rows",
        "privacy.budget": "a device gives no more than this",
        "masking.cohort": "the server hears sums of so many devices, and no device's own message",
        "masking.minimum": "the fewest that must stay to the end of a round",
        "masking.colluders": "so many of them may work with the server",
        "masking.window": "seconds that a round stays open for devices to come",
        "masking.lease": "seconds that each later phase of a round may take",
    }  # fmt: skip
    return said


def _helps(task: Task) -> dict[str, str]:
    """What a protocol says of its own settings, by key: for plug-ins, and for settings that have no words here."""
    settings = find(task).settings
    named = {each.name: each.help for each in (describe(settings) if settings is not None else ())}
    kind = task.protocol["kind"]
    return {f"protocol.{key}": named.get(key) or f"a setting of {kind}: see its page" for key in task.protocol}


class _Written(str):
    """A number as the published task writes it."""

    __slots__ = ()


def _toml(task: Task, why: Mapping[str, str], head: list[str]) -> str:
    """The task as a file: keys at their defaults are left out."""
    plain: dict[str, Any] = json.loads(task.canonical, parse_float=_Written)
    lines = [f"# {line}" for said in head for line in textwrap.wrap(said, 116)]
    lines += [
        "# what the task is called; an edited task is a new one, whatever its name",
        f'name = "{task.name}"',
        '# title = "..."',
        '# purpose = "..."    # why it is learned: participants read it before they join',
    ]
    lines.append('# collects = "..."   # what their devices sense')
    for section in ("features", "labels", "model", "protocol", "privacy", "masking"):
        table = {key: value for key, value in plain.get(section, {}).items() if not _is_default(section, key, value)}
        if not table:
            continue
        lines += ["", f"[{section}]"]
        for key in sorted(table, key=lambda each: _ORDER.index(each) if each in _ORDER else len(_ORDER)):
            if reason := why.get(f"{section}.{key}"):
                lines += [f"# {line}" for line in textwrap.wrap(reason, 116)]
            lines.append(f"{key} = {_value(table[key])}")
    return "\n".join(lines) + "\n"


_ORDER = ["kind", "dimension", "mechanism", "cohort", "low", "high", "epsilon", "minimum", "batch", "uses", "delta"]
"""Keys that come first in their table."""


def _is_default(section: str, key: str, value: Any) -> bool:
    usual = {
        "features": {"kind": "vector"},
        "labels": {"kind": "class", "bound": "1.0", "classes": []},
        "privacy": {"unit": "sample"},
    }
    return value is None or usual.get(section, {}).get(key, "\0") == value


def _value(value: Any) -> str:
    if isinstance(value, _Written):
        return str(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items() if inner is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def task_name(path: str) -> str:
    """The name of a task, from the file that it is written to."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem).strip("-") or "own"


def summary(written: Written) -> str:
    """What was chosen, in a line."""
    task = written.task
    masked = ", under masks" if task.masking is not None else ""
    whole = task.privacy.budget.epsilon if task.privacy.budget is not None else 0
    delta = number_text(task.privacy.delta)
    return f"{task.protocol['kind']}{masked}, ε = {number_text(float(whole))} for a sample at δ = {delta}"
