"""The demo's digits: who holds which, as features that were fitted on nobody's samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crowdml.datasets import load
from crowdml.datasets.populations import Population, by_class
from crowdml.device.sources import FileSource, Sample
from crowdml.errors import DataError
from crowdml.features import normalise
from crowdml.task import Task

__all__ = ["Digits", "TimedSource", "deal", "moments"]

PRIVATE = "digits012"
PUBLIC_FROM = 3
"""Digits 3 to 9 of the same collection are taken as public: their mean picture is subtracted from every other."""


@dataclass(frozen=True)
class Digits:
    """x [n, 64] on the unit sphere, y [n]; those that are dealt out, those that no device holds, and who holds what."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any
    population: Population

    def held_by(self, device: int) -> list[tuple[Any, Any]]:
        rows = self.population.held_by(device)
        return list(zip(self.x[rows], self.y[rows].tolist(), strict=True))


def deal(task: Task, devices: int, each: int, seed: int) -> Digits:
    """Deal `each` digits to every device, of at most two kinds each."""
    data, everything = load(PRIVATE, normalise="none"), load("digits", normalise="none")
    if devices * each > len(data.y_train):
        raise DataError(
            f"{devices:,} devices of task {task.name!r} need {devices * each:,} digits, and there are "
            f"{len(data.y_train)}. Take at most {len(data.y_train) // each} devices."
        )
    centre = everything.x_train[everything.y_train >= PUBLIC_FROM].mean(axis=0)
    x, x_test = normalise(data.x_train - centre, "l2"), normalise(data.x_test - centre, "l2")
    return Digits(x, data.y_train, x_test, data.y_test, by_class(data.y_train, devices, seed))


def moments(devices: int, each: int, seconds: float, seed: int) -> list[list[float]]:
    """When each device senses each of its digits, from 0 to `seconds`; the crowd's last digits come evenly."""
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
