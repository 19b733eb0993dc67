"""A crowd that only counts labels: every batch through the devices' own handlers and doors, one after the other.

Under masks cohorts are laid out as for any masked task (`sim/uncompiled.py`), and the pads, which cancel, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from crowdml.arrays import Array, Integers, Samples
from crowdml.datasets import Population
from crowdml.errors import DataError, TaskError
from crowdml.messages import SERVER
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, Noisy, advance
from crowdml.protocols import find
from crowdml.sim import uncompiled
from crowdml.sim.cohorts import lay_out
from crowdml.sim.crowd import Holding, published, stops, turn
from crowdml.task import Task

__all__ = ["Counts", "counts", "held", "turns"]


@dataclass(frozen=True)
class Counts:
    """What came of one crowd."""

    noisy: Noisy
    """The crowd's noisy counts, and the variance of their noise."""
    true: Integers
    """[classes]: how often each label occurred among the samples of those counts. Nobody has it but the simulator."""
    trips: Integers
    """[devices]: check-ins that each made and paid for."""
    sums: int
    """Check-ins that were counted, or under masks cohorts that were added up."""


def held(task: Task, x: Array, y: Array, population: Population) -> Holding:
    """What devices give: no more samples than `privacy.budget.samples`."""
    batch, budget = find(task).batch(task), task.privacy.budget
    most = population.counts if budget is None else np.minimum(population.counts, budget.samples)
    largest = int(most.max(initial=0))
    if largest < batch:
        raise DataError(
            f"a check-in takes {batch} samples and each of {population.devices} devices gives {largest} at most, "
            "so nobody would check in. Use fewer devices, or lower protocol.batch."
        )
    return Holding(x, y, replace(population, counts=most.astype(np.int32)))


def turns(task: Task, holding: Holding, seed: int, dropout: float = 0.0) -> int:
    """How many check-ins there may be, or rounds under masks."""
    if task.masking is None:
        return int((np.asarray(holding.counts) // find(task).batch(task)).sum())
    return len(lay_out(task, holding, seed, dropout=dropout))


def counts(
    task: Task,
    holding: Holding,
    seed: int,
    *,
    dropout: float = 0.0,
    noise: bool = True,
    tick: Callable[[int], None] = lambda _: None,
) -> Counts:
    """Every whole batch that devices hold, counted once. Raises `TaskError` for a task that learns more than counts."""
    if task.model["kind"] != "histogram":
        raise TaskError(f'model.kind = {task.model["kind"]!r}: only a "histogram" is counted here.')
    state, told, trips, sums = (_masked if task.masking is not None else _one_by_one)(
        task, holding, seed, dropout, noise, tick
    )
    tally = find(task).progress(task, state)
    assert tally is not None
    assert tally.labels is not None
    true = np.bincount(np.asarray(holding.y)[told], minlength=task.classes or 0)
    return Counts(tally.labels, true, trips, sums)


_Told = tuple[object, Array, Integers, int]
"""The server's state, the rows that are in it, check-ins by device, and how many were added up."""


def _one_by_one(
    task: Task, holding: Holding, seed: int, dropout: float, noise: bool, tick: Callable[[int], None]
) -> _Told:
    """Devices take turns, batch after batch, until their samples or the task's steps are used up."""
    protocol, batch = find(task), find(task).batch(task)
    if dropout:
        raise TaskError(f"dropout = {dropout:g}: task {task.name!r} is not masked, and has no cohorts to vanish from.")
    start = protocol.server.start(task, Context(me=SERVER))
    state, offered = start.state, published(start)
    trips = np.zeros(holding.devices, np.int64)
    most = np.asarray(holding.counts) // batch
    told: list[Array] = []
    for trip in range(int(most.max(initial=0))):
        for device in np.flatnonzero(most > trip):
            rows = holding.rows(device, trip * batch + np.arange(batch))
            source = SeededSource(stream(seed, device, trip)) if noise else Silence()
            samples = Samples(holding.x[rows], holding.y[rows])
            said, _ = turn(protocol, task, samples, offered, source, me=int(device), trip=trip)
            step = advance(protocol.server, task, state, said, Context(me=SERVER))
            state, offered = step.state, published(step)
            trips[device] += 1
            told.append(rows)
            tick(1)
            if any(stop.when is None or bool(stop.when) for stop in stops(step)):
                return state, np.concatenate(told), trips, len(told)
    return state, np.concatenate(told) if told else np.zeros(0, np.int64), trips, len(told)


def _masked(task: Task, holding: Holding, seed: int, dropout: float, noise: bool, tick: Callable[[int], None]) -> _Told:
    """In cohorts; who vanished has paid, and is in no sum."""
    batch, masking = find(task).batch(task), task.masking
    assert masking is not None
    run = uncompiled.run(task, holding, seed, dropout=dropout, noise=noise, tick=tick)
    laid = lay_out(task, holding, seed, dropout=dropout)
    rounds = int(run.schedule.version.max(initial=-1)) + 1
    summed = [number for number in range(rounds) if int(laid.alive[number].sum()) >= masking.minimum]
    told = [
        holding.rows(laid.device[number, place], laid.first[number, place] + np.arange(batch))
        for number in summed
        for place in np.flatnonzero(laid.alive[number])
    ]
    trips = np.bincount(np.asarray(run.schedule.device), minlength=holding.devices)
    return run.state, np.concatenate(told) if told else np.zeros(0, np.int64), trips, len(summed)
