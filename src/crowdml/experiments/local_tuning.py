"""How the settings of networks under `local_updates` were chosen: on crowds of digits drawn by code (review, R4).

Half, one and two times each setting of every choice in `frontiers.CROWDS` and `hamm2017.SOUND_CHOICES`, one setting at
a time, by a crowd of the figure's size that holds drawn digits; 10,000 other drawings tell the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, iid
from crowdml.experiments import hamm2017
from crowdml.experiments.drawn import drawn_crowd
from crowdml.experiments.figure import MAIN, Claim, Figure, Panel, Series, over_trials
from crowdml.experiments.frontiers import (
    CROWDS,
    QUICK,
    FrontierCrowd,
    device_label,
    learn_local,
    make_local_task,
    model_errors,
    rows_of,
)
from crowdml.experiments.registry import Progress
from crowdml.sim.layout import Holding
from crowdml.task import Task

AROUND = (0.5, 1.0, 2.0)
AXES = {
    MAIN: "server's step",
    "rounds": "number of rounds",
    "steps": "number of local steps",
    "rate": "local rate",
    "clip": "clip",
}
"""The settings that are tried, and the panel of each."""


@dataclass(frozen=True)
class Tried:
    """One choice, and how a task is made with its settings or others."""

    key: str
    name: str
    choice: Any
    make: Callable[[Any], Task]

    def varied(self, axis: str, factor: float) -> Any:
        """The choice with one setting multiplied by `factor`."""
        value = self.choice.server_rate if axis == MAIN else getattr(self.choice, axis)
        other = max(1, int(value * factor)) if isinstance(value, int) else value * factor
        if axis == "clip":
            return replace(self.choice, clip=other, server_rate=self.choice.server_rate / factor)
        return replace(self.choice, **{"server_rate" if axis == MAIN else axis: other})


def choices(data: Dataset, crowds: Mapping[str, FrontierCrowd]) -> Iterator[Tried]:
    """The choices of these crowds. One that serves several epsilons is tried at the least and the largest of them."""
    for name, crowd in crowds.items():
        for epsilon, choice in crowd.choices.items():
            served = [other for other, its in crowd.choices.items() if its == choice]
            if epsilon not in (min(served), max(served)):
                continue
            make = partial(make_local_task, data, epsilon=epsilon, devices=crowd.devices, held=crowd.held)
            words = f"{crowd.devices:,} devices, ε = {epsilon:g}, {choice.rounds} rounds"
            yield Tried(f"{name}-e{epsilon:g}", words, choice, make)


def deeper_choices(data: Dataset) -> Iterator[Tried]:
    """The choices of the network of `hamm2017/fig2`."""
    crowd = CROWDS["mnist-996"]
    size: dict[str, Any] = {"devices": crowd.devices, "held": crowd.held, "hidden": hamm2017.HIDDEN}
    for epsilon, choice in hamm2017.SOUND_CHOICES.items():
        make = partial(hamm2017.sound_task, data, epsilon=epsilon, **size)
        words = f"the network of hamm2017/fig2, ε = {epsilon:g}, {choice.rounds} rounds"
        yield Tried(f"hamm2017-e{epsilon:g}", words, choice, make)


def accuracies(data: Dataset, task: Task, trials: int) -> Array:
    """[T]: on test rows."""
    assert task.masking is not None
    population = iid(len(data.y_train), task.masking.cohort, 2026)
    weights = learn_local(task, Holding(data.x_train, data.y_train, population, task.privacy.uses), trials)
    return 1 - model_errors(task, weights, data)


def around(data: Dataset, tried: Tried, axes: Sequence[str], trials: int) -> Iterator[Series]:
    """The accuracy around a choice, setting by setting."""
    privacy = device_label(tried.make(tried.choice))
    chosen = accuracies(data, tried.make(tried.choice), trials)
    for axis in axes:
        settings = [tried.varied(axis, factor) for factor in AROUND]
        found = [chosen if each == tried.choice else accuracies(data, tried.make(each), trials) for each in settings]
        key = tried.key if axis == MAIN else f"{tried.key}-{axis}"
        yield over_trials(key, tried.name, AROUND, np.stack(found, axis=1), privacy, panel=axis, marks=True)


def tuning(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """`ours/local-tuning`: does every choice still stand? A quick run looks at one setting, on made-up data."""
    count = trials or 1
    if quick:
        data, _ = rows_of("synthetic-200", QUICK)
        listed = list(choices(data, {"synthetic-200": QUICK}))
    else:
        data = drawn_crowd("mnist", "l2")
        digits = {name: crowd for name, crowd in CROWDS.items() if name.startswith("mnist")}
        listed = [*choices(data, digits), *deeper_choices(data)]
    axes = (MAIN,) if quick else tuple(AXES)
    series: list[Series] = []
    for number, tried in enumerate(listed):
        progress(tried.name, number, len(listed))
        series += around(data, tried, axes, count)
    claims = tuple(Claim.stands(each, 1.0, f"the chosen {AXES[each.panel]}", right=True) for each in series)
    panels = tuple(
        Panel(
            axis,
            f"The {AXES[axis]}",
            "times the chosen value",
            "accuracy on other drawings",
            "log",
            priced=False,
            x_ticks=AROUND,
        )
        for axis in axes
    )
    notes = (
        "One setting at a time, around the choice: nothing that a device holds and no test image was looked at. Where "
        "the clip is larger, the server's step is as much smaller.",
    )
    return Figure(
        "ours/local-tuning", "How the settings of networks that protect devices were chosen", data.name, count,
        tuple(series), claims, panels, notes, ends="accuracy at twice the value",
    )  # fmt: skip
