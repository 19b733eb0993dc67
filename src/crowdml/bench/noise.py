"""`crowdml bench noise`: exact noise from the system's entropy, 10,000 values at a time, beside OpenDP and floats; and
the exponential mechanism, 50,000 of 100,000 at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from crowdml.bench.timing import bound, in_turns, plain_row
from crowdml.privacy import noise
from crowdml.privacy.mechanisms.selection import peel
from crowdml.privacy.noise import SystemSource

COUNT = 10_000
SIZES = (10, 1000, 2**15)
"""Scale or sigma, in grid steps: small, usual, and the largest that a device draws."""
GOAL_MS = 10.0
GOAL_CHOICE_MS = 1000.0
"""Choosing half of ten times `count` uploads by the exponential mechanism."""


def measure(progress: Callable[[str], None], repeats: int = 9, count: int = COUNT) -> dict[str, Any]:
    like = np.zeros(count, np.int32)
    source = SystemSource()
    rows: list[dict[str, Any]] = []
    work: dict[str, Callable[[], Any]] = {}
    for size in SIZES:
        draws = {
            "laplace": partial(source.discrete_laplace, Fraction(size), like),
            "gaussian": partial(source.discrete_gaussian, Fraction(size), like),
            "skellam": partial(source.skellam, Fraction(size * size), like),
        }
        for law, draw in draws.items():
            progress(f"table of {law} at {size}")
            noise.forget_tables()
            began = time.perf_counter()
            draw()
            taken = 1e3 * (time.perf_counter() - began)
            rows.append(plain_row(f"ours, {law} at {size}: table and first draw", taken, "ms"))
            work[f"ours, {law} at {size}"] = draw
    rng = np.random.default_rng(0)
    uploads = 10 * count
    correct = rng.binomial(10_000, 0.9, uploads)  # of 10,000 rows of the server's own
    gamma = Fraction(1, 2 * (uploads // 2))
    work[f"ours, exponential mechanism: {uploads // 2:,} of {uploads:,}"] = partial(
        peel, correct, uploads // 2, gamma, source
    )
    work["NumPy float Laplace, seeded, not private"] = partial(rng.laplace, 0.0, 1000.0, count)
    notes: dict[str, str] = {}
    for law in ("laplace", "gaussian"):
        for size in SIZES:
            name = f"OpenDP, discrete {law} at {size}"
            try:
                work[name] = _opendp(law, size, count)
                work[name]()
            except Exception as error:  # a peer's trouble is a note, whatever it is
                work.pop(name, None)
                notes[name] = (
                    f"{type(error).__name__}: {error}"[:200] if find_spec("opendp") else "not installed: opendp"
                )
    progress(f"{count} values each, in turns")
    noise.forget_tables()
    timed = in_turns(work, dict.fromkeys(work, 1.0), repeats)
    worst = dict.fromkeys(("laplace", "gaussian", "skellam", "exponential"), 0.0)
    for name, rate in timed.items():
        clock, cpu = sorted(rate.walls), sorted(rate.cpus)
        row = plain_row(name, 1e3 * clock[len(clock) // 2], "ms", 1e3 * clock[0], 1e3 * clock[-1])
        row["cpu_ms"] = 1e3 * cpu[len(cpu) // 2]
        rows.append(row)
        for law in worst:
            if name.startswith(f"ours, {law} "):
                worst[law] = max(worst[law], row["cpu_ms"])
    rows += [plain_row(name, None, "ms") | {"note": note} for name, note in notes.items()]
    return {
        "id": "bench/noise",
        "work": f"{count} values of exact noise, entropy from the operating system; median of {repeats}",
        "rows": rows,
        "ratios": [
            bound(law, f"{count} values, {law}, slowest size, CPU time", value, "ms", GOAL_MS)
            if law != "exponential"
            else bound(law, f"{5 * count:,} of {10 * count:,} uploads, CPU time", value, "ms", GOAL_CHOICE_MS)
            for law, value in worst.items()
        ],
    }


def _opendp(law: str, size: int, count: int) -> Callable[[], Any]:
    dp: Any = import_module("opendp.prelude")

    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T="i32"))
    if law == "laplace":
        draw = dp.m.make_laplace(domain, dp.l1_distance(T="i32"), scale=float(size))
    else:
        draw = dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), scale=float(size))
    zeros = [0] * count
    return lambda: draw(zeros)
