"""Masked cohorts of `sgd` at a figure's size, and how their settings were chosen: on the public split alone (R4).

One device of a thousand holds sixty digits and gives all of them in each round it is in; a cohort's total makes one
step. Larger cohorts and more passes take turns: the noise of a sum does not grow with the cohort, so its share of the
mean falls, and every pass is charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, Population, blobs, load
from crowdml.experiments import baselines
from crowdml.experiments.crowds import DELTA, LARGE, Size, deals, trial_seed
from crowdml.experiments.figure import MAIN, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.registry import Progress
from crowdml.experiments.tuning import FOLDS, folds
from crowdml.protocol import quote
from crowdml.protocols import find
from crowdml.sim import cohorts
from crowdml.sim.crowd import Holding
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task

AROUND = (0.5, 1.0, 2.0)
NEAR = 0.01
"""A choice stands while nothing on its grid is better by more than this."""


@dataclass(frozen=True)
class MaskedChoice:
    """Step c / sqrt(t), devices in a cohort, and how often each sample serves; `epsilon` is paid in all of it."""

    c: float
    cohort: int
    uses: int


MNIST: Mapping[float, MaskedChoice] = {
    10.0: MaskedChoice(600.0, 100, 5),
    1.0: MaskedChoice(200.0, 200, 5),
    0.1: MaskedChoice(100.0, 1000, 3),
}
"""For a thousand devices with sixty digits each, by the sample's total epsilon at delta = 1e-6."""


def make_masked_task(data: Dataset, choice: MaskedChoice, *, epsilon: float, batch: int) -> Task:
    """Softmax by masked `sgd`. Every device of a cohort survives, and none of them colludes: `minimum` is all of it."""
    return Task(
        name=data.name,
        features=Features(data.features, Bound("l2")),
        labels=Labels(data.classes),
        model={"kind": "softmax"},
        protocol={
            "kind": "sgd",
            "batch": batch,
            "step": {"c": Fraction(repr(choice.c))},
            "radius": Fraction(repr(LARGE)),
        },
        privacy=Privacy("skellam", {"gradient": Fraction(repr(epsilon))}, DELTA, uses=choice.uses),
        masking=Masking(choice.cohort, choice.cohort),
    )


def masked_label(task: Task) -> PrivacyLabel:
    """The honest total of a sample over all its uses, against who sees the totals of cohorts."""
    total = quote(find(task), task).sample_epsilon(task.privacy.uses)
    return PrivacyLabel(epsilon=float(f"{total:.6g}"), delta=task.privacy.delta)


def learn_masked(task: Task, data: Dataset, size: Size, populations: list[Population] | None = None) -> Array:
    """The last weights of each trial, [T, d, c]."""
    populations = deals(data, size) if populations is None else populations

    def trial(number: int) -> Array:
        holding = Holding(data.x_train, data.y_train, populations[number], task.privacy.uses)
        (run,) = cohorts.run(task, holding, [trial_seed(size, number)], workers=1)
        return run.model

    with ThreadPoolExecutor(size.workers) as pool:
        return np.stack(list(pool.map(trial, range(size.trials))))


def public_errors(data: Dataset, choice: MaskedChoice, *, epsilon: float, size: Size) -> Array:
    """Error on the public fifth that a crowd of the other public rows has not seen, [FOLDS]."""
    public = replace(data, x_train=data.x_public, y_train=data.y_public)
    crowds, left_out = zip(*folds(data, size), strict=True)
    task = make_masked_task(data, choice, epsilon=epsilon, batch=crowds[0].rows.shape[1])
    weights = learn_masked(task, public, replace(size, trials=FOLDS), list(crowds))
    return np.stack([
        baselines.errors(each, data.x_public[rows], data.y_public[rows])
        for each, rows in zip(weights, left_out, strict=True)
    ])  # fmt: skip


def tuning(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """The grid of c again, on public rows; a quick run has one, on made-up data."""
    if quick:
        data, size = blobs(rows=2000, features=20, classes=3, seed=3, normalise="l2"), Size(devices=20, workers=1)
        table: Mapping[float, MaskedChoice] = {10.0: MaskedChoice(30.0, 10, 2)}
    else:
        data, size, table = load("mnist", normalise="l2"), Size(), MNIST
    curves: list[tuple[Series, float]] = []
    for number, (epsilon, choice) in enumerate(table.items()):
        progress(f"epsilon {epsilon:g}, on public rows", number, len(table))
        x = [float(f"{choice.c * factor:.3g}") for factor in AROUND]
        found = [public_errors(data, replace(choice, c=c), epsilon=epsilon, size=size) for c in x]
        held = len(data.y_train) // size.devices
        privacy = masked_label(make_masked_task(data, choice, epsilon=epsilon, batch=held))
        name = f"total ε = {epsilon:g}: cohorts of {choice.cohort}, {choice.uses} passes"
        key = f"masked-e{epsilon:g}"
        curves.append((over_trials(key, name, x, np.stack(found, axis=1), privacy, marks=True), choice.c))
    claims = tuple(
        Claim(
            f"{series.key}-stands",
            f"{series.name}: c = {chosen:g} is within {NEAR} of the best on its grid; ours is how far",
            None,
            series.y[series.x.index(chosen)] - min(series.y),
            series.y[series.x.index(chosen)] - min(series.y) <= NEAR,
        )
        for series, chosen in curves
    )
    title = "How the settings of masked cohorts were chosen"
    panels = (Panel(MAIN, "On the public split, five folds", "c", "error on public rows", "log", y_range=(0, 1)),)
    notes = ("Cohort and passes came from coarser grids by the same function: 25 to 1,000 devices, 1 to 20 passes.",)
    shown = tuple(series for series, _ in curves)
    source = "synthetic" if quick else "mnist"
    return Figure(
        "ours/masked-tuning", title, source, FOLDS, shown, claims, panels, notes, ends="error at the largest c"
    )
