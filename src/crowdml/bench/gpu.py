"""`crowdml bench gpu`: crowds that fill an accelerator, beside the same work written by hand in JAX.

A round of a million devices with sixty samples each, and a pass of them in masked cohorts; thousands of asynchronous
trials at once; and networks trained on thousands of devices. Our engines as they are, from the protocols' own
handlers, with exact noise. The goals are those of one NVIDIA H200. Without an accelerator everything is done at small
sizes, and no goal applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.bench import hand_written, rounds, sim
from crowdml.bench.timing import Rate, in_turns, ratio, sheet
from crowdml.datasets.populations import Population, iid
from crowdml.models.mlp import Mlp
from crowdml.protocols.sgd import plan
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, lay_out, meet
from crowdml.sim.world import Delay, World
from crowdml.task import Task, parse

HELD, DIMENSION, CLASSES = 60, sim.DIMENSION, sim.CLASSES
SCHEDULES = 16
"""How many schedules there are: each runs with many seeds of noise."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything: `cohorts` make up a pass of the `devices`."""

    devices: int
    cohorts: int
    trials: int
    check_ins: int
    networks: int
    rounds: int


LARGE = Sizes(devices=1_000_000, cohorts=16, trials=4096, check_ins=16_384, networks=2048, rounds=8)
SMALL = Sizes(devices=600, cohorts=3, trials=16, check_ins=256, networks=12, rounds=2)
GOALS = {"million": 0.85, "million-in-cohorts": None, "trials": 0.75, "mlp": 0.75}


def work(cohort: int) -> Task:
    """Softmax regression in masked rounds: a device gives one clipped mean gradient of its sixty samples.

    No real cohort has a million devices; a simulated one may, for it has no masks.
    """
    return parse(f"""
        name = "bench"
        [features]
        dimension = {DIMENSION}
        norm = {{ kind = "l2", bound = 1.0 }}
        [labels]
        classes = [{", ".join(f'"{digit}"' for digit in range(CLASSES))}]
        [model]
        kind = "softmax"
        [protocol]
        kind = "local_updates"
        batch = {HELD}
        rate = {{ c = 1.0 }}
        [privacy]
        mechanism = "skellam"
        unit = "device"
        epsilon = {{ update = 1.0 }}
        budget = {{ epsilon = 1.0, samples = {10 * HELD} }}
        [masking]
        cohort = {cohort}
        minimum = {cohort}
    """)


def measure(progress: Callable[[str], None], repeats: int = 9, sizes: Sizes | None = None) -> dict[str, Any]:
    accelerated = jax.default_backend() != "cpu"
    sizes = sizes or (LARGE if accelerated else SMALL)
    found: dict[str, Rate] = {}
    for name, part in (("the crowd", crowd), ("trials", trials), ("networks", networks)):
        progress(f"{name}: ours and by hand, in turns")
        work, units = part(sizes)
        found |= in_turns(work, units, repeats)
    where = jax.devices()[0].device_kind if accelerated else "CPU"
    pairs = {
        "million": ("ours, a round of the crowd", "by hand, a round of the crowd"),
        "million-in-cohorts": ("ours, a pass in cohorts", "by hand, a pass in cohorts"),
        "trials": ("ours, trials", "by hand, trials"),
        "mlp": ("ours, networks, plain", "by hand, networks"),
    }
    return {
        "id": "bench/gpu",
        "work": f"on {where}; a round: {sizes.devices:,} devices with {HELD} samples of {DIMENSION} features, softmax, "
        f"{CLASSES} classes, clipped, Skellam noise; a pass: the same in {sizes.cohorts} cohorts; trials: "
        f"{sizes.trials:,} at once of {sizes.check_ins:,} check-ins of one sample, discrete Laplace noise; networks: "
        f"rounds of {sizes.networks:,} devices, {rounds.STEPS} steps of {rounds.BATCH} samples on an MLP "
        f"{'-'.join(map(str, (DIMENSION, *rounds.HIDDEN, CLASSES)))}"
        + ("" if accelerated else ". There is no accelerator here: small sizes, and no goal applies"),
        "device": where,
        "sizes": vars(sizes),
        "rows": [rate.row(name, "device updates/s") for name, rate in found.items()],
        "ratios": [
            ratio(key, f"{ours} / {limit}", found[ours], found[limit], GOALS[key] if accelerated else None, "wall")
            for key, (ours, limit) in pairs.items()
        ],
    }


Timed = tuple[dict[str, Callable[[], Any]], dict[str, float]]
"""Pieces of work, and how many device updates each is."""


