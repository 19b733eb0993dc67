"""`crowdml bench scale`: cost linear in check-ins and memory nearly flat, from a thousand devices to a million."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import crowdml
from crowdml.bench.timing import bound, sheet

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BATCH = 20
GOALS = {"linear": 1.5, "memory": 2.0}


def measure(progress: Callable[[str], None], sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Each number of devices in a process of its own, so that its peak of memory is its own."""
    points: list[dict[str, Any]] = []
    for devices in sizes:
        progress(f"{devices:,} devices")
        points.append(_alone(devices))
    rows = [
        {"name": f"{point['devices']} devices: {label}", "value": point[key], "unit": unit, "low": None, "high": None}
        for point in points
        for key, label, unit in (
            ("schedule_us", "schedule, CPU time a check-in", "us"),
            ("loop_us", "compiled loop, CPU time a check-in", "us"),
            ("seconds", "schedule and loop, on the clock", "s"),
            ("peak_mb", "peak memory of the process", "MB"),
            ("above_mb", "peak memory above that of a run of 1,000 check-ins", "MB"),
        )
    ]
    by_size = {point["devices"]: point for point in points}
    large, small = by_size[max(by_size)], by_size.get(10_000, by_size[min(by_size)])
    return {
        "id": "bench/scale",
        "work": f"each device checks in once with {BATCH} samples of 50 features, 10 classes, discrete Laplace noise; "
        "samples drawn from a pool of 60,000",
        "rows": rows,
        "points": points,
        "ratios": [
            bound("linear", f"CPU time a check-in, {large['devices']:,} devices / {small['devices']:,}",
                  (large["schedule_us"] + large["loop_us"]) / (small["schedule_us"] + small["loop_us"]),
                  "ratio", GOALS["linear"]),
            bound("memory", f"peak memory of the process, {large['devices']:,} devices / {small['devices']:,}",
                  large["peak_mb"] / small["peak_mb"], "ratio", GOALS["memory"]),
        ],
    }  # fmt: skip


def _alone(devices: int) -> dict[str, Any]:
    root = str(Path(crowdml.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run(
        [sys.executable, "-c", f"from crowdml.bench.scale import alone; alone({devices})"],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.strip().rsplit("\n", 1)[-1])


def alone(devices: int) -> None:
    """One size, in this process: print its point as JSON. A run of 1,000 check-ins before it compiles the loop."""
    from crowdml.bench.sim import samples, work
    from crowdml.datasets.populations import drawn
    from crowdml.sim import compiled
    from crowdml.sim.layout import Holding, lay_out
    from crowdml.sim.world import Delay, World

    task = work("discrete-laplace", BATCH)
    x, y = samples()

    def run(count: int) -> tuple[float, float, int]:
        delay = Delay("uniform", 100.0)
        world = World(count, BATCH, request=delay, check_out=delay, check_in=delay)
        at = time.process_time()
        schedule = lay_out(world, seed=1, batch=BATCH, capacity=100)
        laid = time.process_time()
        compiled.run(task, Holding(x, y, drawn(len(x), count, BATCH, 0)), [schedule], [1], workers=1)
        return laid - at, time.process_time() - laid, len(schedule)

    run(1_000)
    before = _peak_mb()
    run(min(devices, 10_000))  # the lengths that it compiles
    began = time.perf_counter()
    laid, looped, check_ins = run(devices)
    print(json.dumps({
        "devices": devices,
        "check_ins": check_ins,
        "schedule_us": 1e6 * laid / check_ins,
        "loop_us": 1e6 * looped / check_ins,
        "seconds": time.perf_counter() - began,
        "peak_mb": _peak_mb(),
        "above_mb": _peak_mb() - before,
    }))  # fmt: skip


def _peak_mb() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """CPU time a check-in, and peak memory, over the number of devices."""
    points = result["points"]
    devices = [point["devices"] for point in points]
    with sheet(path, ncols=2, figsize=(9, 3.6)) as (left, right):
        for key, label, marker in (("schedule_us", "schedule", "s"), ("loop_us", "compiled loop", "o")):
            left.plot(devices, [point[key] for point in points], marker=marker, label=label)
        left.set(title="CPU time a check-in", ylabel="microseconds")
        right.plot(devices, [point["peak_mb"] for point in points], marker="o", label="whole process")
        right.plot(devices, [point["above_mb"] for point in points], marker="s", label="above a run of 1,000 check-ins")
        right.set(title="Peak memory", ylabel="MB")
        for axes in (left, right):
            axes.set(xscale="log", xlabel="devices, one check-in of 20 samples each")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
