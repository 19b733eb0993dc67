"""`crowdml bench sim`: noisy and clean updates a second on the work of Fig. 4, beside hand-written loops and peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from crowdml.bench import hand_written, peers
from crowdml.bench.timing import Rate, in_turns, ratio
from crowdml.datasets.populations import iid
from crowdml.protocols.sgd import plan
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, lay_out
from crowdml.sim.world import Delay, World
from crowdml.task import Task, parse

ROWS, DIMENSION, CLASSES, DEVICES = 60_000, 50, 10, 1000
C, RADIUS = 30.0, 200.0
GOALS = {"clean": 0.7, "noisy": 0.5}
BATCH = 20
"""Samples of a check-in where it has several, as in the papers."""
MECHANISMS = {"clean": "none", "noisy": "discrete-laplace"}


def work(mechanism: str, batch: int = 1) -> Task:
    """The task of Fig. 4: 50 features in the l1 ball, 10 classes; with noise, the paper's 1/epsilon = 0.1."""
    return parse(f"""
        name = "bench"
        [features]
        dimension = {DIMENSION}
        norm = {{ kind = "l1", bound = 1.0 }}
        [labels]
        classes = [{", ".join(f'"{digit}"' for digit in range(CLASSES))}]
        [model]
        kind = "softmax"
        [protocol]
        kind = "sgd"
        batch = {batch}
        step = {{ c = {C} }}
        radius = {RADIUS}
        [privacy]
        mechanism = "{mechanism}"
        epsilon = {{ gradient = 10.0, errors = 0.1, labels = 0.1 }}
    """)


def samples(rows: int = ROWS, seed: int = 0) -> tuple[Any, Any]:
    """Rows of unit l1 norm in ten blobs: the shape of MNIST in 50 components, made by code."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, rows).astype(np.int32)
    x = rng.normal(size=(CLASSES, DIMENSION))[y] + 1.5 * rng.normal(size=(rows, DIMENSION))
    return (x / abs(x).sum(1, keepdims=True)).astype(np.float32), y


def measure(
    progress: Callable[[str], None], repeats: int = 9, rows: int = ROWS, with_peers: bool = True
) -> dict[str, Any]:
    x, y = samples(rows)
    holding = Holding(x, y, iid(rows, DEVICES, 0))
    loops: dict[str, Callable[[], Any]] = {}
    units: dict[str, float] = {}
    ring = 1
    for batch, label in ((1, ""), (BATCH, f", b={BATCH}")):
        schedules = [_schedule(rows, batch, seed) for seed in (1, 2, 3, 4)]
        check_ins = len(schedules[0])
        ring = 1 << max(int(each.staleness.max(initial=1)) for each in schedules).bit_length()
        wanted = holding.rows(schedules[0].device[:, None], schedules[0].samples)
        fed = (x[wanted], y[wanted], schedules[0].version)
        on_device = jax.device_put(fed)
        for kind, mechanism in MECHANISMS.items():
            task = work(mechanism, batch)
            law = plan(task).table["gradient"].law
            scale = law.steps if law is not None and law.parameter == "scale" else None
            by_hand = hand_written.scan(ring, C, RADIUS, scale)
            loops[f"hand-written scan, {kind}{label}"] = lambda f=by_hand, v=on_device: jax.block_until_ready(f(*v))
            loops[f"ours, {kind}{label}"] = partial(compiled.run, task, holding, schedules[:1], [1], workers=1)
            names = [f"hand-written scan, {kind}{label}", f"ours, {kind}{label}"]
            if batch > 1:
                name = f"hand-written scan by sample, {kind}{label}"
                clip = plan(work("discrete-laplace", batch)).table["gradient"].clipped
                by_sample = hand_written.scan(ring, C, RADIUS, scale, unroll=1, clip=clip)
                loops[name] = lambda f=by_sample, v=on_device: jax.block_until_ready(f(*v))
                names.append(name)
            units |= dict.fromkeys(names, check_ins)
            if batch == 1:
                name = f"ours, {kind}, four trials at once on two threads"
                loops[name] = partial(compiled.run, task, holding, schedules, [1, 2, 3, 4], workers=2)
                units[name] = sum(map(len, schedules))
                name, few = f"NumPy loop, {kind}", tuple(part[: rows // 20] for part in fed)
                by_numpy = partial(hand_written.numpy_loop, ring=ring, c=C, radius=RADIUS, scale=scale)
                loops[name] = lambda f=by_numpy, v=few: f(*v)
                units[name] = len(few[0])
    progress("ours and loops written by hand, in turns")
    rates = in_turns(loops, units, repeats)
    found = [rate.row(name, "updates/s") for name, rate in rates.items()]
    if with_peers:
        found += peers.measure(progress, x, y, DEVICES)
    return {
        "id": "bench/sim",
        "work": f"{rows} samples, {DIMENSION} features, {CLASSES} classes, {DEVICES} devices; an update is a check-in "
        "applied, of one sample or of b; peers: of 20 samples, in rounds of 10 devices, without noise",
        "rows": found,
        "ratios": [_ratio(rates, *wanted) for wanted in _wanted()],
    }


def _wanted() -> list[tuple[str, str, str, float | None]]:
    """The key of each ratio, the two rows that it is formed of, and its goal.

    At b = 20 the loop clips and truncates each sample, as ours does where there is noise. `by-sample` says how that
    loop compares with one that truncates their sum; `clean-b20-sum` is ours beside a loop that adds samples up at once.
    """
    pairs = [(kind, f"ours, {kind}", f"hand-written scan, {kind}", goal) for kind, goal in GOALS.items()]
    several = f", b={BATCH}"
    pairs += [
        (f"{kind}-b{BATCH}", f"ours, {kind}{several}", f"hand-written scan by sample, {kind}{several}", goal)
        for kind, goal in GOALS.items()
    ]
    by_sum = f"hand-written scan, noisy{several}"
    return [
        *pairs,
        ("by-sample", f"hand-written scan by sample, noisy{several}", by_sum, 1 / 3),
        (f"clean-b{BATCH}-sum", f"ours, clean{several}", f"hand-written scan, clean{several}", None),
    ]


def _ratio(rates: dict[str, Rate], key: str, ours: str, limit: str, goal: float | None) -> dict[str, Any]:
    return ratio(key, f"{ours} / {limit}", rates[ours], rates[limit], goal)


def _schedule(rows: int, batch: int, seed: int) -> Any:
    """Delays of up to four samples of the crowd on each leg: a check-in meets about six others on its way."""
    delay = Delay("uniform", 4.0)
    world = World(DEVICES, rows // DEVICES, request=delay, check_out=delay, check_in=delay)
    return lay_out(world, seed=seed, batch=batch, capacity=100)
