"""Every protocol that fits a table, alone and under masks, at the same honest total: `compare`.

A plan lists the runs before any of them starts: each is a task that `suggest` made from public facts, so a protocol is
compared with the settings that a crowd would get. Nothing is tuned by the scores (review, R4).
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets.populations import usual_devices, usually_held
from crowdml.datasets.tables import HELD_OUT, MOST_CLASSES
from crowdml.errors import DataError, PrivacyWarning, TaskError
from crowdml.features import bounds_of, prepared
from crowdml.privacy.losses import exact
from crowdml.protocols import PROTOCOLS
from crowdml.shape import RULES, Rules
from crowdml.sim.arguments import (
    clipped_labels,
    clipped_numbers,
    column_names,
    erased_columns,
    is_number,
    pair,
    read_labels,
    read_rows,
    read_target,
    refuse_bounds,
    several,
    whole,
)
from crowdml.sim.arguments import owners as owners_of
from crowdml.sim.baselines import baselines
from crowdml.sim.studies import simulate
from crowdml.sim.trial import Deal
from crowdml.suggest import Outlook, Shape, fits, fitting_delta, outlook, suggest
from crowdml.task import Bound, Features, Task
from crowdml.texts import number_text
from crowdml.verdict import verdict

UNCOVERED = (
    "The bounds of the {} were taken from the rows: no ε covers what they reveal. Give bounds that are known without "
    "the rows, or those of public rows."
)


@dataclass(frozen=True)
class Row:
    """One protocol in one crowd at one price: the mean of its trials, and the lowest and the highest of them."""

    protocol: str
    masked: bool
    epsilon: float
    """The total that was asked for."""
    devices: int
    accuracy: float
    """On test rows; R² where labels are numbers."""
    low: float
    high: float
    epsilon_sample: float
    """What the most expensive sample pays in all: at most `epsilon`."""
    epsilon_device: float
    bytes_up: int
    """What all devices send, without signatures and transport."""
    rounds: int
    """In how many rounds or check-ins a device takes part, at most."""
    seconds: float
    task: Task = field(repr=False, compare=False)
    """The task that ran."""

    def plain(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "task"}

    @property
    def name(self) -> str:
        return f"{self.protocol}, masked" if self.masked else self.protocol


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: a row for each run, beside two models that need no crowd."""

    rows: tuple[Row, ...]
    majority: float
    """The accuracy of always saying the most common class; the R² of always saying the mean."""
    no_privacy: float
    """Logistic or linear regression on the same rows in one place."""
    classes: int | None
    """None: labels are numbers, and every accuracy is an R²."""
    notes: tuple[str, ...] = ()
    """What the totals do not cover, and what was left out."""
    seed: int = 0
    """The seed that repeats the comparison."""

    @property
    def measure(self) -> str:
        return "R²" if self.classes is None else "accuracy"

    @property
    def best(self) -> Row:
        """The row with the best mean; among several epsilons or crowds, most likely that of the largest."""
        return max(self.rows, key=lambda row: row.accuracy)

    @property
    def verdict(self) -> str:
        """What the best row is worth, in a sentence."""
        best = self.best
        return verdict(
            best.accuracy,
            classes=self.classes,
            majority=self.majority,
            no_privacy=self.no_privacy,
            spread=(best.high - best.low) / 2,
            masked=best.masked,
        ).sentence

    def at(self, devices: int, epsilon: float) -> Comparison:
        """The rows of one crowd at one price."""
        rows = tuple(row for row in self.rows if (row.devices, row.epsilon) == (devices, epsilon))
        return replace(self, rows=rows)

    def plain(self) -> dict[str, Any]:
        """The result as `crowdml compare --json` prints it."""
        rows = [row.plain() for row in self.rows]
        return {"id": "compare", "rows": rows, "majority": self.majority, "no_privacy": self.no_privacy}

    def frame(self) -> dict[str, list[Any]]:
        """The rows by column, as `pandas.DataFrame` takes them."""
        rows = [row.plain() for row in self.rows]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def plot(self, path: str | Path) -> None:
        """Draw the rows into a file: a panel for each number of devices, a line for each protocol."""
        _draw(self, Path(path))


