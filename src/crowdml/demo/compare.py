"""What the demo's crowd is compared with: the same digits in one place, alone on each device, and simulated crowds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crowdml.datasets import load
from crowdml.datasets.populations import Population, iid
from crowdml.demo.digits import Digits, deal
from crowdml.features import normalise
from crowdml.task import Task

__all__ = ["Compared", "Comparison", "Simulated", "comparing"]

TEN_DEVICES = 47


@dataclass(frozen=True)
class Compared:
    """Accuracy of scikit-learn's softmax regression, without privacy: in one place, and on each device alone."""

    central: float
    alone: float
    alone_evenly: float
    """The same if the digits were dealt out without regard to their kind."""
    chance: float


@dataclass(frozen=True)
class Simulated:
    """Accuracy [trials, points] of simulated crowds over check-ins [points], and the dearest totals."""

    points: Any
    accuracy: Any
    devices: int
    each: int
    epsilon_sample: float
    epsilon_device: float
    compared: Compared

    @property
    def last(self) -> Any:
        return self.accuracy[:, -1]


@dataclass(frozen=True)
class Comparison:
    """All that stands beside the real crowd; the simulated ones where there are trials."""

    real: Compared
    three: Simulated | None
    ten: Simulated | None


@contextmanager
def comparing(
    task: Task, ten: Task, devices: int, each: int, seed: int, trials: int
) -> Generator[Callable[[], Comparison]]:
    """Compute beside the crowd, in a process of its own that gives way to it; the result when it is asked for."""
    with multiprocessing.get_context("spawn").Pool(1, _give_way) as pool:
        asked = pool.apply_async(compare, (task, ten, devices, each, seed, trials))
        yield asked.get


def _give_way() -> None:
    """An interrupt is for the demo, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)


def compare(task: Task, ten: Task, devices: int, each: int, seed: int, trials: int) -> Comparison:
    """`each` digits are what a device gives: more than those it does not have."""
    digits, seeds = deal(task, devices, each, seed), range(seed, seed + trials)
    even = iid(len(digits.y), devices, seed)
    real = _compare(digits.x, digits.y, digits.x_test, digits.y_test, digits.population, even, each)
    if not trials:
        return Comparison(real, None, None)
    return Comparison(real, simulate_demo(task, digits, seeds, real), simulate_ten(ten, seeds))


def simulate_demo(task: Task, digits: Digits, seeds: Sequence[int], compared: Compared) -> Simulated:
    """The crowd of the demo, in the simulator: the spread that one run does not show."""
    from crowdml.sim.estimator import simulate, spread_out

    devices = digits.population.devices
    study = simulate(
        task, digits.x, digits.y, lambda seed: spread_out("by_class", digits.y, devices, seed), seeds=seeds
    )
    return _simulated(study, study.accuracy(digits.x_test, digits.y_test), compared)


def simulate_ten(task: Task, seeds: Sequence[int]) -> Simulated:
    """All ten digits at the same price: more to learn from no more digits of a kind."""
    from crowdml.sim.estimator import simulate, spread_out

    data = load("digits", normalise="none")
    x, x_test = normalise(data.x_train - 0.5, "l2"), normalise(data.x_test - 0.5, "l2")
    study = simulate(
        task, x, data.y_train, lambda seed: spread_out("by_class", data.y_train, TEN_DEVICES, seed), seeds=seeds
    )
    even = spread_out("iid", data.y_train, TEN_DEVICES, seeds[0])
    each = int(study.population.rows.shape[1])
    compared = _compare(x, data.y_train, x_test, data.y_test, study.population, even, each)
    return _simulated(study, study.accuracy(x_test, data.y_test), compared)


def _simulated(study: Any, accuracy: Any, compared: Compared) -> Simulated:
    population = study.population
    return Simulated(
        study.points,
        accuracy,
        population.devices,
        int(population.rows.shape[1]),
        study.cost.epsilon_sample,
        study.cost.epsilon_device,
        compared,
    )


def _compare(x: Any, y: Any, x_test: Any, y_test: Any, dealt: Population, even: Population, each: int) -> Compared:
    def alone(population: Population) -> float:
        held = [population.held_by(device)[:each] for device in range(population.devices)]
        return sum(_score(x[rows], y[rows], x_test, y_test) for rows in held) / len(held)

    return Compared(_score(x, y, x_test, y_test), alone(dealt), alone(even), 1 / len(set(y_test.tolist())))


def _score(x: Any, y: Any, x_test: Any, y_test: Any) -> float:
    """Of the only answer where there is one class."""
    from sklearn.linear_model import LogisticRegression

    if len(set(y.tolist())) < 2:
        return float((y_test == y[0]).mean())
    return float(
        LogisticRegression(C=100.0, tol=1e-3, max_iter=300, fit_intercept=False).fit(x, y).score(x_test, y_test)
    )
