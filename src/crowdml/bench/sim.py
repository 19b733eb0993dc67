"""`crowdml bench sim`: noisy and clean updates a second on the work of Fig. 4, beside hand-written loops and peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from crowdml.bench import hand_written
from crowdml.bench.timing import in_turns
from crowdml.datasets.populations import iid
from crowdml.protocols import find
from crowdml.protocols.sgd import plan
from crowdml.sim import compiled
from crowdml.sim.crowd import Holding
from crowdml.sim.schedule import lay_out
from crowdml.sim.world import Delay, World
from crowdml.task import Task, parse

ROWS, DIMENSION, CLASSES, DEVICES = 60_000, 50, 10, 1000


def work(mechanism: str) -> Task:
    """The task of Fig. 4: b = 1, 50 features in the l1 ball, 10 classes; with noise, the paper's 1/epsilon = 0.1."""
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
        batch = 1
        step = {{ c = 30.0 }}
        radius = 200.0
        [privacy]
        mechanism = "{mechanism}"
        epsilon = {{ gradient = 10.0, errors = 0.1, labels = 0.1 }}
    """)


def samples(seed: int = 0) -> tuple[Any, Any]:
    """60,000 rows of unit l1 norm in ten blobs: the shape of MNIST in 50 components, made by code."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    x = rng.normal(size=(CLASSES, DIMENSION))[y] + 1.5 * rng.normal(size=(ROWS, DIMENSION))
    return (x / abs(x).sum(1, keepdims=True)).astype(np.float32), y


def measure(progress: Callable[[str], None], repeats: int = 7) -> dict[str, Any]:
    x, y = samples()
    holding = Holding(x, y, iid(ROWS, DEVICES, 0))
    delay = Delay("uniform", 4.0)
    schedule = lay_out(World(DEVICES, ROWS // DEVICES, request=delay, check_out=delay, check_in=delay), seed=1, batch=1, capacity=100)
    ring = 1 << int(schedule.staleness.max()).bit_length()
    rows = holding.rows(schedule.device[:, None], schedule.samples)[:, 0]
    fed = (jax.device_put(x[rows]), jax.device_put(y[rows]), jax.device_put(schedule.version))
    limits: dict[str, Callable[[], Any]] = {}
    for name, mechanism in (("clean", "none"), ("noisy", "discrete-laplace")):
        task = work(mechanism)
        find(task)
        noise = getattr(plan(task).table["gradient"], "scale", None)
        by_hand = hand_written.loop(ring, 30.0, 200.0, None if noise is None else float(noise))
        limits[f"hand-written scan, {name}"] = lambda f=by_hand: jax.block_until_ready(f(*fed))
        limits[f"ours, {name}"] = lambda t=task: compiled.run(t, holding, [schedule], [1], workers=1)
    progress("ours and the hand-written scan, in turns")
    rates = in_turns(limits, ROWS, repeats)
    ratios = [
        {"key": key, "name": f"ours {key} / hand-written scan {key}",
         "value": rates[f"ours, {key}"].value / rates[f"hand-written scan, {key}"].value,
         "unit": "ratio", "goal": goal, "holds": False}
        for key, goal in (("clean", 0.7), ("noisy", 0.5))
    ]  # fmt: skip
    for ratio in ratios:
        ratio["holds"] = bool(ratio["value"] >= ratio["goal"])
    return {
        "id": "bench/sim",
        "work": f"{ROWS} check-ins of one sample, {DIMENSION} features, {CLASSES} classes, a ring of {ring} versions",
        "rows": [rate.row(name, "updates/s") for name, rate in rates.items()],
        "ratios": ratios,
    }
