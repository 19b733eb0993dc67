"""Rates that hold on a busy machine: several timings in turns, medians, and ratios within each turn."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Rate:
    """Units of work, and how long each timing of them took: on the clock, and in CPU-seconds of this process."""

    units: float
    walls: tuple[float, ...]
    cpus: tuple[float, ...]

    @property
    def value(self) -> float:
        """Units a second, the median of the timings."""
        return self.units / statistics.median(self.walls)

    @property
    def per_cpu_second(self) -> float:
        return self.units / statistics.median(self.cpus)

    def row(self, name: str, unit: str) -> dict[str, Any]:
        return {
            "name": name,
            "value": self.value,
            "unit": unit,
            "low": self.units / max(self.walls),
            "high": self.units / min(self.walls),
            "per_cpu_second": self.per_cpu_second,
        }


def in_turns(work: Mapping[str, Callable[[], Any]], units: Mapping[str, float], repeats: int = 5) -> dict[str, Rate]:
    """Time each piece of work `repeats` times, taking turns, so that a busy minute falls on all of them alike."""
    for each in work.values():
        each()  # compile, warm up
    walls: dict[str, list[float]] = {name: [] for name in work}
    cpus: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, each in work.items():
            wall, cpu = time.perf_counter(), time.process_time()
            each()
            walls[name].append(time.perf_counter() - wall)
            cpus[name].append(max(time.process_time() - cpu, 1e-9))
    return {name: Rate(units[name], tuple(walls[name]), tuple(cpus[name])) for name in work}


def ratio(key: str, name: str, ours: Rate, limit: Rate, goal: float | None, clock: str | None = None) -> dict[str, Any]:
    """Ours over the limit, turn by turn, and the median of that: on the clock or in CPU-seconds, whichever is steadier.

    Steadier is the one whose ratios differ less between turns, lowest to highest. `measure` says which it was, and
    the other one stands beside it. `clock` chooses: an accelerator's work takes no CPU. Without a goal, nothing holds.
    """
    found = {
        "wall": _each(limit.walls, ours.walls, ours.units / limit.units),
        "cpu": _each(limit.cpus, ours.cpus, ours.units / limit.units),
    }
    measure = clock or min(found, key=lambda kind: max(found[kind]) / min(found[kind]))
    value = statistics.median(found[measure])
    return {
        "key": key,
        "name": name,
        "value": value,
        "unit": "ratio",
        "goal": goal,
        "holds": None if goal is None else value >= goal,
        "low": min(found[measure]),
        "high": max(found[measure]),
        "measure": measure,
        "by_wall": statistics.median(found["wall"]),
        "by_cpu": statistics.median(found["cpu"]),
    }


def plain_row(
    name: str, value: float | None, unit: str, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    """A row of one number, with what it was between where it was measured several times."""
    return {"name": name, "value": value, "unit": unit, "low": low, "high": high}


def spread_row(name: str, values: Sequence[float], unit: str, **more: Any) -> dict[str, Any]:
    """A row of a number that was measured several times: the median, the least and the most."""
    return plain_row(name, statistics.median(values), unit, min(values), max(values)) | more


def bound(key: str, name: str, value: float, unit: str, goal: float) -> dict[str, Any]:
    """A number that is to be at most `goal`."""
    return {"key": key, "name": name, "value": value, "unit": unit, "goal": goal, "holds": value <= goal}


def _each(limit: tuple[float, ...], ours: tuple[float, ...], units: float) -> list[float]:
    return [units * theirs / own for theirs, own in zip(limit, ours, strict=True)]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Generator[tuple[int, IO[bytes]]]:
    """The id of a process and its standard output. At the end it is asked to stop, and waited for."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@contextmanager
def sheet(path: str | Path, **options: Any) -> Generator[Any]:
    """Axes to draw on, which are written to `path` at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(**options, layout="constrained")
    yield axes
    figure.savefig(path, dpi=150)
    plt.close(figure)
