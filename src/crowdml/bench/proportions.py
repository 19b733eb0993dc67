"""`crowdml bench proportions`: what a device needs to learn from its peers' proportions, and what a whole city needs.

Made-up traffic with the paper's windows and bins: 2,900 windows of five readings, five classes, batches of 32.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from crowdml.bench.timing import Rate, bound, in_turns, plain_row
from crowdml.datasets import Readings, made_up_city
from crowdml.models import clusters
from crowdml.protocols import find
from crowdml.sim import cities
from crowdml.task import Task, parse

WIDTH, BATCH, CLUSTERS, PEERS, RESTARTS, EPSILON = 5, 32, 16, 3, 10, 1.0
WINDOWS = 2_900
DAYS, LEARNED_DAYS = 38, 31
SIZES = (100, 300, 1_000)
GOALS = {"node-seconds": 0.2, "city-seconds": 180.0, "linear": 1.5}


def work(readings: Readings) -> Task:
    """Each place of the readings has a device, which learns from its three nearest."""
    places = zip(readings.names, readings.lat, readings.lon, strict=True)
    listed = "\n".join(f'[[places]]\nname = "{name}"\nlat = {lat:.6f}\nlon = {lon:.6f}' for name, lat, lon in places)
    return parse(f"""
        name = "bench"
        [features]
        kind = "windows"
        dimension = {WIDTH}
        [labels]
        classes = ["0-5", "5-30", "30-60", "60-150", "150 and more"]
        bins = [5, 30, 60, 150]
        [model]
        kind = "clusters"
        k = {CLUSTERS}
        restarts = {RESTARTS}
        [protocol]
        kind = "proportions"
        batch = {BATCH}
        peers = {PEERS}
        [privacy]
        mechanism = "discrete-laplace"
        epsilon = {{ counts = {EPSILON} }}
        {listed}
    """)


def measure(progress: Callable[[str], None], repeats: int = 9, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    progress("one device")
    work_of = _device()
    timed = in_turns(work_of, dict.fromkeys(work_of, 1.0), repeats)
    rows = [
        plain_row(f"one device, {name}", _cpu(rate), "s of CPU", min(rate.cpus), max(rate.cpus))
        for name, rate in timed.items()
    ]
    points: list[dict[str, Any]] = []
    workers = min(2, os.cpu_count() or 1)
    for places in sizes:
        progress(f"a city of {places:,} devices")
        points.append(_city(places, workers))
    rows += [
        plain_row(f"a city of {point['devices']:,}: {name}", point[key], unit)
        for point in points
        for key, name, unit in (
            ("seconds", "all of it, on the clock", "s"),
            ("exchange_cpu", "noise and exchange, CPU time", "s"),
            ("learn_cpu", "learning, CPU time of all processes", "s"),
            ("device_ms", "CPU time a device", "ms"),
            ("check_in_bytes", "sent for a check-in", "bytes"),
            ("right", "labels of the next week that devices predict", "share"),
        )
    ]
    small, large = points[0], points[-1]
    slowest = max(("shares", "search"), key=lambda name: _cpu(timed[name]))
    return {
        "id": "bench/proportions",
        "work": f"{WINDOWS:,} windows of {WIDTH} made-up readings a device, 5 classes, b = {BATCH}, k = {CLUSTERS}, "
        f"c = {PEERS}, {RESTARTS} restarts, epsilon {EPSILON:g}; a city is simulated on {workers} processes",
        "rows": rows,
        "points": points,
        "ratios": [
            bound("node-seconds", f"one device learns, CPU ({slowest}, the slower way)", _cpu(timed[slowest]), "s",
                  GOALS["node-seconds"]),
            bound("city-seconds", f"{large['devices']:,} devices, on the clock", large["seconds"], "s",
                  GOALS["city-seconds"]),
            bound("linear", f"CPU time a device, {large['devices']:,} devices / {small['devices']:,}",
                  large["device_ms"] / small["device_ms"], "ratio", GOALS["linear"]),
        ],
    }  # fmt: skip


def _device() -> dict[str, Callable[[], Any]]:
    """All that a device does when it learns, by each solver, and k-means alone, which is most of it; where
    scikit-learn is installed, its k-means with as many starts."""
    readings = made_up_city(places=1 + PEERS, days=DAYS, learned_days=LEARNED_DAYS, seed=1)
    task = work(readings)
    protocol = find(task)
    city = cities.exchange(task, readings.values[:, : WINDOWS + WIDTH], seed=1)
    state, kept = city.states[0], city.kept[0]
    x = kept.x.reshape(-1, WIDTH)
    columns = kept.numbers % state.batches.shape[1]
    own = (kept.y[..., None] == np.arange(5)).sum(1)
    there, heard = state.batches[:, columns] == kept.numbers, state.counts[:, columns]
    assert protocol.learn is not None
    learn = protocol.learn
    found: dict[str, Callable[[], Any]] = {
        "shares": lambda: learn(task, state, kept, 1),
        "search": lambda: clusters.fit(x, own, heard, there, k=CLUSTERS, restarts=RESTARTS, seed=1, variance=1.0,
                                       solver="search"),
        "k-means alone": lambda: clusters.k_means(x, CLUSTERS, seed=1, starts=clusters.STARTS),
    }  # fmt: skip
    if find_spec("sklearn") is not None:
        from sklearn.cluster import KMeans

        theirs = KMeans(CLUSTERS, n_init=clusters.STARTS, random_state=1)  # pyright: ignore[reportArgumentType]  its stubs say str
        found["k-means of scikit-learn"] = lambda: theirs.fit(x)
    return found


def _city(places: int, workers: int) -> dict[str, Any]:
    """Readings to predictions: windows, noise, sealing, relaying, hearing, learning, voting."""
    readings = made_up_city(places=places, days=DAYS, learned_days=LEARNED_DAYS, seed=1)
    task = work(readings)
    wall, began = time.perf_counter(), _spent()
    city = cities.exchange(task, readings.values[:, : WINDOWS + WIDTH], seed=1)
    between = _spent()
    voters = cities.learn(task, city.states, city.kept, seed=1, workers=workers)
    right = cities.right(task, voters, readings.values[:, readings.learned :])
    ended = _spent()
    return {
        "devices": places,
        "seconds": time.perf_counter() - wall,
        "exchange_cpu": between - began,
        "learn_cpu": ended - between,
        "device_ms": 1e3 * (ended - began) / places,
        "check_in_bytes": float(city.said.sum() / city.check_ins.sum()),
        "right": float(right.mean()),
    }


def _spent() -> float:
    """CPU-seconds of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _cpu(rate: Rate) -> float:
    return 1 / rate.per_cpu_second
