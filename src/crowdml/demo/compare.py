"""What the demo's crowd is compared with: the same samples in one place, alone on each device, and simulated crowds."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from crowdml.demo.stages import Stage
from crowdml.protocols import find
from crowdml.sim.workers import workers

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

    @property
    def interval(self) -> tuple[float, float]:
        """Where nine of ten runs end: of n trials, the quantiles that a further one is outside of once in ten times."""
        low, high = np.quantile(self.last, [0.05, 0.95], method="weibull")
        return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """All that stands beside the real crowd; the simulated ones where there are trials."""

    real: Compared
    masked: Simulated | None
    """This crowd in the simulator: the spread that one run does not show."""
    unmasked: Simulated | None
    """The simulator at the same price without masks: each device adds all of the noise itself."""
    honest: Simulated | None = None
    """Where some devices lie: the others alone in the simulator, by the same rule."""


def beside() -> AbstractContextManager[ProcessPoolExecutor]:
    """A process that computes beside the crowd, and gives way to it."""
    return workers(1, "what the crowd is compared with", _give_way)


def _give_way() -> None:
    """An interrupt is for the demo, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)


def compare(stage: Stage, seed: int, trials: int) -> Comparison:
    """All but the simulated crowds under masks: they need the pace of the real one."""
    real = compare_real(stage)
    if trials and stage.lies:
        from crowdml.demo.simulated import simulate_honest

        return Comparison(real, None, None, simulate_honest(stage, seed, trials))
    if not trials or not stage.simulated:
        return Comparison(real, None, None)
    from crowdml.demo.simulated import simulate_unmasked

    return Comparison(real, None, simulate_unmasked(stage, range(seed, seed + trials)))


def simulate(stage: Stage, seconds: float, seed: int, trials: int, took: Sequence[float]) -> Simulated | None:
    """The crowd of the demo in the simulator, as fast as the real one, whose rounds `took` so many seconds. None where
    the demo simulates none."""
    from crowdml.demo.simulated import simulate_masked

    if not trials or not stage.simulated:
        return None
    return simulate_masked(stage, seconds, seed, trials, took)


def compare_real(stage: Stage) -> Compared:
    """A ridge on the same features for tasks that solve one, and else a logistic regression."""
    from sklearn.linear_model import LogisticRegression, RidgeClassifier

    x, x_test = stage.x, stage.x_test
    regression = find(stage.task).regression
    is_solved = regression is not None
    if regression is not None:
        x, x_test = (regression(stage.task).features(rows) for rows in (x, x_test))

    def score(rows: Any) -> float:
        """Accuracy of the only answer where there is one class."""
        y = stage.y[rows]
        if len(set(y.tolist())) < 2:
            return float((stage.y_test == y[0]).mean())
        plain = LogisticRegression(C=100.0, tol=1e-3, max_iter=300, fit_intercept=False)
        model: Any = RidgeClassifier(alpha=0.01) if is_solved else plain
        return float(model.fit(x[rows], y).score(x_test, stage.y_test))

    alone = [score(rows) for rows in stage.rows[:: max(1, stage.devices // LOOKED_AT)]]
    return Compared(score(stage.rows.reshape(-1)), sum(alone) / len(alone), stage.chance)