def compare(
    X: Any,
    y: Any,
    *,
    epsilon: float | Sequence[float] = 1.0,
    delta: float | None = None,
    devices: int | Sequence[int] | None = None,
    groups: Any = None,
    protocols: str | Sequence[str] | None = None,
    masked: bool | None = None,
    bounds: tuple[Any, Any] | None = None,
    target: tuple[float, float] | None = None,
    test: float | tuple[Any, Any] = HELD_OUT,
    trials: int = 3,
    seed: int | None = None,
    tick: Callable[[Row], None] = lambda _: None,
) -> Comparison:
    """Let every protocol that fits learn X [n, d], y [n], alone and under masks, at the same total for a sample.

    Guarantee: none for X and y, which stay with the caller; the rows say what the devices of such crowds would pay.

    y: classes (names, or up to 100 whole numbers), or numbers to predict. epsilon, devices: one or several; all
    combinations run. devices: rows are dealt out equally; None: as many as have ten rows each, from 5 to 1000. groups:
    who holds each row, in place of `devices`. delta: None for 1e-6, or less where there are more than 100,000 rows.
    protocols: a name or several; None: all. masked: True or False for one of the two alone. bounds: (low, high) of the
    columns, numbers or one for each, and target: (low, high) of y where it holds numbers; both are public. None: taken
    from X and y, with a warning, for no epsilon covers what they tell. Warnings say what bounds and target clip, and
    which columns they make 0. test: a share of the rows, or other rows (X, y). tick hears each row when it is there.
    """
    made = plan(
        X, y, epsilon=epsilon, delta=delta, devices=devices, groups=groups, protocols=protocols, masked=masked,
        bounds=bounds, target=target, test=test, trials=trials, seed=seed,
    )  # fmt: skip
    for note in made.warnings:
        warnings.warn(note, PrivacyWarning, stacklevel=2)
    for note in made.changed:
        warnings.warn(note, stacklevel=2)
    rows: list[Row] = []
    for cell in made.cells:
        rows.append(made.run(cell))
        tick(rows[-1])
    return made.comparison(rows)


