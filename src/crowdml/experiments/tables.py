"""`ours/gram-tables`: one masked release on the papers' other data: Adult (classes) and census income (a number).

The features are the columns as they are, with a constant: no map, nothing fitted on private rows. Beside Adult stands
ADMM as Guo and Gong publish it, with the noise for the same total and the best that accounting can do for it; beside
census income the functional mechanism of SecProbe's source (Zhang et al. 2012, linear regression) at the same epsilon:
noise for the l1 norm of all coefficients, trimmed and solved, in its most favourable form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import blobs, load
from crowdml.datasets.census import read
from crowdml.datasets.files import find, locate
from crowdml.datasets.table import CENSUS
from crowdml.experiments.crowds import DELTA
from crowdml.experiments.figure import MAIN, SOUND, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.guo import published_at
from crowdml.experiments.registry import Progress
from crowdml.features import normalise
from crowdml.models.ridge import predict
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import gram
from crowdml.second_moments import label_rows, solve_moments
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task

EPSILONS = (0.1, 1.0, 10.0)
CONSTANT = Fraction(1, 5)
"""k: chosen on Adult's public rows among 0.05, 0.1, 0.2 and 0.4, which differ by a hundredth at most."""
LARGEST_SALARY = 200_000
"""Dollars a year; a public bound, and salaries above it count as it."""
DEVICES = 100
NUMBERS = {"age": 64, "family_size": 20, "children": 12, "education_level": 24, "hours_worked": 99, "weeks_worked": 52}
WORDS = {
    "sex": ("male", "female"),
    "race": ("white", "black", "asian", "mix", "other", "AIAN", "NHOPI"),
    "hispanic_origin": ("no", "yes"),
    "citizenship": ("1", "2", "3", "4", "5"),
    "nativity": ("native", "foreign-born"),
    "marital": ("married", "never married", "divorced", "separated", "widowed"),
    "english_level": ("0", "1", "2", "3", "4"),
    "economic_region": ("Southeast", "Far West", "Mideast", "Rocky Mountain", "Great Lakes", "Plains", "New England",
                        "Southwest", "Abroad"),
}  # fmt: skip
"""Columns with public upper bounds, and those with words, from the survey's description."""


