"""Points: moments of a task, kept for its plots. Everything in them is a release or counts devices and check-ins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from crowdml.protocol import Noisy, Tally
from crowdml.server.runner import TaskRunner
from crowdml.storage.server import Store
from crowdml.wire.packing import pack


@dataclass(frozen=True)
class Moment:
    """How a task stood after `tally.check_ins` check-ins by `devices` devices."""

    index: int
    at: str
    devices: int
    tally: Tally


def record(store: Store, runner: TaskRunner, at: str) -> None:
    """Keep how the task stands now. In the writing thread: nothing is applied meanwhile."""
    tally = runner.fold.protocol.progress(runner.task, runner.fold.state) or Tally(runner.check_ins)
    plain = {
        "check_ins": tally.check_ins,
        "devices": store.contributors(runner.task.hash),
        "errors": _plain(tally.errors),
        "labels": _plain(tally.labels),
    }
    store.add_point(runner.task.hash, runner.index, at, pack(plain))


def read_moments(store: Store, task: bytes) -> list[Moment]:
    """Every moment that is kept, oldest first."""
    found: list[Moment] = []
    for point in store.points(task):
        plain = msgpack.unpackb(point.figures)
        tally = Tally(plain["check_ins"], _noisy(plain["errors"]), _noisy(plain["labels"]))
        found.append(Moment(point.index, point.at, plain["devices"], tally))
    return found


def _plain(noisy: Noisy | None) -> list[Any] | None:
    return None if noisy is None else [list(noisy.counts), noisy.samples, noisy.variance]


def _noisy(plain: list[Any] | None) -> Noisy | None:
    if plain is None:
        return None
    counts, samples, variance = plain
    return Noisy(tuple(counts), samples, variance)
