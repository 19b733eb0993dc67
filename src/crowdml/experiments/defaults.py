"""`ours/defaults`: how the numbers in the rules for what nobody chose were found (docs/defaults.md).

Tables are drawn by code, in shapes that real ones have: columns far from zero and of unlike scales, skewed ones such as
spectra, words coded as zeros and ones with classes of unlike size, numbers to predict whose mean is not zero. Beside
them stand public rows of named data sets. No row of a device and no test row is looked at (review, R4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import load
from crowdml.experiments.compare import Table
from crowdml.experiments.figure import Claim, Figure, Panel, PrivacyLabel, Series, numbers
from crowdml.experiments.registry import Parts, Progress
from crowdml.shape import RULES, Rules
from crowdml.task import Task

EPSILONS = {"classes": (1.0,), "numbers": (1.0, 10.0)}
"""The totals at which rules are tried, by what labels are: how many rounds a model of numbers takes hangs on them."""
TEST = 1000
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]


def blobs(features: int, classes: int, distance: float, *, skewed: bool = False, apart: bool = True) -> Draw:
    """A Gaussian blob for each class. `apart`: columns far from zero and of unlike scales; `skewed`: exponentials."""

    def draw(chance: np.random.Generator, rows: int) -> tuple[Array, Array]:
        fixed = np.random.default_rng([features, classes])
        centres = fixed.standard_normal((classes, features))
        centres *= distance / np.linalg.norm(centres, axis=1, keepdims=True)
        scale, shift = 10.0 ** fixed.uniform(-1, 2, features), fixed.uniform(-5, 5, features)
        y = chance.integers(0, classes, rows).astype(np.int32)
        x = centres[y] + chance.standard_normal((rows, features))
        x = np.exp(x) if skewed else x
        return (x + shift) * scale if apart else x, y

    return draw


def coded(features: int, *, numbers: bool = False) -> Draw:
    """Words coded as zeros and ones, five words a question; a rare class, or a number whose mean is far from zero."""

    def draw(chance: np.random.Generator, rows: int) -> tuple[Array, Array]:
        fixed = np.random.default_rng([features, int(numbers)])
        questions = features // 5
        often = fixed.dirichlet(np.full(5, 0.7), questions)
        words = np.stack([chance.choice(5, rows, p=each) for each in often], axis=1)
        x = (words[:, :, None] == np.arange(5)).reshape(rows, -1).astype(np.float64)
        slope = fixed.standard_normal(x.shape[1])
        score = (x - often.ravel()) @ slope
        score /= np.sqrt((often * (1 - often)).ravel() @ slope**2)
        if numbers:
            return x, np.clip(np.exp(0.5 * score + 0.6 * chance.standard_normal(rows)) / 10, 0, 1)
        return x, (2.5 * score + chance.logistic(size=rows) > 3.2).astype(np.int32)

    return draw


def line(features: int) -> Draw:
    """A number that depends on columns far from zero and of unlike scales."""

    def draw(chance: np.random.Generator, rows: int) -> tuple[Array, Array]:
        fixed = np.random.default_rng([features])
        slope = fixed.standard_normal(features) / np.sqrt(features)
        scale, shift = 10.0 ** fixed.uniform(-1, 2, features), fixed.uniform(-5, 5, features)
        x = chance.standard_normal((rows, features))
        y = x @ slope + 0.5 * chance.standard_normal(rows) + 2
        return (x + shift) * scale, np.clip(y / 6, 0, 1)

    return draw


def drawn(name: str, draw: Draw, *, devices: int, held: int, number: bool = False) -> Table:
    """A table with so many devices; public rows, a quarter as many but a hundred at least, tell the bounds."""
    rows = devices * held
    x, y = draw(np.random.default_rng([13, rows]), rows + TEST + max(100, rows // 4))
    public = x[rows + TEST :]
    bounds = public.min(axis=0), public.max(axis=0)
    return Table(name, name, x[:rows], y[:rows], x[rows : rows + TEST], y[rows : rows + TEST], bounds,
                 (0.0, 1.0) if number else None, devices=devices)  # fmt: skip


def public(name: str, devices: int) -> Table:
    """Public rows of a data set: three quarters on devices, the others to test on."""
    data = load(name, normalise="none")
    order = np.random.default_rng(13).permutation(len(data.y_public))
    x, y = data.x_public[order], data.y_public[order]
    rows = 3 * len(x) // 4 // devices * devices
    bounds = x.min(axis=0), x.max(axis=0)
    return Table(f"public-{name}", f"public rows of {name}", x[:rows], y[:rows], x[rows:], y[rows:], bounds,
                 devices=devices)  # fmt: skip


TABLES: tuple[Callable[[], Table], ...] = (
    lambda: drawn("2 classes, 30 columns", blobs(30, 2, 2.5), devices=40, held=10),
    lambda: drawn("3 classes, 10 columns", blobs(10, 3, 3.0), devices=12, held=10),
    lambda: drawn("3 classes, 64 skewed columns", blobs(64, 3, 3.0, skewed=True), devices=30, held=180),
    lambda: drawn("10 classes, 50 columns", blobs(50, 10, 4.5, apart=False), devices=200, held=50),
    lambda: drawn("2 classes, 100 coded columns", coded(100), devices=500, held=60),
    lambda: public("activity", 30),
    lambda: public("adult", 100),
    lambda: drawn("a number, 40 coded columns", coded(40, numbers=True), devices=500, held=60, number=True),
    lambda: drawn("a number, 10 columns", line(10), devices=40, held=20, number=True),
    lambda: drawn("a number, 20 columns", line(20), devices=100, held=20, number=True),
)
FORMS = (("sgd", False), ("sgd", True), ("admm", True), ("gram", True))
"""Protocols that are tried, alone or under masks."""
BEFORE = Rules(steepest=3.0, steps=20, most_steps=20, momentum_of_numbers=0.9, bias_of_numbers=False,
               constant_of_numbers=0.1, ridge_of_numbers=0.35)  # fmt: skip
OFTEN = replace(RULES, alone=300)
TRIED: Mapping[str, Rules] = {
    "in force": RULES,
    "before": BEFORE,
    "sgd in 20 rounds": replace(RULES, steps=20, most_steps=20),
    "sgd in 120 rounds": replace(RULES, steps=120),
    "sgd in 60 rounds, also for numbers": replace(RULES, most_steps=60),
    "sgd in up to 240 rounds for numbers": replace(RULES, most_steps=240),
    "admm in 60 rounds": replace(RULES, rounds=60),
    "often": OFTEN,
    "often, clip 0.7": replace(OFTEN, clip=0.7),
    "often, the other momenta": replace(OFTEN, momentum=0.8, momentum_of_numbers=0.9),
    "often, steepest 3": replace(OFTEN, steepest=3.0),
    "often, noise in a score 0.7": replace(OFTEN, in_a_score=0.7),
    "often, noise in a score 2.8": replace(OFTEN, in_a_score=2.8),
    "often, the other intercepts": replace(OFTEN, bias=True, bias_of_numbers=False),
    "often, a weak ridge": replace(OFTEN, constant_of_numbers=0.1, ridge_of_numbers=0.35),
}
"""The rules that are tried: those in force, those before them, other numbers of rounds, 300 check-ins alone, and single
changes of these."""
NEAR = 0.005
"""The rules in force stand while the mean regret of no others is less by more than this."""
WORST = -1.0
"""No R² counts as less than this: how bad a useless model is says nothing."""
KINDS = ("classes", "numbers")


def defaults(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """The mean regret of each set of rules: how far it stays below the best of all that were tried, case by case.

    A case is a table, a form and an epsilon. Quick: two small tables and two sets of rules.
    """
    count = trials or 1
    made = (TABLES[1], TABLES[-1]) if quick else TABLES
    tried = {name: TRIED[name] for name in (list(TRIED)[:2] if quick else TRIED)}
    forms = FORMS[1:2] if quick else FORMS
    parts = Parts(progress, len(made) * len(tried))
    regrets: dict[str, list[Array]] = {kind: [] for kind in KINDS}
    for make in made:
        table = make()
        kind = KINDS[table.target is not None]
        known: dict[Task, float] = {}  # most changes leave most tasks as they were
        found = np.array([
            [_score(table, tried[name], epsilon, form, count, known) for form in forms for epsilon in EPSILONS[kind]]
            for name in parts.each(tried, table.name + ", {}")
        ])  # fmt: skip
        regrets[kind].append(found.max(axis=0) - found)
    series: list[Series] = []
    claims: list[Claim] = []
    for kind in KINDS:
        mean = np.mean(np.concatenate(regrets[kind], axis=1), axis=1)
        series += [
            Series(f"{kind}-{name}".replace(", ", "-").replace(" ", "-"), name, (float(number),), numbers([value]),
                   privacy=PRICE[kind], panel=kind, marks=True)
            for number, (name, value) in enumerate(zip(tried, mean, strict=True))
        ]  # fmt: skip
        behind = float(mean[0] - mean.min())
        text = f"Labels are {kind}: the mean regret of no other rules is less by more than {NEAR}; ours is how much"
        claims.append(Claim(f"{kind}-stand", text, behind, behind <= NEAR))
        gain = float(mean[list(tried).index("before")] - mean[0])
        text = f"Labels are {kind}: the rules in force have less regret than those before; ours is how much"
        claims.append(Claim(f"{kind}-better", text, gain, gain > 0))
    panels = tuple(Panel(kind, f"Labels are {kind}", "rules, in the order of the table", "mean regret", priced=False)
                   for kind in KINDS)  # fmt: skip
    return Figure("ours/defaults", "How the default rules were found", "drawn tables, public rows", count,
                  tuple(series), tuple(claims), panels, (NOTE,), ends="mean regret")  # fmt: skip


NOTE = (
    "Regret is in accuracy, or in R² where labels are numbers, on rows that no device holds; R² below -1 counts as -1."
)
PRICE = {kind: PrivacyLabel(epsilon=max(epsilons), delta=1e-6) for kind, epsilons in EPSILONS.items()}


def _score(
    table: Table, rules: Rules, epsilon: float, form: tuple[str, bool], trials: int, known: dict[Task, float]
) -> float:
    """The accuracy or R² of one form at one price, by these rules."""
    name, masked = form
    plan = table.plan(trials, (epsilon,), [name], masked=masked, rules=rules)
    task = plan.cells[0].task
    if task not in known:
        known[task] = max(WORST, plan.run(plan.cells[0]).accuracy)
    return known[task]
