"""Crowds of a figure's size: the task, the trials, and the model's error along the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, Population, iid
from crowdml.experiments.baselines import errors, public_only
from crowdml.experiments.figure import PrivacyLabel, Series, level_at
from crowdml.models import Model
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.protocols.sgd import claimed_epsilon, plan
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, Schedule, lay_out, refuse_repeats
from crowdml.sim.world import Delay, World
from crowdml.task import Bound, Features, Labels, Privacy, Task

LARGE = 1e5
"""The paper's "ball of some large radius R": far beyond any weights that a run reaches."""
DELTA = 1e-6


@dataclass(frozen=True)
class Size:
    """How large an experiment is: the paper's own, or a quick one."""

    devices: int = 1000
    passes: int = 5
    trials: int = 10
    looks: int = 30
    seed: int = 2015
    workers: int = 2
    """Trials at once. Two threads that start together compile the same loop twice, so a quick run has one."""


@dataclass(frozen=True)
class Choice:
    """The hyper-parameters of one run: step c / sqrt(t), the ball's radius, the batch."""

    c: float
    batch: int
    radius: float = LARGE


def make_task(
    data: Dataset, choice: Choice, *, epsilon: float | None, mechanism: str = "none", as_published: bool = False
) -> Task:
    """Softmax by `sgd` on this data; `epsilon` is a sample's cost in one check-in. Counts do not leave: nobody reads
    them in these figures (the paper's Remark 1 makes their share negligible).
    """
    return Task(
        name=data.name,
        features=Features(data.features, Bound("l1" if mechanism == "discrete-laplace" else "l2")),
        labels=Labels(data.classes),
        model={"kind": "softmax"},
        protocol={
            "kind": "sgd",
            "batch": choice.batch,
            "step": {"c": _exactly(choice.c)},
            "radius": _exactly(choice.radius),
        },
        privacy=Privacy(mechanism, {} if epsilon is None else {"gradient": _exactly(epsilon)}, DELTA),
        as_published=as_published,
    )


def label(
    task: Task, *, passes: int = 1, as_published: bool = False, not_covered: tuple[str, ...] = ()
) -> PrivacyLabel:
    """The honest total after every sample was used in `passes` check-ins, and what the paper claims for any number.

    A label that says delta = 0 has the pure total: a conversion at some delta above 0 can be less, and is not pure.
    """
    if task.privacy.mechanism == "none":
        return PrivacyLabel(as_published=as_published, not_covered=not_covered)
    delta = 0.0 if task.privacy.mechanism == "discrete-laplace" else task.privacy.delta
    total = replace(Price.of(find(task), task), delta=delta).sample_epsilon(passes)
    return PrivacyLabel(
        epsilon=math.ceil(total * 1e6 - 1e-3) / 1e6,  # a pure total is exact, and a float of it is not
        claimed=claimed_epsilon(task) if as_published else None,
        delta=delta,
        as_published=as_published,
        not_covered=not_covered,
    )


@dataclass(frozen=True)
class Curves:
    """Models of several trials: samples [E] used by the whole crowd, weights [T, E, d, c]."""

    samples: Array
    weights: Array
    schedules: tuple[Schedule, ...]

    def errors(self, x: Array, y: Array) -> Array:
        """[T, E]"""
        return errors(self.weights, x, y)


def learn(
    task: Task,
    data: Dataset,
    size: Size,
    *,
    delay: float = 0.0,
    early: bool = False,
    populations: list[Population] | None = None,
) -> Curves:
    """Trials of a crowd that holds the training rows, dealt out anew in each, or as `populations` say.

    Delays are uniform on [0, delay] for request, check-out and check-in, in samples of the whole crowd: the paper's tau
    in units of Delta.

    Models are looked at after equal stretches of check-ins; with `early`, ten times as often in the first one.
    """
    populations = deals(data, size) if populations is None else populations
    held = populations[0].rows.shape[1]
    leg = Delay("uniform", delay)
    world = World(size.devices, held * size.passes, request=leg, check_out=leg, check_in=leg)
    settings = plan(task).settings
    points = looks(size.devices * (held * size.passes // settings.batch), size.looks, early=early)

    def trial(number: int) -> tuple[Schedule, Array]:
        """Laying out is Python and the loop is not, so two threads keep two cores busy."""
        seed = trial_seed(size, number)
        schedule = lay_out(world, seed=seed, batch=settings.batch, capacity=find(task).capacity(task))
        refuse_repeats(schedule, batch=settings.batch, capacity=find(task).capacity(task), passes=size.passes)
        holding = Holding(data.x_train, data.y_train, populations[number], size.passes)
        (run,) = compiled.run(task, holding, [schedule], [seed], points=points, workers=1)
        # Points beyond the last check-in (samples that met a full buffer) show the last model.
        last = np.searchsorted(run.points, np.minimum(points, len(schedule)))
        return schedule, run.weights[last]

    with ThreadPoolExecutor(size.workers) as pool:
        schedules, weights = zip(*pool.map(trial, range(size.trials)), strict=True)
    return Curves(np.asarray(points) * settings.batch, np.stack(weights), schedules)


def devices_for(data: Dataset, most: int) -> int:
    """As many devices as share the rows evenly: 996 of at most 1,000 for MNIST's 59,760, with 60 rows each."""
    return len(data.y_train) // math.ceil(len(data.y_train) / most)


def public_line(model: Model, data: Dataset, x: Sequence[float], panel: str, *, right: bool = True) -> Series:
    """`public-only`: the accuracy, or without `right` the error, of the same model from the public rows alone."""
    error = public_only(model, data)
    name = f"the {len(data.y_public)} public rows alone"
    return level_at(1 - error if right else error, "public-only", name, x, PrivacyLabel(silent=True), panel)


def trial_seed(size: Size, trial: int) -> int:
    """A seed for each trial."""
    return size.seed + 1_000_003 * trial


def deals(data: Dataset, size: Size) -> list[Population]:
    """Each trial's deal of the training rows to the devices."""
    return [iid(len(data.y_train), size.devices, trial_seed(size, trial)) for trial in range(size.trials)]


def looks(check_ins: int, count: int, *, early: bool = False) -> list[int]:
    """After how many check-ins the model is looked at: equal stretches, since each length is compiled once."""
    part = max(1, check_ins // count)
    first = [part // 10 * step for step in range(1, 10)] if early and part >= 10 and part % 10 == 0 else []
    return [*first, *(part * step for step in range(1, check_ins // part + 1))]


def six_digits(number: float) -> Fraction:
    """A setting of a task that was computed, as people would write it."""
    return Fraction(f"{number:.6g}")


def _exactly(number: float) -> Fraction:
    """The decimal that was written, not the float behind it."""
    return Fraction(repr(float(number)))
