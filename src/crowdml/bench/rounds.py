"""`crowdml bench rounds`: a network trained in rounds of devices that take steps of their own.

MLP 50-75-75-10, ten devices a round, ten local steps of a hundred samples each: ours without noise or clipping, with
every sample's gradient clipped, and with all that a masked task needs, beside a scan over the devices written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from crowdml.bench import hand_written, peers, sim
from crowdml.bench.timing import in_turns, ratio
from crowdml.datasets.populations import iid
from crowdml.models.mlp import Mlp
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, meet
from crowdml.task import Task, parse

DIMENSION, HIDDEN, CLASSES = 50, (75, 75), 10
COHORT, STEPS, BATCH, RATE = 10, 10, 100, 0.5
DEVICES, ROUNDS = 60, 24
LENGTH = 8.0
"""Samples are no longer than this: shorter ones would not move a network whose first weights are of size one."""
GOALS = {"plain": 0.9, "clipped": 0.4}
KINDS = {"plain": ("none", ""), "clipped": ("none", "clip = 1.0"), "noisy": ("skellam", "clip = 1.0")}
PEERS = (
    peers.Peer("pfl, PyTorch model", "pfl", "run_pfl.py", ("torch", "network")),
    peers.Peer("FedJAX", "fedjax", "run_fedjax.py", ("network",)),
    peers.Peer("Flower", "flwr", "run_flower.py", ("16", "network"), seconds=240.0),
)


def work(kind: str, cohort: int = COHORT) -> Task:
    mechanism, clip = KINDS[kind]
    return parse(f"""
        name = "bench"
        [features]
        dimension = {DIMENSION}
        norm = {{ kind = "l2", bound = {LENGTH} }}
        [labels]
        classes = [{", ".join(f'"{digit}"' for digit in range(CLASSES))}]
        [model]
        kind = "mlp"
        hidden = [{", ".join(map(str, HIDDEN))}]
        seed = 1
        [protocol]
        kind = "local_updates"
        batch = {STEPS * BATCH}
        minibatch = {BATCH}
        local_steps = {STEPS}
        rate = {{ c = {RATE} }}
        {clip}
        [privacy]
        mechanism = "{mechanism}"
        unit = "device"
        epsilon = {{ update = 8.0 }}
        budget = {{ epsilon = 8.0, samples = {STEPS * BATCH * 4} }}
        [masking]
        cohort = {cohort}
        minimum = {cohort}
    """)


def _ours(task: Task, holding: Holding, rounds: int) -> Any:
    """One compiled run of ours, which lays out its cohorts anew."""
    return compiled.run(task, holding, [meet(task, holding, 1, rounds=rounds)], [1])


def measure(
    progress: Callable[[str], None], repeats: int = 9, rounds: int = ROUNDS, with_peers: bool = True
) -> dict[str, Any]:
    held = STEPS * BATCH
    x, y = sim.samples(DEVICES * held)
    x = (x * DIMENSION).astype(np.float32)
    x *= np.minimum(1, LENGTH / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    holding = Holding(x, y, iid(len(x), DEVICES, 0), passes=-(-rounds * COHORT // DEVICES))
    laid = meet(work("plain"), holding, 1, rounds=rounds)
    first = Mlp(DIMENSION, CLASSES, HIDDEN, 1).start()
    dealt = holding.population.rows  # pyright: ignore[reportAttributeAccessIssue]  iid makes a table
    fed = jax.device_put((first, x[dealt].reshape(DEVICES, STEPS, BATCH, -1), y[dealt].reshape(DEVICES, STEPS, BATCH),
                          laid.device))  # fmt: skip
    by_hand = hand_written.scan_of_rounds((DIMENSION, *HIDDEN, CLASSES), RATE)
    loops: dict[str, Callable[[], Any]] = {"hand-written scan": lambda: jax.block_until_ready(by_hand(*fed))}
    for kind in KINDS:
        loops[f"ours, {kind}"] = partial(_ours, work(kind), holding, rounds)
    progress("ours and the scan written by hand, in turns")
    rates = in_turns(loops, dict.fromkeys(loops, COHORT * rounds), repeats)
    found = [rate.row(name, "device updates/s") for name, rate in rates.items()]
    if with_peers:
        found += peers.measure(progress, x, y, DEVICES, PEERS)
    return {
        "id": "bench/rounds",
        "work": f"{rounds} rounds of {COHORT} of {DEVICES} devices; a device update is {STEPS} steps of {BATCH} "
        f"samples on an MLP {'-'.join(map(str, (DIMENSION, *HIDDEN, CLASSES)))}; noisy: clipped, with a device's "
        f"share of Skellam noise on {first.size:,} weights",
        "rows": found,
        "ratios": [
            ratio(kind, f"ours {kind} / hand-written scan", rates[f"ours, {kind}"], rates["hand-written scan"], goal)
            for kind, goal in GOALS.items()
        ],
    }
