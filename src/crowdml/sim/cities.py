"""A city of devices that teach each other: the exchange by the event engine, and what each device makes of it.

What a device learns at the end it learns by itself, so that part runs on as many processes as are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from crowdml.arrays import Array, finite_samples
from crowdml.datasets.populations import Population
from crowdml.features.bounds import prepared
from crowdml.features.series import label, look_ahead
from crowdml.models.clusters import Voters, predict
from crowdml.protocol import Kept, Protocol
from crowdml.protocols import find
from crowdml.sim import events
from crowdml.sim import workers as processes
from crowdml.sim.events import Exchanged
from crowdml.sim.layout import Holding
from crowdml.sim.run import Tick
from crowdml.task import Task

__all__ = ["City", "commonest", "exchange", "learn", "right", "samples", "simulate"]


@dataclass(frozen=True)
class City(Exchanged):
    """What came of it."""

    kept: tuple[Kept, ...] = ()
    """Each device's own windows and labels, which never leave it."""
    voters: tuple[Voters | None, ...] = ()
    """What each device learned; None where it gave no batch."""


def simulate(
    task: Task, values: Array, *, seed: int, workers: int = 1, tick: Tick = lambda _: None, **settings: Any
) -> City:
    """Exchange, then learn: values [places, n], the readings of each place in the order of the task's list.

    `settings` are those of `events.exchange`. A device that leaves learns from what it has until then.
    """
    city = exchange(task, values, seed=seed, tick=tick, **settings)
    voters = learn(task, city.states, city.kept, seed=seed, workers=workers, tick=tick)
    return replace(city, voters=voters)


def exchange(task: Task, values: Array, **settings: Any) -> City:
    """Every full batch of windows of every device, said, counted, relayed and heard (`events.exchange`)."""
    cut = [samples(task, each) for each in values]
    counts = np.array([len(y) for _, y in cut], np.int32)
    starts = np.cumsum(counts) - counts
    rows = (starts[:, None] + np.minimum(np.arange(counts.max(initial=1)), counts[:, None] - 1)).astype(np.int32)
    holding = Holding(
        np.concatenate([x for x, _ in cut]), np.concatenate([y for _, y in cut]), Population("places", rows, counts, 0)
    )
    told = events.exchange(task, holding, **settings)
    kept = tuple(_kept(task, find(task), *one, int(given)) for one, given in zip(cut, told.check_ins, strict=True))
    return City(**vars(told), kept=kept)


def samples(task: Task, values: Array) -> tuple[Array, Array]:
    """The windows [m, w] and labels [m] that a device cuts from its readings [n]."""
    features = task.features
    x, target = look_ahead(values, features.dimension, features.horizon)
    y = label(target, [float(edge) for edge in task.labels.bins])
    return prepared(features, finite_samples(x, y).x), y


def learn(
    task: Task, states: Sequence[Any], kept: Sequence[Kept], *, seed: int, workers: int = 1, tick: Tick = lambda _: None
) -> tuple[Voters | None, ...]:
    """What each device learns for itself, from what it heard and its own windows. Deterministic, however many work."""
    each = partial(_learn_one, task, seed)
    work = list(zip(range(len(states)), states, kept, strict=True))
    found: list[Voters | None] = []
    if workers == 1:
        for one in work:
            found.append(each(one))
            tick(1)
        return tuple(found)
    with processes.workers(workers, "what each device of the city learns") as pool:
        for voters in pool.map(each, work, chunksize=max(1, min(16, len(work) // (2 * workers)))):
            found.append(voters)
            tick(1)
    return tuple(found)


def right(task: Task, voters: Sequence[Voters | None], values: Array) -> Array:
    """The share of labels that each device predicts, [places], on readings [places, m] that it has not seen.

    NaN of a device that learned nothing.
    """
    shares: list[float] = []
    for one, readings in zip(voters, values, strict=True):
        x, y = samples(task, readings)
        shares.append(np.nan if one is None else float((predict(one, x) == y).mean()))
    return np.array(shares)


def commonest(task: Task, learned: Array, values: Array) -> Array:
    """The share of labels that each device's commonest label predicts, [places]: a baseline for `right`."""
    shares: list[float] = []
    for before, readings in zip(learned, values, strict=True):
        (_, seen), (_, y) = samples(task, before), samples(task, readings)
        shares.append(float((y == np.bincount(seen).argmax()).mean()))
    return np.array(shares)


def _learn_one(task: Task, seed: int, one: tuple[int, Any, Kept]) -> Voters | None:
    place, state, kept = one
    learner = find(task).learn
    return learner(task, state, kept, seed + place) if learner is not None and len(kept.numbers) else None


def _kept(task: Task, protocol: Protocol, x: Array, y: Array, given: int) -> Kept:
    """The samples of the last batches that a device gave, as many as it keeps."""
    batch = protocol.batch(task)
    first = max(0, given - protocol.keeps(task))
    those = slice(first * batch, given * batch)
    return Kept(x[those].reshape(-1, batch, x.shape[1]), y[those].reshape(-1, batch), np.arange(first, given))
