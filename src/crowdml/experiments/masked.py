"""Masked cohorts of `sgd` at a figure's size, and how their settings were chosen: on digits drawn by code (R4).

Each of 996 devices holds sixty digits and gives all of them in each round it is in; a cohort's total makes one
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
from crowdml.experiments.crowds import DELTA, Choice, Size, deals, devices_for, make_task, trial_seed
from crowdml.experiments.figure import MAIN, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.registry import Progress
from crowdml.experiments.tuning import FOLDS, trial_crowds
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, meet
from crowdml.task import Masking, Privacy, Task

AROUND = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class MaskedChoice:
    """Step c / sqrt(t), devices in a cohort, and how often each sample serves; `epsilon` is paid in all of it."""

    c: float
    cohort: int
    uses: int


MNIST: Mapping[float, MaskedChoice] = {
    10.0: MaskedChoice(1200.0, 100, 10),
    1.0: MaskedChoice(800.0, 996, 20),
    0.1: MaskedChoice(100.0, 996, 10),
}
"""For 996 devices with sixty digits each, by the sample's total epsilon at delta = 1e-6."""


def make_masked_task(data: Dataset, choice: MaskedChoice, *, epsilon: float, batch: int) -> Task:
    """Softmax by masked `sgd`. Every device of a cohort survives, and none of them colludes: `minimum` is all of it."""
    privacy = Privacy("skellam", {"gradient": Fraction(repr(epsilon))}, DELTA, uses=choice.uses)
    plain = make_task(data, Choice(choice.c, batch), epsilon=None)
    return replace(plain, privacy=privacy, masking=Masking(choice.cohort, choice.cohort))


def masked_label(task: Task) -> PrivacyLabel:
    """The honest total of a sample over all its uses, against who sees the totals of cohorts."""
    total = Price.of(find(task), task).sample_epsilon(task.privacy.uses)
    return PrivacyLabel(epsilon=float(f"{total:.6g}"), delta=task.privacy.delta)


def learn_masked(task: Task, data: Dataset, size: Size, populations: list[Population] | None = None) -> Array:
    """The last weights of each trial, [T, d, c]."""
    populations = deals(data, size) if populations is None else populations

    def trial(number: int) -> Array:
        holding = Holding(data.x_train, data.y_train, populations[number], task.privacy.uses)
        seed = trial_seed(size, number)
        (run,) = compiled.run(task, holding, [meet(task, holding, seed)], [seed])
        return run.model

    with ThreadPoolExecutor(size.workers) as pool:
        return np.stack(list(pool.map(trial, range(size.trials))))


def trial_errors(data: Dataset, choice: MaskedChoice, *, epsilon: float, size: Size) -> Array:
    """Error of each of the `trial_crowds`, [FOLDS]."""
    crowd, tried = trial_crowds(data, size)
    populations = [trial.population for trial in tried]
    task = make_masked_task(data, choice, epsilon=epsilon, batch=populations[0].rows.shape[1])
    weights = learn_masked(task, crowd, replace(size, trials=FOLDS), populations)
    return np.stack([baselines.errors(each, trial.x, trial.y) for each, trial in zip(weights, tried, strict=True)])


def tuning(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """The grid of c again, on drawn digits; a quick run has one, on made-up data."""
    if quick:
        data, size = blobs(rows=2000, features=20, classes=3, seed=3, normalise="l2"), Size(devices=20, workers=1)
        table: Mapping[float, MaskedChoice] = {10.0: MaskedChoice(30.0, 10, 2)}
    else:
        data, table = load("mnist", normalise="l2"), MNIST
        size = Size(devices=devices_for(data, Size().devices))
    curves: list[tuple[Series, float]] = []
    for number, (epsilon, choice) in enumerate(table.items()):
        progress(f"epsilon {epsilon:g}, on drawn digits", number, len(table))
        x = [float(f"{choice.c * factor:.3g}") for factor in AROUND]
        found = [trial_errors(data, replace(choice, c=c), epsilon=epsilon, size=size) for c in x]
        held = len(data.y_train) // size.devices
        privacy = masked_label(make_masked_task(data, choice, epsilon=epsilon, batch=held))
        name = f"total ε = {epsilon:g}: cohorts of {choice.cohort}, {choice.uses} passes"
        key = f"masked-e{epsilon:g}"
        curves.append((over_trials(key, name, x, np.stack(found, axis=1), privacy, marks=True), choice.c))
    claims = tuple(Claim.stands(series, chosen, f"c = {chosen:g}") for series, chosen in curves)
    title = "How the settings of masked cohorts were chosen"
    panels = (
        Panel(MAIN, "On digits drawn by code, five crowds", "c", "error on other drawings", "log", y_range=(0, 1)),
    )
    notes = ("Cohort and passes came from coarser grids by the same function: 25 to 996 devices, 1 to 20 passes.",)
    shown = tuple(series for series, _ in curves)
    source = "synthetic" if quick else "drawn-digits"
    return Figure(
        "ours/masked-tuning", title, source, FOLDS, shown, claims, panels, notes, ends="error at the largest c"
    )
