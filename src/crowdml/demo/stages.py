"""What the demo shows: a task, who holds which samples, and samples that no device holds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.attacks import Attackers
from crowdml.datasets import load
from crowdml.datasets.populations import by_class, iid
from crowdml.device.sources import FileSource, Sample
from crowdml.errors import DataError, TaskError
from crowdml.features import normalise
from crowdml.protocols import find, settled
from crowdml.task import Masking, Task
from crowdml.verdict import share_of_majority

WINDOW, LEASE = Fraction(30), Fraction(30)
"""Seconds: the most that a round of the demo waits for devices to come, and for what they say in a phase."""


LYING, LIES = 0.3, "sign-flip,label-flip,gaussian"
"""The share of devices that lie in `robust-digits`, and how, by turns."""
FEWEST_ROBUST = 20


@dataclass(frozen=True, eq=False)
class Stage:
    """x [n, d] and y [n]: those that are dealt out, `rows` [devices, each] of them, and those that nobody holds."""

    task: Task
    what: str
    """Its samples, in the plural."""
    x: Any
    y: Any
    x_test: Any
    y_test: Any
    rows: Any
    rounds: int
    """Cohorts after which the task stops."""
    doomed: int
    """Devices of another process, which is killed with -9 in the middle of a round."""
    lies: str = ""
    """How some of the devices lie, with commas between the ways."""
    simulated: bool = False
    """Whether the demo simulates this crowd too: under masks, and without them at the same price."""

    @property
    def liars(self) -> Mapping[int, Any]:
        """The devices that lie, none of those that are killed, and how (`turn.Tamper`)."""
        if not self.lies:
            return {}
        there = self.devices - self.doomed
        return Attackers(round(LYING * self.devices) / there, self.lies).live(self.task, there)

    @property
    def unit(self) -> str:
        """What the server makes a step of, in the plural."""
        return "cohorts" if self.task.masking is not None else "rounds"

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def each(self) -> int:
        """Samples that a device gives."""
        return int(self.rows.shape[1])

    @property
    def chance(self) -> float:
        """Accuracy of always saying the most common class of the devices' rows."""
        return share_of_majority(self.y_test, self.y[self.rows.reshape(-1)])

    def held_by(self, device: int) -> list[tuple[Any, Any]]:
        rows = self.rows[device]
        return list(zip(self.x[rows], self.y[rows].tolist(), strict=True))

    def accuracy(self, weights: Any) -> float:
        """Accuracy of a published model on samples that no device holds."""
        found = find(self.task).predict(self.task, np.asarray(weights), self.x_test)
        return float(np.mean(np.asarray(found) == self.y_test))

    def write_rows(self, path: Path, devices: Sequence[int]) -> None:
        """The samples of these devices as `crowdml fleet --source ndjson:PATH` deals them out again."""
        held = [self.held_by(device) for device in devices]
        with path.open("w", encoding="utf-8") as file:
            for turn in zip(*held, strict=True):
                for x, y in turn:
                    file.write(json.dumps({"x": [float(value) for value in x], "y": int(y)}) + "\n")


def set_stage(name: str, task: Task, devices: int | None, seed: int) -> Stage:
    """The stage of a task that the demo knows; `devices` as asked for, with cohorts in proportion."""
    if name not in STAGES:
        raise TaskError(f"--task {name}: the demo shows {', '.join(STAGES)}.")
    make, usual, often = STAGES[name]
    devices = FEWER.get(name, usual) if devices is None else devices
    there = devices - devices // 10 if often else devices  # a cohort of those that stay is full, and waits for nobody
    masking = scaled(task.masking, there / usual)
    if masking is not None:  # a study has hours; nobody who watches does
        lease = min(masking.lease, max(LEASE, Fraction(devices, 4)))  # one machine plays them all
        masking = replace(masking, window=min(masking.window, WINDOW), lease=lease)
    return make(settled(replace(task, masking=masking)), devices, seed)


