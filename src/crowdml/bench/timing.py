"""Rates that hold on a busy machine: several timings in turns, medians, and work per CPU-second for the ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rate:
    """Units of work a second, and a CPU-second of this process: median, lowest and highest of the timings."""

    value: float
    low: float
    high: float
    per_cpu_second: float

    def row(self, name: str, unit: str) -> dict[str, Any]:
        return {"name": name, "value": self.value, "unit": unit, "low": self.low, "high": self.high,
                "per_cpu_second": self.per_cpu_second}  # fmt: skip


def in_turns(work: Mapping[str, Callable[[], Any]], units: float, repeats: int = 5) -> dict[str, Rate]:
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
    return {
        name: Rate(
            units / statistics.median(walls[name]),
            units / max(walls[name]),
            units / min(walls[name]),
            units / statistics.median(cpus[name]),
        )
        for name in work
    }
