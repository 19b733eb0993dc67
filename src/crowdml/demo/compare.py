"""What the demo's crowd is compared with: the same samples in one place, alone on each device, and simulated crowds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml.datasets.populations import Population
from crowdml.demo.stages import Stage
from crowdml.protocols import gram, sgd
from crowdml.task import Task

__all__ = ["Compared", "Comparison", "Simulated", "comparing"]

LOOKED_AT = 20
"""Devices that learn alone, for the mean over them."""


@dataclass(frozen=True)
class Compared:
    """Accuracy of scikit-learn's regression, without privacy: in one place, and on some devices alone."""

    central: float
    alone: float
    chance: float


@dataclass(frozen=True)
class Simulated:
    """Accuracy [trials, points] of simulated crowds over cohorts [points]."""

    points: Any
    accuracy: Any

    @property
    def last(self) -> Any:
        return self.accuracy[:, -1]


@dataclass(frozen=True)
class Comparison:
    """All that stands beside the real crowd; the simulated ones where there are trials."""

    real: Compared
    masked: Simulated | None
    """The same crowd in the simulator: the spread that one run does not show."""
    unmasked: Simulated | None
    """The same price without masks: each device adds all of the noise itself."""


@contextmanager
def comparing(stage: Stage, seed: int, trials: int) -> Generator[Callable[[], Comparison]]:
    """Compute beside the crowd, in a process of its own that gives way to it; the result when it is asked for."""
    with multiprocessing.get_context("spawn").Pool(1, _give_way) as pool:
        asked = pool.apply_async(compare, (stage, seed, trials))
        yield asked.get


def _give_way() -> None:
    """An interrupt is for the demo, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)


def compare(stage: Stage, seed: int, trials: int) -> Comparison:
    real = _compare(stage)
    if not trials or stage.task.protocol["kind"] != "sgd":
        return Comparison(real, None, None)
    seeds = range(seed, seed + trials)
    return Comparison(real, simulate_masked(stage, seeds), simulate_unmasked(stage, seeds))


def simulate_masked(stage: Stage, seeds: Sequence[int]) -> Simulated:
    """The crowd of the demo, each time with other devices in other cohorts."""
    from crowdml.sim import cohorts

    points = range(stage.rounds + 1)
    runs = cohorts.run(
        stage.task, _holding(stage, stage.task.privacy.uses), seeds, rounds=stage.rounds, points=points, workers=1
    )
    return Simulated(runs[0].points, np.array([[stage.accuracy(each) for each in run.weights] for run in runs]))


def simulate_unmasked(stage: Stage, seeds: Sequence[int]) -> Simulated:
    """As many passes for the same epsilon, without masks; its step by the same public rule."""
    from crowdml.sim import compiled
    from crowdml.sim.schedule import lay_out
    from crowdml.sim.world import World

    task, devices = unmasked(stage.task), stage.devices
    uses = task.privacy.uses
    points = [devices * use for use in range(uses + 1)]
    found: list[list[float]] = []
    for seed in seeds:
        world = World(devices, stage.each * uses)
        schedule = lay_out(world, seed=seed, batch=stage.each, capacity=10 * stage.each)
        (run,) = compiled.run(task, _holding(stage, uses), [schedule], [seed], points=points, workers=1)
        found.append([stage.accuracy(each) for each in run.weights])
    return Simulated(np.asarray(points), np.array(found))


def unmasked(task: Task) -> Task:
    """The same task at the same price, with all of the noise on each device."""
    plain = replace(task, masking=None, privacy=replace(task.privacy, mechanism="discrete-gaussian", grid=None))
    c = Fraction(sgd.public_step(plain))
    return plain.with_(protocol={"step": {"schedule": "1/sqrt(t)", "c": c}})


def _holding(stage: Stage, passes: int) -> Any:
    from crowdml.sim.crowd import Holding

    counts = np.full(stage.devices, stage.each, np.int32)
    return Holding(stage.x, stage.y, Population("dealt", stage.rows.astype(np.int32), counts, 0), passes)


def _compare(stage: Stage) -> Compared:
    """A ridge on the same features for `gram`, and else a logistic regression."""
    from sklearn.linear_model import LogisticRegression, RidgeClassifier

    x, x_test = stage.x, stage.x_test
    if stage.task.protocol["kind"] == "gram":
        features = gram.plan(stage.task).map
        x, x_test = features(x), features(x_test)

    def score(rows: Any) -> float:
        """Of the only answer where there is one class."""
        y = stage.y[rows]
        if len(set(y.tolist())) < 2:
            return float((stage.y_test == y[0]).mean())
        plain = LogisticRegression(C=100.0, tol=1e-3, max_iter=300, fit_intercept=False)
        model: Any = RidgeClassifier(alpha=0.01) if stage.task.protocol["kind"] == "gram" else plain
        return float(model.fit(x[rows], y).score(x_test, stage.y_test))

    alone = [score(rows) for rows in stage.rows[:: max(1, stage.devices // LOOKED_AT)]]
    return Compared(score(stage.rows.reshape(-1)), sum(alone) / len(alone), stage.chance)