@dataclass(frozen=True)
class Cell:
    """One run of a plan."""

    protocol: str
    masked: bool
    epsilon: float
    shape: Shape
    task: Task

    @property
    def name(self) -> str:
        return f"{self.protocol}, masked" if self.masked else self.protocol

    @property
    def outlook(self) -> Outlook | None:
        """Why this crowd is too small for its price; None where it is not."""
        return outlook(self.task, self.shape)


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, before the first one."""

    cells: tuple[Cell, ...]
    x: Array
    y: Array
    x_test: Array
    y_test: Array
    groups: Array | None
    features: Features
    classes: tuple[str, ...]
    trials: int
    seed: int
    warnings: tuple[str, ...]
    """What no epsilon covers."""
    notes: tuple[str, ...]
    """Why a protocol does not run."""
    changed: tuple[str, ...] = ()
    """What bounds and target do to rows and labels."""

    def run(self, cell: Cell) -> Row:
        people = Deal("iid", cell.shape.devices) if self.groups is None else Deal("by_user", groups=self.groups)
        study = simulate(
            cell.task,
            self.x,
            self.y,
            devices=people,
            test=(self.x_test, self.y_test),
            trials=self.trials,
            seed=self.seed,
            points=1,
        )
        scores = study.scores
        return Row(
            cell.protocol,
            cell.masked,
            cell.epsilon,
            study.population.devices,
            float(scores.mean()),
            float(scores.min()),
            float(scores.max()),
            study.planned.sample,
            study.planned.device,
            study.bytes_up,
            int(np.bincount(study.runs[0].schedule.device).max()),
            study.seconds,
            cell.task,
        )

    def comparison(self, rows: Sequence[Row]) -> Comparison:
        """The comparison of these rows: of all, or of as many as there are yet."""
        majority, no_privacy = self.baselines
        return Comparison(
            tuple(rows),
            majority,
            no_privacy,
            len(self.classes) or None,
            (*self.warnings, *self.changed, *self.notes),
            self.seed,
        )

    @cached_property
    def baselines(self) -> tuple[float, float]:
        """Always the most common class (or the mean), and a model without privacy: both on the test rows."""
        x, test = (prepared(self.features, rows) for rows in (self.x, self.x_test))
        return baselines(x, self.y, test, self.y_test, classes=bool(self.classes))


def plan(
    X: Any,
    y: Any,
    *,
    epsilon: float | Sequence[float],
    delta: float | None,
    devices: int | Sequence[int] | None,
    groups: Any,
    protocols: str | Sequence[str] | None,
    masked: bool | None,
    bounds: tuple[Any, Any] | None,
    target: tuple[float, float] | None,
    test: float | tuple[Any, Any],
    trials: int,
    seed: int | None,
    names: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    crowd: tuple[int, int] | None = None,
    rules: Rules = RULES,
) -> Plan:
    """What `compare` will run; see there. `names`: of the classes, where y holds their places. `columns`: their names,
    where X has none. `crowd`: how many devices take part and how many rows each of them has at least, where `groups`
    says who holds what. `rules`: what `suggest` chooses by."""
    prices, named = _epsilons(epsilon), _names(protocols)
    _check(delta, masked, trials, seed)
    seed = secrets.randbits(32) if seed is None else int(seed)
    columns = column_names(X) if columns is None else columns
    x, labels = _table(X, y, "X", "y")
    owners = None if groups is None else owners_of(groups, len(x))
    if is_number(test):
        mine, held = _split(len(x), float(test), seed)
        x, labels, x_test, y_test = x[mine], labels[mine], x[held], labels[held]
        owners = None if owners is None else owners[mine]
    else:
        x_test, y_test = _table(*pair(test, "test", otherwise="; or a share of X, such as 0.2"), "test[0]", "test[1]")
        _refuse_other_rows(x, labels, x_test, y_test)
    said: list[str] = []
    low, high = _bounds(x, bounds, columns, said)
    features = Features(x.shape[1], Bound("l2"), low=low, high=high)
    if target is not None:
        target = read_target(target)
        _refuse_texts(labels, target)
    if names is not None:
        classes = tuple(names)
    else:
        classes, (labels, y_test) = ((), (labels, y_test)) if target is not None else _encoded(labels, y_test)
    if classes and not np.isin(y_test, labels).any():
        raise DataError(STRANGE.format(*(classes[int(each[0])] for each in (y_test, labels))))
    ends = None if classes else _ends(labels, target, said)
    beyond = None if ends is None else clipped_labels(labels, *ends)
    if ends is not None:
        labels, y_test = (each.clip(*map(float, ends)) for each in (labels, y_test))
    clipped = None if bounds is None else clipped_numbers(features, x, columns)
    erased = erased_columns(features, x, columns, taken=bounds is None)
    delta = fitting_delta(len(x), delta)
    cells: list[Cell] = []
    left_out: dict[str, str] = {}
    for each in _shapes(x, len(classes) or None, devices, owners, crowd):
        shape = replace(each, rules=rules)
        for price in prices:
            for name, under in _entries(named, masked):
                found = _cell(name, under, price, delta, shape, classes, features, ends)
                if isinstance(found, str):
                    left_out[found] = f"{name} {'under masks' if under else 'alone'}"
                else:
                    cells.append(found)
    if not cells:
        also = " Compare under masks, too, or name other protocols." if masked is False else ""
        raise TaskError(" ".join(left_out) + also)
    return Plan(
        tuple(cells),
        x,
        labels,
        x_test,
        y_test,
        owners,
        features,
        classes,
        trials,
        seed,
        tuple(said),
        tuple(f"Left out: {what}, because {reason}" for reason, what in left_out.items()),
        tuple(filter(None, (clipped, beyond, erased))),
    )


STRANGE = "test[1] holds no label that y holds, but {!r}, and y holds {!r}: give labels of the same kind."


def _check(delta: Any, masked: Any, trials: Any, seed: Any) -> None:
    """Refuse settings that no comparison takes."""
    if not (delta is None or is_number(delta)):
        raise TaskError(f"delta = {delta!r}: a number above 0, such as 1e-6, or None.")
    if not (masked is None or isinstance(masked, bool | np.bool_)):
        raise TaskError(f"masked = {masked!r}: True for masks alone, False for none, or None for both.")
    whole(trials, "trials", 1)
    whole(seed, "seed", 0, "a fresh seed")


def _refuse_other_rows(x: Array, y: Array, x_test: Array, y_test: Array) -> None:
    """Refuse test rows that are not of the table: of another width, or with labels of which y has none."""
    if x_test.shape[1] != x.shape[1]:
        raise DataError(f"test[0] has {x_test.shape[1]} columns, and X has {x.shape[1]}: give rows with the same.")
    if (y.dtype.kind in "fiub") != (y_test.dtype.kind in "fiub"):
        raise DataError(STRANGE.format(y_test.tolist()[0], y.tolist()[0]))


def _refuse_texts(labels: Array, target: tuple[Any, Any]) -> None:
    if labels.dtype.kind not in "fiub":
        raise DataError(
            f"target = ({float(target[0]):g}, {float(target[1]):g}), and y holds {str(labels[0])!r}: target bounds "
            "numbers, and names are classes. Leave target out."
        )


def _names(protocols: Any) -> list[str]:
    """The protocols to compare, by name."""
    return sorted(PROTOCOLS) if protocols is None else [str(each) for each in several(protocols, "protocols", "a name")]


def _entries(protocols: Sequence[str], masked: bool | None) -> Iterator[tuple[str, bool]]:
    for name in protocols:
        yield from ((name, under) for under in ((False, True) if masked is None else (masked,)))


def _cell(
    protocol: str,
    masked: bool,
    epsilon: float,
    delta: float,
    shape: Shape,
    classes: Sequence[str],
    features: Features,
    ends: tuple[Fraction, Fraction] | None,
) -> Cell | str:
    """A run, or why there is none."""
    reason = fits(protocol, shape, masked)
    if reason is not None:
        return reason
    task = suggest(
        shape,
        protocol=protocol,
        epsilon=epsilon,
        delta=delta,
        masked=masked,
        names=classes or None,
        low=features.low,
        high=features.high,
        ends=ends,
        name=protocol.replace("_", "-"),
    )
    return Cell(protocol, masked, epsilon, shape, task)


def _table(X: Any, y: Any, name: str, label: str) -> tuple[Array, Array]:
    x = read_rows(X, name)
    return x.astype(np.float32), read_labels(y, len(x), label)


def _split(rows: int, share: float, seed: int) -> tuple[Array, Array]:
    held = round(share * rows)
    if not 0 < share < 1 or not 1 <= held < rows:
        raise DataError(f"test = {share:g} of {rows} rows: take a share that leaves rows on both sides, such as 0.2.")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def _bounds(x: Array, given: tuple[Any, Any] | None, columns: Sequence[str] | None, said: list[str]) -> tuple[Any, Any]:
    """The bounds of the columns, as a task holds them."""
    if given is None:
        said.append(UNCOVERED.format("columns"))
        return bounds_of(x)
    refuse_bounds(given, x.shape[1], columns)
    return _named(given[0], x.shape[1]), _named(given[1], x.shape[1])


def _named(given: Any, columns: int) -> tuple[Fraction, ...]:
    """One side of the bounds that somebody names: a number for all columns, or one for each."""
    sides = np.broadcast_to(np.asarray(given, object), columns).tolist()
    return tuple(each if isinstance(each, Fraction) else exact(float(f"{each:.6g}")) for each in sides)


def _encoded(y: Array, y_test: Array) -> tuple[tuple[str, ...], tuple[Array, Array]]:
    """The names of the classes and their places; no names where labels are numbers."""
    both = np.concatenate([y, y_test])
    found, places = np.unique(both, return_inverse=True)
    if both.dtype.kind in "fiu" and (len(found) > MOST_CLASSES or (found != np.round(found)).any()):
        return (), (y, y_test)
    if len(found) < 2:
        raise DataError(f"all {len(both):,} labels are {found[0]}: there is nothing to tell apart.")
    names = tuple(f"{name:g}" if both.dtype.kind == "f" else str(name) for name in found)
    places = places.astype(np.int32)
    return names, (places[: len(y)], places[len(y) :])


def _ends(y: Array, target: tuple[Any, Any] | None, said: list[str]) -> tuple[Fraction, Fraction]:
    """The bounds of labels that are numbers."""
    if target is None:
        said.append(UNCOVERED.format("labels"))
        (low,), (high,) = bounds_of(y[:, None])
    else:
        low, high = (each if isinstance(each, Fraction) else exact(float(each)) for each in target)
    if not low < high:
        raise DataError(f"labels lie between {float(low):g} and {float(high):g}: their bounds must differ.")
    return low, high


def _epsilons(given: Any) -> list[float]:
    found = several(given, "epsilon", "a number above 0, such as 1")
    for each in found:
        if not (is_number(each) and each > 0):
            raise TaskError(f"epsilon = {f'{each:g}' if is_number(each) else repr(each)}: a number above 0, such as 1.")
    return [float(each) for each in found]


def _shapes(
    x: Array,
    classes: int | None,
    devices: int | Sequence[int] | None,
    owners: Array | None,
    crowd: tuple[int, int] | None,
) -> Iterator[Shape]:
    if owners is not None:
        if devices is not None:
            raise TaskError("who holds each row is known, so the number of devices is, too. Leave out one of the two.")
        if crowd is None:
            counts = np.unique(owners, return_counts=True)[1]
            crowd = int((counts >= usually_held(counts)).sum()), usually_held(counts)
        yield Shape(x.shape[1], classes, *crowd)
        return
    usual = usual_devices(len(x))
    for many in [usual] if devices is None else several(devices, "devices", "a whole number from 1 on"):
        whole(many, "devices", 1)
        if not 1 <= many <= len(x):
            raise DataError(
                f"devices = {many:,}: there are {len(x):,} rows besides those to test on, so 1 to {len(x):,} devices "
                "can hold some."
            )
        yield Shape(x.shape[1], classes, int(many), len(x) // int(many))


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def _draw(found: Comparison, path: Path) -> None:
    from matplotlib.figure import Figure

    crowds = sorted({row.devices for row in found.rows})
    prices = sorted({row.epsilon for row in found.rows})
    names = list(dict.fromkeys(row.name for row in found.rows))
    height = 1.9 + len(names) * max(0.34, 0.16 * len(prices))
    figure = Figure(figsize=(7.2 if len(crowds) == 1 else 4.6 * len(crowds) + 1, height), layout="constrained")
    panels = figure.subplots(1, len(crowds), squeeze=False, sharey=True)[0]
    for axes, many in zip(panels, crowds, strict=True):
        for place, price in enumerate(prices):
            rows = [row for row in found.rows if row.devices == many and row.epsilon == price]
            at = [names.index(row.name) + 0.7 * ((place + 0.5) / len(prices) - 0.5) for row in rows]
            means = np.array([row.accuracy for row in rows])
            reach = np.abs([[row.low for row in rows], [row.high for row in rows]] - means)
            axes.errorbar(means, at, xerr=reach, fmt="o", ms=5, lw=1.6, capsize=3,
                          color=COLOURS[place % len(COLOURS)], label=f"ε = {number_text(price)}")  # fmt: skip
        axes.axvline(found.no_privacy, color="#222222", lw=1.2, label=f"without privacy: {found.no_privacy:.2f}")
        constant = "most common class" if found.classes else "always the mean"
        axes.axvline(found.majority, color="#666666", lw=1.2, ls=":", label=f"{constant}: {found.majority:.2f}")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_title(f"{many:,} devices", loc="left", fontsize=10.5)
        axes.set_xlabel(f"{found.measure} on test rows; whiskers: lowest to highest trial", fontsize=9)
        axes.grid(axis="x", color="#E4E4E4", lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=140)