def crowd(sizes: Sizes) -> Timed:
    """Plans are laid out beforehand, as the samples are: both are the same for every run of a study."""
    count = sizes.devices
    x, y = _samples(count * HELD)
    table = np.arange(count * HELD, dtype=np.int32).reshape(count, HELD)
    holding = Holding(x, y, Population("iid", table, np.full(count, HELD, np.int32), 0))
    held, labels, _ = holding.placed
    weights = jnp.zeros((DIMENSION, CLASSES), jnp.float32)
    at_once = hand_written.round_of_all(rate=1.0, clip=1.0, sigma=0.1)
    in_cohorts = hand_written.pass_in_cohorts(rate=1.0, clip=1.0, sigma=0.1, cohorts=sizes.cohorts)
    by_hand: dict[str, Callable[[], Any]] = {
        "a round of the crowd": lambda: jax.block_until_ready(at_once(weights, held, labels, jnp.int32(1))),
        "a pass in cohorts": lambda: jax.block_until_ready(in_cohorts(weights, held, labels)),
    }
    pieces: dict[str, Callable[[], Any]] = {}
    for (name, limit), cohort in zip(by_hand.items(), (count, count // sizes.cohorts), strict=True):
        task = work(cohort)
        laid = meet(task, holding, 1)
        pieces[f"by hand, {name}"] = limit
        pieces[f"ours, {name}"] = partial(compiled.run, task, holding, [laid], [1])
    return pieces, dict.fromkeys(pieces, count)


def _samples(rows: int) -> tuple[Any, Any]:
    """Rows of unit l2 norm around ten points, made where they are used: a million devices have twelve gigabytes."""

    def make(key: Any) -> tuple[Any, Any]:
        middle, label, noise = jax.random.split(key, 3)
        y = jax.random.randint(label, (rows,), 0, CLASSES, jnp.int32)
        x = jax.random.normal(middle, (CLASSES, DIMENSION))[y] + 1.5 * jax.random.normal(noise, (rows, DIMENSION))
        return x / jnp.sqrt((x * x).sum(1, keepdims=True)), y

    return jax.jit(make)(jax.random.key(0))


def trials(sizes: Sizes) -> Timed:
    x, y = sim.samples()
    task = sim.work("discrete-laplace")
    holding = Holding(x, y, iid(len(x), sim.DEVICES, 0))
    delay = Delay("uniform", 4.0)
    world = World(sim.DEVICES, -(-sizes.check_ins // sim.DEVICES), request=delay, check_out=delay, check_in=delay)
    some = [
        lay_out(world, seed=seed, batch=1, capacity=100).first(sizes.check_ins)
        for seed in range(min(SCHEDULES, sizes.trials))
    ]
    schedules = [some[number % len(some)] for number in range(sizes.trials)]
    ring = 1 << max(int(each.staleness.max(initial=1)) for each in some).bit_length()
    rows = np.stack([holding.rows(each.device, each.samples[:, 0]) for each in schedules], 1).astype(np.int32)
    fed = jax.device_put((x, y, rows, np.stack([each.version for each in schedules], 1)))
    scale = float(plan(task).table["gradient"].scale)  # pyright: ignore[reportAttributeAccessIssue]  discrete Laplace
    by_hand = hand_written.scan_of_trials(ring, sim.C, sim.RADIUS, scale)
    pieces: dict[str, Callable[[], Any]] = {
        "by hand, trials": lambda: jax.block_until_ready(by_hand(*fed)),
        "ours, trials": partial(compiled.run, task, holding, schedules, range(sizes.trials), together=True),
    }
    return pieces, dict.fromkeys(pieces, sizes.trials * sizes.check_ins)


def networks(sizes: Sizes) -> Timed:
    count, held = sizes.networks, rounds.STEPS * rounds.BATCH
    x, y = _samples(count * held)
    table = np.arange(count * held, dtype=np.int32).reshape(count, held)
    holding = Holding(
        x * rounds.LENGTH, y, Population("iid", table, np.full(count, held, np.int32), 0), passes=sizes.rounds
    )
    first = jnp.asarray(Mlp(DIMENSION, CLASSES, rounds.HIDDEN, 1).start())
    shape = (count, rounds.STEPS, rounds.BATCH)
    fed = holding.placed[0].reshape(*shape, DIMENSION), holding.placed[1].reshape(shape)
    by_hand = hand_written.rounds_side_by_side((DIMENSION, *rounds.HIDDEN, CLASSES), rounds.RATE, sizes.rounds)
    pieces: dict[str, Callable[[], Any]] = {"by hand, networks": lambda: jax.block_until_ready(by_hand(first, *fed))}
    for kind in rounds.KINDS:
        task = rounds.work(kind, cohort=count)
        laid = meet(task, holding, 1, rounds=sizes.rounds)
        pieces[f"ours, networks, {kind}"] = partial(compiled.run, task, holding, [laid], [1])
    return pieces, dict.fromkeys(pieces, count * sizes.rounds)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """How near ours comes to what was written by hand, piece by piece, and to the goals."""
    rows, ratios = {row["name"]: row for row in result["rows"]}, result["ratios"]
    with sheet(path, figsize=(9, 1.2 + 0.7 * len(ratios))) as axes:
        places = range(len(ratios), 0, -1)
        reach = np.array([[r["value"] - r["low"] for r in ratios], [r["high"] - r["value"] for r in ratios]])
        axes.barh(places, [r["value"] for r in ratios], xerr=reach, color="#2a6f97", height=0.6, capsize=3)
        axes.set_yticks(list(places), [r["name"].partition(" / ")[0].removeprefix("ours, ") for r in ratios])
        for place, each in zip(places, ratios, strict=True):
            ours, limit = (rows[name]["value"] for name in each["name"].split(" / "))
            text = f"{_short(ours)} of {_short(limit)} updates a second"
            axes.annotate(text, (0.02, place), va="center", color="white")
            if each["goal"] is not None:
                axes.plot([each["goal"]] * 2, [place - 0.42, place + 0.42], color="#D55E00", linewidth=2)
        axes.axvline(1, color="#222222", linewidth=1)
        axes.set(xlim=(0, max(1.1, *(r["high"] + 0.05 for r in ratios))), xlabel="ours / by hand; orange: the goal")
        axes.set_title(f"Simulated crowds on {result['device']}")


def _short(rate: float) -> str:
    return f"{rate / 1e6:,.1f} million" if rate >= 1e6 else f"{rate:,.0f}"
