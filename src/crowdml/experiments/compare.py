"""`ours/compare`: every protocol on six tables at three totals, with no choice made for any one of them.

The settings are those of `crowdml compare`: public rules read the number of columns, classes, devices and rows and the
price. Columns are scaled by public bounds: those of public rows that no device holds, or of the survey's description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import load
from crowdml.datasets.files import locate
from crowdml.experiments.figure import Claim, Figure, Panel, PrivacyLabel, Series, numbers
from crowdml.experiments.registry import Parts, Progress
from crowdml.experiments.tables import CENSUS, LARGEST_SALARY, census_table
from crowdml.shape import RULES, Rules
from crowdml.sim.compare import Plan, Row, plan
from crowdml.texts import count_text

EPSILONS = (0.1, 1.0, 10.0)
SEED = 13
PUBLIC, TEST = 0.1, 0.2
"""The shares of scikit-learn's tables that are public, and that are for tests; devices hold the rest."""


@dataclass(frozen=True)
class Table:
    """Rows of devices, rows for tests, and what is public about them."""

    name: str
    title: str
    x: Array
    y: Array
    x_test: Array
    y_test: Array
    bounds: tuple[Any, Any]
    target: tuple[float, float] | None = None
    groups: Array | None = None
    devices: int | None = None
    trials: int = 3
    """How often each protocol runs, where nobody says it: more often where few rows are there to test on."""

    def plan(
        self,
        trials: int,
        epsilons: tuple[float, ...],
        protocols: list[str] | None,
        *,
        masked: bool | None = None,
        rules: Rules = RULES,
    ) -> Plan:
        return plan(
            self.x,
            self.y,
            epsilon=epsilons,
            delta=None,
            devices=self.devices,
            groups=self.groups,
            protocols=protocols,
            masked=masked,
            bounds=self.bounds,
            target=self.target,
            test=(self.x_test, self.y_test),
            trials=trials,
            seed=SEED,
            rules=rules,
        )


def small(name: str, title: str) -> Table:
    """A table that comes with scikit-learn, cut in one fixed random order."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(y))
    public, test, held = np.split(order, [round(PUBLIC * len(y)), round((PUBLIC + TEST) * len(y))])
    rows = x[held], y[held], x[test], y[test]
    return Table(name.replace("_", "-"), title, *rows, _ends(x[public]), trials=10)


def named(name: str, title: str) -> Table:
    """A data set with public rows of its own; where it names people, each is a device."""
    data = load(name, normalise="none")
    rows = data.x_train, data.y_train, data.x_test, data.y_test
    return Table(name, title, *rows, _ends(data.x_public), groups=data.groups)


def census() -> Table:
    """Census income: the bounds of columns and salaries are those of the survey's description."""
    x, salary, train, test = census_table()
    target = (0.0, LARGEST_SALARY)
    return Table("census", "Census income (R²)", x[train], salary[train], x[test], salary[test], (0, 1), target)


def _ends(x: Array) -> tuple[Array, Array]:
    return x.min(axis=0), x.max(axis=0)


TABLES = (
    lambda: small("breast_cancer", "Breast cancer"),
    lambda: small("wine", "Wine"),
    lambda: small("iris", "Iris"),
    lambda: named("adult", "Adult"),
    census,
    lambda: named("activity", "Activity"),
)