def scaled(masking: Masking | None, factor: float) -> Masking | None:
    """Terms for a crowd of another size, with the same shares of survivors and colluders, or nearly."""
    if masking is None or factor == 1:
        return masking
    cohort = max(3, round(masking.cohort * factor))
    colluders = int(masking.colluders * cohort / masking.cohort)
    minimum = max(round(masking.minimum * cohort / masking.cohort), (cohort + colluders) // 2 + 2)
    return replace(masking, cohort=cohort, minimum=min(cohort, minimum), colluders=colluders)


def _digits(task: Task, devices: int, seed: int) -> Stage:
    """scikit-learn's digits, of at most a few kinds on each device."""
    data = load("digits", normalise="none")
    each = find(task).batch(task)
    _check(task, devices, each, len(data.y_train))
    population = by_class(data.y_train, devices, seed)
    rows = np.stack([population.held_by(device)[:each] for device in range(devices)])
    x, x_test = normalise(data.x_train - 0.5, "l2"), normalise(data.x_test - 0.5, "l2")
    steps, doomed = task.stop.steps or 1, devices // 20
    return Stage(task, "digits", x, data.y_train, x_test, data.y_test, rows, steps, doomed, simulated=True)


def _adult(task: Task, devices: int, seed: int) -> Stage:
    """People of the 1994 census, each on one of the devices: do they earn more than 50,000 dollars?"""
    data = load("adult", normalise="l2")
    return _dealt(task, data, "people", devices, seed, doomed=devices // 10)


def _mnist(task: Task, devices: int, seed: int) -> Stage:
    """MNIST's digits, sixty on each device; one in five devices drops out."""
    data = load("mnist-pixels", normalise="l2")
    return _dealt(task, data, "digits", devices, seed, doomed=devices // 5)


def _dealt(task: Task, data: Any, what: str, devices: int, seed: int, *, doomed: int) -> Stage:
    each = find(task).batch(task)
    _check(task, devices, each, len(data.y_train))
    rows = iid(len(data.y_train), devices, seed).rows[:, :each]
    steps = task.stop.steps or 1
    return Stage(task, what, data.x_train, data.y_train, data.x_test, data.y_test, rows, steps, doomed)


def _robust_digits(task: Task, devices: int, seed: int) -> Stage:
    """scikit-learn's digits on devices of which three in ten lie; two others are killed before they give anything."""
    if devices < FEWEST_ROBUST:
        raise DataError(
            f"{devices} devices of task {task.name!r}: a rule that stands three in ten liars needs {FEWEST_ROBUST}."
        )
    doomed = 2
    combine = {key: value for key, value in task.protocol["combine"].items() if key not in ("minimum", "seconds")}
    combine |= {
        "uploads": devices - doomed,
        "f": devices // 3,
    }  # who watches does not wait until a round's time is over
    task = settled(task.with_(protocol={"combine": combine}))
    return replace(_dealt(task, load("digits", normalise="l2"), "digits", devices, seed, doomed=doomed), lies=LIES)


def _check(task: Task, devices: int, each: int, have: int) -> None:
    if devices * each > have:
        raise DataError(
            f"{devices:,} devices of task {task.name!r} need {devices * each:,} samples, and there are {have:,}. "
            f"Take at most {have // each:,} devices."
        )


STAGES: dict[str, tuple[Callable[[Task, int, int], Stage], int, bool]] = {
    "demo": (_digits, 100, False),
    "admm-adult": (_adult, 100, True),
    "gram-mnist": (_mnist, 1000, False),
    "robust-digits": (_robust_digits, 60, False),
}
"""By the name of their task: how each is set, for how many devices its file is written, and whether all of them are in
every round."""
FEWER = {"gram-mnist": 996}
"""How many devices there are where nobody says, if the data has fewer samples than the file's devices would need."""


def moments(devices: int, each: int, seconds: float, seed: int) -> list[list[float]]:
    """When each device senses each of its samples, from 0 to `seconds`; the crowd's last ones come evenly."""
    chance = np.random.default_rng(seed)
    ends = chance.permutation([seconds * (number + 1) / devices for number in range(devices)]).tolist()
    return [[*sorted((end * chance.random(each - 1)).tolist()), end] for end in ends]


class TimedSource(FileSource):
    """A sensor that has its samples at set moments, in seconds after `start()`."""

    def __init__(self, name: str, rows: Sequence[tuple[Any, Any]], task: Task, at: Sequence[float]) -> None:
        super().__init__(name, rows[: len(at)], task)
        self._at, self._began = at, time.monotonic()

    def start(self) -> None:
        self._began = time.monotonic()

    async def read(self, most: int) -> list[Sample]:
        if self.taken < len(self._at):
            await asyncio.sleep(max(0.0, self._began + self._at[self.taken] - time.monotonic()))
        return await super().read(min(most, 1))
