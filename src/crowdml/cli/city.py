"""`crowdml simulate` for tasks whose devices teach each other: a city of them, by the protocol's own handlers."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from crowdml.cli.output import Report, make_table, size_text
from crowdml.errors import DataError, TaskError
from crowdml.texts import epsilon_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from crowdml.datasets import Readings
    from crowdml.task import Task


def find_readings(task: Task, name: str | None, seed: int) -> Readings:
    """The readings of a data set that has the task's places, in their order; `synthetic` makes some for any task."""
    from dataclasses import replace

    from crowdml.datasets import made_up_city, series

    if name == "synthetic":
        made = made_up_city(places=len(task.places), days=10, learned_days=8, seed=seed)
        return replace(made, names=tuple(place.name for place in task.places))
    found = series(name or task.name)
    rows = {place: row for row, place in enumerate(found.names)}
    strange = [place.name for place in task.places if place.name not in rows]
    if strange:
        raise DataError(
            f"task {task.name!r} lists {strange[0]!r} and {len(strange) - 1} more places that data set {found.name!r} "
            "does not have. Name other data; `synthetic` fits every task."
        )
    order = [rows[place.name] for place in task.places]
    return replace(
        found,
        names=tuple(found.names[row] for row in order),
        lat=found.lat[order],
        lon=found.lon[order],
        values=found.values[order],
    )


def simulate_city(
    report: Report,
    task: Task,
    *,
    data: str | None,
    seed: int,
    seeds: Sequence[int],
    expect: Callable[[int], None],
    tick: Callable[[int], None],
) -> dict[str, Any]:
    """Every place of the task with its readings: exchange, learn, and predict the days held out."""
    import numpy as np

    from crowdml.price import Price
    from crowdml.protocols import find, settled
    from crowdml.sim.cities import commonest, right, simulate

    readings = find_readings(task, data, seed)
    values, learned = readings.values, readings.learned
    started = time.perf_counter()
    batch, places = find(task).batch(task), readings.places
    if learned < batch + task.features.dimension + task.features.horizon - 1:
        raise TaskError(f"protocol.batch = {batch}: a place has {learned} readings, which fill no batch.")
    given = (learned - task.features.dimension - task.features.horizon + 1) // batch
    expect(len(seeds) * places * (given + 1))
    workers = (os.cpu_count() or 1) if places >= 50 else 1  # processes take a second to start
    cities = [simulate(task, values[:, :learned], seed=each, workers=workers, tick=tick) for each in seeds]
    told = np.stack([right(task, city.voters, values[:, learned:]) for city in cities])
    usual = float(commonest(task, values[:, :learned], values[:, learned:]).mean())
    first, priced = cities[0], Price.of(find(task), task)
    check_ins, mean = int(first.check_ins.sum()), told.mean(axis=1)
    paid = priced.after(int(first.check_ins.max()), 1)
    order = np.argsort(told.mean(axis=0), kind="stable")
    result: dict[str, Any] = {
        "id": f"simulate/{task.name}",
        "task": settled(task).hash.hex(),
        "data": readings.name,
        "devices": places,
        "peers": int(task.protocol["peers"]),
        "trials": len(seeds),
        "seed": seed,
        "accuracy": mean.mean(),
        "accuracy_low": mean.min(),
        "accuracy_high": mean.max(),
        "commonest": usual,
        "epsilon_sample": paid.sample,
        "epsilon_device": paid.device,
        "delta": 0.0,
        "check_ins": check_ins,
        "bytes_up": int(first.said.sum()),
        "bytes_down": int(first.heard.sum()),
        "seconds": time.perf_counter() - started,
        "places": [
            {
                "name": readings.names[place],
                "accuracy": told[:, place].mean(),
                "check_ins": int(first.check_ins[place]),
                "bytes_up": int(first.said[place]),
            }
            for place in range(places)
        ],
        "series": [
            {
                "key": "places",
                "unit": "places, from the least to the most accurate",
                "name": task.title or task.name,
                "x": np.arange(1, places + 1),
                "y": told.mean(axis=0)[order],
                "low": told.min(axis=0)[order] if len(told) > 1 else [],
                "high": told.max(axis=0)[order] if len(told) > 1 else [],
                "privacy": {
                    "unit": "sample",
                    "epsilon": paid.sample,
                    "claimed": None,
                    "delta": 0.0,
                    "as_published": False,
                },
            }
        ],
    }  # fmt: skip
    _show(report, task, result)
    report.plotted(lambda path: _plot(path, task, result, told[:, order]))
    return result


def _show(report: Report, task: Task, result: dict[str, Any]) -> None:
    several, y = result["trials"] > 1, result["series"][0]["y"]
    spread = f"  ({result['accuracy_low']:.3f} to {result['accuracy_high']:.3f} over {result['trials']} trials)"
    table = make_table("", "", title=f"{task.name}: {task.title}", numbers=False)
    table.show_header = False
    table.add_row(
        "accuracy on held-out days", f"{result['accuracy']:.3f}{spread if several else ''}, the mean of places"
    )
    table.add_row("  by place", f"{y[0]:.3f} to {y[-1]:.3f}; one that is unlike its neighbours is outvoted")
    table.add_row("  always the commonest label", f"{result['commonest']:.3f}")
    table.add_row("ε of a measurement", epsilon_text(result["epsilon_sample"]))
    table.add_row("ε of the most expensive device", epsilon_text(result["epsilon_device"]))
    table.add_row("devices", f"{result['devices']:,}, each with its {result['peers']} nearest")
    table.add_row("check-ins", f"{result['check_ins']:,}")
    table.add_row("sent up, down", f"{size_text(result['bytes_up'])}, {size_text(result['bytes_down'])}")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    report.print(table)
    report.print("The guarantee protects one measurement, not a person. Models and predictions stay on their devices.")
    report.aside.print(f"Again: --seed {result['seed']}")


def _plot(path: Any, task: Task, result: dict[str, Any], told: Any) -> None:
    from crowdml.cli.charts import Curve, draw

    title = f"{result['devices']:,} devices · ε of a measurement: {epsilon_text(result['epsilon_sample'])}"
    line = result["series"][0]
    levels = (("always the commonest label", result["commonest"]),)
    drawn = Curve(title, line["x"], told, levels, x_label=line["unit"])
    draw(path, f"{task.name}: {task.title}", [drawn])