def compare(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Accuracy over the total, one panel a table. Quick: iris and two protocols."""
    count = trials or (1 if quick else None)
    made, epsilons, protocols = (TABLES[2:3], (1.0, 10.0), ["gram", "sgd"]) if quick else (TABLES, EPSILONS, None)
    parts = Parts(progress, len(made) * len(epsilons) * 7)
    series: list[Series] = []
    claims: list[Claim] = []
    panels: list[Panel] = []
    notes = [NOTE]
    for make in made:
        if make is census and locate(CENSUS) is None:
            notes.append(f"Census income is left out: {CENSUS.name} is not in $CROWDML_DATA.")
            continue
        table = make()
        runs = table.plan(count or table.trials, epsilons, protocols)
        rows: list[Row] = []
        for cell in runs.cells:
            parts(f"{table.name}, {cell.name}, ε {cell.epsilon:g}")
            rows.append(runs.run(cell))
        series += _series(table, runs, rows, epsilons)
        claims += _claims(table, runs, rows, epsilons)
        measure = "accuracy" if runs.classes else "R²"
        title = f"{table.title}: {rows[0].devices:,} devices, {len(runs.x) // rows[0].devices:,} rows each"
        panels.append(Panel(table.name, title, "total ε of a sample", measure, "log", priced=False, x_ticks=epsilons))
        notes.append(f"{table.title}: {len(runs.x):,} rows on {rows[0].devices:,} devices, tested on "
                     f"{len(runs.y_test):,} in {count_text(runs.trials, 'trial')}, "
                     f"δ = {rows[0].task.privacy.delta:.2g}.")  # fmt: skip
    return Figure("ours/compare", "Every protocol on six tables, with no choice made for any of them",
                  ", ".join(panel.key for panel in panels), count or Table.trials, tuple(series), tuple(claims),
                  tuple(panels), tuple(notes), ends=f"accuracy at ε = {max(epsilons):g}")  # fmt: skip


NOTE = (
    "Public bounds scale the columns: those of a tenth of the rows that no device holds (scikit-learn's tables), of "
    "the public rows (Adult, activity) or of the survey's description (census income). Devices are as many as have ten "
    "rows each, from 5 to 1000, or the people (activity). No setting was chosen by a score."
)


MEASURED = ("epsilon", "accuracy", "low", "high")


def _series(table: Table, runs: Plan, rows: list[Row], epsilons: tuple[float, ...]) -> list[Series]:
    found: list[Series] = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        label = PrivacyLabel(epsilon=max(row.epsilon_sample for row in own), delta=own[0].task.privacy.delta)
        key = f"{table.name}-{name.replace(', ', '-').replace('_', '-')}"
        x, y, low, high = (numbers([getattr(row, each) for row in own]) for each in MEASURED)
        found.append(Series(key, name, x, y, low, high, label, table.name, marks=True))
    for which, name, value in zip(
        ("majority", "no-privacy"), ("constant", "without privacy"), runs.baselines, strict=True
    ):
        values = (round(value, 6),) * len(epsilons)
        found.append(Series(f"{table.name}-{which}", name, epsilons, values, panel=table.name))
    return found


def _claims(table: Table, runs: Plan, rows: list[Row], epsilons: tuple[float, ...]) -> list[Claim]:
    constant, without = runs.baselines
    claims: list[Claim] = []
    gains: list[float] = []
    for epsilon in epsilons:
        own = sorted((row for row in rows if row.epsilon == epsilon), key=lambda row: -row.accuracy)
        best = own[0]
        text = (
            f"{table.title} at ε = {epsilon:g}: the best, {best.name}, closes at least half of the gap from a constant "
            f"({constant:.2f}) to no privacy ({without:.2f})"
        )
        claims.append(
            Claim(f"{table.name}-e{epsilon:g}", text, best.accuracy, best.accuracy >= (constant + without) / 2)
        )
        lone, masked = (next(row.accuracy for row in own if row.masked == kind) for kind in (False, True))
        gains.append(masked - lone)
    text = f"{table.title}: at no ε is the best masked protocol more than a point below the best alone"
    claims.append(Claim(f"{table.name}-masks", text, min(gains), min(gains) >= -0.01))
    warned = {(cell.protocol, cell.epsilon) for cell in runs.cells if cell.masked and cell.outlook is not None}
    alone = {(row.protocol, row.epsilon): row.accuracy for row in rows if not row.masked}
    each = [
        row.accuracy - alone[row.protocol, row.epsilon]
        for row in rows
        if row.masked and (row.protocol, row.epsilon) in alone.keys() - warned
    ]
    if each:
        text = (
            f"{table.title}: no protocol is more than a point worse under masks than alone, but where the crowd is too "
            "small for the price and is told so before the run"
        )
        claims.append(Claim(f"{table.name}-each", text, min(each), min(each) >= -0.01))
    return claims
