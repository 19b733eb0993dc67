"""Masked rounds of a protocol that is not compiled: device after device on NumPy, sums in 64 bits.

`gram` multiplies integers in 64 bits and has its maps in NumPy, and it has one round: there is little to compile.
Layout, seeds and noise are those of `cohorts`: a task that runs in both has the same rounds in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.messages import SERVER, masked_steps, total
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, Protocol, advance
from crowdml.protocols import find
from crowdml.sim.cohorts import lay_out, paid
from crowdml.sim.crowd import Holding, Run, published, stops, turn
from crowdml.task import Task

PROTOCOLS = frozenset({"gram"})
"""Those that need it."""


def run(
    task: Task,
    holding: Holding,
    seed: int,
    *,
    dropout: float = 0.0,
    points: Sequence[int] = (),
    noise: bool = True,
    tick: Callable[[int], None] = lambda _: None,
) -> Run:
    """One trial, as `cohorts.run` has it: `points` are the numbers of rounds after which the model is looked at."""
    protocol, masking = find(task), task.masking
    laid = lay_out(task, holding, seed, dropout=dropout)
    assert masking is not None
    assert protocol.masked is not None
    hears: Any = protocol.masked[1]
    start = protocol.server.start(task, Context(me=SERVER))
    state, offered = start.state, published(start)
    ends = sorted({min(int(point), len(laid)) for point in points} | {len(laid)})
    looked: list[Array] = []
    stopped: str | None = None
    done = 0
    for number in range(len(laid)):
        if stopped is None:
            done += 1
            devices = int(laid.alive[number].sum())
            if devices >= masking.minimum:
                sums = _sums(protocol, task, holding, laid, seed, number, offered, noise)
                heard = total(hears.kind, sums, devices=np.int32(devices), version=offered.version)
                step = advance(protocol.server, task, state, heard, Context(me=SERVER))
                state, offered = step.state, published(step)
                stopped = next((stop.reason for stop in stops(step) if stop.when is None or bool(stop.when)), None)
        tick(1)
        if number + 1 in ends:
            looked.append(np.asarray(protocol.model(task, state)))
    return Run(task, seed, paid(laid, protocol.batch(task), done), np.asarray(ends), np.stack(looked), state, stopped)


def _sums(
    protocol: Protocol, task: Task, holding: Holding, laid: Any, seed: int, number: int, offered: Any, noise: bool
) -> dict[str, Array]:
    """What the survivors of a round said, added up. Who vanished paid all the same."""
    sums: dict[str, Array] = {}
    for place in np.flatnonzero(laid.alive[number]):
        device, trip, first = (each[number, place] for each in (laid.device, laid.trip, laid.first))
        rows = holding.rows(device, first + np.arange(protocol.batch(task)))
        source = SeededSource(stream(seed, device, trip)) if noise else Silence()
        said, _ = turn(protocol, task, Samples(holding.x[rows], holding.y[rows]), offered, source, me=int(device))
        for name, steps in masked_steps(said).items():
            sums[name] = sums.get(name, 0) + steps.astype(np.int64)
    return sums