@dataclass(frozen=True)
class Rows:
    """Rows on the unit sphere, what they are labelled with, and which of them are for errors."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...] = ()


def census_table() -> tuple[Array, Array, Array, Array]:
    """Columns within [0, 1], salaries in dollars, and which rows are for devices and for errors, in a fixed order."""
    table = read(find(CENSUS, "census"))
    columns = [np.clip([float(row[name]) / most for row in table], 0, 1) for name, most in NUMBERS.items()]
    columns += [np.array([row[name] == word for row in table], float) for name in WORDS for word in WORDS[name]]
    salary = np.minimum([float(row["salary"]) for row in table], LARGEST_SALARY)
    train, test = np.split(np.random.default_rng(2018).permutation(len(table)), [200_000])
    return np.stack(columns, axis=1), salary, train, test


def census() -> Rows:
    """200,000 rows for devices, 4,309 for errors, on the unit sphere; salaries over their bound."""
    columns, salary, train, test = census_table()
    x, y = normalise(columns, "l2"), salary / LARGEST_SALARY
    return Rows(x[train], y[train], x[test], y[test])


def make_gram_task(rows: Rows, epsilon: float) -> Task:
    """The columns themselves with a constant; every device of the cohort survives."""
    return Task(
        name="tables",
        features=Features(rows.x.shape[1], Bound("l2")),
        labels=Labels(rows.classes) if rows.classes else Labels(kind="number"),
        model={"kind": "ridge"},
        protocol={"kind": "gram", "batch": len(rows.x) // DEVICES, "map": {"kind": "identity", "constant": CONSTANT}},
        privacy=Privacy("skellam", {"moments": Fraction(repr(epsilon))}, DELTA),
        masking=Masking(DEVICES, DEVICES),
    )


def gram_errors(rows: Rows, trials: int) -> Array:
    """[T, E]: error rates, or mean absolute errors."""
    found: list[list[float]] = []
    for epsilon in EPSILONS:
        task = make_gram_task(rows, epsilon)
        fixed = gram.plan(task)
        both = np.concatenate([fixed.map(rows.x), label_rows(fixed, rows.y)], axis=1)
        exact = fixed.mechanism.moments(both)
        weights = [
            solve_moments(fixed, exact + fixed.mechanism.noise(SeededSource(stream(7, trial, 0)), DEVICES), DEVICES)
            for trial in range(trials)
        ]
        found.append(
            [_error(rows, predict(each, fixed.map(rows.x_test), len(rows.classes) or None)) for each in weights]
        )
    return np.asarray(found).T


def _error(rows: Rows, said: Array) -> float:
    return float((said != rows.y_test).mean() if rows.classes else np.abs(said - rows.y_test).mean())


def functional_errors(rows: Rows, trials: int) -> Array:
    """[T, E]: the functional mechanism for linear regression, with eigenvalues below the noise's trimmed.

    Of one sample's coefficients (y^2, 2 y x_j, x_j x_l) the l1 norm is at most 1 + 2 |x|_1 + |x|_1^2 <= (1 + sqrt(d))^2
    for |x|_2 <= 1, and replacing it moves them by twice that. Noise in floats: for the comparison alone.
    """
    d = rows.x.shape[1]
    x = rows.x.astype(np.float64)
    whole, cross = x.T @ x, x.T @ rows.y
    found = np.zeros((trials, len(EPSILONS)))
    for trial in range(trials):
        chance = np.random.default_rng([7, trial])
        for place, epsilon in enumerate(EPSILONS):
            scale = 2 * (1 + math.sqrt(d)) ** 2 / epsilon
            upper = np.triu(chance.laplace(0, scale, (d, d)))
            values, vectors = np.linalg.eigh(whole + upper + np.triu(upper, 1).T)
            towards = vectors.T @ (cross + chance.laplace(0, scale / 2, d))
            floor = 4 * math.sqrt(2) * scale
            weights = vectors @ np.where(values > floor, towards / np.maximum(values, floor), 0.0)
            found[trial, place] = np.abs(np.clip(rows.x_test @ weights, 0, 1) - rows.y_test).mean()
    return found


def tables(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Errors over the total epsilon; a quick run has made-up data."""
    count = trials or (2 if quick else 5)
    progress("Adult", 0, 2)
    if quick:
        made = blobs(rows=4000, features=10, classes=2, seed=1, normalise="l2")
        rows = Rows(made.x_train, made.y_train, made.x_test, made.y_test, made.classes)
    else:
        data = load("adult", normalise="l2")
        rows = Rows(data.x_train, data.y_train, data.x_test, data.y_test, data.classes)
    majority = float(min(np.bincount(rows.y_test) / len(rows.y_test)))
    label = PrivacyLabel(epsilon=max(EPSILONS), delta=DELTA)
    published = np.stack([1 - published_at(epsilon, min(count, 3), quick) for epsilon in EPSILONS], axis=1)
    theirs = replace(label, as_published=True, not_covered=("tuning", "float-noise"))
    series = [
        over_trials("adult-gram", "gram on Adult", EPSILONS, gram_errors(rows, count), label, marks=True),
        over_trials("adult-guo", "Guo and Gong's ADMM", EPSILONS, published, theirs, marks=True),
        Series("adult-majority", "always the larger class", EPSILONS, (round(majority, 6),) * 3),
    ]
    claims = [
        Claim(f"adult-e{epsilon:g}", f"At a total of {epsilon:g} Adult's error is below that of Guo and Gong's ADMM",
              mine, mine < paper, paper=paper)
        for epsilon, mine, paper in zip(EPSILONS, series[0].y, series[1].y, strict=True)
    ]  # fmt: skip
    notes = [
        "Adult: 30,000 rows, the splits and scaling of `adult`; ADMM on `adult-as-published`, 20 iterations, exact "
        "accounting for continuous noise, which grants Lemma 1's condition on private duals (G3)."
    ]
    progress("census income", 1, 2)
    if not quick and locate(CENSUS) is not None:
        series += _census(count)
        ours, theirs = (next(each for each in series if each.key == key) for key in ("census-gram", "census-fm"))
        for epsilon, mine, fm in zip(EPSILONS, ours.y, theirs.y, strict=True):
            text = f"At ε = {epsilon:g} salaries are told better than by the functional mechanism"
            claims.append(Claim(f"census-e{epsilon:g}", text, mine, mine < fm, paper=fm))
        notes.append("Census: 200,000 government employees; the mean absolute error of the salary, in units of 200,000 "
                     "dollars. The functional mechanism is pure, gram at δ = 1e-6 and under masks.")  # fmt: skip
    else:
        notes.append(f"Census income is left out: {CENSUS.name} is not in $CROWDML_DATA, or this is a quick run.")
    panels = (
        Panel(MAIN, "Adult", "total ε", "test error", "log"),
        Panel(SOUND, "Census income", "total ε", "mean absolute error / 200,000 dollars", "log"),
    )
    source = "synthetic" if quick else "adult"
    return Figure("ours/gram-tables", "One masked release on Adult and on census income", source, count,
                  tuple(series), tuple(claims), panels, tuple(notes), ends="error at ε = 10")  # fmt: skip


def _census(trials: int) -> list[Series]:
    rows = census()
    label = PrivacyLabel(epsilon=max(EPSILONS), delta=DELTA)
    pure = PrivacyLabel(epsilon=max(EPSILONS), not_covered=("float-noise",))
    mean = float(np.abs(np.median(rows.y) - rows.y_test).mean())
    x = np.concatenate([rows.x, np.ones((len(rows.x), 1))], axis=1)
    exact = np.linalg.lstsq(x, rows.y, rcond=None)[0]
    best = float(np.abs(rows.x_test @ exact[:-1] + exact[-1] - rows.y_test).mean())
    return [
        over_trials("census-gram", "gram", EPSILONS, gram_errors(rows, trials), label, panel=SOUND, marks=True),
        over_trials("census-fm", "functional mechanism", EPSILONS, functional_errors(rows, trials), pure, panel=SOUND,
                    marks=True),
        Series("census-no-privacy", "least squares", EPSILONS, (round(best, 6),) * 3, panel=SOUND),
        Series("census-median", "always the median", EPSILONS, (round(mean, 6),) * 3, panel=SOUND),
    ]  # fmt: skip
